"""Locks: who may be sent changes alone, where they land, and what a publish of several rounds reports."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes.memory_transport import MemoryFabric, MemoryTransport
from fakes.publish import KEY
from fakes.trainer import publish_report

from slipstream.conf.schema import WeightSyncConfig
from slipstream.weight_sync.layout import (
    Binding,
    DestLayout,
    Load,
    Param,
    PostLoad,
    Region,
    SourceLayout,
    SourceShard,
    TensorMeta,
)
from slipstream.weight_sync.pipeline.landings import ALIGNMENT_BYTES, SKIPPED, ChangeSlots, Landing, part_of_zone
from slipstream.weight_sync.pipeline.packing import Packet
from slipstream.weight_sync.pipeline.sums import Places, Sums
from slipstream.weight_sync.plan.transfer_plan import Task
from slipstream.weight_sync.publish.bases import MIN_BYTES, Bases, Costs
from slipstream.weight_sync.publish.rank0 import Rank0
from slipstream.weight_sync.publish.report import ReplicaReport, joined
from slipstream.weight_sync.replica.landing import held_digest, zone_name
from slipstream.weight_sync.replica.messages import Expected
from slipstream.weight_sync.typed_msgpack import Sent

FIRST, SECOND = (0, 0), (1, 0)
FLAGS = {FIRST: (True,), SECOND: (True,)}


class Source:
    """Counts what it keeps."""

    num_kept = 0

    def keep(self) -> None:
        self.num_kept += 1

    def compile_marked_reads(self, reads: Any) -> Any: ...
    def compile_reads(self, reads: Any) -> Any: ...
    def read(self, *args: Any) -> None: ...
    def tensors(self) -> Any: ...


def expected(number: int) -> Expected:
    return Expected("plan", b"", bytes([number] * 8))


def test_changes_are_for_those_that_committed_the_publish_before_if_it_came_to_its_end() -> None:
    source = Source()
    bases = Bases(source, 640, 0, 1)  # type: ignore[arg-type]
    assert bases.is_on and not bases.has_kept
    bases.begin()
    assert bases.held == {}
    bases.note({FIRST: expected(1)}, FLAGS)
    bases.note({SECOND: expected(2)}, FLAGS)
    assert bases.held == {}, "not of the publish under way"
    bases.end()
    assert bases.has_kept and source.num_kept == 1
    bases.begin()
    assert bases.held == {FIRST: held_digest(expected(1), (True,)), SECOND: held_digest(expected(2), (True,))}
    assert held_digest(expected(1), (True,)) != held_digest(expected(2), (True,)) != ""
    bases.note({SECOND: expected(3)}, FLAGS)
    bases.begin()
    assert bases.held == {}, "the one before did not come to its end"
    served = {FIRST: Binding("a", {}), SECOND: Binding("b", {})}
    for forget, left in (
        (lambda: None, served),
        (lambda: bases.forget_place(0), {SECOND: Binding("b", {})}),
        (bases.forget, {}),
    ):
        bases.note({FIRST: expected(4)}, FLAGS)
        bases.note_served(served)
        bases.end()
        forget()
        bases.begin()
        assert (bases.ahead, bool(bases.held)) == (left, bool(left)), "other replicas, or one in another place"


def ways(
    costs: Costs, count: int, *changes_s: float, whole_s: float, write_s: float, size: int = MIN_BYTES,
    still: float = 1.0,
) -> str:  # fmt: skip
    """What so many publishes to two engine ranks send after a first whole one: w everything, c changes, which take
    these seconds and then the last ones, and let engines stand still for this share of them; each waits half a second
    for the engine."""
    found, report = "", publish_report(0, [])
    seconds = list(changes_s)
    for number in range(count + 1):
        is_whole = number == 0 or costs.is_whole_cheaper
        took = whole_s if is_whole else seconds.pop(0) if seconds[1:] else seconds[0]
        num_bytes, num_takers = (2 * size, 0) if is_whole else (5, 2)
        numbers = {"write_s": write_s, "num_bytes": num_bytes, "num_takers": num_takers, "idle_s": 0.5}
        numbers["pause_s"] = took * (1 if is_whole else still) + 0.5
        costs.note(replace(report, total_s=took + 0.5, **numbers), 2)
        found += "w" if is_whole else "c"
    return found[1:]


def test_everything_is_sent_where_that_is_cheaper() -> None:
    assert ways(Costs(1), 50, 0.44, whole_s=0.25, write_s=0.17) == "cc" + 9 * "w" + "cc" + 17 * "w" + "cc" + 18 * "w"
    long = ways(Costs(1), 1000, 0.44, whole_s=0.25, write_s=0.17)
    assert 0.03 < long.count("c") / (len(long)) < 0.035, "two of 67 in the end"
    assert ways(Costs(1), 9, 0.2, whole_s=0.25, write_s=0.17) == "ccwcccccc", "compared once"
    assert ways(Costs(1), 9, 0.2, 0.2, 0.2, 0.3, whole_s=0.25, write_s=0.17) == "ccwcccwww"
    assert ways(Costs(1), 9, 1.0, whole_s=12.0, write_s=11.8) == 9 * "c", "never over a slow link"
    assert ways(Costs(1), 9, 5.0, 0.6, whole_s=1.5, write_s=1.3) == 9 * "c", "a first one compiles its kernels"
    assert ways(Costs(1), 9, 0.4, whole_s=0.25, write_s=0.52) == "ccwwwwwww", "first writes are slow"
    assert ways(Costs(1), 9, 0.44, whole_s=0.25, write_s=0.17, size=MIN_BYTES - 1) == 9 * "c", "a small model"
    assert ways(Costs(1), 9, 0.42, whole_s=0.25, write_s=0.17, still=0.25) == "ccwcccccc", "0.42 + 2 x 0.105 < 3 x 0.25"
    assert ways(Costs(2), 9, 0.42, whole_s=0.25, write_s=0.17, still=0.25) == "ccwwwwwww", "the trainer has more ranks"
    costs = Costs(1)
    ways(costs, 3, 0.44, whole_s=0.25, write_s=0.17)
    costs.note(publish_report(0, []), 1)
    assert not costs.is_whole_cheaper, "others take part"
    ways(costs, 0, 0.2, whole_s=0.25, write_s=0.17)
    for _ in range(2):
        costs.note(replace(publish_report(0, []), total_s=9.0, num_takers=1), 2)
    assert not costs.is_whole_cheaper, "one of the two got everything"


def test_nobody_takes_changes_in_a_publish_that_is_quicker_whole() -> None:
    bases = Bases(Source(), 640, 0, 1)  # type: ignore[arg-type]
    for is_whole_cheaper in (False, True):
        bases.begin()
        bases.note({FIRST: expected(1)}, FLAGS)
        bases.end()
        bases.begin()
        assert (bases.sends_changes, bool(bases.held)) == (not is_whole_cheaper, not is_whole_cheaper)
        ways(bases.costs, 2, 0.44, whole_s=0.25, write_s=0.17)


def test_without_a_zone_or_without_marks_nobody_is_sent_changes() -> None:
    for bases in (Bases(Source(), 0, 0, 1), Bases(SimpleNamespace(read=None), 640, 0, 1)):  # type: ignore[arg-type]
        bases.begin()
        bases.note({FIRST: expected(1)}, FLAGS)
        bases.end()
        bases.begin()
        assert (bases.is_on, bases.has_kept, bases.held) == (False, False, {})


def test_a_rank_writes_into_its_own_part_of_the_zones_of_those_that_have_one() -> None:
    bases = Bases(Source(), 640, 1, 3)  # type: ignore[arg-type]
    bindings = {
        FIRST: Binding("a", {"w": 1, zone_name(640): 4096}),
        SECOND: Binding("b", {"w": 2, zone_name(320): 8192}),
    }
    landings = bases.landings([FIRST, SECOND], bindings)
    assert landings == {FIRST: Landing(4096, 208, 416)}
    assert bases.landings([], bindings) == {}


def test_parts_of_a_zone_are_aligned_and_leave_nothing_between_them() -> None:
    parts = [part_of_zone(1000, rank, 3) for rank in range(3)]
    assert parts == [(0, 320), (320, 656), (656, 992)]


def test_streams_lie_one_after_the_other_until_the_part_is_full() -> None:
    landing = Landing(4096, 32, 32 + 3 * ALIGNMENT_BYTES)
    assert (landing.take(1), landing.take(17), landing.take(0), landing.take(1)) == (32, 48, 80, None)
    landing = Landing(4096, 32, 32 + 3 * ALIGNMENT_BYTES)
    assert (landing.take(49), landing.take(48), landing.take(1)) == (None, 32, None)
    landing.rows += [(1, 2), (-3, 1 << 40)]
    assert landing.to_bytes() == b"".join(n.to_bytes(8, "little", signed=True) for n in (1, 2, -3, 1 << 40))


def test_a_load_that_no_stream_fits_is_not_marked_for_some_publishes() -> None:
    slots = object.__new__(ChangeSlots)
    slots.was_asked, slots._has_fitted, slots._num_skipped = [False] * 3, [False] * 3, [0] * 3
    slots._numbers, slots._num_changed = [{0: 0}, {0: 0}, {}], torch.zeros(())

    def worth() -> list[bool]:
        slots.begin()
        return [slots.is_worth_it(load) for load in range(3)]

    assert worth() == worth() == [True, True, False], "nobody asked yet; of the last load nothing may go as a stream"
    slots.was_asked[0] = slots.was_asked[1] = slots._has_fitted[1] = True
    said = [worth() for _ in range(SKIPPED + 2)]
    assert [first for first, _, _ in said] == [False] * (SKIPPED - 1) + [True] * 3
    assert all(second for _, second, _ in said), "one fitted"
    slots.was_asked[1] = True
    assert not worth()[1], "that was for one publish"


def test_what_changed_and_what_was_compared_are_counted_in_elements_of_what_may_go_as_a_stream() -> None:
    """Every second element of all is marked; the last packet is of a type that is not compared."""
    tasks = [Task("", 0, 0, 0, "w", 0, size, dtype, ()) for size, dtype in ((64, "bfloat16"), (128, "bfloat16"))]
    tasks.append(replace(tasks[0], dtype="float32"))
    packets = [Packet(place, (task,)) for place, task in zip((0, 64, 192), tasks)]
    slots = ChangeSlots(
        [(packets, lambda _, marks: lambda: marks[::2].fill_(1))] * 2,
        list(torch.zeros(2, 256, dtype=torch.uint8)),
        np.ones(1, np.bool_),
        MemoryTransport(MemoryFabric()),
    )
    for loads in ((0,), (0, 1)):
        slots.begin()
        for load in loads:
            slots.fill(load, load)
            slots.pack(load, load)
        assert slots.found() == (len(loads) * (16 + 32), len(loads) * (32 + 64))


def test_rounds_of_a_publish_add_up_but_for_pauses_and_peaks() -> None:
    """Three replicas: the first round has the second, the second round the others."""
    phases = ("begin", "idle", "mark", "prepare", "write", "verify", "commit", "total")
    summed = (*(f"{phase}_s" for phase in phases), "num_bytes", "num_takers")

    def replicas(wave: str) -> tuple[ReplicaReport, ...]:
        return tuple(ReplicaReport(f"{wave} {number}", True) for number in range(3))

    reports = [
        replace(
            publish_report(7, replicas(wave), num_changed=changed),
            **{name: scale * (place + 1) for place, name in enumerate(summed)},
            pause_s=pause_s,
            peak_bytes=peak,
        )
        for wave, scale, pause_s, peak, changed in (("one", 1, 2.0, 10, 4), ("two", 100, 1.0, 30, None))
    ]
    report = joined(reports, [[1], [0, 2]])
    assert [one.endpoint for one in report.replicas] == ["two 0", "one 1", "two 2"]
    assert {name: getattr(report, name) for name in summed} == {n: 101 * (i + 1) for i, n in enumerate(summed)}
    assert (report.pause_s, report.peak_bytes, report.num_changed_params) == (2.0, 30, 4)
    left = {one.name for one in fields(report)} - {*summed, "replicas", "pause_s", "peak_bytes"}
    left -= {"num_changed_params"}
    assert all(getattr(report, name) == getattr(reports[-1], name) for name in left)
    more = joined([replace(reports[0], num_changed_params=n) for n in (3, 5)], [[1], [0, 2]])
    assert more.num_changed_params == 8 and more.pause_s == pytest.approx(2.0)
    assert joined([reports[1]] * 2, [[1], [0, 2]]).num_changed_params is None


def test_a_digest_is_of_the_parameters_that_changes_may_be_sent_for() -> None:
    first, second = (Expected("plan", b"", bytes([1] * 8 + [last] * 8)) for last in (2, 3))
    assert held_digest(first, (True, False)) == held_digest(second, (True, False))
    assert held_digest(first, (True, True)) != held_digest(second, (True, True))
    assert held_digest(first, (True, False)) != held_digest(replace(first, planned="other parameters"), (True, False))
    assert held_digest(Expected("plan", b"", b""), (True, True)) == ""


def test_a_further_replica_s_ranks_take_changes_of_what_the_same_ranks_of_the_first_take_them_of() -> None:
    whole = Region((0,), (4,))
    source = SourceLayout(0, (TensorMeta("w", (4,), "bfloat16"),), (SourceShard("w", whole),))
    load = Load("w", whole, (0,), "w", 0, (1,))
    kinds = (PostLoad.identity, PostLoad.repack)
    layouts = tuple(DestLayout(rank, (Param("w", (4,), "bfloat16", kind),), (load,)) for rank, kind in enumerate(kinds))
    rank0 = Rank0(WeightSyncConfig(), KEY, Bases(Source(), 640, 0, 1))  # type: ignore[arg-type]
    agreed, _ = rank0.make_plan([layouts, layouts], [(Sent(source), 64)])
    rank0.add_replicas([2, 3])
    assert agreed.flags().tolist() == [True, False] * 2
    assert rank0._flags == {(replica, rank): (rank == 0,) for replica in range(4) for rank in range(2)}


def test_the_base_of_an_engine_that_merges_is_known_by_its_matrices_whatever_its_factors_are() -> None:
    names, whole = ("w", "w.lora_A"), Region((0,), (4,))
    metas = tuple(TensorMeta(name, (4,), "float32") for name in names)
    source = SourceLayout(0, metas, tuple(SourceShard(name, whole) for name in names))
    loads = tuple(Load(name, whole, (0,), name, 0, (1,)) for name in names)
    layout = DestLayout(0, tuple(Param(name, (4,), "float32") for name in names), loads)

    def frozen(*hashes: int) -> dict[tuple[int, int], str]:
        bases = Bases(Source(), 0, 0, 1)  # type: ignore[arg-type]
        rank0 = Rank0(WeightSyncConfig(), KEY, bases)
        rank0.make_plan([(layout,)], [(Sent(source), 64)])
        rank0.freeze_base(Sums(Places({FIRST: names}), np.array([(16, 16), hashes])))
        rank0.add_replicas([1])
        assert bases.frozen.keys() == {FIRST, SECOND} and bases.frozen[FIRST] == bases.frozen[SECOND]
        return bases.frozen

    assert frozen(1, 2) == frozen(1, 3) != frozen(4, 2)
