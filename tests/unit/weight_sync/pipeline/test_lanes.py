"""A publish under way over the memory link: what overlaps, and what one bad replica or link costs the others."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cases.pipeline_world import HASH_BYTES, NUM_RANKS, UnclosableTransport, World, destinations, num_reads, wire_of
from cases.plan_tables import by_name
from fakes.memory_transport import Fault, MemoryFabric, MemoryTransport

from slipstream.weight_sync.errors import TransferTimeout, TransportError
from slipstream.weight_sync.layout import Region
from slipstream.weight_sync.pipeline.landings import Landing
from slipstream.weight_sync.pipeline.lanes import Replay
from slipstream.weight_sync.pipeline.pipeline import Pipeline
from slipstream.weight_sync.pipeline.staging_slots import FreeSlots, Slots
from slipstream.weight_sync.plan.budget import MAX_LINK_THREADS, NUM_SLOTS

pytestmark = pytest.mark.usefixtures("impatience")


class SlowTransport(MemoryTransport):
    """Takes a while to write, and knows who writes."""

    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric)
        self.is_writing = threading.Event()
        self.num_written = 0
        self.threads: set[threading.Thread] = set()

    def write(self, *args: Any, **options: Any) -> None:
        self.is_writing.set()
        self.threads.add(threading.current_thread())
        time.sleep(0.05)
        super().write(*args, **options)
        self.num_written += 1


def test_a_device_that_fails_does_not_leave_a_write_under_way() -> None:
    world = World(transport=SlowTransport)
    prepared_reads = num_reads(world.pipeline.loads[:2])

    def broken(_: str) -> None:
        if world.source.num_reads == prepared_reads:
            assert world.transport.is_writing.wait(60)
            raise RuntimeError("the device is gone")

    world.source.before_read = broken
    assert world.run(1).report.errors == {0: "RuntimeError: the device is gone"}
    num_written = world.transport.num_written
    time.sleep(0.3)
    assert world.transport.num_written == num_written > 0


@pytest.mark.parametrize("fault", [Fault(refuse=True), Fault(stall=True)])
def test_one_replicas_failure_spares_the_others(fault: Fault) -> None:
    world = World(3)
    world.budgets_s = dict.fromkeys(range(3), 0.05)
    world.fabric.inject(world.sessions[1][0].session, fault)
    result = world.run(1)
    assert set(result.report.errors) == {1}
    assert world.arrived(0, 1)
    assert world.arrived(2, 1)
    assert not world.arrived(1, 1)
    counted = by_name(result.sums)
    assert (1, 0) not in counted, "what did not cross is not counted"
    assert result.report.num_bytes == sum(count for sums in counted.values() for count, _ in sums.values())
    assert world.fabric.land_late_writes() == 0


def test_an_engine_rank_that_merges_is_not_written_to_where_a_load_has_no_factors() -> None:
    world = World()
    write, written = world.transport.write, set[str]()

    def noted(session: str, *given: Any, **more: Any) -> None:
        written.add(session)
        write(session, *given, **more)

    world.transport.write = noted
    world.pipeline.prepare(1)
    report = world.pipeline.run(1, world.bindings(), world.budgets_s, merging={(0, 0)}).report
    assert (report.errors, written) == ({}, {world.sessions[0][1].session})
    assert report.num_bytes == sum(task.num_bytes for task in world.plan.tasks[0] if task.dest_rank == 1)


@pytest.mark.parametrize(("seed", "lost"), [(0, set()), (1, set()), (2, {0}), (3, {1})])
def test_of_what_was_sent_ahead_only_what_is_left_is_packed_and_written_and_counted(seed: int, lost: set[int]) -> None:
    """Some loads are there whole at both engine ranks, others at one, or some packets of them; and a slot may be
    lost by then to a write that failed ahead."""
    world, draw = World(), np.random.default_rng(seed)
    slots = world.pipeline._slots
    assert slots is not None
    there = {dest: draw.random(len(entries.sizes)) < 0.5 for dest, entries in slots.entries.items()}
    for number, dest in ((0, None), (1, (0, seed % 2)), (3, None)):
        for of, batch in slots.loads[number].batches.items():
            there[of][batch.span] = dest in (None, of)
    left = [load for load in slots.loads if any(not there[d][b.span].all() for d, b in load.batches.items())]
    assert left[0].number == 1 and len(left) > NUM_SLOTS
    world.pipeline.send_ahead(1, world.bindings(), {}, 5.0)
    prepared = world.pipeline._prepared
    assert prepared is not None
    prepared.there = there
    slots.quarantined.update((slot, ["a session"]) for slot in lost)
    world.pipeline.prepare(1)
    free = sorted({0, 1} - lost)
    assert [(one.slot, one.load.number) for one in prepared.filled] == [(s, of.number) for s, of in zip(free, left)]
    result = world.pipeline.run(1, world.bindings(), world.budgets_s, dict.fromkeys(there, Landing(0, 0, 0)))
    assert world.source.num_reads == num_reads([load.packets for load in left])
    missing = {dest: int(slots.entries[dest].sizes[~flags].sum()) for dest, flags in there.items()}
    counted = {dest: sum(size for size, _ in sums.values()) for dest, sums in by_name(result.sums).items()}
    assert (counted, result.report.num_bytes) == (missing, sum(missing.values()))


def test_slots_that_were_packed_for_nobody_who_began_are_free_at_once() -> None:
    """The first loads are one rank's, which is not there any more; the other rank's need their slots."""
    world = World()
    world.pipeline.load(sorted(world.plan.tasks[0], key=lambda task: task.dest_rank))
    assert [destinations(packets) for packets in world.pipeline.loads[:NUM_SLOTS]] == [{(0, 0)}] * NUM_SLOTS
    bindings = world.bindings()
    del bindings[0, 0]
    result = world.run(1, bindings)
    assert result.report.errors == {}
    assert result.report.num_bytes == sum(task.num_bytes for task in world.plan.tasks[0] if task.dest_rank == 1)


@pytest.mark.parametrize("does_land", [True, False])
def test_a_slot_whose_write_cannot_be_closed_is_not_packed_again(does_land: bool) -> None:
    world = World(2, transport=UnclosableTransport)
    world.budgets_s = {0: 5.0, 1: 0.05}
    world.fabric.inject(world.sessions[1][0].session, Fault(stall=True))
    result = world.run(1)
    assert set(result.report.errors) == {1}
    assert world.arrived(0, 1)

    blocked = world.run(2)
    assert "still draining" in blocked.report.errors[0]
    if does_land:
        # What the stalled write had not sent is still in its slot: it lands as version 1, never as something else.
        assert world.fabric.land_late_writes() == 1
        assert world.holds_nothing_else(1, version=1)
        return
    world.transport.is_stuck = False
    assert world.run(3).report.errors == {}
    assert world.fabric.land_late_writes() == 0
    assert world.arrived(1, 3)


class BreakingTransport(MemoryTransport):
    """A link whose failed writes cannot be closed, for a reason of the device's."""

    def reset(self, session: str) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_slot_is_not_packed_again_where_closing_its_write_broke() -> None:
    world = World(2, transport=BreakingTransport)
    world.budgets_s = {0: 5.0, 1: 0.05}
    world.fabric.inject(world.sessions[1][0].session, Fault(stall=True))
    assert set(world.run(1).report.errors) == {0, 1}, "this rank's device is lost, and all replicas with it"
    with pytest.raises(RuntimeError, match="illegal memory access"):  # it is still asked for, and its slot kept
        world.pipeline.release()
    assert world.transport.registered


@pytest.mark.parametrize("num_starting", [0, 1])
def test_a_lane_that_cannot_enter_the_device_fails_the_publish(num_starting: int) -> None:
    world = World(2)
    entered = iter(range(100))

    def enter(_: Slots) -> None:
        if next(entered) >= num_starting:
            raise RuntimeError("CUDA error: out of memory")

    with mock.patch.object(Slots, "enter_thread", enter):
        result = world.run(1)
    assert set(result.report.errors) == {0, 1}
    assert "CUDA error" in result.report.errors[0]
    assert world.run(2).report.errors == {}


@pytest.mark.parametrize("end", [Pipeline.allocate, Pipeline.release, Pipeline.close])
def test_lanes_keep_their_threads_from_publish_to_publish_and_end_with_staging(end: Callable[[Pipeline], None]) -> None:
    world = World(transport=SlowTransport)
    threads = world.transport.threads
    bindings = world.bindings()
    assert world.run(1, dict([bindings.popitem()])).report.errors == {}
    for version in (2, 3):
        assert world.run(version).report.errors == {}
    assert len(threads) == NUM_RANKS
    assert all(thread.is_alive() for thread in threads)
    end(world.pipeline)
    assert not any(thread.is_alive() for thread in threads)


class GatedTransport(MemoryTransport):
    """Lets the first writes of each session pass, so many as it is told, and holds the others until told to go on."""

    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric)
        self.num_passing: dict[str, int] = {}
        self.num_done: Counter[str] = Counter()
        self.is_writing = threading.Event()
        self.go_on = threading.Event()
        self.after_write: Callable[[str], None] = lambda session: None

    def write(self, session: str, *args: Any, **kwargs: Any) -> None:
        if self.num_done[session] >= self.num_passing.get(session, 1 << 30):
            self.is_writing.set()
            assert self.go_on.wait(timeout=60)
        super().write(session, *args, **kwargs)
        self.num_done[session] += 1
        self.after_write(session)


def test_packing_goes_on_while_a_load_is_written() -> None:
    world = World(transport=GatedTransport)
    gated = world.transport
    loads = world.pipeline.loads
    assert len(loads) > 2
    for _, rank in destinations(loads[0]):
        gated.num_passing[world.sessions[0][rank].session] = 1
    prepared_reads = num_reads(loads[:2])
    during_write = threading.Event()

    def watched(_: str) -> None:
        if world.source.num_reads == prepared_reads:  # load 2 is packed while the gate holds load 1 in its write
            assert gated.is_writing.wait(timeout=60)
            during_write.set()
            gated.go_on.set()

    world.source.before_read = watched
    result = world.run(1)
    assert during_write.is_set()
    assert result.report.errors == {}
    assert world.arrived(0, 1)


@pytest.mark.parametrize("first", [0, 1])
def test_a_load_is_not_packed_over_one_that_is_written_when_the_other_was_packed_for_nobody(first: int) -> None:
    """One of the first two loads is for a rank that is not there; the other is held in its write until the third is
    packed."""
    world = World(transport=GatedTransport)
    tasks = list(world.plan.tasks[0])
    order = [("w13", first), ("w13", 1 - first), ("w2", 0)]
    world.pipeline.load([task for one in order for task in tasks if (task.param, task.dest_rank) == one])
    loads, read = world.pipeline.loads, world.source.read
    assert [destinations(packets) for packets in loads] == [{(0, first)}, {(0, 1 - first)}, {(0, 0)}]

    def noted(tensor: str, region: Region, out: torch.Tensor) -> None:
        read(tensor, region, out)
        if world.source.num_reads == num_reads(loads):
            world.transport.go_on.set()

    world.source.read = noted
    world.transport.num_passing[world.sessions[0][0].session] = 0
    bindings = world.bindings()
    del bindings[0, 1]
    assert world.run(1, bindings).report.errors == {}
    for param in ("w13", "w2"):
        assert torch.equal(world.engines[0].params[0][param], wire_of(1, 0)[param])


def test_a_link_goes_on_while_another_one_still_sends_its_part_of_a_load() -> None:
    world = World(transport=GatedTransport)
    gated = world.transport
    first, second = map(destinations, world.pipeline.loads[:2])
    (quick, _), (slow, _) = sorted(world.bindings().items(), key=lambda item: item[0] not in second)
    assert {quick, slow} <= first and quick in second
    quick_session, slow_session = (world.sessions[replica][rank].session for replica, rank in (quick, slow))
    gated.num_passing[slow_session] = 0

    def release(session: str) -> None:
        if session == quick_session and gated.num_done[session] == 2:  # its part of the second load is over
            assert gated.num_done[slow_session] == 0
            gated.go_on.set()

    gated.after_write = release
    result = world.run(1)
    assert result.report.errors == {}
    assert world.arrived(0, 1)


def test_more_destinations_than_threads_are_written_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    world, write = World(5), MemoryTransport.write
    threads: dict[str, set[str]] = {}

    def write_here(self: MemoryTransport, session: str, *given: Any, **more: Any) -> None:
        threads.setdefault(threading.current_thread().name, set()).add(session)
        write(self, session, *given, **more)

    monkeypatch.setattr(MemoryTransport, "write", write_here)
    report = world.run(1).report
    assert report.errors == {} and report.num_bytes == world.plan.summary().num_bytes
    assert all(world.arrived(replica, 1) for replica in range(5))
    assert sorted(map(len, threads.values())) == [1] * (2 * MAX_LINK_THREADS - 10) + [2] * (10 - MAX_LINK_THREADS)


def test_a_lane_that_fails_wakes_packing_which_waits_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both slots are with lanes that fail in another way than a link does. Packing learns of it at once, and not when
    it next says what it waits for."""
    world = World()
    ended = threading.Event()
    takes, take = [], FreeSlots.take

    def noted(self: FreeSlots, seconds: Any) -> int | None:
        takes.append(1)
        return take(self, seconds)

    monkeypatch.setattr(FreeSlots, "take", noted)
    world.transport.write = Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered"))

    def run() -> None:
        result = world.run(1)
        assert set(result.report.errors) == {0} and "illegal memory access" in result.report.errors[0]
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    assert ended.wait(timeout=20), "packing waits for ever"
    assert takes, "it had to wait"


def test_the_slot_of_a_load_that_nobody_wants_any_more_comes_back() -> None:
    """Both first loads were packed for replicas that have failed since."""
    world = World()
    world.pipeline.prepare(1)
    prepared, slots = world.pipeline._prepared, world.pipeline._slots
    assert prepared is not None and slots is not None
    replay = Replay(slots, world.transport, world.bindings(), world.budgets_s, prepared, {})
    prepared.result.report.errors[0] = "the link broke"
    for filled in prepared.filled:
        replay._hand_over(filled)
    assert [replay._free.take({}) for _ in prepared.filled] == [filled.slot for filled in prepared.filled] == [0, 1]
    num_reads = world.source.num_reads
    replay._free.give_back(0)
    replay._pack_all(slots.loads, {})
    assert world.source.num_reads == num_reads, "nor is any other load packed for them"
    world.pipeline.cancel()


def test_staging_that_a_failed_write_may_still_read_is_not_given_back() -> None:
    world = World(transport=UnclosableTransport)
    world.fabric.inject(world.sessions[0][0].session, Fault(refuse=True))
    assert set(world.run(1).report.errors) == {0}
    (staging,) = world.transport.registered
    for gives_back in (world.pipeline.release, lambda: world.pipeline.compile(world.plan.tasks[0])):
        with pytest.raises(TransportError, match="still draining"):
            gives_back()
    assert world.transport.registered == [staging]
    world.transport.is_stuck = False
    world.pipeline.release()
    assert not world.transport.registered


def test_slots_whose_failed_writes_were_closed_at_last_are_packed_again() -> None:
    world = World(3, HASH_BYTES + 1024, transport=UnclosableTransport)
    loads = world.pipeline.loads
    assert len(loads) > NUM_SLOTS
    for replica, last in ((1, -2), (2, -1)):  # fails in the last load but one, in the last
        before = sum((replica, 0) in destinations(packets) for packets in loads[:last])
        world.fabric.inject(world.sessions[replica][0].session, *[Fault()] * before, Fault(refuse=True))
    assert set(world.run(1).report.errors) == {1, 2}, "one that has every byte is not blamed for slots nobody needs"
    assert world.transport.num_refused == NUM_SLOTS, "each is lost"
    assert world.arrived(0, 1)
    world.transport.is_stuck = False
    assert world.run(2).report.errors == {}
    assert all(world.arrived(replica, 2) for replica in range(3))


def test_a_slot_is_packed_again_only_once_each_of_its_failed_writes_is_closed() -> None:
    """Two replicas' writes of the first load fail, and one of them can be closed before the other."""
    world = World(3, transport=UnclosableTransport)
    failed = [world.sessions[replica][0].session for replica in (1, 2)]
    for session in failed:
        world.fabric.inject(session, Fault(refuse=True))
    assert set(world.run(1).report.errors) == {1, 2}
    world.transport.is_stuck = False
    reset, fails = world.transport.reset, Mock(side_effect=TransferTimeout("still draining"))
    for stuck in failed:
        world.transport.reset = lambda session, stuck=stuck: fails() if session == stuck else reset(session)
        assert "still draining" in world.run(2).report.errors[0]
    world.transport.reset, world.transport.closed = reset, []
    assert world.run(3).report.errors == {} and sorted(world.transport.closed) == sorted(failed)
    assert all(world.arrived(replica, 3) for replica in range(3))


def test_a_survey_sums_what_is_held_and_packs_no_slot_that_a_failed_write_may_read() -> None:
    world = World(transport=UnclosableTransport)
    whole = world.run(0).sums.table
    world.pipeline.prepare(2)
    world.pipeline.cancel()
    num_ends = world.source.num_ends
    assert (world.pipeline.survey().table == whole).all(), "what was packed before does not count"
    assert world.source.num_ends == num_ends + 1
    world.fabric.inject(world.sessions[0][0].session, Fault(refuse=True))
    assert set(world.run(1).report.errors) == {0}
    num_reads = world.source.num_reads
    with pytest.raises(TransportError, match="still draining"):
        world.pipeline.survey()
    assert world.source.num_reads == num_reads
