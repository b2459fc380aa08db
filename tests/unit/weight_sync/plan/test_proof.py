"""The proof over columns and the proof element by element come to one verdict, on right plans and on broken ones."""

from __future__ import annotations

import dataclasses

import pytest
from cases.layouts import systems
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weight_sync.errors import PlanError
from weight_sync.layout import DestLayout, Load, Param, PostLoad, Region, SourceLayout, SourceShard, TensorMeta
from weight_sync.plan.plan import build_plan
from weight_sync.plan.proof import prove_coverage
from weight_sync.plan.scalar_proof import prove_by_element
from weight_sync.plan.tasks import DTYPES, MESH_GROUPS, Piece, Task, TaskTable
from weight_sync.plan.transfer_plan import TransferPlan

FEW = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
PIECE_KINDS = ("tensor", "start", "shape", "axes", "packed at")
TASK_KINDS = ("lost", "twice", "offset", "bytes", "dtype", "group", "param", "rank", "replica", "pieces of another")
PLAN_KINDS = ("order", "sender", "expected", "bound")
SIDE_KINDS = ("shard", "load", "stride", "fill", "derived")


def is_refused(prove, plan: TransferPlan, replicas, sources) -> str:
    """What a proof says against a plan; empty where it accepts it."""
    try:
        prove(plan, replicas, sources)
    except PlanError as error:
        return str(error) or "refused"
    return ""


def broken_piece(draw: st.DrawFn, kind: str, piece: Piece, others: list[Piece]) -> Piece:
    """A piece with one thing changed; by chance, the change may be none."""
    region, dims = piece.region, len(piece.axes)
    if kind == "tensor":
        return dataclasses.replace(piece, tensor=draw(st.sampled_from(others)).tensor)
    if kind == "packed at":
        return dataclasses.replace(piece, offset_elements=piece.offset_elements + draw(st.sampled_from([-1, 1, 2])))
    if kind == "axes":
        return dataclasses.replace(piece, axes=tuple(draw(st.permutations(range(dims)))))
    dim, step = draw(st.integers(0, dims - 1)), draw(st.sampled_from([-1, 1]))
    start, shape = list(region.start), list(region.shape)
    changed = start if kind == "start" else shape
    changed[dim] += step
    return dataclasses.replace(piece, region=Region(tuple(start), tuple(shape)))


def broken_task(draw: st.DrawFn, kind: str, task: Task, others: list[Task]) -> list[Task]:
    """What stands in a schedule instead of a task."""
    if kind in PIECE_KINDS:
        index = draw(st.integers(0, len(task.pieces) - 1))
        pieces = list(task.pieces)
        pieces[index] = broken_piece(draw, kind, pieces[index], [piece for one in others for piece in one.pieces])
        return [dataclasses.replace(task, pieces=tuple(pieces))]
    if kind in ("lost", "twice"):
        return [task] * (2 if kind == "twice" else 0)
    other, shift = draw(st.sampled_from(others)), draw(st.sampled_from([-4, -2, -1, 1, 2, 4]))
    changes = {
        "offset": {"dest_offset_bytes": task.dest_offset_bytes + shift},
        "bytes": {"num_bytes": max(0, task.num_bytes + shift)},
        "dtype": {"dtype": draw(st.sampled_from(DTYPES))},
        "group": {"mesh_group": draw(st.sampled_from(MESH_GROUPS))},
        "param": {"param": other.param},
        "rank": {"dest_rank": task.dest_rank + draw(st.sampled_from([0, 1]))},
        "replica": {"replica": task.replica + draw(st.sampled_from([0, 1]))},
        "pieces of another": {"pieces": other.pieces},
    }
    return [dataclasses.replace(task, **changes[kind])]


def broken_plan(draw: st.DrawFn, kind: str, plan: TransferPlan) -> TransferPlan:
    """A plan of which a rank's schedule, the expected bytes or the bound is another one."""
    rank = draw(st.sampled_from([rank for rank, table in plan.tasks.items() if table.num_rows]))
    tasks = list(plan.tasks[rank])
    if kind == "expected":
        where = draw(st.sampled_from(sorted(plan.expected)))
        params = dict(plan.expected[where])
        params[draw(st.sampled_from(sorted(params)))] += draw(st.sampled_from([-1, 1]))
        return dataclasses.replace(plan, expected={**plan.expected, where: params})
    if kind == "bound":
        return dataclasses.replace(plan, max_task_bytes=draw(st.integers(1, plan.max_task_bytes)))
    if kind == "sender":
        other = draw(st.sampled_from(sorted(plan.tasks)))
        moved = [dataclasses.replace(task, source_rank=other) for task in tasks]
        schedule = {rank: TaskTable.of(rank, [])}
        schedule |= {other: TaskTable.of(other, [*schedule.get(other, plan.tasks[other]), *moved])}
        return dataclasses.replace(plan, tasks={**plan.tasks, **schedule})
    if kind == "order":
        tasks = draw(st.permutations(tasks))
    else:
        index = draw(st.integers(0, len(tasks) - 1))
        tasks[index : index + 1] = broken_task(draw, kind, tasks[index], tasks)
    return dataclasses.replace(plan, tasks={**plan.tasks, rank: TaskTable.of(rank, tasks)})


def broken_sides(
    draw: st.DrawFn, kind: str, sources: tuple[SourceLayout, ...], replicas: tuple[tuple[DestLayout, ...], ...]
):
    """The layouts that a plan is held against, with one thing changed on a side."""
    if kind == "shard":
        rank = draw(st.sampled_from([number for number, source in enumerate(sources) if source.shards]))
        shards = list(sources[rank].shards)
        del shards[draw(st.integers(0, len(shards) - 1))]
        changed = dataclasses.replace(sources[rank], shards=tuple(shards))
        return (*sources[:rank], changed, *sources[rank + 1 :]), replicas
    layout = replicas[0][0]
    params, loads, fills = list(layout.params), list(layout.loads), layout.fills
    index = draw(st.integers(0, len(loads) - 1))
    if kind == "load":
        del loads[index]
    elif kind == "stride":
        loads[index] = dataclasses.replace(loads[index], stride=tuple(reversed(loads[index].stride)))
    elif kind == "fill":
        fills = fills[1:]
    else:
        number = draw(st.integers(0, len(params) - 1))
        params[number] = dataclasses.replace(params[number], post_load=PostLoad.derived)
    changed = DestLayout(layout.rank, tuple(params), tuple(loads), fills)
    return sources, ((changed, *replicas[0][1:]), *replicas[1:])


@FEW
@given(system=systems(), max_task_bytes=st.integers(4, 400))
def test_both_proofs_accept_what_build_plan_makes(system, max_task_bytes):
    sources, replicas = system
    plan = build_plan(sources, replicas, max_task_bytes=max_task_bytes)
    assert is_refused(prove_coverage, plan, replicas, sources) == ""
    assert is_refused(prove_by_element, plan, replicas, sources) == ""


@pytest.mark.parametrize("kind", [*PIECE_KINDS, *TASK_KINDS, *PLAN_KINDS, *SIDE_KINDS])
@FEW
@given(system=systems(), max_task_bytes=st.integers(4, 400), data=st.data())
def test_both_proofs_come_to_one_verdict_where_something_was_broken(kind, system, max_task_bytes, data):
    sources, replicas = system
    plan = build_plan(sources, replicas, max_task_bytes=max_task_bytes)
    if kind in SIDE_KINDS:
        sources, replicas = broken_sides(data.draw, kind, sources, replicas)
    else:
        plan = broken_plan(data.draw, kind, plan)
    by_columns = is_refused(prove_coverage, plan, replicas, sources)
    by_element = is_refused(prove_by_element, plan, replicas, sources)
    assert bool(by_columns) == bool(by_element), (by_columns, by_element)
    if kind in ("lost", "twice", "packed at", "expected", "load"):  # these leave nothing as it was
        assert by_columns


@pytest.mark.parametrize("change", [{"num_bytes": 0, "pieces": ()}, {"num_bytes": 0}])
def test_both_proofs_refuse_a_task_without_bytes(change):
    whole = Region((0,), (4,))
    sources, replicas = _one_vector(whole)
    plan = build_plan(sources, replicas, max_task_bytes=64)
    (task,) = plan.tasks[0]
    empty = dataclasses.replace(task, **change)
    wrong = dataclasses.replace(plan, tasks={0: TaskTable.of(0, [empty, task])})
    assert is_refused(prove_coverage, wrong, replicas, sources)
    assert is_refused(prove_by_element, wrong, replicas, sources)


def _one_vector(whole: Region):
    source = SourceLayout(0, (TensorMeta("t", whole.shape, "float32"),), (SourceShard("t", whole),))
    load = Load("t", whole, (0,), "p", 0, (1,))
    return (source,), ((DestLayout(0, (Param("p", whole.shape, "float32"),), (load,)),),)
