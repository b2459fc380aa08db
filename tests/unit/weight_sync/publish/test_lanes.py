"""A publish under way over the memory link: what overlaps, and what one bad replica or link costs the others."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from cases.pipeline_world import HASH_BYTES, NUM_RANKS, World, num_reads
from fakes.memory_transport import Fault, MemoryFabric, MemoryTransport

from weight_sync.errors import TransferTimeout
from weight_sync.plan.budget import NUM_SLOTS
from weight_sync.publish.lanes import PipelineResult, Replay, _Door
from weight_sync.publish.pipeline import Pipeline
from weight_sync.publish.sums import Places, Sums


def test_a_device_that_fails_at_the_end_does_not_leave_a_write_under_way() -> None:
    world, is_writing, written = World(), threading.Event(), []
    write = world.transport.write

    def slow(*args: object, **options: object) -> None:
        is_writing.set()
        time.sleep(0.2)
        write(*args, **options)  # type: ignore[arg-type]
        written.append(args)

    def broken() -> None:
        assert is_writing.wait(5)
        raise RuntimeError("the device is gone")

    world.transport.write = slow  # type: ignore[method-assign]
    world.pipeline._slots.take_sums = broken  # type: ignore[union-attr, method-assign]
    assert world.run(1).report.errors == {0: "RuntimeError: the device is gone"}
    num_written = len(written)
    time.sleep(0.5)
    assert len(written) == num_written > 0


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
    assert (1, 0) not in result.sums, "what did not cross is not counted"
    assert result.report.num_bytes == sum(count for sums in result.sums.values() for count, _ in sums.values())
    assert world.fabric.land_late_writes() == 0


def test_a_failed_replica_is_served_again_after_its_session_was_reset() -> None:
    world = World(2)
    world.fabric.inject(world.sessions[1][1].session, Fault(refuse=True))
    assert set(world.run(1).report.errors) == {1}
    assert world.run(2).report.errors == {}
    assert world.arrived(1, 2)


def test_a_skipped_replica_gets_nothing() -> None:
    world = World(2)
    bindings = {dest: binding for dest, binding in world.bindings().items() if dest[0] == 1}
    result = world.run(1, bindings)
    assert {replica for replica, _ in result.sums} == {1}
    assert not world.arrived(0, 1)
    assert world.arrived(1, 1)


class UnclosableTransport(MemoryTransport):
    """A link whose failed writes cannot be closed for a while."""

    is_stuck = True

    def reset(self, session: str) -> None:
        if self.is_stuck:
            raise TransferTimeout(f"{session} is still draining")
        super().reset(session)


def test_a_slot_whose_write_cannot_be_closed_is_not_packed_again() -> None:
    world = World(2, transport=UnclosableTransport)
    world.budgets_s = {0: 5.0, 1: 0.05}
    world.fabric.inject(world.sessions[1][0].session, Fault(stall=True))
    result = world.run(1)
    assert set(result.report.errors) == {1}
    assert world.arrived(0, 1)

    # What the stalled write had not sent is still in its slot: it would land as version 1, never as something else.
    staging = world.pipeline._slots._staging
    (slot,) = world.pipeline._quarantined
    before = staging[slot * len(staging) // 2 :][: len(staging) // 2].clone()
    blocked = world.run(2)
    assert "still draining" in blocked.report.errors[0]
    assert torch.equal(staging[slot * len(staging) // 2 :][: len(staging) // 2], before)

    world.transport.is_stuck = False
    assert world.run(3).report.errors == {}
    assert world.fabric.land_late_writes() == 0
    assert world.arrived(1, 3)


def test_a_replica_that_has_every_byte_is_not_blamed_for_slots_that_nobody_needs() -> None:
    world = World(3, HASH_BYTES + 1024, transport=UnclosableTransport)
    loads = world.pipeline._slots.loads
    for replica, last in ((1, -2), (2, -1)):  # fails in the last load but one, in the last
        before = sum((replica, 0) in load.batches for load in loads[:last])
        world.fabric.inject(world.sessions[replica][0].session, *[Fault()] * before, Fault(refuse=True))
    result = world.run(1)
    assert len(world.pipeline._quarantined) == NUM_SLOTS
    assert set(result.report.errors) == {1, 2}
    assert world.arrived(0, 1)
    with pytest.raises(TransferTimeout, match="still draining"):  # nor is staging given to another plan
        world.pipeline.load(world.plan.tasks[0])


def test_a_slot_whose_failed_write_is_being_closed_is_not_lost() -> None:
    """One slot is lost, and its last lane ends while a failed write from the other one is being closed."""
    world = World()
    world.pipeline.prepare(1)
    result = PipelineResult(Sums(Places({})))
    replay = Replay(
        world.pipeline._slots, world.transport, world.bindings(), world.budgets_s, world.pipeline._prepared, result
    )
    world.pipeline._quarantined[0] = ["lost"]
    with mock.patch.object(world.transport, "reset", lambda _: replay._give_back(0)):
        replay._close_failed(1, world.sessions[0][0].session)
    replay._give_back(1)
    assert replay._next_slot() == 1


class BreakingTransport(MemoryTransport):
    """A link whose failed writes cannot be closed, for a reason of the device's."""

    def reset(self, session: str) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_slot_is_not_packed_again_where_closing_its_write_broke() -> None:
    world = World(2, transport=BreakingTransport)
    world.budgets_s = {0: 5.0, 1: 0.05}
    world.fabric.inject(world.sessions[1][0].session, Fault(stall=True))
    assert set(world.run(1).report.errors) == {0, 1}, "this rank's device is lost, and all replicas with it"
    assert list(world.pipeline._quarantined.values()) == [[world.sessions[1][0].session]]


@pytest.mark.parametrize("num_starting", [0, 1])
def test_a_lane_that_cannot_enter_the_device_fails_the_publish(num_starting: int) -> None:
    world = World(2)
    entered = iter(range(100))

    def enter() -> None:
        if next(entered) >= num_starting:
            raise RuntimeError("CUDA error: out of memory")

    with mock.patch.object(world.pipeline._slots, "enter_thread", enter):
        result = world.run(1)
    assert set(result.report.errors) == {0, 1}
    assert "CUDA error" in result.report.errors[0]
    assert world.run(2).report.errors == {}


@pytest.mark.parametrize("end", [Pipeline.allocate, Pipeline.release, Pipeline.close])
def test_lanes_keep_their_threads_from_publish_to_publish_and_end_with_staging(end: Callable[[Pipeline], None]) -> None:
    world, threads = World(), set[threading.Thread]()
    slots, write = world.pipeline._slots, world.transport.write

    def watched(*args: object, **options: object) -> None:
        threads.add(threading.current_thread())
        write(*args, **options)

    world.transport.write = watched  # type: ignore[method-assign]
    bindings = world.bindings()
    assert world.run(1, dict([bindings.popitem()])).report.errors == {}
    for version in (2, 3):
        assert world.run(version).report.errors == {}
    assert len(threads) == NUM_RANKS
    assert all(thread.is_alive() for thread in threads)
    end(world.pipeline)
    assert slots is not world.pipeline._slots
    assert not any(thread.is_alive() for thread in threads)


class GatedTransport(MemoryTransport):
    """Lets the first writes of each session pass, so many as it is told, and holds the others until told to go on."""

    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric)
        self.num_passing: dict[str, int] = {}
        self.num_done: Counter[str] = Counter()
        self.is_writing = threading.Event()
        self.go_on = threading.Event()

    def write(self, session: str, *args: object, **kwargs: object) -> None:
        if self.num_done[session] >= self.num_passing.get(session, 1 << 30):
            self.is_writing.set()
            assert self.go_on.wait(timeout=20)
        super().write(session, *args, **kwargs)  # type: ignore[arg-type]
        self.num_done[session] += 1


def test_packing_goes_on_while_a_load_is_written() -> None:
    world = World(transport=GatedTransport)
    gated = world.transport
    assert len(world.pipeline._slots.loads) > 2
    loads = world.pipeline._slots.loads
    for _, rank in loads[0].batches:
        gated.num_passing[world.sessions[0][rank].session] = 1
    prepared_reads = num_reads(loads[:2])
    read, during_write = world.source.read, threading.Event()

    def watched(tensor: str, *rest: object) -> None:
        if world.source.num_reads == prepared_reads:  # load 2 is packed while the gate holds load 1 in its write
            assert gated.is_writing.wait(timeout=20)
            during_write.set()
            gated.go_on.set()
        read(tensor, *rest)  # type: ignore[arg-type]

    world.source.read = watched  # type: ignore[method-assign]
    result = world.run(1)
    assert during_write.is_set()
    assert result.report.errors == {}
    assert world.arrived(0, 1)


def test_a_link_goes_on_while_another_one_still_sends_its_part_of_a_load() -> None:
    world = World(transport=GatedTransport)
    gated = world.transport
    first, second = world.pipeline._slots.loads[:2]
    (quick, _), (slow, _) = sorted(world.bindings().items(), key=lambda item: item[0] not in second.batches)
    assert {quick, slow} <= set(first.batches) and quick in second.batches
    quick_session, slow_session = (world.sessions[replica][rank].session for replica, rank in (quick, slow))
    gated.num_passing[slow_session] = 0
    super_write = MemoryTransport.write

    def released(self: MemoryTransport, session: str, *args: object, **kwargs: object) -> None:
        super_write(self, session, *args, **kwargs)  # type: ignore[arg-type]
        if session == quick_session and gated.num_done[session] == 1:  # its part of the second load is over
            assert gated.num_done[slow_session] == 0
            gated.go_on.set()

    with mock.patch.object(MemoryTransport, "write", released):
        result = world.run(1)
    assert result.report.errors == {}
    assert world.arrived(0, 1)


class WatchedTransport(MemoryTransport):
    """Slow writes, and a count of those under way whenever a session is reset."""

    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric)
        self.num_writing = 0
        self.writing_at_reset: list[int] = []
        self._lock = threading.Lock()

    def write(self, *args: object, **kwargs: object) -> None:
        with self._lock:
            self.num_writing += 1
        try:
            super().write(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            with self._lock:
                self.num_writing -= 1

    def reset(self, session: str) -> None:
        self.writing_at_reset.append(self.num_writing)
        time.sleep(0.5)
        self.writing_at_reset.append(self.num_writing)
        super().reset(session)


def test_a_failed_write_is_closed_alone_and_nobody_elses_time_runs_meanwhile() -> None:
    world = World(3, transport=WatchedTransport)
    world.budgets_s = dict.fromkeys(range(3), 0.4)
    for replica in (0, 2):
        for transport in world.sessions[replica]:
            world.fabric.inject(transport.session, Fault(delay_s=0.1), Fault(delay_s=0.02))
    world.fabric.inject(world.sessions[1][0].session, Fault(delay_s=0.05, refuse=True))
    result = world.run(1)
    assert set(world.transport.writing_at_reset) == {0}
    assert set(result.report.errors) == {1}
    assert world.arrived(0, 1) and world.arrived(2, 1)
    assert max(result.report.write_s[0], result.report.write_s[2]) < 0.4


def test_no_write_begins_while_a_failed_one_is_closed() -> None:
    door, has_entered = _Door(), threading.Event()

    def write() -> None:
        with door.writing():
            has_entered.set()

    writer = threading.Thread(target=write)
    with door.alone():
        writer.start()
        assert not has_entered.wait(timeout=0.2)
    assert has_entered.wait(timeout=20)
    writer.join()
