"""Locks: who serves after a publish, and that nothing waits in silence or for ever."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fakes.loop import FakeWorker, World, outcome

from orchestrator.errors import WaitTimeout
from orchestrator.fleet.replicas import ReplicaState
from orchestrator.fleet.supervisor import Supervisor
from orchestrator.waiting import together, wait_for
from rollout.types import Prompt
from weight_sync.publish.report import ReplicaReport

PROMPT = Prompt(0, (1,), "p")


def make(num_workers: int = 2) -> tuple[Supervisor, list[FakeWorker]]:
    world = World(committed=[0] * num_workers)
    workers = [FakeWorker(world, i) for i in range(num_workers)]
    return Supervisor(workers), workers


async def serve(supervisor: Supervisor) -> None:
    await supervisor.hold()
    await supervisor.settle([outcome(True) for _ in supervisor.replicas])


async def test_replica_once_out_stays_out() -> None:
    supervisor, _ = make(2)
    await supervisor.hold()
    await supervisor.settle([outcome(False, "IntegrityError: x"), outcome(True)])
    await serve(supervisor)
    assert [replica.state for replica in supervisor.replicas] == [ReplicaState.out, ReplicaState.serving]


async def test_waiting_speaks_gives_up_and_takes_progress_as_patience(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(WaitTimeout, match="waiting for godot"):
        await wait_for(asyncio.Event().wait(), "godot", timeout_s=0.05, say_every_s=0.01)
    assert "s for godot" in caplog.text

    looks = 0

    def progress() -> int:
        nonlocal looks
        looks += 1
        return min(looks, 8)

    with pytest.raises(WaitTimeout):
        await wait_for(asyncio.Event().wait(), "godot", timeout_s=0.01, progress=progress, say_every_s=0.01)
    assert looks >= 8, "every growth of the counter starts the deadline again"


async def test_together_raises_the_first_failure_as_it_is_and_cancels_the_rest() -> None:
    cancelled = asyncio.Event()

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def fails() -> None:
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        await together(hangs(), fails())
    assert cancelled.is_set()


async def publish_without_a_pause(supervisor: Supervisor, *outcomes: ReplicaReport) -> None:
    """One publish of adapter mode."""
    await supervisor.hold(pauses=False)
    await supervisor.settle(outcomes)


async def test_in_adapter_mode_a_replica_serves_on_until_its_version_is_too_old() -> None:
    _, workers = make(2)
    supervisor = Supervisor(workers, max_missed_publishes=1)
    await publish_without_a_pause(supervisor, outcome(True), outcome(True))
    await supervisor.hold(pauses=False)
    assert supervisor.num_serving == 2, "nobody is held"
    await supervisor.settle([outcome(True), outcome(False, "a flipped bit")])
    assert supervisor.num_serving == 2
    await publish_without_a_pause(supervisor, outcome(True), outcome(True))
    await publish_without_a_pause(supervisor, outcome(True), outcome(False, "a flipped bit"))
    assert supervisor.num_serving == 2, "a commit starts the count anew"
    await publish_without_a_pause(supervisor, outcome(True), outcome(False, "again"))
    assert supervisor.out_of_service == [1]
    assert supervisor.replicas[1].reason == "again"


async def test_in_adapter_mode_a_first_publish_that_fails_leaves_nothing_to_serve() -> None:
    _, workers = make(1)
    supervisor = Supervisor(workers, max_missed_publishes=3)
    await publish_without_a_pause(supervisor, outcome(False, "the engine ignores adapters"))
    assert supervisor.out_of_service == [0]
