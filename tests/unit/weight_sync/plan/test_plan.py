"""Plans against a naive oracle: random layouts on both sides, tasks executed in memory, compared with the loads
themselves."""

import dataclasses

import msgpack
import numpy as np
import pytest
from cases.layouts import (
    UNWRITTEN,
    checkpoint_values,
    engine_rank,
    filled_by_loads,
    filled_by_tasks,
    shard_rows,
    systems,
    tiny_checkpoint,
)
from cases.plan_tables import table_of
from cases.plans import PROPERTY, all_tasks, copied, small_system
from hypothesis import given, strategies as st

from slipstream.weight_sync.errors import PlanError
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
from slipstream.weight_sync.plan.columns import LoadTable, widened
from slipstream.weight_sync.plan.plan import build_plan
from slipstream.weight_sync.plan.proof import prove_coverage
from slipstream.weight_sync.plan.transfer_plan import rank_tasks_from_wire


@PROPERTY
@given(system=systems(), max_task_bytes=st.integers(4, 400))
def test_a_plan_of_any_system_is_right(system, max_task_bytes):
    sources, replicas = system
    plan = build_plan(sources, replicas, max_task_bytes=max_task_bytes)
    replaying_it_leaves_what_the_loader_leaves(plan, sources, replicas)
    assert all(0 < task.num_bytes <= max_task_bytes for task in all_tasks(plan))
    for source in sources:
        it_holds_what_it_sends(source, plan)
    expected_bytes_are_what_the_tasks_write(plan, replicas)
    again = build_plan(list(reversed(sources)), replicas, max_task_bytes=max_task_bytes)
    assert plan.digest == again.digest, "is deterministic"
    for source in sources:
        tasks = rank_tasks_from_wire(msgpack.unpackb(msgpack.packb(plan.to_wire(source.rank))))
        assert tasks == tuple(plan.tasks[source.rank])


def replaying_it_leaves_what_the_loader_leaves(plan, sources, replicas):
    values = checkpoint_values(sources[0].tensors)
    memory, writes = filled_by_tasks(replicas, all_tasks(plan), values)
    for replica, layouts in enumerate(replicas):
        for layout in layouts:
            for name, wanted in filled_by_loads(layout, values).items():
                key = (replica, layout.rank, name)
                np.testing.assert_array_equal(memory[key], wanted, err_msg=str(key))
                # once where the loader copies; never in fills and derived parameters
                np.testing.assert_array_equal(writes[key], (wanted != UNWRITTEN).astype(int), err_msg=str(key))


def it_holds_what_it_sends(source, plan):
    held = {meta.name: np.zeros(meta.shape, dtype=bool) for meta in source.tensors}
    for shard in source.shards:
        held[shard.tensor][tuple(map(slice, shard.region.start, shard.region.stop))] = True
    for task in plan.tasks[source.rank]:
        assert task.source_rank == source.rank
        for piece in task.pieces:
            assert held[piece.tensor][tuple(map(slice, piece.region.start, piece.region.stop))].all(), piece


def expected_bytes_are_what_the_tasks_write(plan, replicas):
    for replica, layouts in enumerate(replicas):
        for layout in layouts:
            written = {param.name: 0 for param in layout.params if param.post_load is not PostLoad.derived}
            for task in all_tasks(plan):
                if (task.replica, task.dest_rank) == (replica, layout.rank):
                    written[task.param] += task.num_bytes
            assert plan.expected[replica, layout.rank] == written
    summary = plan.summary()
    assert sum(summary.sent_bytes.values()) == sum(summary.received_bytes.values()) == summary.num_bytes
    assert sum(summary.group_bytes.values()) == summary.num_bytes


def test_a_block_of_local_experts_is_one_write():
    tensors = tiny_checkpoint(1, 4, hidden=8, heads=4, kv_heads=2, head_dim=2, inter=4, vocab=8)
    source = SourceLayout(0, tensors, tuple(SourceShard(m.name, shard_rows(m, [0, m.shape[0]])[0]) for m in tensors))
    plan = build_plan([source], [[engine_rank(tensors, 0, 1)]], max_task_bytes=1 << 20)
    (w13,) = [task for task in plan.tasks[0] if task.param.endswith(".w13")]
    # 4 experts x (gate, up) of 4 x 8 bfloat16
    assert w13.num_bytes == 4 * 2 * 4 * 8 * 2
    assert [piece.tensor.split(".")[5:7] for piece in w13.pieces] == [
        [str(expert), half] for expert in range(4) for half in ("gate_proj", "up_proj")
    ]


def test_a_row_longer_than_the_bound_is_cut_inside():
    sources, layout = copied({"t": (3, 10)}, dtype="bfloat16")
    plan = build_plan(sources, [[layout]], max_task_bytes=12)
    # rows of 20 bytes, bound 12: every row is 6 + 4 elements
    assert [task.num_bytes for task in plan.tasks[0]] == [12, 8] * 3


def test_a_scalar_and_a_dim_of_size_one_cross():
    (source,), layout = copied({"scale": (), "thin": (1, 4, 1)})
    scale, thin = layout.params
    layout = dataclasses.replace(layout, params=(scale, dataclasses.replace(thin, shape=(4,))))
    plan = build_plan([source], [[layout]], max_task_bytes=1 << 20)
    assert sorted(task.num_bytes for task in plan.tasks[0]) == [4, 16]
    regions = {piece.tensor: piece.region for task in plan.tasks[0] for piece in task.pieces}
    assert regions == {shard.tensor: shard.region for shard in source.shards}
    assert table_of(0, list(plan.tasks[0])).to_wire() == plan.tasks[0].to_wire(), "the same columns from objects"


def test_an_engine_rank_that_derives_all_its_parameters_is_sent_nothing():
    layout = DestLayout(0, (Param("d", (4,), "float32", PostLoad.derived),), ())
    plan = build_plan(copied({"t": (4,)})[0], [[layout]], max_task_bytes=64)
    assert (plan.summary().num_tasks, plan.expected) == (0, {(0, 0): {}})


def test_sources_may_hold_tensors_of_different_numbers_of_dims():
    shapes = {"scalar": (), "row": (4,), "square": (2, 2)}
    sources, layout = copied(shapes, [[name] for name in shapes])
    plan = build_plan(sources, [[layout]], max_task_bytes=1 << 20)
    assert [task.num_bytes for rank in range(3) for task in plan.tasks[rank]] == [4, 16, 16]
    apart = {rank: table_of(rank, list(tasks)) for rank, tasks in plan.tasks.items()}
    assert [table.pieces.start.shape[1] for table in apart.values()] == [1, 1, 2]
    prove_coverage(dataclasses.replace(plan, tasks=apart), [[layout]], sources)


def test_a_parameter_of_dense_and_of_expert_tensors_is_sent_in_both_groups():
    """Neighbours in memory, of the same source."""
    names = ("layers.0.mlp.experts.0.w", "layers.0.mlp.shared.w")
    sources, layout = copied(dict.fromkeys(names, (2, 4)))
    loads = tuple(dataclasses.replace(load, param="p", offset=8 * n) for n, load in enumerate(layout.loads))
    plan = build_plan(sources, [[DestLayout(0, (Param("p", (4, 4), "float32"),), loads)]], max_task_bytes=1 << 20)
    assert [(task.mesh_group, task.dest_offset_bytes) for task in plan.tasks[0]] == [("dense", 32), ("experts", 0)]


def test_a_known_system_keeps_its_digests():
    """A planner that is made faster must make the same plan; one that should make another changes these numbers."""
    plan = build_plan(*small_system(), max_task_bytes=100)
    assert plan.layouts_digest == "2fbd59725eaf487d1310433225e0882f230148b60708d75d77b5d80dbcd3078f"
    assert plan.digest == "28498491e427820c6756422c27db12a511a9097c721c6ffdd014a3c24c3519a4"


@pytest.mark.parametrize("field", ["bound", "dtype", "fill", "route"])
def test_the_digest_covers_everything(field):
    sources, replicas = small_system()
    plan = build_plan(sources, replicas, max_task_bytes=1 << 20)
    bound = 1 << 20
    if field == "bound":
        bound += 1
    elif field == "dtype":
        first = replicas[0][0]
        params = tuple(dataclasses.replace(p, dtype="float16") for p in first.params)
        replicas[0][0] = dataclasses.replace(first, params=params)
    elif field == "fill":
        first = replicas[0][0]
        replicas[0][0] = dataclasses.replace(first, fills=tuple(dataclasses.replace(f, value=1.0) for f in first.fills))
    else:
        sources = [dataclasses.replace(s, rank=1 - s.rank) for s in sources]
    assert build_plan(sources, replicas, max_task_bytes=bound).digest != plan.digest


def test_a_layout_has_one_digest_whatever_form_its_loads_have():
    """Also as a table that is as wide as other tensors need."""
    metas, whole = (TensorMeta("row", (4,), "float32"), TensorMeta("square", (2, 2), "float32")), Region((0,), (4,))
    source = SourceLayout(0, metas, (SourceShard("row", whole),))
    loads = (Load("row", whole, (0,), "row", 0, (1,)),)
    table = LoadTable.of(loads)
    fillers = {"start": 0, "shape": 1, "stride": 0}
    wide = dataclasses.replace(table, **{name: widened(getattr(table, name), 2, of) for name, of in fillers.items()})
    layouts = [DestLayout(0, (Param("row", (4,), "float32"),), form) for form in (loads, table, wide)]
    assert len({build_plan([source], [[layout]], max_task_bytes=64).digest for layout in layouts}) == 1


def test_a_tampered_wire_part_is_refused():
    sources, replicas = small_system()
    plan = build_plan(sources, replicas, max_task_bytes=1 << 20)
    for path, pattern in (
        (("tasks", "num_rows"), "differ"),
        (("named", 1), "add up"),
        (("named", 0), "format"),
    ):
        wire = msgpack.unpackb(msgpack.packb(plan.to_wire(0)))
        target = wire
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] += 1
        with pytest.raises(PlanError, match=pattern):
            rank_tasks_from_wire(wire)


@pytest.mark.parametrize("field", ["tasks", "rank"])
def test_a_rank_does_not_take_another_rank_s_tasks_of_the_same_plan(field):
    plan = build_plan(*small_system(), max_task_bytes=1 << 20)
    with pytest.raises(PlanError, match="differ"):
        rank_tasks_from_wire(plan.to_wire(0) | {field: plan.to_wire(1)[field]})
