"""Locks: who serves after a publish, and that nothing waits in silence or for ever."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fakes.clock import on_jumping_clock
from fakes.loop import FakeWorker, World, outcome

from fleet.errors import NoReplicasLeft, WaitTimeout
from fleet.replicas import ReplicaState
from fleet.supervisor import Supervisor
from fleet.waiting import together, wait_for
from rollout.types import Prompt
from weight_sync.publish.report import ReplicaReport

PROMPT = Prompt(0, (1,), "p")


def make(num_workers: int = 2) -> tuple[Supervisor, list[FakeWorker]]:
    world = World(committed=[0] * num_workers)
    workers = [FakeWorker(world, i) for i in range(num_workers)]
    return Supervisor(workers), workers


async def serve(supervisor: Supervisor) -> None:
    await supervisor.hold()
    await supervisor.settle([outcome(True) for _ in supervisor.replicas.values()])


async def test_replica_once_out_stays_out() -> None:
    supervisor, _ = make(2)
    await supervisor.hold()
    await supervisor.settle([outcome(False, "IntegrityError: x"), outcome(True)])
    await serve(supervisor)
    assert [replica.state for replica in supervisor.replicas.values()] == [ReplicaState.out, ReplicaState.serving]


async def test_a_death_that_a_publish_notices_is_told_with_how_it_came(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, workers = make(3)
    workers[0].death = "rollout-0 died of SIGSEGV (main thread in a.py:1, f)"
    workers[2].death = "the engine's process was ended by SIGKILL"
    await supervisor.hold()
    told = [
        outcome(False, "PeerLost: a link broke"),
        outcome(False, "IntegrityError: x"),
        outcome(False, workers[2].death),
    ]
    await supervisor.settle(told)
    reasons = [
        f"{workers[0].death}; a publish noticed it: PeerLost: a link broke",
        "IntegrityError: x",
        workers[2].death,
    ]
    assert [replica.reason for replica in supervisor.replicas.values()] == reasons
    assert [message.partition("left: ")[2] for message in caplog.messages] == reasons
    with pytest.raises(NoReplicasLeft, match="rollout-0: rollout-0 died of SIGSEGV"):
        supervisor.require_replicas()


async def test_a_worker_that_was_replaced_while_it_was_asked_how_it_died_is_not_failed_again() -> None:
    supervisor, workers = make(2)
    replica = supervisor.replicas["rollout-0"]

    async def replaced() -> None:
        replica.worker, replica.state = workers[1], ReplicaState.recovering
        raise ConnectionError("it died")

    workers[0].check = replaced  # type: ignore[method-assign]
    await supervisor.hold()
    await supervisor.settle([outcome(False, "PeerLost: x"), outcome(True)])
    assert (replica.state, replica.reason) == (ReplicaState.recovering, "")


@on_jumping_clock
async def test_a_worker_that_does_not_say_whether_it_is_alive_is_waited_for_briefly() -> None:
    supervisor, workers = make(2)
    workers[0].check = asyncio.Event().wait  # type: ignore[method-assign]
    await supervisor.hold()
    began = asyncio.get_running_loop().time()
    await supervisor.settle([outcome(False, "PeerLost: x"), outcome(True)])
    assert asyncio.get_running_loop().time() - began < 10
    assert supervisor.replicas["rollout-0"].reason == "PeerLost: x"


@on_jumping_clock
async def test_waiting_speaks_gives_up_and_takes_progress_as_patience(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = asyncio.get_running_loop().time
    began, says = now(), iter(["godot", "godot", "somebody else"])
    with pytest.raises(WaitTimeout, match="gave up after 70 s of waiting for somebody else"):
        await wait_for(asyncio.Event().wait(), lambda: next(says), timeout_s=70, say_every_s=30)
    assert now() - began == pytest.approx(70)
    assert caplog.messages == [f"waited {waited} s for godot (gives up after 70 s)" for waited in (30, 60)]

    began, grows_until = now(), now() + 100
    with pytest.raises(WaitTimeout, match="gave up after 150 s"):
        await wait_for(
            asyncio.Event().wait(), "godot", timeout_s=50, progress=lambda: int(min(now(), grows_until)), say_every_s=10
        )
    assert now() - began == pytest.approx(150), "every growth of the counter starts the deadline again"


@on_jumping_clock
async def test_what_is_waited_for_ends_with_the_wait_and_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert await wait_for(asyncio.sleep(29, "it"), "godot", timeout_s=29.5) == "it"
    assert caplog.messages == []
    with pytest.raises(KeyError):
        await wait_for(fails_after(1), "godot", timeout_s=2)
    for how in ("timeout", "cancelled"):
        hangs = asyncio.ensure_future(asyncio.Event().wait())
        waiting = asyncio.ensure_future(wait_for(hangs, "godot", timeout_s=5))
        await asyncio.sleep(1)
        if how == "cancelled":
            waiting.cancel()
        with pytest.raises(WaitTimeout if how == "timeout" else asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0)
        assert hangs.cancelled()


async def fails_after(seconds: float) -> None:
    await asyncio.sleep(seconds)
    raise KeyError


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
    assert supervisor.out_of_service == ["rollout-1"]
    assert supervisor.replicas["rollout-1"].reason == "again"


async def test_in_adapter_mode_a_first_publish_that_fails_leaves_nothing_to_serve() -> None:
    _, workers = make(1)
    supervisor = Supervisor(workers, max_missed_publishes=3)
    await publish_without_a_pause(supervisor, outcome(False, "the engine ignores adapters"))
    assert supervisor.out_of_service == ["rollout-0"]
