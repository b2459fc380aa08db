"""Locks: a run that is told to end (Ctrl-C, SIGTERM) ends the step under way and saves what it has. Files, checksums
and flushing of a checkpoint go on beside the steps that follow; nothing of it is lost or hidden.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes.clock import turns
from fakes.fleet import until
from fakes.loop import Loop, end, make_config

from slipstream.conf.schema import TrainMode
from slipstream.fleet.waiting import finish_first
from slipstream.orchestrator.checkpoints.loop_state import RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import complete_checkpoints, step_of
from slipstream.orchestrator.errors import CheckpointLost, DiskFull
from slipstream.orchestrator.loop import step_loop

UNSAVED = make_config(num_steps=9, run={"checkpoint_every_steps": 0})


async def test_while_it_waits_for_a_batch_it_is_saved_as_it_is(tmp_path: Path) -> None:
    loop = Loop(tmp_path, UNSAVED)
    running = asyncio.create_task(loop.run())
    await until(lambda: len(loop.trainer.trained) == 3)
    for worker in loop.workers:
        worker.gate = asyncio.Event()  # the next batch comes when the run is saved
    await until(lambda: loop.controller is not None and loop.controller.step == 3)
    await turns()

    async def it_comes() -> None:
        for worker in loop.workers:
            assert worker.gate is not None
            worker.gate.set()
        await turns(50)

    loop.trainer.before["end of begin_checkpoint"] = it_comes
    await end(running)
    state = loop.saved
    assert (state.step, state.policy_version, state.buffer.num_batches) == (3, 3, 3), "nobody takes it any more"
    assert len(state.buffer.groups) == 3

    rest = Loop(tmp_path, UNSAVED, resume_step=3)
    await rest.run()
    assert [row["step"] for row in rest.rows] == list(range(10))


async def test_a_step_under_way_is_ended_and_saved(tmp_path: Path) -> None:
    loop = Loop(tmp_path, UNSAVED)
    gate = asyncio.Event()

    async def slow_at_4() -> None:
        if loop.world.version == 4:
            await gate.wait()

    loop.trainer.before["optimizer_step"] = slow_at_4
    running = asyncio.create_task(loop.run())
    await until(lambda: len(loop.trainer.trained) == 5)
    asyncio.get_running_loop().call_later(0.05, gate.set)
    await end(running)
    state = loop.saved
    assert (state.step, state.policy_version, state.buffer.num_batches) == (5, 5, 5)
    assert [row["step"] for row in loop.rows] == list(range(6))


async def test_a_step_that_takes_too_long_is_left_and_nothing_half_done_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "LAST_STEP_S", 0.05)
    loop = Loop(tmp_path, UNSAVED)

    async def never_at_3() -> None:
        if len(loop.trainer.trained) == 3:
            await asyncio.Event().wait()

    loop.trainer.before["optimizer_step"] = never_at_3
    running = asyncio.create_task(loop.run())
    await until(lambda: len(loop.trainer.trained) == 3)
    await end(running)
    assert len(loop.rows) == 3 and loop.checkpoints.newest() is None


async def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config())
    for worker in loop.workers:
        worker.gate = asyncio.Event()
    running = asyncio.create_task(loop.run())
    await until(lambda: ("publish", 0) in loop.world.diary)
    await end(running)
    assert loop.checkpoints.newest() is None


async def test_a_checkpoint_of_the_same_step_is_not_written_twice(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=4))
    controller = await loop.run()
    newest = loop.checkpoints.newest()
    assert newest is not None
    before = {path: path.stat().st_mtime_ns for path in newest.rglob("*")}
    assert (newest / "adapter" / "adapter_model.safetensors").read_text() == "4", "it can be served"
    assert await controller.save() == newest
    assert {path: path.stat().st_mtime_ns for path in newest.rglob("*")} == before


async def test_what_the_work_raised_meanwhile_is_told(caplog: pytest.LogCaptureFixture) -> None:
    gate = asyncio.Event()

    async def fails() -> None:
        await gate.wait()
        raise ValueError("no such thing")

    running = asyncio.create_task(finish_first(fails(), "the step", timeout_s=5))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.01, gate.set)
    await end(running)
    assert "the step failed while the run was told to end: no such thing" in caplog.text


class Completing:
    """The completion of the first checkpoint, of step 2, which waits."""

    def __init__(self, loop: Loop) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self.finish, loop.checkpoints.finish = loop.checkpoints.finish, self  # type: ignore[method-assign]

    def __call__(self, partial: Path, state: RunState) -> Path:
        if state.step == 2:
            self.begun.set()
            assert self.goes_on.wait(60)
            if self.error is not None:
                raise self.error
        return self.finish(partial, state)


@contextmanager
def completing(loop: Loop) -> Iterator[Completing]:
    held = Completing(loop)
    try:
        yield held
    finally:
        held.goes_on.set()


async def until_trained(loop: Loop, num_steps: int) -> None:
    async with asyncio.timeout(60):
        while len(loop.trainer.trained) < num_steps:
            await asyncio.sleep(0.001)


async def test_steps_go_on_until_the_next_checkpoint_which_waits(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=6))
    with completing(loop) as held:
        running = asyncio.create_task(loop.run())
        await until_trained(loop, 4)
        assert await asyncio.to_thread(held.begun.wait, 60)
        await asyncio.sleep(0.05)
        assert loop.checkpoints.newest() is None
        assert len(loop.trainer.trained) == 4
    await running
    assert [path.name for path in sorted(loop.folder.checkpoints.glob("step-*"))][-1] == "step-000006"
    assert [row["step"] for row in loop.rows] == list(range(7))


async def test_steps_go_on_while_the_trainer_writes_its_files(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=6))
    loop.trainer.is_slow_to_write = True
    running = asyncio.create_task(loop.run())
    await until_trained(loop, 4)
    await asyncio.sleep(0.05)
    assert loop.checkpoints.newest() is None
    assert len(loop.trainer.trained) == 4, "the next checkpoint waits"
    loop.trainer.is_slow_to_write = False
    await running
    saved = complete_checkpoints(loop.folder.checkpoints)
    assert step_of(saved[-1]) == 6
    for path in saved:
        for file in ("trainer/rank0.json", "adapter/adapter_model.safetensors"):
            assert (path / file).read_text() == str(step_of(path))


async def test_it_holds_the_state_of_its_own_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=4, staleness=1))
    with completing(loop):
        running = asyncio.create_task(loop.run())
        await until_trained(loop, 3)
    await running
    state = loop.checkpoints.read(loop.folder.checkpoints / "step-000002")
    assert (state.step, state.policy_version, state.buffer.num_batches) == (2, 2, 2)


@pytest.mark.parametrize("num_steps", [9, 2])
async def test_what_keeps_it_from_being_complete_ends_the_run_after_the_step_under_way(
    num_steps: int, tmp_path: Path
) -> None:
    """Also a run that has made its steps."""
    loop = Loop(tmp_path, make_config(num_steps=num_steps))
    with completing(loop) as held:
        held.error = OSError(28, "No space left on device")
        running = asyncio.create_task(loop.run())
        await until_trained(loop, min(4, num_steps))
        assert await asyncio.to_thread(held.begun.wait, 60)
    with pytest.raises(DiskFull, match="No space left on device"):
        await running
    assert list(loop.folder.checkpoints.iterdir()) == [], "what was half written is gone"
    assert len(loop.trainer.trained) == min(4, num_steps)


@pytest.mark.parametrize("mode", TrainMode)
async def test_it_holds_an_adapter_where_one_is_trained(tmp_path: Path, mode: TrainMode) -> None:
    loop = Loop(tmp_path, make_config(num_steps=2, trainer={"mode": mode}))
    await loop.run()
    (path,) = complete_checkpoints(loop.folder.checkpoints)
    assert (path / "adapter").exists() == (mode is TrainMode.lora)


async def test_a_run_that_is_told_to_end_waits_for_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=9))
    with completing(loop) as held:
        running = asyncio.create_task(loop.run())
        await until_trained(loop, 3)
        running.cancel()
        assert await asyncio.to_thread(held.begun.wait, 60)
        await asyncio.sleep(0.05)
        assert not running.done()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (loop.folder.checkpoints / "step-000002" / "manifest.json").exists()
    assert loop.saved.step >= 3


async def test_a_run_that_is_told_to_end_while_ranks_begin_one_lets_them_and_makes_no_second_one(
    tmp_path: Path,
) -> None:
    """They write into its folder, which could not be made anew then."""
    loop, begun, goes_on = Loop(tmp_path, make_config(num_steps=9)), asyncio.Event(), asyncio.Event()
    begin, folders = loop.trainer.begin_checkpoint, list[Path]()

    async def takes_its_time(folder: Path, adapter: Path | None) -> None:
        folders.append(folder)
        begun.set()
        await goes_on.wait()
        await begin(folder, adapter)

    loop.trainer.begin_checkpoint = takes_its_time  # type: ignore[method-assign]
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(begun.wait(), 60)
    running.cancel()
    await asyncio.sleep(0.05)
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(folders) == 1
    assert step_of(loop.checkpoints.newest()) == loop.rows[-1]["step"] == 2


async def test_a_checkpoint_that_a_dead_rank_had_not_written_is_given_up_and_the_next_one_made(tmp_path: Path) -> None:
    loop, num_looks = Loop(tmp_path, make_config(num_steps=6)), 0
    written = loop.trainer.has_written

    async def is_lost_at_first() -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 1:
            loop.trainer.down_s += [1.5, 2.0]
            loop.trainer.unkept_steps = 3
            raise CheckpointLost("a trainer rank died before its files were there")
        return await written()

    loop.trainer.has_written = is_lost_at_first  # type: ignore[method-assign]
    await loop.run()
    assert [step_of(path) for path in complete_checkpoints(loop.folder.checkpoints)] == [4, 6]
    assert sorted(path.name for path in loop.folder.checkpoints.iterdir()) == ["step-000004", "step-000006"]
    told = [(row["trainer/restarts"], row["trainer/down_s"]) for row in loop.rows[1:]]
    assert sorted(told, key=str) == [(0, None)] * 5 + [(2, 3.5)], "each restart is told in one row"
    assert [row["trainer/unkept_steps"] for row in (loop.rows[1], loop.rows[-1])] == [None, 3]
