"""Several trainer ranks publish together: one rank's failure is everybody's knowledge, and none is left waiting.

The ranks are threads, their group a room in which all must make the same calls (fakes.meeting).
"""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fakes.meeting import ThreadMeeting
from fakes.memory_transport import Fault
from fakes.publish import DictSource, EndpointThread, committed, engine_layout
from fakes.publish_world import World

from slipstream.conf.errors import ConfigError
from slipstream.weight_sync.errors import (
    LinkMismatch,
    PlanError,
    ProtocolError,
    ReplicaError,
    TransportError,
    WeightSyncError,
)
from slipstream.weight_sync.pipeline.lanes import RankPublishReport
from slipstream.weight_sync.pipeline.sums import Sums
from slipstream.weight_sync.plan.plan import build_plan
from slipstream.weight_sync.publish import publisher as module
from slipstream.weight_sync.publish.bases import Costs
from slipstream.weight_sync.publish.collectives import Meeting
from slipstream.weight_sync.publish.publisher import Publisher
from slipstream.weight_sync.publish.rank0 import Rank0
from slipstream.weight_sync.publish.report import EXCLUDED
from slipstream.weight_sync.publish.transaction import Transaction

NUM_RANKS = 2
NUM_BYTES = sum((40, 10, 70, 80, 80))
"""Of one engine rank."""


@pytest.fixture
def make(make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    monkeypatch.setattr(module, "Meeting", ThreadMeeting)

    def one(**options: Any) -> World:
        world = make_world(num_ranks=NUM_RANKS, timeout_s=30.0, **options)
        world.connect()
        return world

    return one


def test_every_rank_writes_its_part_and_the_sums_of_all_are_what_is_proven(make) -> None:
    world = make()
    for version in (0, 1):
        report = world.publish(version)
        assert committed(report) == [True, True]
        assert [engine.wrong_params(version) for engine in world.engines] == [[], []]
        states = [endpoint.endpoint.state for endpoint in world.endpoints]
        assert [(state.is_serving, state.version) for state in states] == [(True, version)] * 2
    assert report.num_bytes == 2 * 2 * NUM_BYTES and report.pause_s > 0
    assert 0 < report.peak_bytes <= report.watermark_bytes == 1 << 16
    assert report.num_changed_params == 2 * 2 * 5
    assert world.room.calls.count("add_up") == 2


@pytest.mark.parametrize("broken", range(NUM_RANKS))
def test_a_link_that_fails_on_any_rank_costs_its_replica_and_is_named(make, broken: int) -> None:
    world = make()
    world.publish(0)
    session = world.sessions(1)[0]
    write = world.links[broken].write

    def refuses(to: str, *args: Any, **kwargs: Any) -> None:
        if to == session:
            world.fabric.inject(session, Fault(refuse=True))
        write(to, *args, **kwargs)

    world.links[broken].write = refuses
    report = world.publish(1)
    assert committed(report) == [True, False]
    assert f"trainer rank {broken}: TransferFailed" in (report.replicas[1].error or "")
    assert world.engines[0].wrong_params(1) == []
    assert world.engines[1].aborted.is_set() and world.serving() == [True, False]
    assert world.endpoints[1].endpoint.state.epoch == report.epoch
    for link in world.links:
        assert set(world.sessions(1)) <= set(link.closed), "links to it are closed on every rank"
        assert not set(world.sessions(0)) & set(link.closed)
    world.links[broken].write = write
    assert committed(world.publish(2)) == [True, True]


@pytest.mark.parametrize("broken", range(NUM_RANKS))
def test_a_source_that_fails_on_any_rank_is_every_replicas_error(make, broken: int) -> None:
    world = make()
    world.sources[broken].begin_error = RuntimeError("gather broke")
    report = world.publish(0)
    assert committed(report) == [False, False]
    assert {replica.error for replica in report.replicas} == {f"trainer rank {broken}: RuntimeError: gather broke"}
    assert [source.num_ends for source in world.sources] == [1, 1], "on every rank"
    world.sources[broken].begin_error = None
    assert committed(world.publish(0)) == [True, True]


@pytest.mark.parametrize("broken", range(NUM_RANKS))
@pytest.mark.parametrize("verb", ["layout", "compile", "allocate"])
def test_a_rank_that_cannot_connect_is_an_error_on_every_rank(make, monkeypatch, broken: int, verb: str) -> None:
    world = make()

    owner = world.sources[broken] if verb == "layout" else world.publishers[broken]._pipeline
    with monkeypatch.context() as patch:
        patch.setattr(owner, verb, Mock(side_effect=PlanError("no room")))
        layouts = world.publishers[0]._rank0.met
        world.raises(PlanError, f"trainer rank {broken}: no room", lambda publisher: (
            publisher.plan_for(layouts), publisher.connect(world.addresses)
        ))  # fmt: skip
        world.raises(ProtocolError, r"publish\(\) before connect\(\)", lambda publisher: publisher.publish(0))
    world.connect()
    assert committed(world.publish(0)) == [True, True]


@pytest.mark.parametrize("broken", range(NUM_RANKS))
def test_a_rank_that_cannot_release_its_memory_says_so_on_every_rank(make, monkeypatch, broken: int) -> None:
    world = make()

    def breaks() -> None:
        raise WeightSyncError("still draining")

    with monkeypatch.context() as patch:
        patch.setattr(world.publishers[broken]._pipeline, "release", breaks)
        world.raises(WeightSyncError, f"trainer rank {broken}: still draining", Publisher.release)
    world.all(Publisher.release)
    assert [link.registered for link in world.links] == [[], []]
    assert committed(world.publish(0)) == [True, True]


def test_an_error_of_options_stays_one_on_its_way_to_other_ranks() -> None:
    with pytest.raises(ConfigError, match=r"^model\.a=1: give b$"):
        Meeting(0, 1, None).on_rank0(None, Mock(side_effect=ConfigError("model.a=1: give b")))


def test_a_link_of_any_rank_must_be_the_replicas(make) -> None:
    world = make()
    for rank in range(NUM_RANKS):
        plain = type(world.links[rank])
        world.links[rank].__class__ = type("Other", (plain,), {"link": property(lambda _: "rdma")})
        world.raises(
            LinkMismatch, "receives over memory, the trainer's ranks send over .*rdma",
            lambda publisher: publisher.connect(world.addresses),
        )  # fmt: skip
        world.links[rank].__class__ = plain
    world.connect()


@pytest.mark.parametrize("verb", ["begin", "finish"])
def test_what_fails_on_rank_0_alone_is_raised_on_every_rank_and_leaves_nothing_behind(make, monkeypatch, verb) -> None:
    world = make()

    def breaks(*_: object) -> None:
        raise WeightSyncError("no socket")

    async def breaks_later(*_: object) -> None:
        breaks()

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, verb, breaks_later if verb == "begin" else breaks)
        world.raises(WeightSyncError, "no socket", lambda publisher: publisher.publish(0))
    assert [source.num_ends for source in world.sources] == [1, 1]
    world.all(lambda publisher: publisher.disconnect([0, 1]))
    opened = sorted(world.sessions(0) + world.sessions(1)) if verb == "finish" else []
    assert [sorted(link.closed) for link in world.links] == [opened] * 2, "a replica that dies now can be let go"
    assert committed(world.publish(1)) == [True, True]


def test_a_replica_started_again_is_met_by_rank_0_and_known_to_all(make) -> None:
    world = make()
    world.publish(0)
    old, gone = world.sessions(0), world.engines[0]
    world.endpoints[0].close()
    for version in (1, 2):
        failed = world.publish(version)
        assert committed(failed) == [False, True] and "is gone" in (failed.replicas[0].error or "")
    for link in world.links:
        assert sorted(link.closed) == sorted(old), "once"
    world.start(0)
    world.engines[1].calls.clear()
    world.all(lambda publisher: publisher.reconnect(0, world.addresses[0]))
    assert world.engines[1].calls == [], "the other one notices nothing"
    report = world.publish(3)
    assert committed(report) == [True, True] and report.epoch == failed.epoch + 1
    assert [engine.wrong_params(3) for engine in world.engines] == [[], []]
    assert gone.wrong_params(0) == [], "nothing is written to where it was, which is still mapped"
    assert report.num_changed_params == 2 * 5, "what the old process held is no measure for the new one"
    assert report.replicas[0].endpoint == world.addresses[0]
    world.endpoints[0].close()
    world.raises(ReplicaError, "gone", lambda publisher: publisher.reconnect(0, "tcp://127.0.0.1:9"))
    assert committed(world.publish(4)) == [False, True]
    world.endpoints[0] = EndpointThread(world.engines[0])
    world.all(lambda publisher: publisher.reconnect(0, world.addresses[0]))
    assert committed(world.publish(5)) == [True, True]


def test_excluded_replicas_are_left_alone_by_every_rank(make) -> None:
    world = make()
    world.publish(0)
    sessions = world.sessions(0)
    world.engines[0].calls.clear()
    report = world.publish(1, exclude=[0])
    assert committed(report) == [False, True] and report.num_bytes == 2 * NUM_BYTES
    assert report.replicas[0].error == EXCLUDED and world.engines[0].calls == []
    assert report.num_changed_params == 2 * 5, "counted over the replica that committed"
    assert world.engines[0].wrong_params(0) == [] and world.engines[1].wrong_params(1) == []
    for link in world.links:
        assert sorted(link.closed) == sorted(sessions)
    nobody = world.publish(2, exclude=[0, 1])
    assert committed(nobody) == [False, False] and nobody.num_bytes == 0
    assert committed(world.publish(3)) == [True, True]


def test_a_further_replica_gets_every_rank_s_part_and_its_bytes_are_packed_once(make) -> None:
    world = make()
    world.publish(0)
    num_reads = [source.num_reads for source in world.sources]
    world.start(2)
    world.all(lambda publisher: publisher.reconnect(2, world.addresses[2]))
    report = world.publish(1)
    assert committed(report) == [True, True, True] and report.num_bytes == 3 * 2 * NUM_BYTES
    assert [engine.wrong_params(1) for engine in world.engines] == [[], [], []]
    assert [source.num_reads for source in world.sources] == [2 * num for num in num_reads]


def test_a_rank_that_has_no_place_for_a_further_replica_is_everybody_s_error(make) -> None:
    """The ranks' places would differ from there on: no publish follows."""
    world = make()
    world.publish(0)
    tries = []

    def fails(more: range) -> None:
        tries.append(more)
        raise TransportError("still draining")

    world.publishers[1]._pipeline.add_replicas = fails
    world.raises(WeightSyncError, "still draining", lambda publisher: publisher.reconnect(2, world.addresses[0]))
    assert tries == [range(2, 3)]
    world.raises(ProtocolError, r"before connect\(\)", lambda publisher: publisher.publish(1))


def test_a_link_that_cannot_be_closed_is_tried_again(make) -> None:
    from slipstream.weight_sync.errors import TransferTimeout

    world = make()
    world.publish(0)
    link, reset, tries = world.links[1], world.links[1].reset, []

    def stuck(session: str) -> None:
        tries.append(session)
        raise TransferTimeout("still draining")

    link.reset = stuck
    world.all(lambda publisher: publisher.disconnect([0]))
    link.reset = reset
    assert sorted(tries) == sorted(world.sessions(0)) and link.closed == []
    for _ in range(2):
        world.all(lambda publisher: publisher.disconnect([0]))
    assert sorted(link.closed) == sorted(world.sessions(0)), "and once"


def test_a_publisher_that_met_somebody_else_in_vain_publishes_to_nobody(make) -> None:
    world = make()
    world.raises(ReplicaError, "gone", lambda publisher: publisher.connect(["tcp://127.0.0.1:9"]))
    world.raises(ProtocolError, r"publish\(\) before connect\(\)", lambda publisher: publisher.publish(0))
    world.connect()
    assert committed(world.publish(0)) == [True, True]


def test_nothing_of_a_publisher_is_left_at_its_end(make) -> None:
    before = set(threading.enumerate())
    world = make()
    world.publish(0)
    for publisher in world.publishers:
        publisher.close()
        publisher.close()
    assert [link.registered for link in world.links] == [[], []]
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not any(name.startswith("weight-sync-") for name in left), left


def test_no_task_is_longer_than_the_rank_with_the_least_room_allows(make) -> None:
    world = make()
    world.sources[1].temporary_bytes = 1 << 14
    layouts = [tuple(engine_layout(rank) for rank in range(2))] * 2
    world.all(lambda publisher: publisher.plan_for(layouts))
    summary, _ = world.all(lambda publisher: publisher.connect(world.addresses))
    roomy, tight = (publisher._pipeline.max_task_bytes for publisher in world.publishers)
    assert tight < roomy
    plan = build_plan([source.layout() for source in world.sources], layouts, max_task_bytes=tight)
    assert summary.digest == plan.digest


def test_changes_of_all_ranks_are_what_an_engine_rank_is_told_of(make) -> None:
    """One after the other, as their parts of the zone lie."""
    publisher, told = make().publishers[0], []
    transaction: Any = SimpleNamespace(
        bases={(0, 1): "base"},
        replicas=[SimpleNamespace(committed=None)] * 2,
        finish=lambda _, expected_of: told.extend(expected_of(0)),
        report=lambda *_, **__: None,
    )
    results = [RankPublishReport(changes={(0, 1): part}) for part in (b"of rank 0", b", of rank 1")]
    publisher._rank0._begun = transaction, None
    publisher._rank0.finish(results, Sums(publisher._places), None)
    assert [(one.base, one.changes) for one in told] == [("", b""), ("base", b"of rank 0, of rank 1")]


def test_what_engines_are_taken_to_hold_is_what_all_ranks_send_together(make, monkeypatch) -> None:
    """Before a first publish that sends changes, and before engines merge for themselves."""
    world, seen = make(zone=1 << 12), []
    bases, note_base = world.publishers[0]._rank0._bases, Rank0.note_base
    monkeypatch.setattr(Rank0, "freeze_base", lambda _, sums: seen.append(sums))
    monkeypatch.setattr(Rank0, "note_base", lambda self, sums: (seen.append(sums), note_base(self, sums)))
    for rank, publisher in enumerate(world.publishers):
        publisher._base = DictSource(rank, NUM_RANKS)
    world.connect()
    world.all(Publisher.note_base)
    assert len(bases._committed) == 4
    world.publish(0)
    sent = world.publishers[0]._rank0._last_sums
    assert len(seen) == 2 and len(sent) == 4
    assert all((sums.part(dest) == part).all() for sums in seen for dest, part in sent.items())


def test_what_one_replica_proved_is_known_of_equal_ranks_of_those_that_missed_it(make) -> None:
    """They may read it from that one. What nobody proved is not known."""
    world = make(zone=1 << 12)
    bases = world.publishers[0]._rank0._bases
    world.publish(0, exclude=[1])
    known = bases._committed
    assert known == {(replica, rank): known[0, rank] for replica in range(2) for rank in range(2)}
    assert known[0, 0] != known[0, 1]
    for replica in range(2):
        world.fabric.inject(world.sessions(replica)[0], Fault(drop=True))
    assert committed(world.publish(1)) == [False, False] and bases._committed == bases._served == {}


@pytest.mark.parametrize("errors", [({}, {1: "the link is down"}), ({1: "the link is down"}, {1: "so is this one"})])
def test_a_replica_to_which_a_rank_cannot_send_changes_ahead_is_asked_nothing_and_the_first_such_rank_is_named(
    make, monkeypatch: pytest.MonkeyPatch, errors: tuple[dict[int, str], ...]
) -> None:
    world, costed = make(zone=1 << 12), []
    monkeypatch.setattr(Costs, "note", lambda _, report, num_ranks: costed.append((report.version, num_ranks)))
    for version in range(2):
        assert committed(report := world.publish(version)) == [True, True]
    assert report.num_takers == 4
    calls = len(world.engines[1].calls)
    with monkeypatch.context() as patch:
        for publisher, own in zip(world.publishers, errors, strict=True):
            patch.setattr(publisher._pipeline, "send_ahead", lambda *_, own=own, **__: own)
        report = world.publish(2)
    assert committed(report) == [True, False]
    first = next(rank for rank, own in enumerate(errors) if own)
    assert report.replicas[1].error == f"trainer rank {first}: the link is down"
    assert len(world.engines[1].calls) == calls
    states = [endpoint.endpoint.state for endpoint in world.endpoints]
    assert [(state.is_serving, state.version) for state in states] == [(True, 2), (True, 1)], "what it had, whole"
    assert committed(world.publish(3)) == [True, True]
    assert sorted(costed) == [(version, 4) for version in (0, 0, 1, 1, 3, 3)], "on every rank, if all engines committed"
