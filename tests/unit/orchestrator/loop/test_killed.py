"""Locks: whatever instant a run is killed at, the one that goes on, from a checkpoint or from what the controller wrote
down in a step, has every row and prompt once, and the best checkpoint.
"""

import json
import shutil
from collections import defaultdict
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
from slipstream.orchestrator.checkpoints.journal import Journal, Whereabouts, read_journal, write_journal
from slipstream.orchestrator.checkpoints.loop_state import RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import complete_checkpoints, step_of
from slipstream.orchestrator.files.row_files import read_rows
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.metrics.telemetry import Telemetry
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


def config_of(staleness: int) -> RunConfig:
    run = {"checkpoint_every_steps": 0, "samples_per_step": 100}
    return make_config(num_steps=6, staleness=staleness, run=run)


def steps_of_prompts(folder: Path) -> dict[str, set[int]]:
    """The steps that trained on each prompt."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for row in map(json.loads, (folder / "samples.jsonl").read_text().splitlines()):
        if row["step"] > 0 and not row.get("eval"):
            found[row["prompt"]].add(row["step"])
    return {prompt: steps for prompt, steps in found.items() if prompt.startswith("prompt ")}


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("killed_in", [1, 4, 6])
async def test_every_prompt_is_used_once_and_every_row_written_once(
    tmp_path: Path, staleness: int, killed_in: int
) -> None:
    states: list[RunState] = []
    loop = Loop(tmp_path, config_of(staleness))
    loop.folder.journal.parent.mkdir()

    async def note(state: RunState) -> None:
        if states:
            assert newest() == loop.rows[-1]["step"], "the step under way has its row"
        write_journal(loop.folder, Journal(Whereabouts("", 0), "", state))
        assert newest() == len(loop.rows) - 1 == max(0, state.step - 1), "and before, the one before it counts"
        states.append(state)

    def newest() -> int:
        journal = read_journal(loop.folder)
        assert journal is not None
        return journal.state.step

    loop.hold = note
    await loop.run()
    assert [state.step for state in states] == list(range(6))

    found = states[killed_in - 1]
    another = Loop(tmp_path, config_of(staleness), resume_step=found.step)
    another.found, another.world.version = found, found.policy_version
    controller = await another.run()
    assert (controller.step, controller.policy_version) == (6, 6)
    assert another.world.diary[0] == ("publish", found.policy_version), "whatever engines hold"
    assert [row["step"] for row in another.rows] == list(range(7))
    used = steps_of_prompts(tmp_path)
    assert sorted(used) == sorted(f"prompt {number}" for number in range(18))
    assert {len(steps) for steps in used.values()} == {1}
    assert another.controller is not None and another.controller.buffer.state().num_batches == 6
