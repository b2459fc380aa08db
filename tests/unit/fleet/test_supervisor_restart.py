"""Locks: how a failed worker comes back, who fills it, and that it is never asked before it holds current weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from fakes.fleet import FakeFleet, until
from fakes.loop import FakeWorker, World, an_offer, outcome

from slipstream.fleet import roster as roster_module
from slipstream.fleet.errors import NoReplicasLeft
from slipstream.fleet.fleet_log import FleetEvent
from slipstream.fleet.replicas import ReplicaState
from slipstream.fleet.router import Router
from slipstream.fleet.starts import NUM_READS
from slipstream.fleet.supervisor import Supervisor
from slipstream.rollout.types import Prompt

PROMPT = Prompt(0, (1,), "p")
S = ReplicaState
E = FleetEvent


class Cast(FakeFleet):
    """Restarts succeed unless they are told to fail."""

    def __init__(self, num_workers: int = 2, max_restarts: int = 2, **options: float) -> None:
        super().__init__(num_workers, max_restarts=max_restarts, **options)
        self.failures: list[Exception] = []
        self.prepare: Callable[[FakeWorker], None] = lambda worker: None
        """Called with every worker that was started again."""
        self.num_started = 0
        self.router = Router(self.supervisor, request_timeout_s=60)

    async def restart(self, name: str) -> FakeWorker:
        self.num_started += 1
        number = self.num_started
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        worker = await super().restart(name)
        worker.name, worker.endpoint = f"{name}.{number}", f"tcp://{number}"
        self.prepare(worker)
        return worker

    def told(self, worker: int) -> list[tuple[str, FleetEvent]]:
        """Process and event, in the order in which they were noted."""
        return [(row.name, row.event) for row in self.rows if row.worker == worker]

    async def serves(self, index: int) -> None:
        await until(lambda: self.states[index] is S.serving)

    async def fail(self, index: int) -> None:
        await self.supervisor.fail(self.replica(index), "it died")


async def serving(*args: int, **options: float) -> Cast:
    """One whose workers hold version 0."""
    cast = Cast(*args, **options)  # type: ignore[arg-type]
    await cast.publish(0)
    return cast


async def broken_link() -> None:
    raise ConnectionError("the link broke")


async def turns() -> None:
    """Let every ready task run."""
    for _ in range(30):
        await asyncio.sleep(0)


async def test_a_failed_worker_is_restarted_and_filled_by_a_peer_while_the_other_serves() -> None:
    cast = Cast()
    await cast.publish(7)
    cast.gate.clear()
    await cast.fail(0)
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


async def test_a_publish_leaves_out_whoever_is_recovering_and_what_it_read_meanwhile_is_read_again() -> None:
    cast = await serving()
    offered, go_on = asyncio.Event(), asyncio.Event()

    async def read_slowly() -> None:
        offered.set()
        await go_on.wait()

    cast.prepare = lambda worker: worker.before.update(pull=read_slowly)
    await cast.fail(0)
    await offered.wait()
    assert cast.states[0] is S.recovering
    assert await cast.publish(1) == [0]
    go_on.set()
    await until(lambda: cast.states == [S.serving, S.serving])
    assert [entry for entry in cast.world.diary if entry[0] == "pull"] == [("pull", 0, 0), ("pull", 0, 1)]
    assert cast.world.committed == [1, 1]


async def test_a_worker_whose_reads_all_meet_a_publish_joins_the_next_one() -> None:
    cast = await serving()
    version = 0

    async def another_publish() -> None:
        nonlocal version
        version += 1
        assert await cast.publish(version) == [0]

    cast.prepare = lambda worker: worker.before.update(pull=another_publish)
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.pending)
    assert version == NUM_READS
    assert await cast.publish(9) == []
    assert cast.states == [S.serving, S.serving]
    assert cast.supervisor.roster.recoveries[0].read_s is None, "a publish brought the weights"


@pytest.mark.parametrize("pauses", [True, False])
async def test_a_worker_that_comes_up_during_a_publish_reads_as_soon_as_a_peer_has_committed(pauses: bool) -> None:
    """In adapter mode a peer serves during a publish; what it offers then may be the version before."""
    cast = await serving()
    cast.gate.clear()
    await cast.fail(0)
    assert (await cast.supervisor.hold(pauses=pauses)).exclude == [0]
    assert cast.states == [S.starting, S.updating if pauses else S.serving]
    cast.gate.set()
    await until(lambda: cast.states[0] is S.recovering)
    await turns()
    assert not any(entry[0] == "pull" for entry in cast.world.diary)
    cast.world.committed[1] = 1
    await cast.supervisor.settle([outcome(False, "excluded"), outcome(True)])
    await cast.serves(0)
    assert cast.states[1] is S.serving
    assert cast.world.committed == [1, 1]


async def test_a_peer_that_moved_without_our_knowledge_is_noticed_by_its_second_offer() -> None:
    cast = await serving()

    async def peer_moves() -> None:
        cast.world.committed[1] += 1

    cast.prepare = lambda worker: worker.before.update(pull=peer_moves)
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.pending)
    assert cast.world.committed[0] == -1, "nothing was adopted"


async def test_a_publish_that_begins_after_the_peers_second_offer_makes_it_read_again_too() -> None:
    cast = await serving()

    async def a_publish_begins() -> None:
        cast.worker(0).before.clear()
        assert (await cast.supervisor.hold()).exclude == [0]

    cast.prepare = lambda worker: worker.before.update(adopt=a_publish_begins)
    await cast.fail(0)
    await until(lambda: cast.states == [S.recovering, S.updating] and cast.world.committed[0] == 0)
    cast.world.committed[1] = 1
    await cast.supervisor.settle([outcome(False, "excluded"), outcome(True)])
    assert cast.states == [S.recovering, S.serving], "it holds version 0"
    await until(lambda: cast.states == [S.serving, S.serving])
    assert cast.world.committed == [1, 1]


async def test_a_recovery_that_fails_leaves_the_worker_to_the_next_publish() -> None:
    cast, asked = Cast(), list[str]()
    await cast.publish(0)

    async def breaks() -> None:
        asked.append("offer")
        await broken_link()

    cast.worker(1).before["offer"] = breaks
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.pending)
    assert cast.states[1] is S.serving
    assert asked == ["offer"], "no publish is to blame, so it does not read again"
    await cast.publish(1)
    assert cast.states == [S.serving, S.serving]


async def test_a_worker_with_nobody_to_read_from_is_stranded_until_it_is_published_to() -> None:
    cast = await serving(num_workers=1)
    stranded = asyncio.create_task(cast.supervisor.roster.stranded())
    group = asyncio.create_task(cast.router.generate_group(PROMPT, 2))
    await until(lambda: group.done() or cast.worker(0).num_groups == 1)
    assert not stranded.done()
    await cast.fail(0)
    await until(stranded.done)
    assert cast.states == [S.pending]
    waiting = asyncio.create_task(cast.router.generate_group(PROMPT, 2))
    await asyncio.sleep(0)
    assert not waiting.done()
    await cast.publish(0)
    assert len(await waiting) == 2


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


async def test_a_restart_on_request_takes_any_worker_and_grants_new_attempts() -> None:
    cast = await serving(max_restarts=1)
    await cast.fail(0)
    await cast.serves(0)
    cast.failures = []
    await cast.fail(0)
    assert cast.states[0] is S.out
    assert "was out" in await cast.supervisor.restart_now("rollout-0")
    await cast.serves(0)
    cast.gate.clear()
    assert "was serving" in await cast.supervisor.restart_now("rollout-0")
    await until(lambda: cast.num_started == 3)
    assert "already" in await cast.supervisor.restart_now("rollout-0")
    cast.gate.set()
    await cast.serves(0)


async def test_a_run_that_restarts_nothing_by_itself_gets_a_worker_back_on_request() -> None:
    cast = await serving(max_restarts=0)
    await cast.fail(0)
    assert cast.states[0] is S.out
    await cast.supervisor.restart_now("rollout-0")
    await cast.serves(0)


async def test_a_peer_that_missed_a_publish_gives_its_base_and_not_its_version() -> None:
    cast = await serving(max_missed_publishes=1)
    await cast.supervisor.hold(pauses=False)
    await cast.supervisor.settle([outcome(True), outcome(False, "its link stalled")])
    assert cast.states == [S.serving, S.serving]
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.pending)
    assert ("pull", 0, 0) in cast.world.diary
    assert cast.world.committed[0] == -1, "the version was not adopted"
    await cast.publish(1)
    assert cast.states == [S.serving, S.serving]


async def test_a_worker_that_lacks_its_base_says_where_it_goes_and_a_recovered_one_lacks_nothing() -> None:
    cast = await serving()

    def without_base(worker: FakeWorker) -> None:
        worker.wants_base_at = f"tcp://base-{cast.num_started}"

    cast.prepare = without_base
    cast.worker(1).before["offer"] = broken_link
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.pending)
    assert cast.replica(0).base_wanted_at == "tcp://base-1"
    cast.worker(1).before.clear()
    await cast.fail(0)
    await cast.serves(0)
    assert cast.replica(0).base_wanted_at == ""


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
    assert alone.supervisor.roster.replicas["rollout-0"].reason == "it died"
    assert alone.supervisor.roster.recoveries == []
    await cast.supervisor.close()


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


@pytest.mark.parametrize("call", ["offer", "pull", "broken pull", "adopt", "second offer", "base_wanted_at"])
async def test_a_worker_that_leaves_while_it_comes_back_stays_where_it_went(call: str) -> None:
    """A restart is asked for in the middle of every call of a recovery: what the old process answers changes nothing
    any more, and the peer is read from once more."""
    cast = await serving()
    reached, go_on, num_calls = asyncio.Event(), asyncio.Event(), 0

    async def hold_on() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == (2 if call == "second offer" else 1):
            cast.worker(1).before.clear()
            reached.set()
            await go_on.wait()

    async def hold_on_and_break() -> None:
        await hold_on()
        await broken_link()

    if call in ("offer", "second offer"):
        cast.worker(1).before["offer"] = hold_on
    elif call == "broken pull":
        cast.prepare = lambda worker: worker.before.update(pull=hold_on_and_break)
    elif call == "base_wanted_at":
        cast.worker(1).before["offer"] = broken_link
        cast.prepare = lambda worker: worker.before.update(base_wanted_at=hold_on)
    else:
        cast.prepare = lambda worker: worker.before.update({call: hold_on})
    await cast.fail(0)
    await until(reached.is_set)
    cast.gate.clear()
    cast.prepare = lambda worker: None
    assert "is being restarted" in await cast.supervisor.restart_now("rollout-0")
    go_on.set()
    await turns()
    assert cast.states == [S.starting, S.serving]
    assert cast.supervisor.roster.recoveries == []
    assert cast.replica(0).reason == "a restart was asked for"
    assert call == "base_wanted_at" or E.waiting not in cast.events(0)
    cast.worker(1).before.clear()
    cast.gate.set()
    await until(lambda: cast.states == [S.serving, S.serving])
    assert cast.num_started == 2
    assert cast.world.committed == [0, 0]
    assert len(cast.supervisor.roster.recoveries) == 1


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


async def test_a_worker_that_leaves_before_it_reads_reads_once() -> None:
    """A restart is asked for while the recovery before waits for the end of a publish."""
    cast = await serving()
    cast.gate.clear()
    await cast.fail(0)
    await cast.supervisor.hold()
    cast.gate.set()
    await until(lambda: cast.states[0] is S.recovering)
    cast.gate.clear()
    await cast.supervisor.restart_now("rollout-0")
    cast.world.committed[1] = 1
    await cast.supervisor.settle([outcome(False, "excluded"), outcome(True)])
    await turns()
    assert not any(entry[0] == "pull" for entry in cast.world.diary)
    assert cast.states[0] is S.starting
    cast.gate.set()
    await cast.serves(0)
    assert [entry for entry in cast.world.diary if entry[0] == "pull"] == [("pull", 0, 1)]


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


async def test_the_peer_that_is_read_from_is_the_most_current_and_the_least_busy() -> None:
    cast = await serving(num_workers=4, max_missed_publishes=2)
    for index, (num_missed, num_in_flight) in enumerate([(0, 0), (1, 0), (0, 2), (0, 1)]):
        replica = cast.supervisor.roster.replicas[f"rollout-{index}"]
        replica.num_missed, replica.num_in_flight = num_missed, num_in_flight
    await cast.fail(0)
    await cast.serves(0)
    assert [row.facts["peer"] for row in cast.rows if row.event is E.read] == ["rollout-3"]
    assert cast.replica(0).num_missed == 0


async def test_who_waits_for_a_worker_gets_the_one_that_has_read_from_a_peer() -> None:
    """The peer fails before it serves."""
    cast = await serving()
    reads, may_serve = asyncio.Event(), asyncio.Event()

    def slow(worker: FakeWorker) -> None:
        adopt = worker.adopt

        async def adopts(*args: int) -> None:
            reads.set()
            await may_serve.wait()
            await adopt(*args)

        worker.adopt = adopts  # type: ignore[method-assign]

    cast.prepare = slow
    await cast.fail(0)
    await until(reads.is_set)
    cast.gate.clear()
    await cast.fail(1)
    waiting = asyncio.create_task(cast.supervisor.roster.least_loaded())
    await turns()
    may_serve.set()
    await until(waiting.done)
    assert waiting.result() is cast.replica(0)


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


async def test_no_publish_begins_while_a_link_is_closed_and_no_link_is_closed_in_a_publish(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cast = await serving(num_workers=4)
    cast.replica(3).state = S.out
    cast.supervisor.linked("rollout-1", "rollout-0", [an_offer(0)])
    cast.supervisor.linked("rollout-2", "rollout-0", [an_offer(0)])
    await cast.supervisor.hold()
    await cast.fail(0)
    await turns()
    released = [entry for entry in cast.world.diary if entry[0] == "release"]
    assert released == [], "closing a link changes a worker's address in the middle of a publish"
    assert cast.num_started == 0, "and the memory is not free before"
    go_on, releasing = asyncio.Event(), asyncio.Event()
    release = cast.worker(1).release

    async def slowly(offers: object) -> None:
        releasing.set()
        await go_on.wait()
        await release([an_offer(0)])

    cast.worker(1).release = slowly  # type: ignore[method-assign]
    cast.worker(2).release = broken_release  # type: ignore[method-assign]
    outcomes = [outcome(False, "excluded"), outcome(True), outcome(True), outcome(False, "excluded")]
    await cast.supervisor.settle(outcomes)
    await until(releasing.is_set)
    holding = asyncio.create_task(cast.supervisor.hold())
    await turns()
    assert not holding.done() and cast.num_started == 0
    go_on.set()
    await until(holding.done)
    await cast.supervisor.settle(outcomes)
    await until(lambda: cast.states == [S.serving] * 3 + [S.out])
    assert "rollout-2 keeps its link to rollout-0: the link broke" in caplog.text
    assert not cast.replica(1).links and not cast.replica(2).links
    assert cast.num_started == 1


async def broken_release(offers: object) -> None:
    raise ConnectionError("the link broke")


async def test_closing_ends_what_waits_and_nothing_fails_or_starts_after_it() -> None:
    cast = await serving()
    cast.gate.clear()
    await cast.fail(0)
    await until(lambda: cast.num_started == 1)
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


async def test_a_run_that_restarts_nobody_says_so() -> None:
    world = World(committed=[0])
    supervisor = Supervisor([FakeWorker(world, 0)], max_restarts=3)
    assert "does not restart workers" in await supervisor.restart_now("rollout-0")
    await supervisor.fail(supervisor.roster.replicas["rollout-0"], "it died")
    assert supervisor.roster.out_of_service == ["rollout-0"]
    with pytest.raises(NoReplicasLeft, match="rollout-0: it died"):
        supervisor.roster.require_replicas()


async def test_a_stranded_worker_is_not_stranded_where_another_may_fill_it() -> None:
    """Neither one that serves, nor one in a publish, nor one that reads just now."""
    cast = Cast()
    for other in (S.serving, S.updating, S.recovering):
        cast.replica(0).state, cast.replica(1).state = S.pending, other
        stranded = asyncio.create_task(cast.supervisor.roster.stranded())
        await turns()
        assert not stranded.done(), other
        stranded.cancel()
    for other in (S.pending, S.out, S.starting):
        cast.replica(1).state = other
        stranded = asyncio.create_task(cast.supervisor.roster.stranded())
        await until(stranded.done)
    cast.replica(0).state = S.out
    stranded = asyncio.create_task(cast.supervisor.roster.stranded())
    await turns()
    assert not stranded.done(), "nobody needs weights"
    stranded.cancel()
