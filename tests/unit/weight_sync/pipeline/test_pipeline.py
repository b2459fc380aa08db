"""The pipeline over the memory link: the watermark, what is counted, what is prepared."""

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases.pipeline_world import (
    HASH_BYTES,
    NUM_RANKS,
    SMALL_WATERMARK,
    World,
    num_reads,
)
from cases.plan_tables import by_name
from fakes.memory_transport import Fault
from fakes.publish import DictSource, checkpoint, engine_layout

from slipstream.weight_sync.disk.kept_source import KeptSource
from slipstream.weight_sync.errors import PlanError, WatermarkError
from slipstream.weight_sync.integrity import MIN_SCRATCH_BYTES, hash_bytes
from slipstream.weight_sync.pipeline import lanes, pipeline as pipeline_module, staging_slots
from slipstream.weight_sync.pipeline.pipeline import Pipeline
from slipstream.weight_sync.plan import budget
from slipstream.weight_sync.plan.budget import NUM_SLOTS, SLOT_ALIGNMENT_BYTES, aligned, sums_bytes
from slipstream.weight_sync.plan.plan import build_plan


@pytest.mark.parametrize("given_up", [[], ["nobody began"], ["cancelled", "nobody began"]])
def test_every_byte_arrives_and_is_counted_and_hashed(given_up: list[str]) -> None:
    """Also after publishes that went no further than to pack their first loads."""
    world = World()
    for version, end in enumerate(given_up):
        world.pipeline.prepare(version)
        if end == "cancelled":
            world.pipeline.cancel()
        else:
            assert world.pipeline.run(version, {}, {}).report.errors == {}
    num_ends = world.source.num_ends
    result = world.run(3)
    assert result.report.errors == {}
    assert world.arrived(0, 3)
    for rank in range(NUM_RANKS):
        params = world.engines[0].params[rank]
        sums = by_name(result.sums)[0, rank]
        assert {name: count for name, (count, _) in sums.items()} == world.plan.expected[0, rank]
        for name, (count, total) in sums.items():
            assert total == hash_bytes(params[name].reshape(-1).view(torch.uint8)[:count])
    assert result.report.num_bytes == world.plan.summary().num_bytes
    assert world.source.num_ends == num_ends + 1


@pytest.mark.parametrize(("more_bytes", "has_room"), [(0, False), (128, True)], ids=["full windows", "with room"])
def test_hashes_of_more_packets_than_the_device_has_sums_for(
    monkeypatch: pytest.MonkeyPatch, more_bytes: int, has_room: bool
) -> None:
    world = World(2, SMALL_WATERMARK + more_bytes)
    most = max(map(len, world.pipeline.loads))
    monkeypatch.setattr(staging_slots, "max_packets", lambda _: -(-most // NUM_SLOTS))
    world.pipeline.load(world.plan.tasks[0])
    num_sums = NUM_SLOTS * -(-most // NUM_SLOTS)
    assert sum(map(len, world.pipeline.loads)) > 2 * num_sums, "of more than two windows"
    assert any(len(load) < num_sums for load in world.pipeline.loads[:-1]) == has_room
    for version in (3, 4):
        world.pipeline.prepare(version)
        world.pipeline.cancel()
        result = world.run(version)
        assert result.report.errors == {} and by_name(result.sums).keys() == world.bindings().keys()
        for (replica, rank), sums in by_name(result.sums).items():
            params = world.engines[replica].params[rank]
            for name, (count, total) in sums.items():
                assert total == hash_bytes(params[name].reshape(-1).view(torch.uint8)[:count])


@pytest.mark.parametrize("watermark_bytes", [SMALL_WATERMARK, HASH_BYTES + 1024, 1 << 16, 1 << 20])
@pytest.mark.parametrize("temporary_bytes", [0, 100])
def test_temporary_memory_stays_under_the_watermark(watermark_bytes: int, temporary_bytes: int) -> None:
    world = World(2, watermark_bytes + temporary_bytes, temporary_bytes)
    result = world.run(1)
    assert result.report.errors == {}
    assert 0 < result.report.peak_bytes <= watermark_bytes + temporary_bytes
    assert world.arrived(0, 1)
    assert world.arrived(1, 1)


def test_two_pipelines_of_a_rank_keep_to_one_watermark() -> None:
    """What each holds, as it accounts for it: staging that the link knows, and the sums."""
    world = World(1, watermark_bytes := HASH_BYTES + 1024)
    other = Pipeline(DictSource(0, num_ranks=1), world.transport, device="cpu", watermark_bytes=watermark_bytes)

    def held_bytes() -> int:
        staging = sum(held.num_bytes for held in world.transport.registered)
        return staging + sums_bytes(watermark_bytes) + MIN_SCRATCH_BYTES

    assert world.run(1).report.peak_bytes == held_bytes() <= watermark_bytes
    world.pipeline.release()
    other.load(world.plan.tasks[0])
    other.prepare(2)
    assert other.run(2, world.bindings(), world.budgets_s).report.peak_bytes == held_bytes() <= watermark_bytes
    other.close()
    assert world.run(3).report.peak_bytes == held_bytes() <= watermark_bytes
    assert world.arrived(0, 3)
    slots = world.pipeline._slots
    assert world.run(4).report.errors == {} and world.pipeline._slots is slots, "what was released is made again once"


def test_nothing_that_fills_slots_is_kept_by_a_pipeline_that_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source may hold device memory in it."""
    world, real, made = World(), pipeline_module.compile_reads, []

    def noted(*given: Any) -> Any:
        made.append(weakref.ref(compiled := real(*given)))
        return compiled

    monkeypatch.setattr(pipeline_module, "compile_reads", noted)
    world.pipeline.load(world.plan.tasks[0])
    world.run(1)
    world.pipeline.release()
    gc.collect()
    assert made and [ref() for ref in made if ref() is not None] == []


def test_replicas_that_join_together_take_changes_of_what_replica_0_takes_them_of() -> None:
    world = World(2)
    before, takes = world.pipeline.places, np.arange(world.pipeline.places.size) % 3 == 0
    world.pipeline.load(world.plan.tasks[0], before, takes)
    world.pipeline.add_replicas([2, 3])
    places, found = world.pipeline.places, world.pipeline._takes_changes
    assert found is not None and len(found) == 2 * len(takes)
    for replica, rank in places.params:
        wanted = takes[before.columns((replica if replica < 2 else 0, rank))]
        assert np.array_equal(found[places.columns((replica, rank))], wanted)


def test_a_plan_frees_the_staging_of_the_one_before() -> None:
    world = World()
    world.pipeline.compile(world.plan.tasks[0])
    assert world.transport.registered == []


def test_a_rank_that_has_nothing_to_send_holds_no_staging_and_takes_part() -> None:
    world = World()
    world.pipeline.load([])
    report = world.run(1).report
    assert (world.transport.registered, report.errors, report.num_bytes, world.source.num_ends) == ([], {}, 0, 1)


def test_the_first_loads_have_few_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, 1 << 16)
    monkeypatch.setattr(budget, "FIRST_PACKETS", 1)
    world.pipeline.load(world.plan.tasks[0])
    assert [len(packets) for packets in world.pipeline.loads[:2]] == [1, 2]


@pytest.mark.parametrize(("is_marking", "has_changes"), [(False, True), (True, False), (True, True)])
def test_room_is_left_for_changes_if_they_are_sent_and_the_source_can_mark_them(
    is_marking: bool, has_changes: bool
) -> None:
    world = World(1, watermark_bytes := 1 << 20)
    source = KeptSource(world.source, watermark_bytes, "cpu") if is_marking else world.source
    pipeline = Pipeline(source, world.transport, device="cpu", watermark_bytes=watermark_bytes, has_changes=has_changes)
    assert (pipeline.max_task_bytes < world.pipeline.max_task_bytes) == (is_marking and has_changes)


def test_a_watermark_without_room_for_staging_is_refused() -> None:
    with pytest.raises(WatermarkError, match="leaves no room for staging"):
        World(1, HASH_BYTES + 100)


def test_a_task_larger_than_a_slot_is_refused_and_one_as_large_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    layouts = [engine_layout(rank) for rank in range(NUM_RANKS)]
    plan = build_plan([world.source.layout()], [layouts], max_task_bytes=1 << 10)
    largest = max(task.num_bytes for task in plan.tasks[0])
    monkeypatch.setattr(budget, "SLOT_ALIGNMENT_BYTES", 2)
    for watermark_bytes, fits in ((HASH_BYTES + 2 * largest, True), (HASH_BYTES + 2 * largest - 1, False)):
        pipeline = Pipeline(world.source, world.transport, device="cpu", watermark_bytes=watermark_bytes)
        if fits:
            pipeline.load(plan.tasks[0])
            continue
        with pytest.raises(PlanError, match="does not fit a staging slot"):
            pipeline.load(plan.tasks[0])


def test_kernels_that_hash_are_compiled_with_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    world, compiled_for = World(), []
    monkeypatch.setattr(pipeline_module, "compile_kernels", compiled_for.append)
    pipeline = Pipeline(world.source, world.transport, device="cpu", watermark_bytes=SMALL_WATERMARK)
    pipeline.load(world.plan.tasks[0])
    assert compiled_for == [torch.device("cpu")]
    pipeline.prepare(1)
    assert pipeline.run(1, world.bindings(), world.budgets_s).report.errors == {}
    assert compiled_for == [torch.device("cpu")], "no publish waits for them"
    pipeline.close()


def test_a_slot_is_as_large_as_the_largest_task_of_a_short_schedule() -> None:
    world = World(1, HASH_BYTES + 4096)
    small, *_, large = sorted(world.plan.tasks[0], key=lambda task: task.num_bytes)
    assert small.num_bytes < large.num_bytes
    world.pipeline.load([small, large])
    (staging,) = world.transport.registered
    assert staging.num_bytes == NUM_SLOTS * aligned(large.num_bytes)
    report = world.run(1).report
    assert (report.errors, report.num_bytes) == ({}, small.num_bytes + large.num_bytes)


def test_a_publish_needs_a_plan() -> None:
    world = World()
    empty = Pipeline(world.source, world.transport, device="cpu", watermark_bytes=HASH_BYTES + 256)
    empty.prepare(1)
    assert "a publish before there is a plan" in empty.run(1, world.bindings(), world.budgets_s).report.errors[0]
    assert world.source.num_ends == 1
    empty.cancel()
    assert world.source.num_ends == 1, "nothing is prepared any more"
    empty.prepare(2)
    empty.cancel()
    assert world.source.num_ends == 2, "it had begun, though there is no plan"


def test_seconds_of_packing_are_those_of_the_first_loads_and_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read takes a second of a clock that nothing else moves."""
    world, clock = World(), SimpleNamespace(now=50.0)
    for module in (pipeline_module, lanes, staging_slots):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def second(_: str) -> None:
        clock.now += 1.0

    world.source.before_read = second
    assert world.run(1).report.prepare_s == num_reads(world.pipeline.loads) > num_reads(world.pipeline.loads[:2])


def test_what_was_prepared_and_is_not_run_ends_once() -> None:
    world = World()
    world.pipeline.prepare(1, trace=True)
    callbacks = list(gc.callbacks)
    for _ in range(2):
        world.pipeline.cancel()
    assert world.source.num_ends == 1
    assert len(gc.callbacks) == len(callbacks) - 1, "its trace, too"
    with pytest.raises(PlanError, match="without prepare"):
        world.pipeline.run(1, world.bindings(), world.budgets_s)
    world.pipeline.prepare(2)
    with pytest.raises(PlanError, match="without prepare"):
        world.pipeline.run(3, world.bindings(), world.budgets_s)
    world.pipeline.close()
    assert world.source.num_ends == 2


def test_a_source_that_holds_more_than_it_declared_fails_the_publish() -> None:
    world = World()
    world.source.undeclared_bytes = 77
    result = world.run(1)
    assert "holds 77 temporary bytes" in result.report.errors[0]
    assert world.source.num_ends == 1


def test_what_a_source_declared_is_accounted_for_also_where_it_holds_less() -> None:
    """It may hold the rest while it is read."""
    world = World(1, SMALL_WATERMARK + 100, temporary_bytes=100)
    whole = world.run(1).report.peak_bytes
    world.source.undeclared_bytes = -60
    assert world.run(2).report.peak_bytes == whole
    world.source.undeclared_bytes = 0
    for temporary_bytes, is_right in (
        (100 + SMALL_WATERMARK + 100 - whole, True),
        (100 + SMALL_WATERMARK + 101 - whole, False),
    ):
        world.source.temporary_bytes = temporary_bytes  # more than when the slots were cut
        said = world.run(3).report.errors
        assert (said == {}) == is_right, said
        assert is_right or f"would hold {SMALL_WATERMARK + 101} temporary bytes" in said[0]


def test_a_publish_whose_source_could_not_begin_ahead_is_not_packed_afterwards() -> None:
    world = World()
    world.source.begin_error = RuntimeError("gather broke")
    assert world.pipeline.send_ahead(1, world.bindings(), {}, 5.0) == {}, "no replica failed"
    world.source.tensors, world.source.begin_error = checkpoint(0), None
    assert world.run(1).report.errors == {0: "RuntimeError: gather broke"}
    assert (world.source.num_reads, world.source.num_ends) == (0, 1)


def test_a_source_that_raises_fails_all_replicas_and_is_ended() -> None:
    world = World(2)

    def broken(tensor: str) -> None:
        if "down" in tensor:
            raise RuntimeError("merge broke")

    world.source.before_read = broken
    result = world.run(1)
    assert result.report.errors == {0: "RuntimeError: merge broke", 1: "RuntimeError: merge broke"}
    assert world.source.num_ends == 1
    world.source.before_read = lambda tensor: None
    assert world.run(2).report.errors == {}
    assert world.arrived(1, 2)
    world.source.before_read = broken
    began = {dest: binding for dest, binding in world.bindings().items() if dest[0] == 1}
    assert set(world.run(3, began).report.errors) == {1}, "of those that are written to"


def test_a_replica_whose_link_failed_before_the_source_did_keeps_its_own_reason() -> None:
    world = World(2)
    world.fabric.inject(world.sessions[1][0].session, Fault(refuse=True))
    reset, is_closed, num_prepared = world.transport.reset, threading.Event(), num_reads(world.pipeline.loads[:2])

    def closes(session: str) -> None:
        reset(session)
        is_closed.set()

    def breaks(_: str) -> None:
        if world.source.num_reads >= num_prepared:
            assert is_closed.wait(timeout=30)
            raise RuntimeError("merge broke")

    world.transport.reset, world.source.before_read = closes, breaks
    errors = world.run(1).report.errors
    assert errors[0] == "RuntimeError: merge broke"
    assert errors[1].startswith("TransferFailed: ")


def test_one_load_a_slot_is_packed_before_it_is_known_who_receives_it() -> None:
    world = World()
    assert len(world.pipeline.loads) > 2
    world.pipeline.prepare(1)
    assert world.source.num_reads == num_reads(world.pipeline.loads[:2])
    result = world.pipeline.run(1, {}, {})
    assert result.report.num_bytes == 0
    assert world.source.num_reads == num_reads(world.pipeline.loads[:2])
    assert world.source.num_ends == 1
    assert world.run(2).report.errors == {}
    assert world.arrived(0, 2)


def test_a_traced_run_has_a_span_for_every_stage_of_every_load() -> None:
    world = World()
    callbacks = list(gc.callbacks)
    world.pipeline.prepare(1, trace=True)
    gc.collect()
    spans = world.pipeline.run(1, world.bindings(), world.budgets_s).report.spans
    names = {track: [span.name for span in spans if span.track == track] for track in {s.track for s in spans}}
    every_load = [f"load {number}" for number in range(len(world.pipeline.loads))]
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
    assert world.run(2).report.spans == []


@pytest.mark.parametrize("watermark_bytes", [SMALL_WATERMARK, HASH_BYTES + 1024])
def test_packets_begin_at_aligned_places_and_share_no_byte_and_fit_their_slot(watermark_bytes: int) -> None:
    pipeline = World(watermark_bytes=watermark_bytes).pipeline
    assert pipeline._slots is not None
    slot_bytes = pipeline._slots.num_bytes // NUM_SLOTS
    sizes = {packet.tasks[0].num_bytes for packets in pipeline.loads for packet in packets[:-1]}
    assert any(size % SLOT_ALIGNMENT_BYTES for size in sizes), "one behind which a place is left"
    for packets in pipeline.loads:
        starts = [packet.offset_bytes for packet in packets]
        stops = [packet.offset_bytes + packet.tasks[0].num_bytes for packet in packets]
        assert not any(start % SLOT_ALIGNMENT_BYTES for start in starts)
        assert all(stop <= start for stop, start in zip(stops, [*starts[1:], slot_bytes], strict=True))
