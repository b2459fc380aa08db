"""Layouts for which there is no plan: what is refused, and what of it is named."""

import dataclasses

import pytest
from cases.plans import small_system

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
from slipstream.weight_sync.plan.columns import LoadTable
from slipstream.weight_sync.plan.plan import build_plan


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
