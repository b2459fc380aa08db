"""A restarted worker is filled by a peer or by a publish, and never asked before it holds current weights."""

import asyncio
from unittest.mock import AsyncMock

import pytest
from fakes.clock import turns
from fakes.fleet import PROMPT, broken_link, serving, until
from fakes.trainer import outcome
from fakes.workers import FakeWorker, an_offer

from slipstream.fleet.fleet_log import FleetEvent
from slipstream.fleet.replicas import ReplicaState
from slipstream.fleet.starts import NUM_READS

S = ReplicaState
E = FleetEvent


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
    assert cast.roster.recoveries[0].read_s is None, "a publish brought the weights"


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
    cast = await serving()
    cast.worker(1).before["offer"] = offer = AsyncMock(side_effect=ConnectionError("the link broke"))
    await cast.fail(0)
    await until(lambda: cast.states == [S.pending, S.serving])
    assert offer.await_count == 1, "no publish is to blame, so it does not read again"
    await cast.publish(1)
    assert cast.states == [S.serving, S.serving]


async def test_a_worker_with_nobody_to_read_from_is_stranded_until_it_is_published_to() -> None:
    cast = await serving(num_workers=1)
    stranded = asyncio.create_task(cast.roster.stranded())
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


@pytest.mark.parametrize("call", ["offer", "pull", "broken pull", "adopt", "second offer", "base_wanted_at"])
async def test_a_worker_that_leaves_while_it_comes_back_stays_where_it_went(call: str) -> None:
    """A restart is asked for in the middle of every call of a recovery: what the old process answers, or how it fails,
    changes nothing any more, and the peer is read from once more."""
    cast, verb = await serving(), call.rpartition(" ")[2]
    reached, go_on, num_calls = asyncio.Event(), asyncio.Event(), 0

    async def hold_on() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == (2 if call == "second offer" else 1):
            cast.worker(1).before.clear()
            reached.set()
            await go_on.wait()
            if call.startswith("broken"):
                await broken_link()

    if verb == "offer":
        cast.worker(1).before["offer"] = hold_on
    else:
        cast.prepare = lambda worker: worker.before.update({verb: hold_on})
    if verb == "base_wanted_at":
        cast.worker(1).before["offer"] = broken_link
    await cast.fail(0)
    await until(reached.is_set)
    cast.gate.clear()
    cast.prepare = lambda worker: None
    assert "is being restarted" in await cast.supervisor.restart_now("rollout-0")
    go_on.set()
    await turns()
    assert cast.states == [S.starting, S.serving]
    assert cast.roster.recoveries == []
    assert cast.replica(0).reason == "a restart was asked for"
    assert verb == "base_wanted_at" or E.waiting not in cast.events(0)
    cast.worker(1).before.clear()
    cast.gate.set()
    await until(lambda: cast.states == [S.serving, S.serving])
    assert (cast.num_started, cast.world.committed) == (2, [0, 0])
    assert len(cast.roster.recoveries) == 1


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


async def test_the_peer_that_is_read_from_is_the_most_current_and_the_least_busy() -> None:
    cast = await serving(num_workers=4, max_missed_publishes=2)
    for index, (num_missed, num_in_flight) in enumerate([(0, 0), (1, 0), (0, 2), (0, 1)]):
        replica = cast.roster.replicas[f"rollout-{index}"]
        replica.num_missed, replica.num_in_flight = num_missed, num_in_flight
    await cast.fail(0)
    await cast.serves(0)
    assert [row.facts["peer"] for row in cast.rows if row.event is E.read] == ["rollout-3"]
    assert cast.replica(0).num_missed == 0


async def test_who_waits_for_a_worker_gets_the_one_that_has_read_from_a_peer() -> None:
    """The peer fails before it serves."""
    cast = await serving()
    reads, may_serve = asyncio.Event(), asyncio.Event()

    async def slowly() -> None:
        reads.set()
        await may_serve.wait()

    cast.prepare = lambda worker: worker.before.update(adopt=slowly)
    await cast.fail(0)
    await until(reads.is_set)
    cast.gate.clear()
    await cast.fail(1)
    waiting = asyncio.create_task(cast.roster.least_loaded())
    await turns()
    may_serve.set()
    await until(waiting.done)
    assert waiting.result() is cast.replica(0)


async def test_no_publish_begins_while_a_link_is_closed_and_no_link_is_closed_in_a_publish(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cast = await serving(num_workers=4)
    cast.replica(3).state = S.out
    for reader in (1, 2):
        cast.replica(reader).links["rollout-0"] = [an_offer(0)]
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
    cast.worker(2).before["release"] = broken_link
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
