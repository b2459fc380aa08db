"""Locks: where a run's files are, that `latest` follows, and what the folder says about the run before it starts."""

import json
import os
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from cases.largest_file import largest_file

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import ClusterConfig, LoraConfig, ModelConfig, RunConfig, RunSection, TrainerConfig
from slipstream.orchestrator.control.control_folder import alive, note_started
from slipstream.orchestrator.errors import DiskFull
from slipstream.orchestrator.files.run_folder import (
    RunFolder,
    changed_options,
    changed_packages,
    follow_latest,
    open_run_folder,
    point_latest,
    write_description,
)
from slipstream.orchestrator.run import run

NOON = datetime(2026, 1, 31, 12, 0, 0)


def test_folder_is_named_by_run_and_time_and_latest_follows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    section = RunSection(name="demo", dir=str(tmp_path / "runs"))
    first = open_run_folder(section, NOON)
    second = open_run_folder(section, NOON)
    assert first.root.name == "demo-20260131-120000"
    assert second.root.name == "demo-20260131-120000-2"
    for folder in (first, second):
        point_latest(folder.root)
        assert (tmp_path / "runs" / "latest").resolve() == folder.root
    (tmp_path / "runs" / f".latest-{os.getpid()}").mkdir()  # nothing can be renamed to latest, as another user's link
    point_latest(first.root)
    assert (tmp_path / "runs" / "latest").resolve() == second.root
    assert "latest does not lead to demo-20260131-120000: Is a directory" in caplog.text


def test_resume_opens_the_folder_and_refuses_a_missing_one(tmp_path: Path) -> None:
    section = RunSection(name="demo", dir=str(tmp_path))
    first = open_run_folder(section, NOON)
    open_run_folder(section, NOON)
    assert open_run_folder(RunSection(dir=str(tmp_path), resume=str(first.root)), NOON) == first
    point_latest(first.root)
    assert open_run_folder(RunSection(dir=str(tmp_path), resume=str(tmp_path / "latest")), NOON) == first
    with pytest.raises(ConfigError, match=r"run\.resume"):
        open_run_folder(RunSection(resume=str(tmp_path / "absent")), NOON)


def test_what_lies_below_latest_stays_the_same_folder_when_the_next_run_starts(tmp_path: Path) -> None:
    first = open_run_folder(RunSection(name="demo", dir=str(tmp_path)), NOON)
    point_latest(first.root)
    below = {"path": str(tmp_path / "latest" / "merged"), "tokenizer": "characters"}
    trainer = TrainerConfig(lora=LoraConfig(init_from=str(tmp_path / "latest" / "adapter")))
    config = RunConfig(run=RunSection(dir=str(tmp_path)), model=ModelConfig(**below), trainer=trainer)
    followed = follow_latest(config)
    point_latest(open_run_folder(config.run, NOON).root)
    assert followed.model.path == str(first.merged)
    assert followed.model.tokenizer == "characters"
    assert followed.trainer.lora.init_from == str(first.root / "adapter")
    assert replace(followed, model=config.model, trainer=trainer) == config

    again = RunConfig(run=RunSection(dir=str(tmp_path), resume=str(tmp_path / "latest")))
    assert follow_latest(again).run.resume == str((tmp_path / "latest").resolve())
    elsewhere = RunConfig(run=RunSection(dir=str(tmp_path / "other")), model=config.model)
    assert follow_latest(elsewhere) == elsewhere


def test_real_file_called_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("mine")
    point_latest(open_run_folder(RunSection(dir=str(tmp_path)), NOON).root)
    assert (tmp_path / "latest").read_text() == "mine"


def test_run_dir_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir="):
        open_run_folder(RunSection(dir=str(tmp_path / "file")), NOON)


def test_description_is_complete_and_plain(tmp_path: Path) -> None:
    folder = open_run_folder(RunSection(dir=str(tmp_path)), NOON)
    write_description(folder, RunConfig(), ["run.seed=3"])
    config = yaml.safe_load(folder.config.read_text())
    assert config["algorithm"]["ratio_baseline"] == "trainer"
    assert config["trainer"]["optim"]["betas"] == [0.9, 0.999]
    environment = json.loads(folder.environment.read_text())
    assert environment["overrides"] == ["run.seed=3"]
    assert environment["packages"]["numpy"]


def test_a_resumed_run_names_the_options_that_changed(tmp_path: Path) -> None:
    folder = open_run_folder(RunSection(dir=str(tmp_path)), NOON)
    config = RunConfig()
    assert changed_options(folder, config) == []
    write_description(folder, config, [])
    assert changed_options(folder, config) == []
    run_section = replace(config.run, resume=str(folder.root), num_steps=config.run.num_steps + 1)
    optim = replace(config.trainer.optim, lr=0.25, betas=(0.8, 0.9))
    resumed = replace(config, run=run_section, trainer=replace(config.trainer, optim=optim))
    assert changed_options(folder, resumed) == [
        f"run.num_steps: {config.run.num_steps} before, {config.run.num_steps + 1} now",
        f"trainer.optim.betas: {[*config.trainer.optim.betas]} before, [0.8, 0.9] now",
        f"trainer.optim.lr: {config.trainer.optim.lr} before, 0.25 now",
    ]
    assert changed_packages(folder) == []
    written = json.loads(folder.environment.read_text())
    written["packages"] |= {"ray": "0.1", "gone": "2"}
    folder.environment.write_text(json.dumps(written))
    assert changed_packages(folder) == ["gone: '2' before, not there now", f"ray: '0.1' before, '{version('ray')}' now"]


@pytest.mark.parametrize("left", [b"", b"run: {num_steps: 3", b"ru", b"\x00\xff"])
def test_a_run_whose_description_is_damaged_can_be_resumed(tmp_path: Path, left: bytes) -> None:
    folder = open_run_folder(RunSection(dir=str(tmp_path)), NOON)
    folder.config.write_bytes(left)
    (line,) = changed_options(folder, RunConfig())
    assert f"{folder.config} cannot be read" in line


@pytest.mark.parametrize("is_in_store", [False, True])
@pytest.mark.parametrize("has_started", [False, True])
def test_options_of_a_resume_become_the_runs_own_when_its_start_is_over(
    has_started: bool, is_in_store: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a machine that has nothing of the run: what it ran with before is in the store."""
    folder = open_run_folder(RunSection(dir=str(tmp_path)), NOON)
    write_description(folder, RunConfig(), [])
    before = folder.config.read_text(), folder.environment.read_text()
    section = RunSection(dir=str(tmp_path), resume=str(folder.root), seed=7)
    if is_in_store:
        section = replace(
            section, dir=str(tmp_path / "elsewhere"), resume=folder.root.as_uri(), checkpoint_dir=tmp_path.as_uri()
        )
        folder = open_run_folder(section, NOON)
    seen: list[int] = []

    async def refused(config: RunConfig, folder: RunFolder, *_: object) -> None:
        seen.append(yaml.safe_load(folder.config.read_text())["run"]["seed"])  # other machines compare it
        if has_started:
            note_started(folder)
        raise ConfigError("no")

    monkeypatch.setattr("slipstream.orchestrator.run.reinforce", refused)
    with pytest.raises(ConfigError, match="no"):
        run(RunConfig(run=section, cluster=ClusterConfig(ray_address="elsewhere")), ["run.seed=7"], folder)
    assert seen == [7]
    assert ((folder.config.read_text(), folder.environment.read_text()) == before) is not has_started
    assert not folder.starting.exists()
    kept = sorted(folder.root.glob("*.1.*"))
    assert [file.name for file in kept] == ["config.1.yaml", "environment.1.json"] * has_started
    assert not kept or tuple(file.read_text() for file in kept) == before


def test_a_run_under_way_keeps_its_description_when_it_is_resumed_again(tmp_path: Path) -> None:
    folder = open_run_folder(RunSection(dir=str(tmp_path)), NOON)
    write_description(folder, RunConfig(), [])
    before = folder.config.read_text(), folder.environment.read_text()
    again = RunConfig(run=RunSection(dir=str(tmp_path), resume=str(folder.root), seed=7))
    beside = open_run_folder(RunSection(dir=str(tmp_path)), NOON)
    point_latest(beside.root)
    with alive(folder.root), pytest.raises(ConfigError, match="is being run by another process"):
        run(again, ["run.seed=7"], folder)
    assert (folder.config.read_text(), folder.environment.read_text()) == before
    assert (tmp_path / "latest").resolve() == beside.root


def test_a_disk_that_is_full_before_the_first_checkpoint_leaves_nothing_to_resume(tmp_path: Path) -> None:
    folder = open_run_folder(RunSection(dir=str(tmp_path)), NOON)
    with largest_file(1000), pytest.raises(DiskFull, match=r"no checkpoint is saved\. Make room, and start it again"):
        run(RunConfig(), [], folder)
