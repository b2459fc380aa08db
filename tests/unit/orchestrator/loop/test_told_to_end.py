"""Locks: a run that is told to end (Ctrl-C, SIGTERM) ends the step under way and saves what it has."""

import asyncio
from pathlib import Path

import pytest
from fakes.clock import turns
from fakes.fleet import until
from fakes.loop import Loop, end, make_config

from slipstream.fleet.waiting import finish_first
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
