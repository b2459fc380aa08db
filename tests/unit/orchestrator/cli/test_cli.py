"""The command line: flags that start nothing, what a run is handed, exit codes."""

import json
import os
import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fakes.command import READY, fake_run

from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_resolved_yaml, load_run_config
from slipstream.fleet.errors import NoReplicasLeft
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.data import training_stream
from slipstream.orchestrator.errors import CheckpointError
from slipstream.orchestrator.files.run_folder import RunFolder, open_run_folder, point_latest
from slipstream.weight_sync.errors import WatermarkError

pytestmark = pytest.mark.usefixtures("somewhere_else")


def test_cfg_job_prints_yaml_that_loads_to_the_same_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["experiment=quickstart", "run.seed=3"]
    assert main(["train", *words, "--cfg", "job"]) == 0
    assert load_resolved_yaml(capsys.readouterr().out) == load_run_config(words)
    assert not list(tmp_path.iterdir())


def test_dry_run_reports_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_run(monkeypatch, lambda *_: pytest.fail("a dry run must not train"))
    assert main([*READY, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "8 experts" in out
    assert "Nothing was started" in out
    assert not list(tmp_path.iterdir())


def test_a_long_read_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n" for _ in range(2500))
    (tmp_path / "train.jsonl").write_text(rows)
    words = [*READY, "data.path=train.jsonl", "--dry-run"]
    monkeypatch.setattr(training_stream, "SAY_EVERY_S", 0.0)
    assert main(words) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "train.jsonl" in line]
    assert said == [f"checking train.jsonl: {count} rows so far" for count in ("1,024", "2,048")]


def test_a_run_says_at_its_start_what_is_seldom_meant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_run(monkeypatch, lambda *_: None)
    assert main([*READY, "reward=exact_match", "rollout.sampling.max_tokens=3"]) == 0
    assert "warning: prompts: 704 in pkg://letters_train.jsonl" in capsys.readouterr().err
    assert main([*READY]) == 0
    assert "warning" not in capsys.readouterr().err


def test_train_sets_the_environment_and_hands_over_config_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, list[str], str | None]] = []
    fake_run(monkeypatch, lambda config, words, folder: calls.append((config, words, os.environ.get("HF_HUB_OFFLINE"))))
    assert main([*READY, "run.seed=5"]) == 0
    ((config, words, offline),) = calls
    assert config.run.seed == 5
    assert words == [*READY[1:], "run.seed=5"]
    assert offline == "1"


@pytest.mark.parametrize(
    ("error", "code", "has_log", "has_traceback"),
    [
        (ConfigError("an option is wrong"), 2, False, False),
        (CheckpointError("it belongs to another run"), 2, False, False),
        (WatermarkError("trainer rank 0: raise the watermark"), 2, False, False),
        (NoReplicasLeft("every worker is gone"), 1, True, False),
        (ZeroDivisionError("a bug"), 1, True, True),
    ],
)
def test_exit_code_and_traceback_tell_whose_mistake_it_was(
    error: Exception,
    code: int,
    has_log: bool,
    has_traceback: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened: list[RunFolder] = []

    def run(config: Any, words: list[str], folder: RunFolder) -> None:
        opened.append(folder)
        raise error

    fake_run(monkeypatch, run)
    assert main(READY) == code
    err = capsys.readouterr().err
    assert ("Traceback" in err) == has_traceback
    assert str(error) in err.splitlines()[-3 if has_log else -1]
    assert (f"Log: {opened[0].log}\nThere is no checkpoint" in err) == has_log


@pytest.mark.parametrize("error", [KeyboardInterrupt(), NoReplicasLeft("every worker is gone")])
def test_a_run_that_ended_early_says_how_to_go_on(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[RunFolder] = []

    def run(config: Any, words: list[str], folder: RunFolder) -> None:
        opened.append(folder)
        for name in ("step-000020", "step-000040", ".step-000060.partial"):
            (folder.checkpoints / name).mkdir(parents=True)
            (folder.checkpoints / name / "manifest.json").write_text("{}")
        beside = open_run_folder(config.run, datetime.now())  # another run in the same run.dir: `latest` names it
        point_latest(beside.root)
        (beside.checkpoints / "step-000012").mkdir(parents=True)
        (beside.checkpoints / "step-000012" / "manifest.json").write_text("{}")
        raise error

    fake_run(monkeypatch, run)
    assert main([*READY, "model.hf_config.rope_parameters={rope_type: default}"]) != 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "go on with" in line]
    told, _, command = said.partition(": ")
    assert told == "Step 40 is saved; go on with"
    assert shlex.split(command) == ["slipstream", "resume", str(opened[0].root)]
