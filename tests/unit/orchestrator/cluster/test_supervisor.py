"""Locks: who is asked, what a failed request costs, and that nothing waits in silence or for ever."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fakes.loop import FakeWorker, World, outcome

from orchestrator.cluster.replicas import ReplicaState
from orchestrator.cluster.supervisor import Supervisor
from orchestrator.errors import NoReplicasLeft, WaitTimeout
from orchestrator.waiting import together, wait_for
from rollout.types import Prompt, Rollout
from weight_sync.errors import ReplicaDirty

PROMPT = Prompt(0, (1,), "p")


def make(num_workers: int = 2, request_timeout_s: float = 5) -> tuple[Supervisor, list[FakeWorker]]:
    world = World(committed=[0] * num_workers)
    workers = [FakeWorker(world, i) for i in range(num_workers)]
    return Supervisor(workers, request_timeout_s=request_timeout_s), workers


async def serve(supervisor: Supervisor) -> None:
    await supervisor.hold()
    await supervisor.settle([outcome(True) for _ in supervisor.replicas])


async def test_least_loaded_replica_is_asked() -> None:
    supervisor, workers = make()
    await serve(supervisor)
    for worker in workers:
        worker.gate = asyncio.Event()
    calls = [asyncio.create_task(supervisor.generate_group(PROMPT, 2)) for _ in range(6)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert [worker.num_groups for worker in workers] == [3, 3]
    for worker in workers:
        worker.gate.set()
    assert all(len(rollouts) == 2 for rollouts in await asyncio.gather(*calls))


async def test_no_group_starts_before_the_first_commit_or_during_a_publish() -> None:
    supervisor, workers = make()
    call = asyncio.create_task(supervisor.generate_group(PROMPT, 2))
    for _ in range(10):
        await asyncio.sleep(0)
    assert sum(worker.num_groups for worker in workers) == 0
    await serve(supervisor)
    await call
    await supervisor.hold()
    call = asyncio.create_task(supervisor.generate_group(PROMPT, 2))
    for _ in range(10):
        await asyncio.sleep(0)
    assert sum(worker.num_groups for worker in workers) == 1
    await supervisor.settle([outcome(True), outcome(True)])
    await call


async def test_request_that_crossed_a_publish_is_repeated_and_costs_nobody() -> None:
    supervisor, (worker,) = make(1)
    await serve(supervisor)
    generate = worker.generate_group

    async def dirty_once(prompt: Prompt, n: int, sampling: object = None) -> list[Rollout]:
        worker.generate_group = generate  # type: ignore[method-assign]
        await supervisor.hold()
        asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(supervisor.settle([outcome(True)])))
        raise ReplicaDirty("begin came first")

    worker.generate_group = dirty_once  # type: ignore[method-assign]
    assert len(await supervisor.generate_group(PROMPT, 2)) == 2
    assert supervisor.num_failed_groups == 0
    assert supervisor.replicas[0].state is ReplicaState.serving


async def test_replica_that_refuses_without_a_publish_goes_out() -> None:
    supervisor, (worker,) = make(1)
    await serve(supervisor)

    async def dirty(prompt: Prompt, n: int, sampling: object = None) -> list[Rollout]:
        raise ReplicaDirty("phase DIRTY")

    worker.generate_group = dirty  # type: ignore[method-assign]
    with pytest.raises(NoReplicasLeft, match="phase DIRTY"):
        await supervisor.generate_group(PROMPT, 2)


async def test_hanging_request_times_out_and_moves_to_another_replica() -> None:
    supervisor, workers = make(2, request_timeout_s=0.05)
    await serve(supervisor)
    workers[0].gate = asyncio.Event()
    assert len(await supervisor.generate_group(PROMPT, 2)) == 2
    assert supervisor.num_failed_groups == 1
    assert supervisor.replicas[0].state is ReplicaState.out and "gave up" in supervisor.replicas[0].reason


async def test_replica_once_out_stays_out() -> None:
    supervisor, _ = make(2)
    await supervisor.hold()
    await supervisor.settle([outcome(False, "IntegrityError: x"), outcome(True)])
    await serve(supervisor)
    assert [replica.state for replica in supervisor.replicas] == [ReplicaState.out, ReplicaState.serving]


async def test_wrong_number_of_responses_is_a_failure() -> None:
    supervisor, (worker,) = make(1)
    await serve(supervisor)

    async def one_too_few(prompt: Prompt, n: int, sampling: object = None) -> list[Rollout]:
        return [Rollout([1], [0.0], [0], "x", "stop")] * (n - 1)

    worker.generate_group = one_too_few  # type: ignore[method-assign]
    with pytest.raises(NoReplicasLeft, match="asked for 2 responses, got 1"):
        await supervisor.generate_group(PROMPT, 2)


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


async def publish_without_a_pause(supervisor: Supervisor, *outcomes: outcome) -> None:
    """One publish of adapter mode."""
    await supervisor.hold(pauses=False)
    await supervisor.settle(outcomes)


async def test_in_adapter_mode_a_replica_serves_on_until_its_version_is_too_old() -> None:
    _, workers = make(2)
    supervisor = Supervisor(workers, request_timeout_s=5, max_missed_publishes=1)
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
    supervisor = Supervisor(workers, request_timeout_s=5, max_missed_publishes=3)
    await publish_without_a_pause(supervisor, outcome(False, "the engine ignores adapters"))
    assert supervisor.out_of_service == [0]
