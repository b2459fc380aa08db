"""Locks: how a failed worker comes back, how often, and what of the process before it is forgotten."""

import asyncio
from types import SimpleNamespace

import pytest
from fakes.clock import on_jumping_clock, turns
from fakes.fleet import until
from fakes.restarts import PROMPT, Cast, broken_link, serving
from fakes.trainer import outcome
from fakes.workers import FakeWorker

from slipstream.fleet import roster as roster_module
from slipstream.fleet.errors import NoReplicasLeft
from slipstream.fleet.fleet_log import FleetEvent
from slipstream.fleet.replicas import ReplicaState

S = ReplicaState
E = FleetEvent


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
    (recovery,) = cast.supervisor.roster.recoveries
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
    (recovery,) = cast.supervisor.roster.recoveries
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


async def test_the_first_attempt_comes_at_once_and_only_a_failed_one_is_followed_by_a_pause() -> None:
    cast = await serving(backoff_s=3600.0)
    for times in (1, 2):  # a restart that succeeded costs the next one nothing
        await cast.fail(0)
        await cast.serves(0)
        assert cast.num_started == times
    await cast.publish(1)
    cast.failures = [RuntimeError("no memory")]
    await cast.fail(1)
    await until(lambda: "no memory" in cast.replica(1).reason)
    await turns()
    assert cast.num_started == 3
    await cast.supervisor.close()


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


async def test_a_late_failure_of_the_old_process_does_not_cost_its_successor() -> None:
    cast = await serving()
    old = cast.worker(0)
    reached, die = asyncio.Event(), asyncio.Event()

    async def die_late() -> None:
        reached.set()
        await die.wait()
        raise ConnectionError("the actor died")

    old.before["generate_group"] = die_late
    group = asyncio.create_task(cast.router.generate_group(PROMPT, 2))
    await reached.wait()
    replica = cast.replica(0)
    left, replica.left = replica.left, asyncio.Event()  # the group does not hear of the failure
    await cast.fail(0)
    await cast.serves(0)
    die.set()
    assert len(await group) == 2
    assert cast.states == [S.serving, S.serving]
    assert cast.num_started == 1
    assert not left.is_set()


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

    async def dead() -> None:
        raise ConnectionError("the actor died")

    def dies_once(worker: FakeWorker) -> None:
        if cast.num_started == 1:
            worker.before.update(pull=dead, base_wanted_at=dead)

    cast.prepare = dies_once
    await cast.fail(0)
    await cast.serves(0)
    assert cast.num_started == 2


async def test_a_worker_that_fails_during_a_publish_does_not_serve_at_its_end() -> None:
    """The report of a publish comes later than the failure, and says that the worker committed."""
    cast = await serving()
    cast.gate.clear()
    await cast.supervisor.hold()
    await cast.fail(0)
    await cast.supervisor.settle([outcome(True), outcome(True)])
    assert cast.states == [S.starting, S.serving]
    alone = Cast(max_restarts=0)
    await alone.supervisor.hold()
    await alone.fail(0)
    await alone.supervisor.settle([outcome(True), outcome(True)])
    assert alone.states == [S.out, S.serving]
    assert alone.replica(0).reason == "it died"
    assert alone.supervisor.roster.recoveries == []
    await cast.supervisor.close()


async def test_a_worker_that_the_trainer_has_not_met_and_that_failed_again_joins_no_publish() -> None:
    cast = await serving(max_restarts=1)
    await cast.fail(0)
    await cast.serves(0)
    await cast.fail(0)
    held = await cast.supervisor.hold()
    assert (held.exclude, held.joining) == ([0], [])


@pytest.mark.parametrize("other", S)
async def test_a_worker_is_stranded_where_no_other_has_or_will_have_weights_to_read(other: ReplicaState) -> None:
    cast = Cast()
    cast.replica(1).state = other
    for cast.replica(0).state in (S.pending, S.out):
        stranded = asyncio.create_task(cast.supervisor.roster.stranded())
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
    assert [replica.num_missed for replica in cast.supervisor.roster.replicas.values()] == [0, 1, 0]
    await cast.supervisor.settle([outcome(False), outcome(False, "excluded"), outcome(False)])
    assert cast.states == [S.starting, S.serving, S.pending], "it was not held"
    assert cast.replica(1).num_missed == 1
    assert not any(replica.is_held for replica in cast.supervisor.roster.replicas.values())
    await cast.supervisor.close()


async def test_a_call_of_the_process_before_that_fails_late_costs_its_successor_nothing() -> None:
    cast = await serving()
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def breaks_late() -> None:
        reached.set()
        await go_on.wait()
        await broken_link()

    cast.worker(1).before["offer"] = broken_link
    cast.prepare = lambda worker: worker.before.update(base_wanted_at=breaks_late)
    await cast.fail(0)
    await until(reached.is_set)
    cast.worker(1).before.clear()
    cast.prepare = lambda worker: None
    await cast.supervisor.restart_now("rollout-0")
    await until(lambda: cast.states == [S.serving, S.serving])
    go_on.set()
    await turns()
    assert cast.states == [S.serving, S.serving] and cast.num_started == 2


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


async def test_the_pause_after_a_failed_attempt_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    cast, pauses, sleep = Cast(max_restarts=4, backoff_s=3.0), [], asyncio.sleep

    async def at_once(delay: float) -> None:
        if delay:
            pauses.append(delay)
        await sleep(0)

    await cast.publish(0)
    monkeypatch.setattr(asyncio, "sleep", at_once)
    cast.failures = [RuntimeError("a"), RuntimeError("b"), RuntimeError("c")]
    await cast.fail(0)
    await cast.serves(0)
    assert pauses == [3.0, 6.0, 12.0]
    assert (cast.num_started, cast.supervisor.starts.num_restarts) == (4, 1)


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
    assert [one.read_s for one in cast.supervisor.roster.recoveries] == [0.5, None], (
        "the publish filled it, nothing was read"
    )


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

    cast.supervisor.roster.spawn(fails_as_it_is_ended())
    await turns()
    await cast.supervisor.close()
    cast.gate.set()
    await turns()
    assert cast.states == [S.starting, S.serving], "the restart under way was given up"
    await cast.fail(1)
    await turns()
    assert cast.states[1] is S.serving and cast.num_started == 1
    assert E.failed not in cast.events(1)


async def test_a_worker_that_is_out_or_starting_fails_once() -> None:
    cast = await serving(max_restarts=1)
    cast.gate.clear()
    await cast.fail(0)
    await until(lambda: cast.num_started == 1)
    await cast.fail(0)
    assert cast.events(0).count(E.failed) == 1
    cast.gate.set()
    await cast.serves(0)
    await cast.fail(0)
    await cast.fail(0)
    assert cast.events(0).count(E.failed) == 2
    assert cast.states[0] is S.out
    assert cast.supervisor.roster.out_of_service == ["rollout-0"]
