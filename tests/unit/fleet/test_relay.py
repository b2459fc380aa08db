"""Locks: who is written and who reads in a publish by relay, and that no failure costs more than it must.

Supervisor and relay are the product's own; workers and the trainer's publish are fakes (tests/fakes/fleet.py).
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from fakes.clock import on_jumping_clock
from fakes.fleet import FakeFleet, until
from fakes.trainer import outcome, publish_report
from fakes.workers import FakeWorker, an_offer

from slipstream.fleet import relay
from slipstream.fleet.relay import by_node, publish_by_relay
from slipstream.fleet.replicas import ReplicaState
from slipstream.weight_sync.publish.report import PublishReport
from slipstream.weight_sync.replica.recovery import Offer, Pulled

S = ReplicaState


class Cast(FakeFleet):
    """Workers on nodes, and a trainer's publish that fails where it is told to."""

    def __init__(self, nodes: str) -> None:
        self.nodes = nodes
        super().__init__(len(nodes), recovery_timeout_s=50.0)
        self.gate.clear()
        self.failing: set[int] = set()
        self.written: list[list[int]] = []

    def made(self, index: int) -> FakeWorker:
        worker = super().made(index)
        worker.node = self.nodes[index]
        return worker

    @property
    def workers(self) -> list[FakeWorker]:
        return [self.worker(index) for index in range(len(self.nodes))]

    async def restart(self, name: str) -> FakeWorker:
        self.world.diary.append(("restart", int(name[-1])))
        return await super().restart(name)

    def break_at(self, index: int, verb: str, how: str = "dies") -> None:
        """From now on a worker dies or hangs there."""
        dies = AsyncMock(side_effect=ConnectionError("it died"))
        self.worker(index).before[verb] = dies if how == "dies" else asyncio.Event().wait  # type: ignore[assignment]

    def all_take(self, pull_s: float) -> None:
        """So long they read from a peer."""
        for worker in self.workers:
            worker.before["pull"] = lambda: asyncio.sleep(pull_s)

    async def relayed(self, version: int) -> PublishReport:
        async def write(exclude: Sequence[int], number: int) -> PublishReport:
            assert number == len(self.written) - before
            included = [i for i in range(len(self.workers)) if i not in exclude]
            self.written.append(included)
            done = [i for i in included if i not in self.failing]
            for index in done:
                self.world.committed[index] = version
            outcomes = [outcome(i in done, None if i in done else "not written") for i in range(len(self.workers))]
            return publish_report(version, outcomes)

        before = len(self.written)
        self.world.diary.clear()
        held = await self.supervisor.hold()
        for replica in held.joining:
            replica.is_known = True
        report = await publish_by_relay(write, self.supervisor)
        await self.supervisor.settle(report.replicas)
        return report

    def pulls(self) -> list[int]:
        return [entry[1] for entry in self.world.diary if entry[0] == "pull"]


@on_jumping_clock
async def test_one_replica_of_every_node_is_written_and_the_others_read_from_it() -> None:
    cast = Cast("abababa")
    report = await cast.relayed(3)
    assert cast.written == [[0, 1]], "one write, to the first replica of each node"
    assert sorted(cast.pulls()) == [2, 3, 4, 5, 6]
    assert cast.world.committed == [3] * 7
    assert cast.states == [S.serving] * 7
    assert [replica.committed for replica in report.replicas] == [True] * 7
    assert (report.num_committed, report.num_relayed, report.relay_bytes) == (7, 5, 50)
    assert report.num_bytes == 1000, "bytes of the trainer's writes alone"
    assert report.total_s == pytest.approx(0.06 + report.relay_s)
    await cast.relayed(4)
    assert cast.written[1] == [0, 1], "the same ones: the trainer's links stay open"


@on_jumping_clock
async def test_every_holder_gives_to_one_reader_at_a_time() -> None:
    cast = Cast("a" * 8)
    open_reads: dict[int, int] = {}
    most = 0
    sources: dict[int, int] = {}
    for worker in cast.workers:

        async def pull(offers: Sequence[Offer], worker: FakeWorker = worker) -> Pulled:
            nonlocal most
            peer = offers[0].epoch
            open_reads[peer] = open_reads.get(peer, 0) + 1
            sources[worker.index] = peer
            assert open_reads[peer] == 1
            most = max(most, sum(open_reads.values()))
            await asyncio.sleep(0.01)
            open_reads[peer] -= 1
            return await FakeWorker.pull(worker, offers)

        async def offer(worker: FakeWorker = worker) -> list[Offer]:
            (one,) = await FakeWorker.offer(worker)
            return [an_offer(version, worker.index) for version in (0, one.version)]  # of a base and an adapter

        worker.pull, worker.offer = pull, offer  # type: ignore[method-assign]
    await cast.relayed(1)
    assert sources == {1: 0, 2: 0, 3: 1, 4: 0, 5: 1, 6: 2, 7: 3}, "one holder, then two, then four"
    links = [list(replica.links) for replica in cast.roster.replicas.values()]
    assert links == [[], *([f"rollout-{sources[reader]}"] for reader in range(1, 8))]
    assert most == 4
    assert cast.world.committed == [1] * 8


NO_OFFER = "then made no offer"


@pytest.mark.parametrize(
    ("nodes", "unwritten", "broken", "written", "failed"),
    [
        ("aaabb", {0}, {}, [[0, 3], [1]], {0: "not written"}),
        ("aab", {0, 1}, {}, [[0, 2], [1]], {0: "not written", 1: "not written"}),
        ("aaa", (), {(0, "offer"): "dies"}, [[0], [1]], {0: NO_OFFER}),  # 1 was not touched
        ("aaa", (), {(0, "offer"): "hangs"}, [[0], [1]], {0: NO_OFFER}),
        ("aaaa", (), {(1, "pull"): "dies"}, [[0]], {1: "reading from rollout-0 failed"}),  # what it has is not written
        ("aaaa", (), {(1, "pull"): "hangs"}, [[0]], {1: "reading from rollout-0 failed"}),
        ("aaaa", (), {(1, "offer"): "dies"}, [[0]], {1: NO_OFFER}),  # it had read, and was to give on
    ],
)
@on_jumping_clock
async def test_a_failure_costs_whom_it_must_and_its_node_still_gets_the_version(
    nodes: str,
    unwritten: Collection[int],
    broken: Mapping[tuple[int, str], str],
    written: list[list[int]],
    failed: Mapping[int, str],
) -> None:
    cast = Cast(nodes)
    cast.failing = set(unwritten)
    for (index, verb), how in broken.items():
        cast.break_at(index, verb, how)
    report = await cast.relayed(1)
    assert cast.written == written
    assert {i for i, one in enumerate(report.replicas) if not one.committed} == failed.keys()
    assert all(said in (report.replicas[index].error or "") for index, said in failed.items())
    assert cast.states == [S.starting if index in failed else S.serving for index in range(len(nodes))]
    assert report.num_committed == len(nodes) - len(failed)
    assert report.num_relayed == report.num_committed - len({one for turn in written for one in turn} - failed.keys())
    assert all(index in failed for index, version in enumerate(cast.world.committed) if version == -1)
    cast.gate.set()
    await until(lambda: set(cast.states) == {S.serving})  # recoveries bring them back
    assert cast.world.committed == [1] * len(nodes)


@on_jumping_clock
async def test_rounds_add_up_and_a_healthy_node_does_not_wait_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
    cast = Cast("aaabb")
    cast.failing = {0}
    cast.all_take(0.25)
    report = await cast.relayed(1)
    assert cast.pulls() == [4, 2]
    assert (report.relay_s, report.total_s, report.pause_s) == pytest.approx((0.5, 0.62, 0.25))
    cast.all_take(0.0)
    assert (await cast.relayed(2)).pause_s == 0.01, "the trainer's writes paused them for longer"


@pytest.mark.parametrize(("what", "said"), [("moves", "has moved on"), ("dies", "it died")])
@on_jumping_clock
async def test_a_version_whose_peer_moved_or_died_while_it_was_read_is_not_adopted(what: str, said: str) -> None:
    cast = Cast("aa")

    async def the_peer_is_another() -> None:
        if what == "moves":
            cast.world.committed[0] = 9
        else:
            cast.break_at(0, "offer")

    cast.worker(1).before["pull"] = the_peer_is_another
    report = await cast.relayed(1)
    assert not report.replicas[1].committed and said in (report.replicas[1].error or "")
    assert cast.world.committed[1] == -1
    await cast.fail(0)
    await until(lambda: ("release", 1) in cast.world.diary)  # its link pins the dead worker's memory


@on_jumping_clock
async def test_a_replica_that_fails_while_its_neighbours_read_is_left_alone() -> None:
    cast = Cast("aaa")
    cast.worker(1).before["pull"] = lambda: cast.fail(2, "a group on it failed")
    report = await cast.relayed(1)
    assert cast.pulls() == [1]
    assert [replica.committed for replica in report.replicas] == [True, True, False]
    assert cast.states == [S.serving, S.serving, S.starting]
    cast = Cast("aaabb")
    cast.failing = {0}
    cast.worker(4).before["pull"] = lambda: cast.fail(1, "a group on it failed")
    await cast.relayed(1)
    assert cast.written == [[0, 3], [2]]


@on_jumping_clock
async def test_a_publish_to_nobody_is_made_and_one_that_comes_back_is_not_written_first() -> None:
    cast = Cast("aaa")
    await cast.relayed(0)
    await cast.supervisor.hold()
    await cast.fail(0, "a group on it failed")
    assert by_node(cast.roster.replicas.values()) == {"a": [cast.replica(1), cast.replica(2)]}
    await cast.supervisor.settle([outcome(True)] * 3)
    for index in (1, 2):
        cast.break_at(index, "offer")  # so that nobody fills it before the next publish
    cast.gate.set()
    await until(lambda: cast.states[0] is S.pending)
    for worker in cast.workers:
        worker.before.clear()
    await cast.relayed(1)
    assert cast.written[-1] == [1] and cast.states == [S.serving] * 3
    alone = Cast("a")
    await alone.relayed(0)
    await alone.fail(0)
    assert (await alone.relayed(1)).num_committed == 0 and alone.written[-1] == []
