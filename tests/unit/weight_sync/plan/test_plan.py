"""Plans of random layouts on both sides, against the proof element by element; and plans by hand."""

import dataclasses

import msgpack
import pytest
from cases.layouts import engine_rank, shard_rows, systems, tiny_checkpoint
from cases.plan_tables import table_of
from cases.plans import PROPERTY, copied, small_system
from hypothesis import given, strategies as st
from oracles.scalar_proof import prove_by_element

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
from slipstream.weight_sync.plan.chunks import MAX_RUNS
from slipstream.weight_sync.plan.columns import LoadTable, widened
from slipstream.weight_sync.plan.plan import build_plan
from slipstream.weight_sync.plan.proof import prove_coverage
from slipstream.weight_sync.plan.transfer_plan import rank_tasks_from_wire


@PROPERTY
@given(system=systems(), max_task_bytes=st.integers(4, 400))
def test_a_plan_of_any_system_is_right(system, max_task_bytes):
    sources, replicas = system
    plan = build_plan(sources, replicas, max_task_bytes=max_task_bytes)
    prove_by_element(plan, replicas, sources)
    assert all(task.source_rank == rank for rank, tasks in plan.tasks.items() for task in tasks)
    summary = plan.summary()
    assert sum(summary.sent_bytes.values()) == sum(summary.received_bytes.values()) == summary.num_bytes
    assert sum(summary.group_bytes.values()) == summary.num_bytes
    again = build_plan(list(reversed(sources)), replicas, max_task_bytes=max_task_bytes)
    assert plan.digest == again.digest, "is deterministic"
    for source in sources:
        tasks = rank_tasks_from_wire(msgpack.unpackb(msgpack.packb(plan.to_wire(source.rank))))
        assert tasks == tuple(plan.tasks[source.rank])


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


def test_ranks_may_have_other_parameters_in_another_order():
    (source,), ((layout,),) = one_matrix()
    (param,), (load,) = layout.params, layout.loads
    half = dataclasses.replace(load, param="q", region=Region((0, 0), (2, 6)))
    more = DestLayout(1, (dataclasses.replace(param, name="q", shape=(2, 6)), param), (half, load))
    plan = build_plan([source], [[layout, more]], max_task_bytes=1 << 20)
    sizes = {(task.dest_rank, task.param): task.num_bytes for task in plan.tasks[0]}
    assert sizes == {(0, "p"): 96, (1, "p"): 96, (1, "q"): 48}


@pytest.mark.timeout(60)
def test_a_table_of_loads_may_be_wider_than_its_checkpoint():
    """As one is that is part of a table whose other loads have more dims."""
    (source,), ((layout,),) = one_matrix()
    cube = Load("c", Region((0, 0, 0), (2, 2, 2)), (0, 1, 2), "q", 0, (4, 2, 1))
    wider = LoadTable.of((*layout.loads, cube)).take(slice(1))
    assert wider.shape.tolist() == [[4, 6, 1]]
    plans = [
        build_plan([source], [[dataclasses.replace(layout, loads=loads)]], max_task_bytes=48)
        for loads in (layout.loads, wider)
    ]
    assert len(plans[0].tasks[0]) == 2 and list(plans[0].tasks[0]) == list(plans[1].tasks[0])
    assert plans[0].digest == plans[1].digest


def test_a_missing_shard_names_the_tensor_the_rows_and_the_parameter():
    sources, replicas = small_system()
    name = "model.layers.1.self_attn.k_proj.weight"
    sources[1] = dataclasses.replace(sources[1], shards=tuple(s for s in sources[1].shards if s.tensor != name))
    with pytest.raises(
        PlanError, match=r"layers\.1\.qkv needs model\.layers\.1\.self_attn\.k_proj\.weight start \[2, 0\]"
    ):
        build_plan(sources, replicas, max_task_bytes=1 << 20)
    (source,), ((layout,),) = one_matrix()
    source = dataclasses.replace(source, shards=(SourceShard("t", Region((0, 0), (3, 6))),))
    derived = Param("d", (4, 6), "float32", PostLoad.derived)
    more = {
        "params": (derived, *layout.params),
        "loads": (dataclasses.replace(layout.loads[0], param="d"), *layout.loads),
    }
    with pytest.raises(PlanError, match=r"p needs t start \[3, 0\] shape \[1, 6\]"):  # what is derived needs nothing
        build_plan([source], [[dataclasses.replace(layout, **more)]], max_task_bytes=1 << 20)


def one_matrix(**changes):
    """A (4, 6) matrix, one source, one engine rank; `changes` break the load."""
    load = dataclasses.replace(Load("t", Region((0, 0), (4, 6)), (0, 1), "p", 0, (6, 1)), **changes)
    source = SourceLayout(0, (TensorMeta("t", (4, 6), "float32"),), (SourceShard("t", Region((0, 0), (4, 6))),))
    return [source], [[DestLayout(0, (Param("p", (4, 6), "float32"),), (load,))]]


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"region": Region((1, 0), (4, 6))}, r"does not lie inside t of shape \[4, 6\]"),
        ({"region": Region((0,), (4,))}, "does not lie inside t"),
        ({"tensor": "x"}, "no such tensor"),
        ({"param": "x"}, "no such parameter"),
        ({"axes": (0, 0)}, "do not order"),
        ({"offset": 1}, "leaves the parameter"),
        ({"region": Region((0, 0), (3, 6))}, "has 24 elements, its loads bring 18"),
        ({"stride": (0, 1)}, r"nobody writes bytes|written twice"),
        ({"stride": (1, 3)}, r"written twice|nobody writes|no load"),
    ],
)
def test_a_load_that_does_not_fit_is_refused_and_named(changes, pattern):
    """Also where equal ranks of other replicas, or other ranks, have loads that do."""
    (sources, ((right,),)), (_, ((wrong,),)) = one_matrix(), one_matrix(**changes)
    for replicas, where in (
        ([[wrong]], "replica 0 rank 0"),
        ([[right], [wrong]], "replica 1 rank 0"),
        ([[right, dataclasses.replace(wrong, rank=1)]], "replica 0 rank 1"),
    ):
        with pytest.raises(PlanError, match=pattern) as caught:
            build_plan(sources, replicas, max_task_bytes=1 << 20)
        assert where in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"region": Region((0, 0), (0, 6))}, {"stride": (6, -1), "offset": 5}, {"offset": 1}, {"offset": -1}]
)
def test_a_table_of_loads_is_refused_as_its_loads_are(changes):
    sources, ((layout,),) = one_matrix(**changes)
    for loads in (layout.loads, LoadTable.of(layout.loads)):
        with pytest.raises(PlanError, match="leaves the parameter's 24 elements"):
            build_plan(sources, [[dataclasses.replace(layout, loads=loads)]], max_task_bytes=1 << 20)


def test_two_loads_of_the_same_bytes_are_refused():
    sources, ((layout,),) = one_matrix()
    twice = dataclasses.replace(layout, loads=(*layout.loads, *layout.loads))
    with pytest.raises(PlanError, match="has 24 elements, its loads bring 48"):
        build_plan(sources, [[twice]], max_task_bytes=1 << 20)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda s: [], "at least one source rank"),
        (lambda s: [s[0], s[0]], "claim rank 0"),
        (lambda s: [s[0], dataclasses.replace(s[1], tensors=s[1].tensors[:-1])], "disagree on the checkpoint"),
        (
            lambda s: [s[0], dataclasses.replace(s[1], tensors=(TensorMeta("x", (1,), "int32"), *s[1].tensors[1:]))],
            "disagree on the checkpoint: .* instead of ",
        ),
        (lambda s: [s[0], dataclasses.replace(s[1], shards=(SourceShard("x", Region((0,), (1,))),))], "does not have"),
        (
            lambda s: [s[0], dataclasses.replace(s[1], shards=(SourceShard("model.norm.weight", Region((4,), (8,))),))],
            "does not lie inside model.norm.weight",
        ),
    ],
)
def test_source_layouts_that_do_not_belong_together_are_refused(change, pattern):
    sources, replicas = small_system()
    with pytest.raises(PlanError, match=pattern):
        build_plan(change(sources), replicas, max_task_bytes=1 << 20)


def test_an_empty_parameter_an_unknown_dtype_and_a_tiny_bound_are_refused():
    sources, ((layout,),) = one_matrix()
    for params, bound, pattern in (
        ((Param("p", (0,), "float32"),), 64, "is empty"),
        ((Param("p", (4, 6), "complex64"),), 64, "known are"),
        (layout.params, 3, "more than max_task_bytes 3"),
        (layout.params, 0, "must be >= 1"),
    ):
        with pytest.raises(PlanError, match=pattern):
            build_plan(sources, [[dataclasses.replace(layout, params=params)]], max_task_bytes=bound)


def test_replicas_that_claim_a_rank_twice_or_have_none_are_refused():
    sources, ((layout,),) = one_matrix()
    for replicas, pattern in (
        ([[layout, layout]], "claim rank 0"),
        ([[]], "has no engine rank"),
        ([], "no replica to plan for"),
    ):
        with pytest.raises(PlanError, match=pattern):
            build_plan(sources, replicas, max_task_bytes=64)


def test_a_load_that_would_make_too_many_tiny_writes_is_refused():
    shape = (MAX_RUNS // 2 + 1, 2)
    meta, whole = TensorMeta("t", shape, "float32"), Region((0, 0), shape)
    source = SourceLayout(0, (meta,), (SourceShard("t", whole),))
    loads = (Load("t", whole, (0, 1), "p", 0, (4, 1)), Load("t", whole, (0, 1), "p", 2, (4, 1)))
    layout = DestLayout(0, (Param("p", (shape[0], 4), "float32"),), loads)
    build_plan([source], [[layout]], max_task_bytes=1 << 20)  # one run a row: within the limit
    columns = (
        SourceLayout(0, (meta,), (SourceShard("t", Region((0, 0), (shape[0], 1))),)),
        SourceLayout(1, (meta,), (SourceShard("t", Region((0, 1), (shape[0], 1))),)),
    )
    with pytest.raises(PlanError, match=f"more than {MAX_RUNS} runs"):  # one run an element
        build_plan(columns, [[layout]], max_task_bytes=1 << 20)
