"""The pipeline over the memory link: the watermark, what overlaps, and what one bad replica costs the others."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from fakes.publish import DictSource, PlainEngine, engine_bytes, engine_layout, repacked

import weight_sync.slots
from weight_sync.errors import PlanError, TransferTimeout, TransportError, WatermarkError
from weight_sync.integrity import MIN_SCRATCH_BYTES, hash_bytes
from weight_sync.layout import Binding
from weight_sync.pipeline import Pipeline
from weight_sync.plan import build_plan
from weight_sync.replay import PipelineResult, _Door
from weight_sync.slots import Destination, Load
from weight_sync.staging import NUM_SLOTS, sums_bytes
from weight_sync.transport.memory import Fault, MemoryFabric, MemoryTransport

NUM_RANKS = 2
HASH_BYTES = MIN_SCRATCH_BYTES + sums_bytes(0)
SMALL_WATERMARK = HASH_BYTES + 256
"""Two slots of 128 bytes: the tiny model (290 bytes a rank and replica) needs several loads."""


class World:
    """One trainer rank that holds everything, some replicas of two engine ranks, one fabric."""

    def __init__(
        self,
        num_replicas: int = 1,
        watermark_bytes: int = SMALL_WATERMARK,
        temporary_bytes: int = 0,
        transport: type[MemoryTransport] = MemoryTransport,
    ) -> None:
        self.fabric = MemoryFabric()
        self.transport: Any = transport(self.fabric)
        self.source = DictSource(0, num_ranks=1, temporary_bytes=temporary_bytes)
        self.sessions = [[MemoryTransport(self.fabric) for _ in range(NUM_RANKS)] for _ in range(num_replicas)]
        self.engines = [PlainEngine(transports) for transports in self.sessions]
        self.pipeline = Pipeline(
            self.source, self.transport, device="cpu", watermark_bytes=watermark_bytes, verify_hashes=True
        )
        layouts = [engine_layout(rank) for rank in range(NUM_RANKS)]
        self.plan = build_plan(
            [self.source.layout()], [layouts] * num_replicas, max_task_bytes=self.pipeline.max_task_bytes
        )
        self.pipeline.load(self.plan.tasks_of(0))
        self.budgets_s = dict.fromkeys(range(num_replicas), 5.0)

    def bindings(self) -> dict[Destination, Binding]:
        return {
            (replica, rank): receiver.describe().binding
            for replica, engine in enumerate(self.engines)
            for rank, receiver in enumerate(engine.receivers)
        }

    def run(self, version: int, bindings: dict[Destination, Binding] | None = None) -> PipelineResult:
        """Prepare and run."""
        self.pipeline.prepare(version)
        return self.pipeline.run(version, self.bindings() if bindings is None else bindings, self.budgets_s)

    def arrived(self, replica: int, version: int) -> bool:
        """Whether a replica holds a version's wire bytes."""
        for rank, params in enumerate(self.engines[replica].params):
            wanted = engine_bytes(version, rank)
            wanted["w2"] = repacked(wanted["w2"])
            del wanted["absorbed"]
            if not all(torch.equal(params[name], data) for name, data in wanted.items()):
                return False
        return True


def test_every_byte_arrives_and_is_counted_and_hashed() -> None:
    world = World()
    result = world.run(3)
    assert result.errors == {}
    assert world.arrived(0, 3)
    for rank in range(NUM_RANKS):
        params = world.engines[0].params[rank]
        sums = result.sums[0, rank]
        assert {name: count for name, (count, _) in sums.items()} == world.plan.expected_bytes(0, rank)
        for name, (count, total) in sums.items():
            assert total == hash_bytes(params[name].reshape(-1).view(torch.uint8)[:count])
    assert result.num_bytes == world.plan.summary().num_bytes
    assert world.source.num_ends == 1


def test_hashes_of_more_packets_than_the_device_has_sums_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)
    most = max(len(load.packets) for load in world.pipeline._slots.loads)
    monkeypatch.setattr(weight_sync.slots, "max_packets", lambda _: -(-most // NUM_SLOTS))
    world.pipeline.load(world.plan.tasks_of(0))
    assert len(world.pipeline._slots._windows) > 2
    for version in (3, 4):
        world.pipeline.prepare(version)
        world.pipeline.cancel()
        result = world.run(version)
        for (replica, rank), sums in result.sums.items():
            params = world.engines[replica].params[rank]
            for name, (count, total) in sums.items():
                assert total == hash_bytes(params[name].reshape(-1).view(torch.uint8)[:count])


@pytest.mark.parametrize("watermark_bytes", [SMALL_WATERMARK, HASH_BYTES + 1024, 1 << 16, 1 << 20])
@pytest.mark.parametrize("temporary_bytes", [0, 100])
def test_temporary_memory_stays_under_the_watermark(watermark_bytes: int, temporary_bytes: int) -> None:
    world = World(2, watermark_bytes + temporary_bytes, temporary_bytes)
    result = world.run(1)
    assert result.errors == {}
    assert 0 < result.peak_bytes <= watermark_bytes + temporary_bytes
    assert world.arrived(0, 1)
    assert world.arrived(1, 1)


def test_two_pipelines_of_a_rank_keep_to_one_watermark() -> None:
    """What each holds, as it accounts for it: staging that the link knows, and the sums."""
    world = World(1, watermark_bytes := HASH_BYTES + 1024)
    other = Pipeline(
        DictSource(0, num_ranks=1), world.transport, device="cpu", watermark_bytes=watermark_bytes, verify_hashes=True
    )

    def held_bytes() -> int:
        staging = sum(held.num_bytes for held in world.transport.registered)
        slots = [pipeline._slots for pipeline in (world.pipeline, other) if pipeline._slots is not None]
        return staging + sum(one._sums.nbytes for one in slots) + MIN_SCRATCH_BYTES

    assert world.run(1).peak_bytes == held_bytes() <= watermark_bytes
    world.pipeline.release()
    other.load(world.plan.tasks_of(0))
    other.prepare(2)
    assert other.run(2, world.bindings(), world.budgets_s).peak_bytes == held_bytes() <= watermark_bytes
    other.close()
    assert world.run(3).peak_bytes == held_bytes() <= watermark_bytes
    assert world.arrived(0, 3)


def test_staging_that_a_failed_write_may_still_read_is_not_given_back() -> None:
    world = World()
    world.pipeline._quarantined |= {0: ["nowhere"]}
    reset, world.transport.reset = world.transport.reset, unreachable  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="not closed"):
        world.pipeline.release()
    assert world.transport.registered
    world.transport.reset = reset  # type: ignore[method-assign]
    world.pipeline.release()
    assert not world.transport.registered


def unreachable(session: str) -> None:
    raise TransportError(f"{session} is not closed")


def test_replicas_share_one_packing() -> None:
    one, three = World(1), World(3)
    one.run(1)
    three.run(1)
    assert three.source.num_reads == one.source.num_reads


def test_a_watermark_without_room_for_staging_is_refused() -> None:
    with pytest.raises(WatermarkError, match="leaves no room for staging"):
        World(1, HASH_BYTES + 100)


def test_a_task_larger_than_a_slot_is_refused() -> None:
    world = World()
    plan = build_plan(
        [world.source.layout()],
        [[engine_layout(rank) for rank in range(NUM_RANKS)]],
        max_task_bytes=10 * world.pipeline.max_task_bytes,
    )
    pipeline = Pipeline(
        world.source, world.transport, device="cpu", watermark_bytes=HASH_BYTES + 128, verify_hashes=True
    )
    with pytest.raises(PlanError, match="does not fit a staging slot"):
        pipeline.load(plan.tasks_of(0))


def test_a_source_that_holds_more_than_it_declared_fails_the_publish() -> None:
    world = World()
    world.source.begin = lambda version: 77  # type: ignore[method-assign]
    result = world.run(1)
    assert "holds 77 temporary bytes" in result.errors[0]
    assert world.source.num_ends == 1


def test_a_source_that_raises_fails_all_replicas_and_is_ended() -> None:
    world = World(2)
    read = world.source.read

    def broken(tensor: str, *rest: object) -> None:
        if "down" in tensor:
            raise RuntimeError("merge broke")
        read(tensor, *rest)  # type: ignore[arg-type]

    world.source.read = broken  # type: ignore[method-assign]
    result = world.run(1)
    assert result.errors == {0: "RuntimeError: merge broke", 1: "RuntimeError: merge broke"}
    assert world.source.num_ends == 1
    world.source.read = read  # type: ignore[method-assign]
    assert world.run(2).errors == {}
    assert world.arrived(1, 2)


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
    assert world.run(1).errors == {0: "RuntimeError: the device is gone"}
    num_written = len(written)
    time.sleep(0.5)
    assert len(written) == num_written > 0


def test_an_engine_that_does_not_say_where_a_parameter_is_fails_the_replicas_and_the_source_is_ended() -> None:
    world = World(2)
    bindings = world.bindings()
    del bindings[1, 0].addresses["norm"]
    assert set(world.run(1, bindings).errors) == {0, 1}
    assert world.source.num_ends == 1
    assert world.run(2).errors == {}
    assert world.arrived(1, 2)


@pytest.mark.parametrize("fault", [Fault(refuse=True), Fault(stall=True)])
def test_one_replicas_failure_spares_the_others(fault: Fault) -> None:
    world = World(3)
    world.budgets_s = dict.fromkeys(range(3), 0.05)
    world.fabric.inject(world.sessions[1][0].session, fault)
    result = world.run(1)
    assert set(result.errors) == {1}
    assert world.arrived(0, 1)
    assert world.arrived(2, 1)
    assert not world.arrived(1, 1)
    assert (1, 0) not in result.sums, "what did not cross is not counted"
    assert result.num_bytes == sum(count for sums in result.sums.values() for count, _ in sums.values())
    assert world.fabric.land_late_writes() == 0


def test_a_failed_replica_is_served_again_after_its_session_was_reset() -> None:
    world = World(2)
    world.fabric.inject(world.sessions[1][1].session, Fault(refuse=True))
    assert set(world.run(1).errors) == {1}
    assert world.run(2).errors == {}
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
    assert set(result.errors) == {1}
    assert world.arrived(0, 1)

    # What the stalled write had not sent is still in its slot: it would land as version 1, never as something else.
    staging = world.pipeline._slots._staging
    (slot,) = world.pipeline._quarantined
    before = staging[slot * len(staging) // 2 :][: len(staging) // 2].clone()
    blocked = world.run(2)
    assert "still draining" in blocked.errors[0]
    assert torch.equal(staging[slot * len(staging) // 2 :][: len(staging) // 2], before)

    world.transport.is_stuck = False
    assert world.run(3).errors == {}
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
    assert set(result.errors) == {1, 2}
    assert world.arrived(0, 1)
    with pytest.raises(TransferTimeout, match="still draining"):  # nor is staging given to another plan
        world.pipeline.load(world.plan.tasks_of(0))


class BreakingTransport(MemoryTransport):
    """A link whose failed writes cannot be closed, for a reason of the device's."""

    def reset(self, session: str) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_slot_is_not_packed_again_where_closing_its_write_broke() -> None:
    world = World(2, transport=BreakingTransport)
    world.budgets_s = {0: 5.0, 1: 0.05}
    world.fabric.inject(world.sessions[1][0].session, Fault(stall=True))
    assert set(world.run(1).errors) == {0, 1}, "this rank's device is lost, and all replicas with it"
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
    assert set(result.errors) == {0, 1}
    assert "CUDA error" in result.errors[0]
    assert world.run(2).errors == {}


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


def num_reads(loads: Sequence[Load]) -> int:
    return sum(len(packet.tasks[0].pieces) for load in loads for packet in load.packets)


def test_one_load_a_slot_is_packed_before_it_is_known_who_receives_it() -> None:
    world = World()
    assert len(world.pipeline._slots.loads) > 2
    world.pipeline.prepare(1)
    assert world.source.num_reads == num_reads(world.pipeline._slots.loads[:2])
    result = world.pipeline.run(1, {}, {})
    assert result.num_bytes == 0
    assert world.source.num_reads == num_reads(world.pipeline._slots.loads[:2])
    assert world.source.num_ends == 1
    assert world.run(2).errors == {}
    assert world.arrived(0, 2)


def test_a_run_follows_its_own_prepare() -> None:
    world = World()
    with pytest.raises(PlanError, match="without prepare"):
        world.pipeline.run(1, world.bindings(), world.budgets_s)
    world.pipeline.prepare(1)
    with pytest.raises(PlanError, match="without prepare"):
        world.pipeline.run(2, world.bindings(), world.budgets_s)


def test_a_traced_run_has_a_span_for_every_stage_of_every_load() -> None:
    world = World()
    callbacks = list(gc.callbacks)
    world.pipeline.prepare(1, trace=True)
    gc.collect()
    spans = world.pipeline.run(1, world.bindings(), world.budgets_s).spans
    names = {track: [span.name for span in spans if span.track == track] for track in {s.track for s in spans}}
    every_load = [f"load {number}" for number in range(len(world.pipeline._slots.loads))]
    assert names["gather"] == ["source.begin"]
    assert names["prepare (host)"] == every_load
    assert "generation 2" in names["gc"]
    writes = [span for span in spans if span.track.startswith("write ")]
    assert {span.track for span in writes} == {"write replica 0 rank 0", "write replica 0 rank 1"}
    assert sorted({span.name for span in writes}) == sorted(every_load)
    assert sum(int(span.facts["bytes"]) for span in writes) == world.plan.summary().num_bytes
    packed = {span.name: span.stop_s for span in spans if span.track == "prepare (host)"}
    assert all(packed[span.name] <= span.start_s <= span.stop_s for span in writes)
    assert gc.callbacks == callbacks, "a trace leaves nothing behind"
    assert world.run(2).spans == []


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
    assert result.errors == {}
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
    assert result.errors == {}
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
    assert set(result.errors) == {1}
    assert world.arrived(0, 1) and world.arrived(2, 1)
    assert max(result.write_s[0], result.write_s[2]) < 0.4


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


def test_staging_leaves_the_link_with_its_plan_and_with_the_pipeline() -> None:
    world = World()
    (first,) = world.transport.registered
    world.pipeline.load(world.plan.tasks_of(0)[:1])  # another plan, another staging
    (second,) = world.transport.registered
    assert second.num_bytes < first.num_bytes
    world.pipeline.close()
    assert world.transport.registered == []
