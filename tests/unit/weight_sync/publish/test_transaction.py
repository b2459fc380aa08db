"""Locks: whom rank 0 asks, tells and waits for how long, and what the report says of it. No socket, no clock."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest

from slipstream.weight_sync.errors import ReplicaError, TransferTimeout
from slipstream.weight_sync.pipeline.lanes import RankPublishReport
from slipstream.weight_sync.pipeline.trace import Span
from slipstream.weight_sync.publish import transaction as module
from slipstream.weight_sync.publish.report import EXCLUDED, PublishReport, ReplicaReport
from slipstream.weight_sync.publish.transaction import MIN_COMMIT_S, Alive, Transaction
from slipstream.weight_sync.replica.messages import Begun, Bound, Committed, PublishId, ReplicaVerbs

SLOTS = (({},), ({}, {}, {}))
"""A replica's two ranks: the first has one slot, the second three."""
PUBLISH = PublishId("publisher", version=7, epoch=3, digest="plan")
BEGIN, COMMIT, ABORT = ReplicaVerbs.begin, ReplicaVerbs.commit, ReplicaVerbs.abort


class Clock:
    """Goes on only when it is told to."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 5000.0 + self.now


@dataclass
class Clients:
    """Replicas that answer what they were given; a replica without an answer gets the usual one."""

    clock: Clock
    answers: dict[tuple[object, int], object] = field(default_factory=dict)
    takes_s: dict[object, float] = field(default_factory=dict)
    answer_s: dict[int, float] = field(default_factory=dict)
    asked: list[tuple[object, dict[int, object], dict[int, float]]] = field(default_factory=list)
    """Verb, and per replica what it was given beside the name of the publish, and its seconds."""

    def call(self, verb: object, arguments: Mapping, timeouts_s: Mapping[int, float]) -> dict[int, object]:
        assert all(named == PUBLISH for named, *_ in arguments.values())
        given = {number: more[0] if more else None for number, (_, *more) in arguments.items()}
        self.asked.append((verb, given, dict(timeouts_s)))
        self.clock.now += self.takes_s.get(verb, 0.0)
        usual = {BEGIN: begun(), COMMIT: committed(), ABORT: None}[verb]
        return {number: self.answers.get((verb, number), usual) for number in arguments}

    async def ask(self, *args: Any) -> dict[int, object]:
        return self.call(*args)

    def of(self, verb: object) -> list[tuple[dict[int, object], dict[int, float]]]:
        return [(given, timeouts_s) for one, given, timeouts_s in self.asked if one is verb]


def begun(slots: Sequence[int] = (0, 2), idle_s: float = 0.25, mark_s: float = 0.125,
          holds: Sequence[str] = ("", "")) -> Begun:  # fmt: skip
    bounds = [Bound(f"session {rank}", slot, holds[rank]) for rank, slot in enumerate(slots)]
    return Begun(tuple(bounds), idle_s, mark_s)


def committed(verify_s: float = 0.5, commit_s: float = 1.0, pause_s: float = 2.0) -> Committed:
    return Committed(verify_s, commit_s, pause_s)


class Setup:
    """Three replicas, of which two take part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, included: tuple[int, ...] = (0, 2),
                 held: Mapping[tuple[int, int], str] = MappingProxyType({}),
                 failed: Mapping[int, str] = MappingProxyType({})):  # fmt: skip
        self.clock = Clock()
        monkeypatch.setattr(module, "time", self.clock)
        self.clients = Clients(self.clock, answer_s={0: 1.0, 1: 9.0, 2: 4.0})
        self.transaction = Transaction(
            self.clients, ["tcp://a", "tcp://b", "tcp://c"], included, PUBLISH,
            timeout_s=10.0, held=held, failed=failed, ahead_s=0.0625,
        )  # fmt: skip

    def begin(self) -> Alive:
        return asyncio.run(self.transaction.begin([SLOTS] * 3))

    def finish(self, *results: RankPublishReport) -> PublishReport:
        self.transaction.finish(results, lambda number: (f"expected of {number}",))  # type: ignore[arg-type,return-value]
        return self.transaction.report(results, watermark_bytes=11, num_changed_params=5)

    @property
    def errors(self) -> list[str | None]:
        return [replica.error for replica in self.transaction.replicas]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Setup]:
    return lambda *args, **kwargs: Setup(monkeypatch, *args, **kwargs)


@pytest.mark.parametrize(("answer_s", "left_s"), [(4.0, 6.0), (10.5, 0.0)])
def test_who_takes_part_is_asked_to_begin_and_has_the_rest_of_its_deadline_for_writes(make, answer_s, left_s) -> None:
    setup = make()
    setup.clients.answer_s[2] = answer_s
    alive = setup.begin()
    assert setup.clients.asked == [(BEGIN, {0: None, 2: None}, {0: 10.0, 2: 10.0})]
    assert alive.budgets_s == {0: 9.0, 2: left_s}
    assert alive.bound == {(replica, rank): bound for replica in (0, 2) for rank, bound in enumerate(begun().bindings)}
    assert setup.errors == [None, EXCLUDED, None]


def test_changes_are_for_ranks_that_hold_what_was_kept_for_them(make) -> None:
    setup = make((0, 1, 2), held={(0, 0): "sixth", (0, 1): "sixth", (1, 0): "", (2, 0): "sixth"})
    setup.clients.answers[BEGIN, 0] = begun(holds=("sixth", "fifth"))
    setup.clients.answers[BEGIN, 2] = begun(holds=("", "sixth"))
    assert setup.begin().take_changes == [(0, 0)], (
        "the others hold another version, nothing, what nobody hashed, or what nobody kept"
    )
    assert setup.transaction.bases == {(0, 0): "sixth"}


def test_a_replica_that_took_no_changes_ahead_is_not_asked_to_begin(make) -> None:
    setup = make(failed={2: "trainer rank 1: TransferFailed: gone", 1: "left out, so nobody wrote to it"})
    assert setup.begin().budgets_s == {0: 9.0}
    setup.finish(RankPublishReport(errors={2: "TransferFailed: gone"}))
    assert [set(fields) for _, fields, _ in setup.clients.asked] == [{0}, {0}], "to begin, and to commit"
    assert setup.errors == [None, EXCLUDED, "trainer rank 1: TransferFailed: gone"]


def test_a_replica_that_does_not_begin_is_not_written_to_and_told_nothing(make) -> None:
    setup = make()
    setup.clients.answers[BEGIN, 0] = TransferTimeout("it did not answer")
    alive = setup.begin()
    assert set(alive.budgets_s) == {2} and {replica for replica, _ in alive.bound} == {2}
    setup.finish(RankPublishReport(write_s={2: 1.0}))
    assert [set(fields) for _, fields, _ in setup.clients.asked] == [{0, 2}, {2}], "Begin, and Commit of the other"
    assert setup.errors == ["TransferTimeout: it did not answer", EXCLUDED, None]


@pytest.mark.parametrize("slots", [(1, 0), (0, 3), (-1, 0), (0,), (0, 0, 0)])
def test_a_replica_that_begins_where_it_has_described_nothing_is_not_written_to_and_aborted(make, slots) -> None:
    setup = make()
    setup.clients.answers[BEGIN, 0] = begun(slots, holds=("",) * 3)
    assert {replica for replica, _ in setup.begin().bound} == {2}
    setup.finish(RankPublishReport(write_s={2: 1.0}))
    ((fields, timeouts_s),) = setup.clients.of(ABORT)
    assert set(fields) == {0} and timeouts_s == {0: MIN_COMMIT_S}
    assert f"it begins in slots {list(slots)} of its ranks, which have [1, 3]" in str(fields[0])
    assert set(setup.clients.of(COMMIT)[0][0]) == {2}


@pytest.mark.parametrize(
    ("write_s", "left_s"),
    [
        # 10 s - 1 s of Begin - 5 s of the slower rank; 10 - 4 - 5.75 is less than a commit gets at least
        (({0: 2.0, 2: 5.75}, {0: 5.0}), {0: 4.0, 2: MIN_COMMIT_S}),
        (({}, {0: 0.25}), {0: 10 - 1 - 0.25, 2: 10 - 4}),
    ],
)
def test_a_commit_has_what_begin_and_the_slowest_ranks_writes_left(make, write_s, left_s) -> None:
    setup = make()
    setup.begin()
    setup.finish(*(RankPublishReport(write_s=own) for own in write_s))
    assert setup.clients.of(COMMIT) == [({number: (f"expected of {number}",) for number in (0, 2)}, left_s)]
    assert setup.clients.of(ABORT) == []
    assert setup.errors == [None, EXCLUDED, None]


@pytest.mark.parametrize("failing", [[0], [1], [2], [0, 2]])
def test_an_error_of_any_rank_keeps_a_replica_from_committing_and_each_is_named(make, failing: list[int]) -> None:
    setup = make()
    setup.begin()
    results = [RankPublishReport(write_s={0: 1.0, 2: 1.0}) for _ in range(3)]
    for rank in failing:
        results[rank].errors[2] = f"TransferFailed: no {rank}"
    setup.finish(*results)
    assert list(setup.clients.of(COMMIT)[0][0]) == [0]
    reason = "; ".join(f"trainer rank {rank}: TransferFailed: no {rank}" for rank in failing)
    assert setup.clients.of(ABORT) == [({2: reason}, {2: MIN_COMMIT_S})]
    assert [kind for kind, _, _ in setup.clients.asked] == [BEGIN, COMMIT, ABORT], "the others first"
    assert setup.errors == [None, EXCLUDED, reason]


def test_a_replica_whose_commit_failed_is_not_told_again_and_is_in_the_log_as_no_other_is(make, caplog) -> None:
    setup = make()
    setup.begin()
    setup.clients.answers[COMMIT, 0] = ReplicaError("it broke")
    report = setup.finish(RankPublishReport())
    assert setup.clients.of(ABORT) == []
    assert setup.errors[0] == "ReplicaError: it broke" and setup.errors[2] is None
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert record.getMessage() == "version 7, epoch 3: tcp://a did not commit: ReplicaError: it broke"
    assert [replica.committed for replica in report.replicas] == [False, False, True]
    assert report.num_committed == 1


@pytest.mark.parametrize(("one", "other"), [(0, 2), (2, 0)])
def test_the_report_has_the_slowest_of_each_and_the_sum_of_bytes(make, one: int, other: int) -> None:
    """Whichever replica, and whichever rank, the slowest is."""
    setup = make()
    setup.clients.takes_s = {BEGIN: 4.5, COMMIT: 2.0}
    setup.clients.answers |= {
        (BEGIN, one): begun(idle_s=0.5, mark_s=0.0), (BEGIN, other): begun(idle_s=0.25, mark_s=0.125),
        (COMMIT, one): committed(0.5, 1.0, 2.0), (COMMIT, other): committed(0.25, 3.0, 1.0),
    }  # fmt: skip
    setup.begin()
    setup.clock.now += 3.0
    results = [
        RankPublishReport({}, {one: 1.0}, 100, prepare_s=0.5, busy_write_s=2.0, peak_bytes=7, num_changed=1,
                          num_compared=8),
        RankPublishReport({}, {other: 1.0}, 20, prepare_s=0.75, busy_write_s=1.0, peak_bytes=9, num_changed=2,
                          num_compared=4),
    ]  # fmt: skip
    report = setup.finish(*(results if one == 0 else results[::-1]))
    assert report == PublishReport(
        version=7, epoch=3,
        replicas=(
            ReplicaReport("tcp://a", True, None, 2.0 if one == 0 else 1.0),
            ReplicaReport("tcp://b", False, EXCLUDED, 0.0),
            ReplicaReport("tcp://c", True, None, 1.0 if one == 0 else 2.0),
        ),
        pause_s=2.0, idle_s=0.5, mark_s=0.125, verify_s=0.5, commit_s=3.0,
        begin_s=4.5, total_s=0.0625 + 4.5 + 3.0 + 2.0, prepare_s=0.75, write_s=2.0, peak_bytes=9, num_bytes=120,
        watermark_bytes=11, num_changed_params=5, changed_fraction=3 / 12, num_takers=0,
    )  # fmt: skip


@pytest.mark.parametrize(("num_compared", "fraction"), [(0, None), (8, 0.0)])
def test_a_publish_to_nobody_asks_nobody(make, num_compared: int, fraction: float | None) -> None:
    setup = make(())
    assert setup.begin() == Alive()
    report = setup.finish(RankPublishReport(num_compared=num_compared))
    assert [fields for _, fields, _ in setup.clients.asked] == [{}, {}]
    assert (report.pause_s, report.verify_s, report.commit_s, report.idle_s, report.mark_s) == (0, 0, 0, 0, 0)
    assert report.changed_fraction == fraction


def test_timelines_are_of_all_ranks_and_of_the_replicas_that_began(make) -> None:
    setup = make((0, 1, 2))
    setup.clients.takes_s = {BEGIN: 4.0, COMMIT: 2.0}
    setup.clients.answers |= {(BEGIN, 2): TransferTimeout("late"), (COMMIT, 1): ReplicaError("it broke")}
    setup.begin()
    setup.clock.now += 3.0
    results = [RankPublishReport(spans=[Span("gather", str(rank), 0.0, 1.0)]) for rank in range(2)]
    setup.finish(*results)
    spans = setup.transaction.spans(results)
    assert list(spans) == ["trainer rank 0", "trainer rank 1", "replica tcp://a", "replica tcp://b"]
    assert [spans[f"trainer rank {rank}"] for rank in range(2)] == [result.spans for result in results]
    found = {span.name: (span.start_s - 6000, span.stop_s - 6000) for span in spans["replica tcp://a"]}
    assert found == {
        "pause": (0.0, 0.25), "mark dirty": (0.25, 0.375), "writes arrive": (0.375, 7.0), "verify": (7.0, 7.5),
        "commit": (7.5, 8.5),
    }  # fmt: skip
    assert [span.name for span in spans["replica tcp://b"]] == ["pause", "mark dirty"], "it did not commit"
