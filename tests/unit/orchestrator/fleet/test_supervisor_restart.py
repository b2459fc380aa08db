"""Locks: how a failed worker comes back, who fills it, and that it is never asked before it holds current weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fakes.loop import FakeWorker, World, outcome

from orchestrator.errors import NoReplicasLeft
from orchestrator.fleet.fleet_log import FleetEvent, FleetRow
from orchestrator.fleet.replicas import ReplicaState
from orchestrator.fleet.router import Router
from orchestrator.fleet.supervisor import NUM_READS, Supervisor
from rollout.types import Prompt

PROMPT = Prompt(0, (1,), "p")
S = ReplicaState
E = FleetEvent


class Cast:
    """A supervisor, its workers, and restarts that succeed when `gate` is open, unless they are told to fail."""

    def __init__(
        self, num_workers: int = 2, max_restarts: int = 2, max_missed_publishes: int = 0, backoff_s: float = 0.0
    ) -> None:
        self.world = World(committed=[-1] * num_workers)
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[Exception] = []
        self.prepare: Callable[[FakeWorker], None] = lambda worker: None
        """Called with every worker that was started again."""
        self.num_started = 0
        self.rows: list[FleetRow] = []
        self.supervisor = Supervisor(
            [FakeWorker(self.world, i) for i in range(num_workers)],
            restart=lambda index: self.restart(index), max_restarts=max_restarts, backoff_s=backoff_s,
            max_missed_publishes=max_missed_publishes, note=self.rows.append,
        )  # fmt: skip
        self.router = Router(self.supervisor, request_timeout_s=5)

    @property
    def states(self) -> list[ReplicaState]:
        return [replica.state for replica in self.supervisor.replicas]

    def worker(self, index: int) -> FakeWorker:
        worker = self.supervisor.replicas[index].worker
        assert isinstance(worker, FakeWorker)
        return worker

    def events(self, worker: int) -> list[tuple[str, FleetEvent]]:
        """Process and event, in the order in which they were noted."""
        return [(row.name, row.event) for row in self.rows if row.worker == worker]

    async def restart(self, index: int) -> FakeWorker:
        self.num_started += 1
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.world.committed[index] = -1
        worker = FakeWorker(self.world, index)
        worker.name, worker.endpoint = f"rollout-{index}.{self.num_started}", f"tcp://{self.num_started}"
        self.prepare(worker)
        return worker

    async def publish(self, version: int) -> list[int]:
        """Returns who was left out."""
        held = await self.supervisor.hold()
        for replica in held.joining:
            self.supervisor.joined(replica.index)
        for index in range(len(self.states)):
            if index not in held.exclude:
                self.world.committed[index] = version
        await self.supervisor.settle([outcome(i not in held.exclude, "excluded") for i in range(len(self.states))])
        return held.exclude

    async def fail(self, index: int) -> None:
        await self.supervisor.fail(self.supervisor.replicas[index], "it died")


async def broken_link() -> None:
    raise ConnectionError("the link broke")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
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
    await until(lambda: cast.states[0] is S.serving)
    await until(lambda: cast.world.diary[-2:] == [("pull", 0, 7), ("release", 0)])
    assert cast.world.committed == [7, 7]
    (recovery,) = cast.supervisor.recoveries
    assert (recovery.replica, recovery.read_s) == (0, 0.5)
    assert cast.supervisor.num_restarts == 1
    held = await cast.supervisor.hold()
    assert held.exclude == []
    assert [(one.index, one.worker.endpoint) for one in held.joining] == [(0, "tcp://1")], "it is not met yet"


async def test_every_step_of_a_restart_is_noted_with_its_time() -> None:
    cast = Cast()
    await cast.publish(7)
    assert cast.events(0) == [("rollout-0", E.process_up), ("rollout-0", E.up)], "its first start"
    cast.rows.clear()
    cast.prepare = lambda worker: setattr(worker, "started_at", {"up": 9.0, "process_up": 4.0, "imported": 6.0})
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.serving)
    assert cast.events(0) == [
        ("rollout-0", E.failed), ("rollout-0", E.restarting),
        ("rollout-0.1", E.process_up), ("rollout-0.1", E.imported), ("rollout-0.1", E.up),
        ("rollout-0.1", E.read), ("rollout-0.1", E.serving),
    ]  # fmt: skip
    by_event = {row.event: row for row in cast.rows}
    assert [by_event[event].time for event in (E.process_up, E.imported, E.up)] == [4.0, 6.0, 9.0]
    assert by_event[E.failed].facts == {"reason": "it died"}
    assert by_event[E.restarting].facts == {"attempt": 1}
    assert by_event[E.process_up].facts == {"pid": 1000}
    assert by_event[E.read].facts == {"peer": "rollout-1", "version": 7, "bytes": 10, "read_s": 0.5, "verify_s": 0.1}
    assert by_event[E.serving].facts["down_s"] == pytest.approx(
        by_event[E.serving].time - by_event[E.failed].time, abs=0.1
    )


async def test_a_worker_that_waits_for_a_publish_and_one_that_stays_out_say_why() -> None:
    cast = Cast(num_workers=1, max_restarts=1)
    await cast.publish(0)
    await cast.fail(0)
    await until(lambda: cast.states == [S.pending])
    assert cast.rows[-1].event is E.waiting
    assert cast.rows[-1].facts == {"reason": "no other worker serves, from which it could read"}
    await cast.publish(0)
    await cast.fail(0)
    assert [row.event for row in cast.rows[-3:]] == [E.serving, E.failed, E.out]


async def test_the_first_attempt_comes_at_once_and_only_a_failed_one_is_followed_by_a_pause() -> None:
    cast = Cast(backoff_s=3600.0)
    await cast.publish(0)
    for times in (1, 2):  # a restart that succeeded costs the next one nothing
        await cast.fail(0)
        await until(lambda: cast.states[0] is S.serving)
        assert cast.num_started == times
    await cast.publish(1)
    cast.failures = [RuntimeError("no memory")]
    await cast.fail(1)
    await until(lambda: "no memory" in cast.supervisor.replicas[1].reason)
    for _ in range(20):
        await asyncio.sleep(0)
    assert cast.num_started == 3
    await cast.supervisor.close()


async def test_a_worker_that_ends_with_the_run_is_not_restarted() -> None:
    cast = Cast()
    await cast.publish(0)
    await cast.supervisor.close()
    await cast.fail(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert cast.num_started == 0
    assert E.failed not in [event for _, event in cast.events(0)]


async def test_a_publish_leaves_out_whoever_is_recovering_and_what_it_read_meanwhile_is_read_again() -> None:
    cast = Cast()
    await cast.publish(0)
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
    cast = Cast()
    await cast.publish(0)
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
    assert cast.supervisor.recoveries[0].read_s is None, "a publish brought the weights"


async def test_a_worker_that_comes_up_during_a_publish_reads_as_soon_as_a_peer_has_committed() -> None:
    cast = Cast()
    await cast.publish(0)
    cast.gate.clear()
    await cast.fail(0)
    held = await cast.supervisor.hold()
    assert held.exclude == [0]
    cast.gate.set()
    await until(lambda: cast.states[0] is S.recovering)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(entry[0] == "pull" for entry in cast.world.diary)
    cast.world.committed[1] = 1
    await cast.supervisor.settle([outcome(False, "excluded"), outcome(True)])
    await until(lambda: cast.states[0] is S.serving)
    assert cast.world.committed == [1, 1]


async def test_a_peer_that_moved_without_our_knowledge_is_noticed_by_its_second_offer() -> None:
    cast = Cast()
    await cast.publish(0)

    async def peer_moves() -> None:
        cast.world.committed[1] += 1

    cast.prepare = lambda worker: worker.before.update(pull=peer_moves)
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.pending)
    assert cast.world.committed[0] == -1, "nothing was adopted"


async def test_a_publish_that_begins_after_the_peers_second_offer_makes_it_read_again_too() -> None:
    cast = Cast()
    await cast.publish(0)

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
    cast = Cast()
    await cast.publish(0)
    cast.worker(1).before["offer"] = broken_link
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.pending)
    assert cast.states[1] is S.serving
    await cast.publish(1)
    assert cast.states == [S.serving, S.serving]


async def test_a_worker_with_nobody_to_read_from_is_stranded_until_it_is_published_to() -> None:
    cast = Cast(num_workers=1)
    await cast.publish(0)
    stranded = asyncio.create_task(cast.supervisor.stranded())
    group = asyncio.create_task(cast.router.generate_group(PROMPT, 2))
    await until(lambda: group.done() or cast.worker(0).num_groups == 1)
    assert not stranded.done()
    await cast.fail(0)
    await asyncio.wait_for(stranded, 5)
    assert cast.states == [S.pending]
    waiting = asyncio.create_task(cast.router.generate_group(PROMPT, 2))
    await asyncio.sleep(0)
    assert not waiting.done()
    await cast.publish(0)
    assert len(await waiting) == 2


async def test_restarts_are_counted_a_failed_one_too_and_end_for_good() -> None:
    cast = Cast(max_restarts=2)
    await cast.publish(0)
    cast.failures = [RuntimeError("no memory"), RuntimeError("no memory still")]
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.out)
    assert cast.num_started == 2
    assert cast.supervisor.num_restarts == 0
    assert "restart 2 of 2 failed: RuntimeError: no memory still" in cast.supervisor.replicas[0].reason
    cast.failures = [RuntimeError("a"), RuntimeError("b")]
    await cast.fail(1)
    with pytest.raises(NoReplicasLeft, match=r"no memory still.*b"):
        await cast.router.generate_group(PROMPT, 2)


async def test_a_late_failure_of_the_old_process_does_not_cost_its_successor() -> None:
    cast = Cast()
    await cast.publish(0)
    old = cast.worker(0)
    reached, die = asyncio.Event(), asyncio.Event()

    async def die_late() -> None:
        reached.set()
        await die.wait()
        raise ConnectionError("the actor died")

    old.before["generate_group"] = die_late
    group = asyncio.create_task(cast.router.generate_group(PROMPT, 2))
    await reached.wait()
    replica = cast.supervisor.replicas[0]
    left, replica.left = replica.left, asyncio.Event()  # the group does not hear of the failure
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.serving)
    die.set()
    assert len(await group) == 2
    assert cast.states == [S.serving, S.serving]
    assert cast.num_started == 1
    assert not left.is_set()


async def test_a_restart_on_request_takes_any_worker_and_grants_new_attempts() -> None:
    cast = Cast(max_restarts=1)
    await cast.publish(0)
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.serving)
    cast.failures = []
    await cast.fail(0)
    assert cast.states[0] is S.out
    assert "was out" in await cast.supervisor.restart_now(0)
    await until(lambda: cast.states[0] is S.serving)
    cast.gate.clear()
    assert "was serving" in await cast.supervisor.restart_now(0)
    await until(lambda: cast.num_started == 3)
    assert "already" in await cast.supervisor.restart_now(0)
    cast.gate.set()
    await until(lambda: cast.states[0] is S.serving)


async def test_closing_gives_up_restarts_under_way() -> None:
    cast = Cast()
    await cast.publish(0)
    cast.gate.clear()
    await cast.fail(0)
    await until(lambda: cast.num_started == 1)
    await cast.supervisor.close()
    assert cast.states[0] is S.starting


async def test_nobody_reads_from_a_peer_while_a_publish_goes_past_it() -> None:
    """In adapter mode a peer serves during a publish; what it offers then may be the version before."""
    cast = Cast()
    await cast.publish(0)
    cast.gate.clear()
    await cast.fail(0)
    await cast.supervisor.hold(pauses=False)
    assert cast.states == [S.starting, S.serving]
    cast.gate.set()
    await until(lambda: cast.states[0] is S.recovering)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(entry[0] == "pull" for entry in cast.world.diary)
    cast.world.committed[1] = 1
    await cast.supervisor.settle([outcome(False, "excluded"), outcome(True)])
    await until(lambda: cast.states == [S.serving, S.serving])
    assert cast.world.committed == [1, 1]


async def test_a_peer_that_missed_a_publish_gives_its_base_and_not_its_version() -> None:
    cast = Cast(max_missed_publishes=1)
    await cast.publish(0)
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
    cast = Cast()
    await cast.publish(0)

    def without_base(worker: FakeWorker) -> None:
        worker.wants_base_at = f"tcp://base-{cast.num_started}"

    cast.prepare = without_base
    cast.worker(1).before["offer"] = broken_link
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.pending)
    assert cast.supervisor.replicas[0].base_wanted_at == "tcp://base-1"
    cast.worker(1).before.clear()
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.serving)
    assert cast.supervisor.replicas[0].base_wanted_at == ""


async def test_a_worker_that_dies_while_it_comes_back_is_started_again() -> None:
    cast = Cast()
    await cast.publish(0)

    async def dead() -> None:
        raise ConnectionError("the actor died")

    def dies_once(worker: FakeWorker) -> None:
        if cast.num_started == 1:
            worker.before.update(pull=dead, base_wanted_at=dead)

    cast.prepare = dies_once
    await cast.fail(0)
    await until(lambda: cast.states[0] is S.serving)
    assert cast.num_started == 2
