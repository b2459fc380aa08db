"""A run is not resumed on other weights than it began from."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import object_in
from slipstream.conf.schema import (
    AlgorithmConfig,
    DataConfig,
    Init,
    LoraConfig,
    ModelConfig,
    RunConfig,
    RunSection,
    TrainerConfig,
)
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState
from slipstream.orchestrator.checkpoints.object_store import ObjectStore
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore, fingerprint
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.files.origin import check_weights
from slipstream.orchestrator.files.run_folder import RunFolder, changed_options, write_description
from slipstream.orchestrator.inputs.preflight import check_run_folder
from slipstream.orchestrator.inputs.resumed import with_its_warm_up
from slipstream.orchestrator.machine import HERE


def _write(folder: Path, name: str, seed: int) -> Path:
    """Weights as another seed's training leaves them: of the same size, and other throughout."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(np.random.default_rng(seed).bytes(3_000_001))
    return folder


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run that compares with the adapter that it starts from; it has made three steps."""
    base, adapter = _write(tmp_path / "base", "model.safetensors", 1), tmp_path / "adapter"
    _write(adapter, "adapter_model.safetensors", 2)
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    config = RunConfig(
        model=ModelConfig(path=str(base), init=Init.checkpoint),
        trainer=TrainerConfig(lora=LoraConfig(init_from=str(adapter))),
        algorithm=AlgorithmConfig(kl_coef=0.1),
        data=DataConfig(path="pkg://letters_train.jsonl", eval_path="pkg://letters_heldout.jsonl"),
        run=RunSection(dir=str(tmp_path), resume=str(folder.root), num_steps=9),
    )
    write_description(folder, config, [])
    store = CheckpointStore(folder.checkpoints, keep=2, options=fingerprint(config))
    store.finish(store.begin(3), RunState(3, 3, {"epoch": 0}, {}, BufferState(3)))
    return config


def test_a_run_goes_on_from_the_same_weights_wherever_they_are(config: RunConfig, tmp_path: Path) -> None:
    assert "goes on from step 3" in check_run_folder(config, HERE).finding
    (tmp_path / "base" / "model.safetensors").rename(tmp_path / "base" / "model-00001-of-00001.safetensors")
    check_run_folder(config, HERE)


@pytest.mark.parametrize(
    ("folder", "name", "option"),
    [
        ("base", "model.safetensors", "model.path"),
        ("adapter", "adapter_model.safetensors", "trainer.lora.init_from"),
    ],
)
def test_a_run_whose_base_or_reference_was_written_anew_is_not_resumed(
    config: RunConfig, tmp_path: Path, folder: str, name: str, option: str
) -> None:
    _write(tmp_path / folder, name, 3)
    with pytest.raises(ConfigError, match=f"{option}={tmp_path / folder} has other weights than when the run began"):
        check_run_folder(config, HERE)


def test_what_no_resume_reads_may_change_and_what_is_not_known_is_not_compared(
    config: RunConfig, tmp_path: Path
) -> None:
    environment = tmp_path / "run" / "environment.json"
    _write(tmp_path / "adapter", "adapter_model.safetensors", 3)
    began = object_in(environment)
    check_weights(began, replace(config, algorithm=AlgorithmConfig()), is_resumed=True)
    (tmp_path / "base" / "model.safetensors").unlink()
    check_weights(began, config)
    environment.write_text("{}")
    check_weights(object_in(environment), config, is_resumed=True)
    environment.write_text('{"weights": 3}')
    check_weights(object_in(environment), config, is_resumed=True)


def with_warm_up(config: RunConfig, num_steps: int, warmup_steps: float) -> RunConfig:
    trainer = replace(config.trainer, optim=replace(config.trainer.optim, warmup_steps=warmup_steps))
    return replace(config, run=replace(config.run, num_steps=num_steps), trainer=trainer)


@pytest.mark.parametrize(
    ("num_steps", "given", "kept"),
    [(9, 0.5, 0.5), (90, 0.5, 4.0), (90, 0.25, 0.25), (90, 7.0, 7.0), (90, 0.0, 0.0)],
)
def test_a_warm_up_that_is_a_share_of_the_run_stays_as_long_as_it_was(
    config: RunConfig, tmp_path: Path, num_steps: int, given: float, kept: float
) -> None:
    """Half of 9 steps: 4; another share is the user's own. Also where the run's folder is in a store alone."""
    write_description(RunFolder(tmp_path / "run"), with_warm_up(config, 9, 0.5), [])
    resumed = with_warm_up(config, num_steps, given)
    assert with_its_warm_up(resumed) == with_warm_up(config, num_steps, kept)
    assert with_its_warm_up(replace(resumed, run=RunSection(num_steps=num_steps))).trainer == resumed.trainer
    remote = ObjectStore((tmp_path / "store" / "run").as_uri())
    remote.send(tmp_path / "run" / "checkpoints" / "step-000003", lambda send: send())
    run = replace(resumed.run, dir=str(tmp_path / "here"), resume=remote.url, checkpoint_dir=remote.url[:-4])
    assert with_its_warm_up(replace(resumed, run=run)).trainer.optim.warmup_steps == kept
    (tmp_path / "run" / "config.yaml").write_text("run: [")
    assert with_its_warm_up(resumed) == resumed, "what is damaged is told elsewhere"


@pytest.mark.parametrize("is_in_store", [False, True])
def test_a_command_given_again_keeps_the_warm_up_that_it_kept_before(
    config: RunConfig, tmp_path: Path, is_in_store: bool
) -> None:
    """It says the share still, and nothing has changed: processes that wait for a controller can be used."""
    folder = RunFolder(tmp_path / "run")
    write_description(folder, with_warm_up(config, 9, 0.5), [])
    again, kept = with_warm_up(config, 90, 0.5), with_warm_up(config, 90, 4.0)
    for _ in range(2):
        write_description(folder, with_its_warm_up(again), [])
        assert with_its_warm_up(again) == kept
        assert changed_options(folder, with_its_warm_up(again)) == []
    assert with_its_warm_up(with_warm_up(config, 900, 0.5)) == with_warm_up(config, 900, 4.0)
    for own in (0.25, 7.0):
        assert with_its_warm_up(with_warm_up(config, 90, own)) == with_warm_up(config, 90, own)
    if is_in_store:
        remote = ObjectStore((tmp_path / "store" / "run").as_uri())
        remote.send(tmp_path / "run" / "checkpoints" / "step-000003", lambda send: send())
        run = replace(again.run, dir=str(tmp_path / "here"), resume=remote.url, checkpoint_dir=remote.url[:-4])
        assert with_its_warm_up(replace(again, run=run)).trainer.optim.warmup_steps == 4.0
    write_description(folder, with_warm_up(config, 90, 7.0), [])
    assert with_its_warm_up(again) == again, "a number of the user's own is no share"


def test_a_resume_from_a_store_knows_which_weights_the_run_began_from(config: RunConfig, tmp_path: Path) -> None:
    """On another machine, whose files of that name may be others."""
    remote = ObjectStore((tmp_path / "store" / "run").as_uri())
    remote.send(tmp_path / "run" / "checkpoints" / "step-000003", lambda send: send())
    run = replace(config.run, dir=str(tmp_path / "here"), resume=remote.url, checkpoint_dir=remote.url[:-4])
    (tmp_path / "here").mkdir()
    elsewhere = replace(config, run=run)
    assert "goes on from step 3" in check_run_folder(elsewhere, HERE).finding
    _write(tmp_path / "base", "model.safetensors", 3)
    with pytest.raises(ConfigError, match=r"model\.path=.* has other weights than when the run began"):
        check_run_folder(elsewhere, HERE)
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("command", ["merge", "eval"])
def test_what_was_learned_is_neither_merged_into_another_base_nor_evaluated_on_it(
    config: RunConfig, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "base", "model.safetensors", 3)
    assert main([command, str(tmp_path / "run")]) == 2
    assert "base has other weights than when the run began" in capsys.readouterr().err
