"""Locks: who serves after a publish, and whom it costs."""

import asyncio
import gc
import weakref

import pytest
from fakes.clock import on_jumping_clock
from fakes.fleet import never, serve, supervised, until
from fakes.trainer import outcome

from slipstream.conf.plural import counted
from slipstream.fleet.errors import NoReplicasLeft
from slipstream.fleet.replicas import ReplicaState
from slipstream.fleet.supervisor import Supervisor
from slipstream.rollout.types import Prompt
from slipstream.weight_sync.publish.report import ReplicaReport

PROMPT = Prompt(0, (1,), "p")


@pytest.mark.parametrize(
    ("error", "reason"),
    [("IntegrityError: x", "IntegrityError: x"), (None, "it did not commit and gave no reason")],
)
async def test_replica_once_out_stays_out_and_has_a_reason(error: str | None, reason: str) -> None:
    supervisor, _ = supervised(2)
    await supervisor.hold()
    await supervisor.settle([outcome(False, error), outcome(True)])
    await serve(supervisor)
    out, serving = supervisor.roster.replicas.values()
    assert (out.state, out.reason, serving.state) == (ReplicaState.out, reason, ReplicaState.serving)


async def test_whoever_waits_for_a_worker_hears_that_the_last_one_failed() -> None:
    supervisor, _ = supervised(1)
    await serve(supervisor)
    await supervisor.hold()
    waiting = asyncio.create_task(supervisor.roster.least_loaded())
    await asyncio.sleep(0)
    await supervisor.fail(supervisor.roster.replicas["rollout-0"], "it died")
    await until(waiting.done)
    with pytest.raises(NoReplicasLeft, match="it died"):
        await waiting


async def test_a_death_that_a_publish_notices_is_told_with_how_it_came(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, workers = supervised(3)
    workers[0].death = "rollout-0 died of SIGSEGV (main thread in a.py:1, f)"
    workers[2].death = "the engine's process was ended by SIGKILL"
    await supervisor.hold()
    errors = ("PeerLost: a link broke", "IntegrityError: x", workers[2].death)
    await supervisor.settle([outcome(False, error) for error in errors])
    reasons = [
        f"{workers[0].death}; a publish noticed it: PeerLost: a link broke",
        "IntegrityError: x",
        workers[2].death,
    ]
    assert [replica.reason for replica in supervisor.roster.replicas.values()] == reasons
    assert caplog.messages == [
        f"rollout-{number} is out of service, {counted(2 - number, 'other worker')} left: {reason}"
        for number, reason in enumerate(reasons)
    ]
    with pytest.raises(NoReplicasLeft, match="rollout-0: rollout-0 died of SIGSEGV"):
        supervisor.roster.require_replicas()


@pytest.mark.parametrize(("process", "state"), [(1, ReplicaState.recovering), (0, ReplicaState.leaving)])
async def test_a_worker_that_was_replaced_or_left_while_it_was_asked_how_it_died_is_not_failed_again(
    process: int, state: ReplicaState
) -> None:
    supervisor, workers = supervised(2)
    replica = supervisor.roster.replicas["rollout-0"]

    async def meanwhile() -> None:
        replica.handle, replica.state = workers[process], state
        raise ConnectionError("it died")

    workers[0].check = meanwhile  # type: ignore[method-assign]
    await supervisor.hold()
    await supervisor.settle([outcome(False, "PeerLost: x"), outcome(True)])
    assert (replica.state, replica.reason) == (state, "")


@on_jumping_clock
async def test_a_worker_that_does_not_say_whether_it_is_alive_is_waited_for_briefly() -> None:
    supervisor, workers = supervised(2)
    workers[0].check = asyncio.Event().wait  # type: ignore[method-assign]
    await supervisor.hold()
    began = asyncio.get_running_loop().time()
    await supervisor.settle([outcome(False, "PeerLost: x"), outcome(True)])
    assert asyncio.get_running_loop().time() - began < 10
    assert supervisor.roster.replicas["rollout-0"].reason == "PeerLost: x"


async def test_a_worker_that_a_publish_holds_is_not_chosen_though_it_is_the_least_loaded() -> None:
    supervisor, _ = supervised(2)
    await serve(supervisor)
    held, serving = supervisor.roster.replicas.values()
    held.state, serving.num_in_flight = ReplicaState.updating, 1
    assert await supervisor.roster.least_loaded() is serving


async def test_what_was_done_beside_is_not_kept() -> None:
    supervisor, _ = supervised(1)
    task = supervisor.roster.spawn(asyncio.sleep(0))
    kept = weakref.ref(task)
    await task
    del task
    await asyncio.sleep(0)
    gc.collect()
    assert kept() is None
    task = supervisor.roster.spawn(asyncio.sleep(3600))
    await supervisor.close()
    assert task.done(), "close() waits until it has ended"


async def publish_without_a_pause(supervisor: Supervisor, *outcomes: ReplicaReport) -> None:
    """One publish of adapter mode."""
    await supervisor.hold(pauses=False)
    await supervisor.settle(outcomes)


async def test_in_adapter_mode_a_replica_serves_on_until_its_version_is_too_old() -> None:
    _, workers = supervised(2)
    supervisor = Supervisor(workers, restart=never, max_missed_publishes=1)
    await publish_without_a_pause(supervisor, outcome(True), outcome(True))
    await supervisor.hold(pauses=False)
    assert supervisor.roster.num_serving == 2, "nobody is held"
    await supervisor.settle([outcome(True), outcome(False, "a flipped bit")])
    assert supervisor.roster.num_serving == 2
    await publish_without_a_pause(supervisor, outcome(True), outcome(True))
    await publish_without_a_pause(supervisor, outcome(True), outcome(False, "a flipped bit"))
    assert supervisor.roster.num_serving == 2, "a commit starts the count anew"
    await publish_without_a_pause(supervisor, outcome(True), outcome(False, "again"))
    assert supervisor.roster.out_of_service == ["rollout-1"]
    assert supervisor.roster.replicas["rollout-1"].reason == "again"
    assert supervisor.roster.num_publishes == 5, "whoever reads from a peer is told that another version came"


async def test_in_adapter_mode_a_first_publish_that_fails_leaves_nothing_to_serve() -> None:
    _, workers = supervised(1)
    supervisor = Supervisor(workers, restart=never, max_missed_publishes=3)
    await publish_without_a_pause(supervisor, outcome(False, "the engine ignores adapters"))
    assert supervisor.roster.out_of_service == ["rollout-0"]
