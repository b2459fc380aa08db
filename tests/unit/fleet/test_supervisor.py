"""Locks: who serves after a publish, and whom it costs; how a failed worker comes back, how often, and what of the
process before it is forgotten."""

import asyncio
import gc
import weakref
from types import SimpleNamespace

import pytest
from fakes.clock import on_jumping_clock, turns
from fakes.fleet import PROMPT, Cast, broken_link, serving, until
from fakes.trainer import outcome
from fakes.workers import FakeWorker

from slipstream.conf.plural import counted
from slipstream.fleet import roster as roster_module
from slipstream.fleet.errors import NoReplicasLeft
from slipstream.fleet.fleet_log import FleetEvent
from slipstream.fleet.replicas import ReplicaState
from slipstream.weight_sync.publish.report import ReplicaReport

S = ReplicaState
E = FleetEvent


async def settled(cast: Cast, *outcomes: ReplicaReport, pauses: bool = True) -> Cast:
    """After a publish that came to this; without a pause, as in adapter mode."""
    await cast.supervisor.hold(pauses=pauses)
    await cast.supervisor.settle(outcomes)
    return cast


@pytest.mark.parametrize(
    ("error", "reason"),
    [("IntegrityError: x", "IntegrityError: x"), (None, "it did not commit and gave no reason")],
)
async def test_replica_once_out_stays_out_and_has_a_reason(error: str | None, reason: str) -> None:
    cast = await settled(Cast(max_restarts=0), outcome(False, error), outcome(True))
    await settled(cast, outcome(True), outcome(True))
    assert (cast.states, cast.replica(0).reason) == ([S.out, S.serving], reason)


async def test_whoever_waits_for_a_worker_hears_that_the_last_one_failed() -> None:
    cast = await serving(1, max_restarts=0)
    await cast.supervisor.hold()
    waiting = asyncio.create_task(cast.roster.least_loaded())
    await asyncio.sleep(0)
    await cast.fail(0)
    await until(waiting.done)
    with pytest.raises(NoReplicasLeft, match="it died"):
        await waiting


async def test_a_death_that_a_publish_notices_is_told_with_how_it_came(caplog: pytest.LogCaptureFixture) -> None:
    cast = Cast(3, max_restarts=0)
    segfault, kill = "rollout-0 died of SIGSEGV (main thread in a.py:1, f)", "the engine's process was ended by SIGKILL"
    cast.worker(0).death, cast.worker(2).death = segfault, kill
    await settled(cast, *(outcome(False, error) for error in ("PeerLost: a link broke", "IntegrityError: x", kill)))
    reasons = [f"{segfault}; a publish noticed it: PeerLost: a link broke", "IntegrityError: x", kill]
    assert [cast.replica(index).reason for index in range(3)] == reasons
    assert caplog.messages == [
        f"rollout-{number} is out of service, {counted(2 - number, 'other worker')} left: {reason}"
        for number, reason in enumerate(reasons)
    ]
    with pytest.raises(NoReplicasLeft, match="rollout-0: rollout-0 died of SIGSEGV"):
        cast.roster.require_replicas()


@pytest.mark.parametrize(("process", "state"), [(1, S.recovering), (0, S.leaving)])
async def test_a_worker_that_was_replaced_or_left_while_it_was_asked_how_it_died_is_not_failed_again(
    process: int, state: S
) -> None:
    cast = Cast(max_restarts=0)
    replica, worker = cast.replica(0), cast.worker(process)

    async def meanwhile() -> None:
        replica.handle, replica.state = worker, state
        raise ConnectionError("it died")

    cast.worker(0).check = meanwhile  # type: ignore[method-assign]
    await settled(cast, outcome(False, "PeerLost: x"), outcome(True))
    assert (replica.state, replica.reason) == (state, "")


@on_jumping_clock
async def test_a_worker_that_does_not_say_whether_it_is_alive_is_waited_for_briefly() -> None:
    cast, began = Cast(max_restarts=0), asyncio.get_running_loop().time()
    cast.worker(0).check = asyncio.Event().wait  # type: ignore[method-assign]
    await settled(cast, outcome(False, "PeerLost: x"), outcome(True))
    assert asyncio.get_running_loop().time() - began < 10
    assert cast.replica(0).reason == "PeerLost: x"


async def test_a_worker_that_a_publish_holds_is_not_chosen_though_it_is_the_least_loaded() -> None:
    cast = await serving()
    cast.replica(0).state, cast.replica(1).num_in_flight = S.updating, 1
    assert await cast.roster.least_loaded() is cast.replica(1)


async def test_what_was_done_beside_is_not_kept() -> None:
    cast = Cast(1)
    task = cast.roster.spawn(asyncio.sleep(0))
    kept = weakref.ref(task)
    await task
    del task
    await asyncio.sleep(0)
    gc.collect()
    assert kept() is None
    task = cast.roster.spawn(asyncio.sleep(3600))
    await cast.supervisor.close()
    assert task.done(), "close() waits until it has ended"


async def test_in_adapter_mode_a_replica_serves_on_until_its_version_is_too_old() -> None:
    cast = Cast(max_restarts=0, max_missed_publishes=1)
    roster = cast.roster
    for error, is_held in ((None, False), ("a flipped bit", True), (None, False), ("a flipped bit", False)):
        held = await cast.supervisor.hold(pauses=False)
        assert not is_held or (held.exclude, roster.num_serving) == ([], 2), "nobody stops serving"
        await cast.supervisor.settle([outcome(True), outcome(error is None, error)])
        assert roster.num_serving == 2, "a commit starts the count anew"
    await settled(cast, outcome(True), outcome(False, "again"), pauses=False)
    assert (roster.out_of_service, cast.replica(1).reason) == (["rollout-1"], "again")
    assert roster.num_publishes == 5, "whoever reads from a peer is told that another version came"
    first = Cast(1, 0, max_missed_publishes=3)
    await settled(first, outcome(False, "the engine ignores adapters"), pauses=False)
    assert first.supervisor.roster.out_of_service == ["rollout-0"], "the first publish left nothing to serve"


async def test_a_failed_worker_is_restarted_and_filled_by_a_peer_while_the_other_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cast = Cast()
    await cast.publish(7)
    cast.gate.clear()
    await cast.fail(0)
    assert caplog.messages[-1] == "rollout-0 is out of service and is restarted, 1 other worker left: it died"
    await until(lambda: cast.num_started == 1)
    assert cast.states == [S.starting, S.serving]
    assert len(await cast.router.generate_group(PROMPT, 2)) == 2
    assert cast.worker(1).num_groups == 1
    cast.gate.set()
    await cast.serves(0)
    await until(lambda: cast.world.diary[-2:] == [("pull", 0, 7), ("release", 0)])
    assert cast.world.committed == [7, 7]
    (recovery,) = cast.roster.recoveries
    assert (recovery.replica, recovery.read_s) == ("rollout-0", 0.5)
    assert cast.supervisor.starts.num_restarts == 1
    held = await cast.supervisor.hold()
    assert held.exclude == []
    assert [(one.place, one.worker.endpoint) for one in held.joining] == [(0, "tcp://1")], "it is not met yet"


async def test_every_step_of_a_restart_is_noted_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=50.0)
    monkeypatch.setattr(roster_module, "time", SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now))
    cast = Cast()
    await cast.publish(7)
    assert cast.told(0) == [("rollout-0", E.process_up), ("rollout-0", E.up)], "its first start"
    cast.rows.clear()

    def started(worker: FakeWorker) -> None:
        worker.started_at = {"up": 9.0, "process_up": 4.0, "imported": 6.0}
        clock.now += 7.5

    cast.prepare = started
    await cast.fail(0)
    await cast.serves(0)
    assert cast.told(0) == [
        ("rollout-0", E.failed), ("rollout-0", E.restarting),
        ("rollout-0.1", E.process_up), ("rollout-0.1", E.imported), ("rollout-0.1", E.up),
        ("rollout-0.1", E.read), ("rollout-0.1", E.serving),
    ]  # fmt: skip
    by_event = {row.event: row for row in cast.rows}
    assert [by_event[event].time for event in (E.process_up, E.imported, E.up)] == [4.0, 6.0, 9.0]
    assert by_event[E.failed].facts == {"reason": "it died"}
    assert by_event[E.restarting].facts == {"attempt": 1}
    assert (by_event[E.process_up].facts, by_event[E.up].facts) == ({"pid": 1000}, {})
    assert by_event[E.read].facts == {"peer": "rollout-1", "version": 7, "bytes": 10, "read_s": 0.5, "verify_s": 0.1}
    assert by_event[E.failed].time == 50.0
    assert (by_event[E.serving].time, by_event[E.serving].facts["down_s"]) == (57.5, 7.5)
    (recovery,) = cast.roster.recoveries
    assert recovery.down_s == 7.5


async def test_a_worker_that_waits_for_a_publish_and_one_that_stays_out_say_why() -> None:
    cast = await serving(num_workers=1, max_restarts=1)
    await cast.fail(0)
    await until(lambda: cast.states == [S.pending])
    assert cast.rows[-1].event is E.waiting
    assert cast.rows[-1].facts == {"reason": "no other worker serves, from which it could read"}
    await cast.publish(0)
    await cast.fail(0)
    assert [row.event for row in cast.rows[-3:]] == [E.serving, E.failed, E.out]
    assert cast.rows[-1].facts == cast.rows[-2].facts == {"reason": "it died"}


async def test_an_attempt_comes_at_once_and_each_further_one_after_twice_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cast, pauses, sleep = await serving(max_restarts=6, backoff_s=3.0), list[float](), asyncio.sleep

    async def at_once(delay: float) -> None:
        if delay:
            pauses.append(delay)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", at_once)
    for _ in range(2):  # a restart that succeeded costs the next one nothing
        await cast.fail(0)
        await cast.serves(0)
    assert (pauses, cast.num_started) == ([], 2)
    cast.failures = [RuntimeError("a"), RuntimeError("b"), RuntimeError("c")]
    await cast.fail(0)
    await cast.serves(0)
    assert pauses == [3.0, 6.0, 12.0]
    assert (cast.num_started, cast.supervisor.starts.num_restarts) == (6, 3)


async def test_restarts_are_counted_a_failed_one_too_and_end_for_good() -> None:
    cast = await serving(max_restarts=2)
    cast.failures = [RuntimeError("no memory"), RuntimeError("no memory still")]
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.out)
    assert cast.num_started == 2
    assert cast.supervisor.starts.num_restarts == 0
    assert "restart 2 of 2 failed: RuntimeError: no memory still" in cast.replica(0).reason
    cast.failures = [RuntimeError("a"), RuntimeError("b")]
    await cast.fail(1)
    with pytest.raises(NoReplicasLeft, match=r"no memory still.*b"):
        await cast.router.generate_group(PROMPT, 2)


@pytest.mark.parametrize("max_restarts", [0, 1])
async def test_a_restart_on_request_takes_any_worker_and_grants_new_attempts(max_restarts: int) -> None:
    cast = await serving(max_restarts=max_restarts)
    for _ in range(max_restarts):
        await cast.fail(0)
        await cast.serves(0)
    await cast.fail(0)
    assert cast.states[0] is S.out
    assert "was out" in await cast.supervisor.restart_now("rollout-0")
    await cast.serves(0)
    cast.gate.clear()
    assert "was serving" in await cast.supervisor.restart_now("rollout-0")
    await until(lambda: cast.num_started == max_restarts + 2)
    assert "already" in await cast.supervisor.restart_now("rollout-0")
    cast.gate.set()
    await cast.serves(0)


async def test_a_worker_that_dies_while_it_comes_back_is_started_again() -> None:
    cast = await serving()

    def dies_once(worker: FakeWorker) -> None:
        if cast.num_started == 1:
            worker.before.update(pull=broken_link, base_wanted_at=broken_link)

    cast.prepare = dies_once
    await cast.fail(0)
    await cast.serves(0)
    assert cast.num_started == 2


@pytest.mark.parametrize(("max_restarts", "state"), [(2, S.starting), (0, S.out)])
async def test_a_worker_that_fails_during_a_publish_does_not_serve_at_its_end(max_restarts: int, state: S) -> None:
    """The report of a publish comes later than the failure, and says that the worker committed."""
    cast = Cast(max_restarts=max_restarts)
    cast.gate.clear()
    await cast.supervisor.hold()
    await cast.fail(0)
    await cast.supervisor.settle([outcome(True), outcome(True)])
    assert (cast.states, cast.replica(0).reason, cast.roster.recoveries) == ([state, S.serving], "it died", [])


@pytest.mark.parametrize("other", S)
async def test_a_worker_is_stranded_where_no_other_has_or_will_have_weights_to_read(other: ReplicaState) -> None:
    cast = Cast()
    cast.replica(1).state = other
    for cast.replica(0).state in (S.pending, S.out):
        stranded = asyncio.create_task(cast.roster.stranded())
        await turns()
        needs_weights = S.pending in cast.states
        assert stranded.done() == (needs_weights and other not in (S.serving, S.updating, S.recovering))
        stranded.cancel()


async def test_a_worker_that_left_out_a_publish_is_not_changed_by_its_end() -> None:
    cast = await serving(num_workers=3, max_missed_publishes=1)
    cast.gate.clear()
    await cast.fail(0)
    await cast.supervisor.hold(pauses=False)
    cast.replica(2).state = S.pending
    await cast.supervisor.settle([outcome(True), outcome(False, "its link stalled"), outcome(True)])
    assert cast.states == [S.starting, S.serving, S.pending]
    assert [replica.num_missed for replica in cast.roster.replicas.values()] == [0, 1, 0]
    await cast.supervisor.settle([outcome(False), outcome(False, "excluded"), outcome(False)])
    assert cast.states == [S.starting, S.serving, S.pending], "it was not held"
    assert cast.replica(1).num_missed == 1
    assert not any(replica.is_held for replica in cast.roster.replicas.values())


@on_jumping_clock
async def test_each_call_of_a_recovery_is_waited_for_as_long_as_was_said() -> None:
    """Here the worker lets nobody read into it, and then does not say where its base goes either."""
    cast = await serving(recovery_timeout_s=40.0, backoff_s=7.0, max_restarts=1)
    silent = {"pull": asyncio.Event().wait, "base_wanted_at": asyncio.Event().wait}
    cast.prepare = lambda worker: worker.before.update(silent)  # type: ignore[arg-type]
    began = asyncio.get_running_loop().time()
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.out, every_s=1.0)
    assert asyncio.get_running_loop().time() - began == pytest.approx(80, abs=1)


async def test_what_a_restarted_worker_was_told_before_is_forgotten() -> None:
    cast = await serving()
    replica = cast.replica(0)
    replica.num_missed, replica.base_wanted_at, replica.links = 3, "tcp://old", {"rollout-1": []}
    left = replica.left
    await cast.fail(0)
    assert left.is_set()
    await cast.serves(0)
    assert (replica.num_missed, replica.base_wanted_at, replica.links, replica.is_known) == (0, "", {}, False)
    assert replica.left is not left and not replica.left.is_set()
    assert replica.pulled is not None and replica.reason == ""
    cast.worker(1).offer = broken_link  # type: ignore[method-assign]
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.pending)
    await cast.publish(1)
    assert [one.read_s for one in cast.roster.recoveries] == [0.5, None], "the publish filled it, nothing was read"


async def test_closing_ends_what_waits_and_nothing_fails_or_starts_after_it() -> None:
    cast = await serving()
    cast.gate.clear()
    await cast.fail(0)
    await until(lambda: cast.num_started == 1)

    async def fails_as_it_is_ended() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await cast.fail(1)

    cast.roster.spawn(fails_as_it_is_ended())
    await turns()
    await cast.supervisor.close()
    cast.gate.set()
    await turns()
    assert cast.states == [S.starting, S.serving], "the restart under way was given up"
    await cast.fail(1)
    await turns()
    assert cast.states[1] is S.serving and cast.num_started == 1
    assert E.failed not in cast.events(1)


async def test_a_worker_that_is_out_or_starting_fails_once_and_joins_no_publish() -> None:
    cast = await serving(max_restarts=1)
    cast.gate.clear()
    await cast.fail(0)
    await until(lambda: cast.num_started == 1)
    await cast.fail(0)
    assert cast.events(0).count(E.failed) == 1
    cast.gate.set()
    await cast.serves(0)
    for _ in range(2):
        await cast.fail(0)
    assert (cast.events(0).count(E.failed), cast.states[0]) == (2, S.out)
    assert cast.roster.out_of_service == ["rollout-0"]
    held = await cast.supervisor.hold()
    assert (held.exclude, held.joining) == ([0], []), "nor is the trainer to meet it"
