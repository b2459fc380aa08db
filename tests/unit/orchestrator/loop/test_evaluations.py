"""Locks: evaluations beside training delay no step, have their figures in the row in which they end, and are of the
version with which they began where engines keep it; the best evaluated checkpoint stays.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.fleet import until
from fakes.loop import Loop, end, make_config
from fakes.workers import FakeWorker
from fakes.world import World

from slipstream.conf.schema import RunConfig, SyncMode, WeightSyncConfig
from slipstream.fleet.errors import NoReplicasLeft
from slipstream.orchestrator.checkpoints.best_checkpoint import BestCheckpoint, options_behind
from slipstream.orchestrator.checkpoints.run_checkpoint import complete_checkpoints, step_of
from slipstream.orchestrator.files.row_files import read_rows
from slipstream.orchestrator.loop import evaluations
from slipstream.orchestrator.loop.evaluations import Evaluations
from slipstream.rollout.types import Group, Prompt, Rollout


def beside(num_steps: int = 6, every: int = 2, **run: object) -> RunConfig:
    section = {"eval_every_steps": every, "eval_beside": True, "checkpoint_every_steps": 0} | run
    return make_config(num_steps=num_steps, run=section, eval_path="held_out.jsonl")


class SlowWorker(FakeWorker):
    """Held-out prompts (1000 and up) wait for `gate`, if there is one, and note which version they ask for."""

    def __init__(self, world: World, index: int) -> None:
        super().__init__(world, index)
        self.held_out_gate: asyncio.Event | None = None
        self.asked: list[int | None] = []
        self.kept: int | None = None

    async def keep_version(self, version: int | None) -> bool:
        self.kept = version
        return version is not None

    async def generate_group(
        self, prompt: Prompt, n: int, sampling: object = None, version: int | None = None, so_far: object = ()
    ) -> list[Rollout]:
        if prompt.prompt_id >= 1000:
            self.asked.append(version)
            if self.held_out_gate is not None:
                await self.held_out_gate.wait()
            assert version == self.kept
        return await super().generate_group(prompt, n, None, version)


def slow_loop(folder: Path, config: RunConfig) -> Loop:
    loop = Loop(folder, config)
    loop.workers[:] = [SlowWorker(loop.world, i) for i in range(2)]
    return loop


def slow_workers(loop: Loop) -> list[SlowWorker]:
    return [worker for worker in loop.workers if isinstance(worker, SlowWorker)]


def opens_at(loop: Loop, version: int) -> asyncio.Event:
    """A gate for held-out prompts that opens when the trainer makes this version."""
    gate = asyncio.Event()

    async def publish() -> None:
        if loop.world.version >= version:
            gate.set()

    loop.trainer.before["publish"] = publish
    for worker in slow_workers(loop):
        worker.held_out_gate = gate
    return gate


async def test_steps_go_on_while_an_evaluation_does_and_the_row_says_whose_it_is(tmp_path: Path) -> None:
    loop = slow_loop(tmp_path, beside(num_steps=12, every=11))
    opens_at(loop, 3)
    await loop.run()
    evaluated = {row["step"]: row["eval/step"] for row in loop.rows if row["eval/step"] is not None}
    found = read_rows(loop.folder.evaluations)
    assert [row["step"] for row in found] == [0, 11, 12]  # that of the last step is awaited
    taken = min(step for step, whose in evaluated.items() if whose == 0)
    assert 3 <= taken < 11, "three steps were done meanwhile, and nobody waited for the next one that is due"
    assert loop.rows[-1]["eval/step"] == 12
    assert [row["step"] for row in loop.rows if row["eval/wait_s"] is not None] == [0, 11, 12]
    assert [row["eval/pass_at_1"] for row in found] == [0.0] * 3


async def test_the_next_evaluation_waits_for_the_one_before_it(tmp_path: Path) -> None:
    loop = slow_loop(tmp_path, beside(num_steps=4, every=1))
    gate = opens_at(loop, 99)
    asyncio.get_running_loop().call_later(0.05, gate.set)
    await loop.run()
    assert [row["step"] for row in read_rows(loop.folder.evaluations)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("mode", [SyncMode.adapter, SyncMode.merged])
async def test_engines_keep_the_version_of_an_evaluation_where_they_can(tmp_path: Path, mode: SyncMode) -> None:
    config = replace(beside(), weight_sync=WeightSyncConfig(mode=mode))
    loop = slow_loop(tmp_path, config)
    await loop.run()
    versions = [version for worker in slow_workers(loop) for version in worker.asked]
    assert sorted(set(versions), key=str) == ([0, 2, 4, 6] if mode is SyncMode.adapter else [None])
    assert {worker.kept for worker in slow_workers(loop)} == {None}
    assert config.num_adapter_slots == 3 and beside().evaluates_beside


@pytest.mark.parametrize(
    ("mode", "is_beside", "kept"),
    [(SyncMode.adapter, True, [7, None]), (SyncMode.adapter, False, []), (SyncMode.merged, True, [])],
)
async def test_an_evaluation_lets_go_of_its_version_when_it_has_sampled_and_says_how_long_that_took(
    mode: SyncMode, is_beside: bool, kept: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = SimpleNamespace(now=100.0), []
    monkeypatch.setattr(evaluations, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def keep_version(version: int | None) -> int:
        asked.append(version)
        return 2

    async def evaluate(version: int | None) -> dict[str, list[Group]]:
        assert version == (7 if kept else None) and None not in asked
        clock.now += 3.5
        return {}

    config = replace(beside(eval_beside=is_beside), weight_sync=WeightSyncConfig(mode=mode))
    services: Any = SimpleNamespace(router=SimpleNamespace(keep_version=keep_version))
    sampler: Any = SimpleNamespace(evaluate=evaluate)
    under_way = Evaluations(config, services, sampler)
    assert not under_way.is_running and not under_way.has_ended
    await under_way.begin(4, 7)
    assert under_way.is_running and not under_way.has_ended
    found = await under_way.finish()
    assert not under_way.is_running and asked == kept
    assert (found.step, found.policy_version) == (4, 7)
    assert (found.figures["eval/step"], found.figures["eval/total_s"]) == (4, 3.5)


async def test_tokens_of_other_versions_are_told(tmp_path: Path) -> None:
    """With merged weights, the held-out prompts that begin at version 0 are answered at version 3 (as fakes do)."""
    loop = slow_loop(tmp_path, beside(num_steps=6, every=6))
    opens_at(loop, 3)
    await loop.run()
    first, last = read_rows(loop.folder.evaluations)
    assert first["eval/version_spread"] >= 2 and first["eval/other_version_fraction"] == 1.0
    assert (last["eval/version_spread"], last["eval/other_version_fraction"]) == (0, 0.0)


async def test_a_run_that_is_told_to_end_leaves_no_evaluation_behind(tmp_path: Path) -> None:
    loop = slow_loop(tmp_path, beside(num_steps=9, every=2))
    opens_at(loop, 99)
    running = asyncio.create_task(loop.run())
    await until(lambda: len(loop.trainer.trained) == 1)
    await end(running)
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if "Evaluations._run" in repr(task)]


async def test_an_evaluation_that_fails_beside_training_ends_the_run_with_its_state_saved(tmp_path: Path) -> None:
    loop = slow_loop(tmp_path, beside(num_steps=50, every=2))

    async def gone() -> None:
        if loop.world.version >= 3:
            raise ConnectionError("gone")

    for worker in loop.workers:
        worker.before["generate_group"] = gone
    with pytest.raises(NoReplicasLeft, match="gone"):
        await loop.run()
    assert loop.saved.step == loop.rows[-1]["step"]


async def test_the_best_checkpoint_stays_and_old_ones_do_not(tmp_path: Path) -> None:
    config = beside(num_steps=6, every=1, keep_best="eval/reward", eval_samples_per_prompt=2, eval_beside=False)
    loop = Loop(tmp_path, config)
    folder, saved_early = loop.folder.checkpoints, list[bool]()

    def is_flat(prompt: Prompt) -> bool:
        if is_held_out := prompt.prompt_id >= 1000:
            saved_early.append(bool(complete_checkpoints(folder)) and loop.saved.step >= len(loop.rows))
        return is_held_out and loop.world.version == 2

    loop.rewards.is_flat = is_flat
    await loop.run()
    assert not any(saved_early), "a run that dies during an evaluation would go on behind a step without a row"
    assert [step_of(path) for path in complete_checkpoints(folder)] == [2, 5, 6]
    facts = {"metric": "eval/reward", "value": 1.0, "step": 2, "since": 0, "held_out": {"": "held_out.jsonl"}}
    judged_by = {"options": options_behind(config), "files": {}}
    assert json.loads((folder / "best.json").read_text()) == {**facts, **judged_by}
    assert loop.folder.best.resolve() == folder / "step-000002"

    again = BestCheckpoint(loop.checkpoints, config, up_to_step=6)
    again.judge(6, 1.0)  # no better, and the first one stays
    assert loop.folder.best.resolve().name == "step-000002"
    again.judge(6, 2.0)
    assert loop.folder.best.resolve().name == "step-000006"
    assert [step_of(path) for path in complete_checkpoints(folder)] == [5, 6]
    forgotten = BestCheckpoint(loop.checkpoints, config, up_to_step=5)  # a run that redoes step 6
    forgotten.judge(5, 0.1)
    assert loop.folder.best.resolve().name == "step-000005"


async def test_a_checkpoint_stays_while_its_evaluation_goes_on_however_many_are_newer(tmp_path: Path) -> None:
    """Two are kept. That of step 3 is judged when steps 4 to 6 are made."""
    loop = slow_loop(tmp_path, beside(num_steps=6, every=3, keep_best="eval/reward", checkpoint_every_steps=1))
    gate = asyncio.Event()

    async def publish() -> None:
        for worker in slow_workers(loop):
            worker.held_out_gate = gate if loop.world.version >= 3 else None
        if loop.world.version == 6:
            gate.set()

    loop.trainer.before["publish"] = publish
    await loop.run()
    assert [step_of(path) for path in complete_checkpoints(loop.folder.checkpoints)] == [3, 5, 6]
    assert loop.folder.best.resolve().name == "step-000003"


async def test_a_run_of_no_step_publishes_and_evaluates_once(tmp_path: Path) -> None:
    """What `slipstream eval` starts."""
    loop = slow_loop(tmp_path, beside(num_steps=0, eval_beside=False))
    controller = await loop.run()
    (row,) = read_rows(loop.folder.evaluations)
    assert (controller.step, row["step"], row["eval/failures"], loop.trainer.trained) == (0, 0, 0, [])
    assert [row["step"] for row in loop.rows] == [0]
