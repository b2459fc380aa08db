"""Promises of weight_sync/prediction: never faster than the wire, a faster link never costs time, and the real
pipeline's own cutting and constants."""

import dataclasses

import numpy as np
import pytest
from cases.layouts import systems
from cases.plan_tables import table_of
from hypothesis import HealthCheck, given, settings, strategies as st

from slipstream.weight_sync import integrity
from slipstream.weight_sync.errors import PlanError, WatermarkError
from slipstream.weight_sync.layout import (
    DestLayout,
    Load,
    Param,
    PostLoad,
    Region,
    SourceLayout,
    SourceShard,
    TensorMeta,
)
from slipstream.weight_sync.pipeline import packing, pipeline
from slipstream.weight_sync.plan import budget as staging
from slipstream.weight_sync.plan.budget import Staging
from slipstream.weight_sync.plan.plan import build_plan
from slipstream.weight_sync.plan.transfer_plan import MESH_GROUPS, Piece, Task, TaskTable, TransferPlan
from slipstream.weight_sync.prediction.links import LinkRates, Placement, place
from slipstream.weight_sync.prediction.predict import (
    Prediction,
    apply_passes,
    neighbours,
    predict,
    relay_s,
    written_alone,
)

PROPERTY = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
SLOW = LinkRates(
    nic_bytes_s=1e3,
    nvlink_bytes_s=4e3,
    hbm_bytes_s=2e4,
    write_latency_s=0.01,
    op_s=0.001,
    load_launch_s=0.005,
    hand_over_s=0.002,
    source_begin_s=0.1,
    replay_s=0.03,
    begin_s=0.5,
    commit_s=0.4,
    barrier_s=0.25,
    entry_s=0.02,
)
"""Rates that suit plans of a few kilobytes."""
RATES = [field.name for field in dataclasses.fields(LinkRates)]
STAGING = Staging(watermark_bytes=1 << 11)


def placed(plan: TransferPlan, ranks_per_node: int = 2) -> Placement:
    return place(list(plan.tasks), list(plan.expected), ranks_per_node)


def run(plan: TransferPlan, rates: LinkRates = SLOW, ranks_per_node: int = 2, **options) -> Prediction:
    return predict(plan, placed(plan, ranks_per_node), rates, options.pop("staging", STAGING), **options)


@st.composite
def plans(draw: st.DrawFn) -> TransferPlan:
    """Any schedule: senders of unequal loads, any destinations, runs of tasks that differ in the replica alone."""
    destinations = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=5, unique=True))
    expected: dict[tuple[int, int], dict[str, int]] = {where: {"w": 0} for where in destinations}
    tasks: dict[int, TaskTable] = {}
    for rank in range(draw(st.integers(1, 4))):
        schedule: list[Task] = []
        rows = draw(st.lists(st.tuples(st.integers(1, 500), st.sampled_from(destinations)), max_size=12))
        num_dense = draw(st.integers(0, len(rows)))
        for position, (num_bytes, (_, dest_rank)) in enumerate(rows):
            for where in [where for where in destinations if where[1] == dest_rank]:
                group = MESH_GROUPS[position >= num_dense]
                piece = Piece("w", Region((0,), (num_bytes,)), (0,), 0)
                schedule.append(Task(group, rank, *where, "w", 1000 * position, num_bytes, "uint8", (piece,)))
                expected[where]["w"] += num_bytes
        tasks[rank] = table_of(rank, schedule)
    return TransferPlan(STAGING.max_task_bytes, tasks, expected, "", {})


def even_plan(num_sources: int = 1, num_dests: int = 1, num_bytes: int = 8000, num_replicas: int = 1) -> TransferPlan:
    """Source i holds rows of one tensor; destination j wants an equal part of the rows."""
    tensor = TensorMeta("model.layers.0.w.weight", (num_bytes,), "uint8")
    held, wanted = num_bytes // num_sources, num_bytes // num_dests
    sources = [
        SourceLayout(i, (tensor,), (SourceShard(tensor.name, Region((i * held,), (held,))),))
        for i in range(num_sources)
    ]
    layouts = [
        DestLayout(
            j,
            (Param("w", (wanted,), "uint8"),),
            (Load(tensor.name, Region((j * wanted,), (wanted,)), (0,), "w", 0, (1,)),),
        )
        for j in range(num_dests)
    ]
    return build_plan(sources, [layouts] * num_replicas, max_task_bytes=STAGING.max_task_bytes)


# --- properties over random plans ---


@PROPERTY
@given(plan=plans(), ranks_per_node=st.integers(1, 4))
def test_no_publish_is_faster_than_its_floors_and_none_passes_the_watermark(plan, ranks_per_node):
    found = run(plan, ranks_per_node=ranks_per_node)
    assert found.write_end_s - found.begin_s >= found.floor_s * (1 - 1e-9)
    assert found.total_s >= found.write_end_s + found.verify_s + found.commit_s
    assert found.peak_bytes <= STAGING.watermark_bytes
    assert found == run(plan, ranks_per_node=ranks_per_node)


@PROPERTY
@given(plan=plans(), ranks_per_node=st.integers(1, 4), name=st.sampled_from(RATES), factor=st.floats(1, 50))
def test_better_hardware_never_costs_time(plan, ranks_per_node, name, factor):
    value = getattr(SLOW, name)
    better = dataclasses.replace(SLOW, **{name: value * factor if name.endswith("bytes_s") else value / factor})
    before = run(plan, ranks_per_node=ranks_per_node)
    after = run(plan, better, ranks_per_node=ranks_per_node)
    assert after.total_s <= before.total_s * (1 + 1e-9)


# --- the real pipeline ---


@settings(PROPERTY, max_examples=15)
@given(system=systems(), limit=st.integers(400, 3000))
def test_loads_are_those_of_the_pipeline(system, limit):
    plan = build_plan(*system, max_task_bytes=limit // staging.TASKS_A_SLOT)
    for rank, tasks in plan.tasks.items():
        limits = Staging(watermark_bytes=2 * limit)
        edges, slot_bytes = limits.cut(table_of(rank, tuple(tasks)).num_bytes, str)
        loads, expected = packing.cut_into_packets(tuple(tasks), limits)
        assert ([len(packets) for packets in loads], expected) == (np.diff(edges).tolist(), slot_bytes)
        for packets in loads:
            assert packets[-1].offset_bytes + packets[-1].tasks[0].num_bytes <= slot_bytes


@pytest.mark.parametrize(
    ("watermark_bytes", "packets"),
    # In all 30,000: 512, twice as many from load to load, up to 1024 (64 MiB), or to a slot, a quarter of them (1 GiB).
    [(64 << 20, [512, *[1024] * 28, 816]), (1 << 30, [512, 1024, 2048, 4096, 7500, 7500, 7320])],
)
def test_loads_of_many_packets_are_those_of_the_pipeline(watermark_bytes, packets):
    schedule = (tuple(even_plan(num_bytes=1 << 12).tasks[0]) * 30_000)[:30_000]
    limits = Staging(watermark_bytes=watermark_bytes)
    assert np.diff(limits.cut(table_of(0, schedule).num_bytes, str)[0]).tolist() == packets
    assert [len(load) for load in packing.cut_into_packets(schedule, limits)[0]] == packets


def test_scratch_is_that_of_the_hashes():
    assert staging.scratch_bytes("cpu", 1 << 30) == integrity.DEFAULT_SCRATCH_BYTES["cpu"]
    assert staging.scratch_bytes("cuda", 1 << 30) == integrity.MIN_SCRATCH_BYTES


def test_counts_of_changes_are_reserved_beside_the_sums():
    plain, changes = (
        staging.reserved_bytes("cpu", 1 << 20, 0, has_changes=has_changes) for has_changes in (False, True)
    )
    assert changes - plain == staging.sums_bytes(1 << 20) // 2 > 0


@pytest.mark.parametrize("watermark_bytes", [1 << 16, 1 << 20, 1 << 30])
def test_the_pipeline_holds_what_is_reserved_beside_its_slots(watermark_bytes):
    class Source:
        temporary_bytes = 1000

    real = pipeline.Pipeline(Source(), None, device="cpu", watermark_bytes=watermark_bytes)
    real.load([])
    slots = real._slots
    assert slots is not None
    held = slots._sums.nbytes + slots._hash_scratch_bytes + Source.temporary_bytes
    assert staging.reserved_bytes("cpu", watermark_bytes, 1000) == held
    assert real.max_task_bytes == Staging(watermark_bytes=watermark_bytes, reserved_bytes=held).max_task_bytes


def test_marks_and_streams_of_changes_are_as_large_as_a_third_slot():
    plain, changes = (Staging(watermark_bytes=1 << 16, has_changes=has_changes) for has_changes in (False, True))
    assert run(even_plan(), staging=changes).peak_bytes * 2 == run(even_plan(), staging=plain).peak_bytes * 3 > 0


# --- figures that can be worked out by hand ---

BARE = dataclasses.replace(SLOW, hbm_bytes_s=1e12, write_latency_s=0, op_s=0, load_launch_s=0, barrier_s=0, entry_s=0)
BARE = dataclasses.replace(BARE, hand_over_s=0, source_begin_s=0, replay_s=0, begin_s=0, commit_s=0)


def test_one_sender_and_one_receiver_take_bytes_over_rate():
    # 8000 bytes at 1000 bytes/s through NICs, at 4000 bytes/s over NVLink
    assert run(even_plan(), BARE, ranks_per_node=1).total_s == pytest.approx(8.0, rel=1e-6)
    assert run(even_plan(), BARE, ranks_per_node=2).total_s == pytest.approx(2.0, rel=1e-6)


def test_a_receiver_of_two_senders_takes_all_its_bytes_through_one_port():
    found = run(even_plan(num_sources=2), BARE, ranks_per_node=1)
    assert found.total_s == pytest.approx(8.0, rel=1e-6)
    assert (found.sender_floor_s, found.receiver_floor_s) == pytest.approx((4.0, 8.0))


def test_two_pairs_take_half_and_two_replicas_double_and_a_slow_rank_shows():
    assert run(even_plan(2, 2), BARE, ranks_per_node=1).total_s == pytest.approx(4.0, rel=1e-6)
    assert run(even_plan(num_replicas=2), BARE, ranks_per_node=1).total_s == pytest.approx(16.0, rel=1e-6)
    slowed = run(even_plan(2, 2), BARE, ranks_per_node=2, slow_ranks={1: 3.0})
    assert slowed.total_s == pytest.approx(12.0, rel=1e-6)
    assert slowed.senders[0].end_s == pytest.approx(4.0, rel=1e-6)


def test_packing_is_hidden_behind_writing_and_the_first_load_is_not():
    # Slots of 1024 bytes are cut to ceil(8000 / 1024) = 8 loads. 6 passes over 1000 bytes at 30 kB/s: 0.2 s a load.
    packing = dataclasses.replace(BARE, hbm_bytes_s=30e3)
    assert run(even_plan(), packing, ranks_per_node=1).write_end_s == pytest.approx(8.0 + 0.2, rel=0.02)
    # Packing at a sixth of the wire: 6 passes at 1 kB/s are 48 s, and only the last write is not hidden.
    slow = run(even_plan(), dataclasses.replace(BARE, hbm_bytes_s=1e3), ranks_per_node=1)
    assert slow.write_end_s == pytest.approx(48.0 + 8.0 / slow.senders[0].num_loads, rel=1e-6)


def test_hashes_cost_a_pass_at_either_end():
    rates = dataclasses.replace(BARE, hbm_bytes_s=1e3)
    with_hashes, without = (run(even_plan(), rates, verify_hashes=flag) for flag in (True, False))
    assert (with_hashes.verify_s, without.verify_s) == pytest.approx((8.0, 0.0))
    assert with_hashes.prepare_s / without.prepare_s == pytest.approx(6 / 5)


def test_what_changed_costs_passes_to_find_and_to_put_in_and_saves_bytes():
    rates = dataclasses.replace(BARE, hbm_bytes_s=1e3)
    whole, changes = run(even_plan(), rates), run(even_plan(), rates, sent_share=0.1, mark_passes=6, apply_passes=2)
    assert changes.prepare_s == pytest.approx(2 * whole.prepare_s)
    assert changes.verify_s == pytest.approx(3 * whole.verify_s)
    assert changes.floor_s == pytest.approx(0.1 * whole.floor_s)
    assert [round(61 / 3.87 * apply_passes(share)) for share in (0.005, 0.02, 0.05, 0.12)] == [22, 26, 35, 56]


def test_messages_are_of_all_parameters_and_stand_before_the_proof():
    # Three engine ranks of two replicas with 2 parameters each: 6 entries told, 4 of them read by the first replica.
    task = next(iter(even_plan().tasks[0]))
    dests = [(0, 0), (0, 1), (1, 0)]
    rows = [dataclasses.replace(task, replica=r, dest_rank=d) for r, d in dests]
    tasks = {0: table_of(0, rows), 1: table_of(1, ())}
    plan = TransferPlan(1 << 30, tasks, {where: {"v": 0, "w": task.num_bytes} for where in dests}, "", {})
    rates = dataclasses.replace(BARE, entry_s=3.0)
    found, silent = run(plan, rates), run(plan, BARE)
    assert found.messages_s == 3.0 * (6 + 4)
    assert silent.messages_s == 0
    assert found.total_s == pytest.approx(silent.total_s + found.messages_s)
    assert found.write_end_s == silent.write_end_s
    assert found.verify_s == pytest.approx(silent.verify_s, rel=1e-3)


def test_the_source_and_the_first_loads_are_ready_when_engines_stand_still():
    # Begin 10 s; sources begin in 4 s, and loads of 1000 bytes at 6 passes and 60 kB/s are packed in 0.1 s each.
    rates = dataclasses.replace(BARE, begin_s=10, source_begin_s=4, hbm_bytes_s=60e3)
    assert run(even_plan(), rates, ranks_per_node=1).write_end_s == pytest.approx(10 + 8)
    # Where there is no pause, both are waited for.
    late = run(even_plan(), dataclasses.replace(rates, begin_s=0), ranks_per_node=1)
    assert late.write_start_s == late.senders[0].write_start_s == pytest.approx(4 + 0.1, rel=0.01)
    assert late.write_end_s == pytest.approx(late.write_start_s + 8)


# --- placement and refusals ---


def test_ranks_fill_nodes_and_a_replica_that_fits_a_node_stays_on_one():
    found = place(range(3), [(0, 0), (0, 1), (1, 0), (1, 1)], 4)
    assert found.trainer_gpus == {0: 0, 1: 1, 2: 2}
    assert found.engine_gpus == {(0, 0): 4, (0, 1): 5, (1, 0): 6, (1, 1): 7}
    assert found.num_nodes == 2
    assert place([0], [(0, 0)], 8).num_nodes == 1
    assert place([0], [(0, rank) for rank in range(16)], 8).engine_gpus[0, 0] == 8  # two nodes, not three


def test_replicas_of_one_rank_may_share_a_gpu_and_its_links():
    found = place(range(2), [(replica, 0) for replica in range(4)], 4, 2)
    assert found.engine_gpus == {(0, 0): 2, (1, 0): 2, (2, 0): 3, (3, 0): 3}
    with pytest.raises(PlanError, match="no two ranks of a replica share"):
        Placement(8, {0: 0}, {(0, 0): 1, (0, 1): 1})


def test_what_makes_no_sense_is_refused():
    plan = even_plan()
    with pytest.raises(PlanError, match="nic_bytes_s must be > 0"):
        LinkRates(nic_bytes_s=0)
    with pytest.raises(PlanError, match="begin_s must be >= 0"):
        LinkRates(begin_s=-1)
    with pytest.raises(PlanError, match="own GPU"):
        Placement(8, {0: 0}, {(0, 0): 0})
    with pytest.raises(PlanError, match="lacks replica 0 rank 0"):
        predict(plan, Placement(8, {0: 0}, {}), SLOW, STAGING)
    with pytest.raises(PlanError, match="does not fit a staging slot"):
        predict(plan, Placement(8, {0: 0}, {(0, 0): 1}), SLOW, Staging(watermark_bytes=128))
    with pytest.raises(WatermarkError, match="raise the watermark"):
        _ = Staging(watermark_bytes=1000, reserved_bytes=990).max_slot_bytes


# --- relay ---


def test_one_replica_of_every_node_is_written():
    everyone = place(range(8), [(r, rank) for r in range(16) for rank in range(4)], 8)
    assert neighbours(everyone) == {r: [r + 1] for r in range(0, 16, 2)}, "8 nodes of 2 x TP4"
    spanning = place(range(8), [(r, rank) for r in range(3) for rank in range(16)], 8)
    assert neighbours(spanning) == {0: [], 1: [], 2: []}, "TP16 on nodes of 8 has no neighbour to read from"
    halves = {(replica, rank): 8 * (1 + rank // 4) + 4 * replica + rank % 4 for replica in (0, 1) for rank in range(8)}
    assert neighbours(Placement(8, {0: 0}, halves)) == {0: [], 1: []}, "both on nodes 1 and 2"
    mixed = place(range(4), [(r, rank) for r in range(5) for rank in range(2)], 8)
    assert neighbours(mixed) == {0: [1], 2: [3, 4]}, "the trainer's own node has engines too"


def test_those_that_are_written_keep_their_gpus_and_a_sender_is_spared_the_bytes_of_the_others():
    everyone = place(range(8), [(r, rank) for r in range(4) for rank in range(4)], 8)
    few = written_alone(everyone, [0, 2])
    assert few.engine_gpus == {(0, rank): 8 + rank for rank in range(4)} | {(1, rank): 16 + rank for rank in range(4)}
    placement = Placement(2, {0: 0}, {(0, 0): 2, (1, 0): 3})
    direct = predict(even_plan(num_replicas=2), placement, BARE, STAGING)
    written = predict(even_plan(), written_alone(placement, list(neighbours(placement))), BARE, STAGING)
    assert written.sender_floor_s == pytest.approx(direct.sender_floor_s / 2)


@pytest.mark.parametrize(("readers", "rounds"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4)])
def test_holders_double_every_round_of_a_pause_the_slowest_read_and_a_pass_of_hashes(readers: int, rounds: int):
    # 8004 bytes in two parameters over NVLink at 4 kB/s, and at 1 kB/s through memory.
    rates = dataclasses.replace(BARE, begin_s=0.5, commit_s=0.25, write_latency_s=0.1, op_s=0.01, hbm_bytes_s=1e3)
    params = (Param("w", (8000,), "uint8"), Param("v", (1,), "float32"), Param("d", (9,), "uint8", PostLoad.derived))
    engine = [DestLayout(0, params, ()), DestLayout(1, params[1:], ())]
    members = {0: range(1, 1 + readers), 20: []}
    for verify_hashes in (True, False):
        a_round = 0.75 + 0.1 + 2 * 0.01 + 8004 / 4e3 + 8004 / 1e3 * verify_hashes
        assert relay_s(members, engine, rates, verify_hashes=verify_hashes) == pytest.approx(rounds * a_round)
