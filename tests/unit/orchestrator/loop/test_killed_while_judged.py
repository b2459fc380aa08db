"""Locks: whatever instant a run is killed at, the one that goes on has every row once, and the best checkpoint."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any

import pytest
from fakes.loop import Loop, make_config
from fakes.workers import FakeWorker

from slipstream.conf.schema import RunConfig
from slipstream.fleet.errors import NoReplicasLeft
from slipstream.orchestrator.checkpoints.run_checkpoint import complete_checkpoints, step_of
from slipstream.orchestrator.files.row_files import read_rows
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.telemetry import Telemetry
from slipstream.rollout.types import Prompt, Rollout


def judged(**run: object) -> RunConfig:
    options = {"eval_every_steps": 1, "checkpoint_every_steps": 0, "keep_best": "eval/reward"} | run
    return make_config(num_steps=3, run=options, eval_path="held_out.jsonl")


def loop_of(folder: Path, config: RunConfig, step: int = 0) -> Loop:
    """Its policy of step 2 is the best one."""
    resume = str(folder) if step else None
    loop = Loop(folder, replace(config, run=replace(config.run, resume=resume)), resume_step=step)
    loop.rewards.is_flat = lambda prompt: prompt.prompt_id >= 1000 and loop.world.version == 2
    return loop


def photograph(folder: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on copy the run's folder before each row, and before each name that a file gets."""
    numbers, one_at_a_time = count(), RLock()

    def photographed(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*given: object, **named: object) -> object:
            with one_at_a_time:  # checkpoints are completed in a thread
                hidden = shutil.ignore_patterns(".*")  # what has no name yet, or none any more
                shutil.copytree(folder, into / f"{next(numbers):03d}", symlinks=True, ignore=hidden)
                return change(*given, **named)

        return changed

    for owner, name in ((Path, "replace"), (Path, "symlink_to"), (Path, "rename"), (Telemetry, "step")):
        monkeypatch.setattr(owner, name, photographed(getattr(owner, name)))


@pytest.mark.parametrize("run", [{}, {"eval_beside": True}, {"eval_every_steps": 2, "checkpoint_every_steps": 1}])
async def test_a_run_that_is_killed_at_any_instant_keeps_its_rows_and_its_best_checkpoint(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = judged(**run)
    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patches:
        photograph(tmp_path / "run", tmp_path / "killed", patches)
        await loop_of(tmp_path / "run", config).run()
    num_resumed = 0
    for killed in sorted((tmp_path / "killed").iterdir()):
        complete = complete_checkpoints(killed / "checkpoints")
        if not complete:
            continue
        loop = loop_of(killed, config, step_of(complete[-1]))
        await loop.run()
        assert [row["step"] for row in loop.rows] == [0, 1, 2, 3], killed
        steps = [row["step"] for row in read_rows(loop.folder.evaluations)]
        assert steps == sorted({*steps})
        if not config.run.eval_beside:  # one that goes on beside training is lost with the run
            assert steps == [0, *(step for step in (1, 2, 3) if config.run.is_due(config.run.eval_every_steps, step))]
        if 2 in steps:
            assert loop.folder.best.resolve().name == "step-000002", killed
            assert json.loads((killed / "checkpoints" / "best.json").read_text())["step"] == 2
        num_resumed += 1
    assert num_resumed > 4


async def test_a_run_that_is_killed_while_it_ends_has_the_row_of_every_step_that_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engines are lost in the evaluation of step 2."""
    config = judged(keep_best=None)
    (tmp_path / "run").mkdir()
    loop = loop_of(tmp_path / "run", config)

    async def dies_at_2(prompt: Prompt, n: int, *_: object, worker: FakeWorker) -> list[Rollout]:
        if prompt.prompt_id >= 1000 and loop.world.version == 2:
            raise ConnectionError("gone")
        return await FakeWorker.generate_group(worker, prompt, n)

    for worker in loop.workers:
        monkeypatch.setattr(worker, "generate_group", partial(dies_at_2, worker=worker))
    with monkeypatch.context() as patches:
        photograph(tmp_path / "run", tmp_path / "killed", patches)
        with pytest.raises(NoReplicasLeft, match="gone"):
            await loop.run()
    for folder in [*(tmp_path / "killed").iterdir(), tmp_path / "run"]:
        rows = [row["step"] for row in read_rows(RunFolder(folder).metrics)]
        saved = [step_of(path) for path in complete_checkpoints(folder / "checkpoints")]
        assert {*saved} <= {*rows}, folder
    assert (saved, rows) == ([2], [0, 1, 2])
