"""Locks: which replica is asked, and what a failed request costs."""

from __future__ import annotations

import asyncio

import pytest
from fakes.loop import FakeWorker, World, outcome

from orchestrator.errors import NoReplicasLeft
from orchestrator.fleet.replicas import ReplicaState
from orchestrator.fleet.router import Router
from orchestrator.fleet.supervisor import Supervisor
from rollout.types import Prompt, Rollout
from weight_sync.errors import ReplicaDirty

PROMPT = Prompt(0, (1,), "p")


def make(num_workers: int = 2) -> tuple[Supervisor, list[FakeWorker]]:
    world = World(committed=[0] * num_workers)
    workers = [FakeWorker(world, i) for i in range(num_workers)]
    return Supervisor(workers), workers


async def serve(supervisor: Supervisor) -> None:
    await supervisor.hold()
    await supervisor.settle([outcome(True) for _ in supervisor.replicas])


async def test_least_loaded_replica_is_asked() -> None:
    supervisor, workers = make()
    router = Router(supervisor, request_timeout_s=5)
    await serve(supervisor)
    for worker in workers:
        worker.gate = asyncio.Event()
    calls = [asyncio.create_task(router.generate_group(PROMPT, 2)) for _ in range(6)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert [worker.num_groups for worker in workers] == [3, 3]
    for worker in workers:
        worker.gate.set()
    assert all(len(rollouts) == 2 for rollouts in await asyncio.gather(*calls))


async def test_no_group_starts_before_the_first_commit_or_during_a_publish() -> None:
    supervisor, workers = make()
    router = Router(supervisor, request_timeout_s=5)
    call = asyncio.create_task(router.generate_group(PROMPT, 2))
    for _ in range(10):
        await asyncio.sleep(0)
    assert sum(worker.num_groups for worker in workers) == 0
    await serve(supervisor)
    await call
    await supervisor.hold()
    call = asyncio.create_task(router.generate_group(PROMPT, 2))
    for _ in range(10):
        await asyncio.sleep(0)
    assert sum(worker.num_groups for worker in workers) == 1
    await supervisor.settle([outcome(True), outcome(True)])
    await call


async def test_request_that_crossed_a_publish_is_repeated_and_costs_nobody() -> None:
    supervisor, (worker,) = make(1)
    router = Router(supervisor, request_timeout_s=5)
    await serve(supervisor)

    async def dirty_once() -> None:
        worker.before.clear()
        await supervisor.hold()
        asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(supervisor.settle([outcome(True)])))
        raise ReplicaDirty("begin came first")

    worker.before["generate_group"] = dirty_once
    assert len(await router.generate_group(PROMPT, 2)) == 2
    assert router.num_failed_groups == 0
    assert supervisor.replicas[0].state is ReplicaState.serving


async def test_replica_that_refuses_without_a_publish_goes_out() -> None:
    supervisor, (worker,) = make(1)
    router = Router(supervisor, request_timeout_s=5)
    await serve(supervisor)

    async def dirty() -> None:
        raise ReplicaDirty("phase DIRTY")

    worker.before["generate_group"] = dirty
    with pytest.raises(NoReplicasLeft, match="phase DIRTY"):
        await router.generate_group(PROMPT, 2)


async def test_hanging_request_times_out_and_moves_to_another_replica() -> None:
    supervisor, workers = make(2)
    router = Router(supervisor, request_timeout_s=0.05)
    await serve(supervisor)
    workers[0].gate = asyncio.Event()
    assert len(await router.generate_group(PROMPT, 2)) == 2
    assert router.num_failed_groups == 1
    assert supervisor.replicas[0].state is ReplicaState.out and "gave up" in supervisor.replicas[0].reason


async def test_wrong_number_of_responses_is_a_failure() -> None:
    supervisor, (worker,) = make(1)
    router = Router(supervisor, request_timeout_s=5)
    await serve(supervisor)

    async def one_too_few(prompt: Prompt, n: int, sampling: object = None, version: object = None) -> list[Rollout]:
        return [Rollout([1], [0.0], [0], "x", "stop")] * (n - 1)

    worker.generate_group = one_too_few  # type: ignore[method-assign]
    with pytest.raises(NoReplicasLeft, match="asked for 2 responses, got 1"):
        await router.generate_group(PROMPT, 2)
