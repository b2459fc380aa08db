"""The proof over columns and the proof element by element come to one verdict, on right plans and on broken ones."""

import dataclasses

import pytest
from cases.joined_plan import Joined, is_refused
from cases.layouts import systems
from cases.plan_tables import table_of
from cases.plans import copied
from hypothesis import HealthCheck, given, settings, strategies as st
from oracles.scalar_proof import prove_by_element

from slipstream.weight_sync.layout import (
    DestLayout,
    Fill,
    Load,
    Param,
    PostLoad,
    Region,
    SourceLayout,
    SourceShard,
)
from slipstream.weight_sync.plan.plan import build_plan
from slipstream.weight_sync.plan.proof import prove_coverage
from slipstream.weight_sync.plan.transfer_plan import DTYPES, MESH_GROUPS, Piece, Task, TransferPlan

FEW = settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
PIECE_KINDS = ("tensor", "start", "shape", "axes", "packed at")
TASK_KINDS = ("lost", "twice", "offset", "bytes", "dtype", "group", "param", "rank", "replica", "pieces of another")
PLAN_KINDS = ("order", "sender", "expected", "bound")
SIDE_KINDS = ("shard", "load", "stride", "fill", "derived")


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
        schedule = {rank: table_of(rank, [])}
        schedule |= {other: table_of(other, [*schedule.get(other, plan.tasks[other]), *moved])}
        return dataclasses.replace(plan, tasks={**plan.tasks, **schedule})
    if kind == "order":
        tasks = draw(st.permutations(tasks))
    else:
        index = draw(st.integers(0, len(tasks) - 1))
        tasks[index : index + 1] = broken_task(draw, kind, tasks[index], tasks)
    return dataclasses.replace(plan, tasks={**plan.tasks, rank: table_of(rank, tasks)})


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
    sources, layout = copied({"p": (4,)})
    replicas = [[layout]]
    plan = build_plan(sources, replicas, max_task_bytes=64)
    (task,) = plan.tasks[0]
    empty = dataclasses.replace(task, **change)
    wrong = dataclasses.replace(plan, tasks={0: table_of(0, [empty, task])})
    assert is_refused(prove_coverage, wrong, replicas, sources)
    assert is_refused(prove_by_element, wrong, replicas, sources)


def test_both_proofs_refuse_any_task_for_an_engine_rank_that_loads_nothing():
    sources, layout = copied({"p": (4,)})
    filled = dataclasses.replace(layout, loads=(), fills=(Fill("p", 0, 4),))
    plan = build_plan(sources, [[layout]], max_task_bytes=64)
    (task,) = plan.tasks[0]
    for tasks in ([], [task], [dataclasses.replace(task, num_bytes=0)]):
        given = dataclasses.replace(plan, tasks={0: table_of(0, tasks)}, expected={(0, 0): {"p": 0}})
        for prove in (prove_coverage, prove_by_element):
            assert bool(is_refused(prove, given, [[filled]], sources)) == bool(tasks), (prove, tasks)


def rows_of(*rows: int) -> list[Piece]:
    """Rows of p, as pieces: 0 is t's first, 1 is u's second."""
    return [Piece("tu"[row], Region((row, 0), (1, 4)), (0, 1), 4 * place) for place, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (lambda j: [j.task("p", *rows_of(0, 1))], ""),
        (lambda j: [j.task("p", *rows_of(0), num_bytes=16)], "p: tasks and fills end at byte 16 of 32"),
        (lambda j: [j.task("p", *rows_of(1), at=16, num_bytes=16)],
         "p: nobody writes bytes 0..15 (between the start and u)"),
        (
            lambda j: [j.task("p", *rows_of(0, 1)), j.task("p", *rows_of(1), at=16, num_bytes=16)],
            "p: written twice: bytes 16..31 (between t and u)",
        ),
        (
            lambda j: [j.task("p", *rows_of(0, 1), num_bytes=16), j.task("p", *rows_of(1), at=16, num_bytes=16)],
            "its pieces pack to 32 bytes, it says 16",
        ),
        (lambda j: [j.task("p", *rows_of(0), num_bytes=32)], "its pieces pack to 16 bytes, it says 32"),
        (lambda j: [j.task("p", num_bytes=32)], "its pieces pack to 0 bytes, it says 32"),
        (lambda j: [j.task("p", rows_of(0)[0], dataclasses.replace(rows_of(1)[0], offset_elements=3))],
         "u is packed at 3, not at 4"),
        (lambda j: [dataclasses.replace(j.task("p", *rows_of(0, 1)), dtype="int32")], "32 bytes of int32"),
        (lambda j: [dataclasses.replace(j.task("p", *rows_of(0, 1)), mesh_group="experts")], "sent in mesh group"),
        (lambda j: [j.task("p", Piece("t", Region((0,), (1,)), (0,), 0), Piece("t", Region((0, 1), (1, 3)), (0, 1), 1),
                           rows_of(0, 1)[1])], "no load puts t start [0] shape [1]"),
        (lambda j: [j.task("p", Piece("t", Region((0, 0, 0), (1, 4, 1)), (0, 1, 2), 0), rows_of(0, 1)[1])],
         "no load puts t start [0, 0, 0]"),
        # its second row is another load's; of it the second row alone is a load's
        (lambda j: [j.task("p", Piece("t", Region((0, 0), (2, 4)), (0, 1), 0))],
         "no load puts t start [0, 0] shape [2, 4]"),
        (lambda j: [j.task("p", *rows_of(0), num_bytes=16),
                    j.task("p", Piece("u", Region((0, 0), (1, 4)), (0, 1), 0), at=16, num_bytes=16)],
         "no load puts u start [0, 0]"),
        (lambda j: [j.task("r", *rows_of(0, 1))], "tasks write parameters that it does not have: r"),
        (lambda j: [dataclasses.replace(j.task("p", *rows_of(0, 1)), replica=1)], "goes to replica 1 rank 0, unknown"),
        (lambda j: [dataclasses.replace(j.task("p", *rows_of(0, 1)), dest_rank=1)], "replica 0 rank 1, unknown"),
    ],
)  # fmt: skip
def test_each_thing_that_is_wrong_with_a_task_is_named(first, message: str) -> None:
    joined = Joined()
    others = [task for task in joined.right if task.param == "q"]
    for tasks in ([*first(joined), *others], [*others, *first(joined)]):
        said = joined.refused(tasks)
        assert message in said if message else said == ""


def test_dense_tensors_are_sent_as_dense_and_experts_as_experts() -> None:
    sources, layout = copied(dict.fromkeys(("layers.0.mlp.experts.0.w", "layers.0.mlp.shared.w"), (4,)))
    layouts = [[layout]]
    plan = build_plan(sources, layouts, max_task_bytes=64)
    for number, task in enumerate(plan.tasks[0]):
        tasks = list(plan.tasks[0])
        (other,) = set(MESH_GROUPS) - {task.mesh_group}
        tasks[number] = dataclasses.replace(task, mesh_group=other)
        wrong = dataclasses.replace(plan, tasks={0: table_of(0, tasks)})
        assert f"{task.param} is sent in mesh group {other}" in is_refused(prove_coverage, wrong, layouts, sources)
        assert is_refused(prove_by_element, wrong, layouts, sources)


def test_a_derived_parameter_may_have_fills_and_no_task_and_whose_task_it_is_is_said() -> None:
    """The first source's row is for two replicas, the second's for one of them."""
    (source,), layout = copied({"p": (4,)})
    sources = (source, dataclasses.replace(source, rank=1, shards=()))
    derived = Param("d", (4,), "float32", PostLoad.derived)
    filled = Param("e", (2,), "float32")
    fills = (Fill("d", 2, 2), Fill("e", 0, 1), Fill("e", 1, 1))
    layout = dataclasses.replace(layout, params=(*layout.params, derived, filled), fills=fills)
    plan = build_plan(sources, [[layout]] * 2, max_task_bytes=64)
    assert is_refused(prove_by_element, plan, [[layout]] * 2, sources) == ""
    (task, _) = plan.tasks[0]
    task = dataclasses.replace(task, source_rank=1, replica=1, param="d")
    strange = dataclasses.replace(plan, tasks={**plan.tasks, 1: table_of(1, [dataclasses.replace(task, param="x")])})
    said = is_refused(prove_coverage, strange, [[layout]] * 2, sources)
    assert said == "replica 1 rank 0: tasks write parameters that it does not have: x"
    wrong = dataclasses.replace(plan, tasks={**plan.tasks, 1: table_of(1, [task])})
    said = is_refused(prove_coverage, wrong, [[layout]] * 2, sources)
    assert "replica 1 rank 0: d is derived, and Task(" in said and "source_rank=1, replica=1," in said


def test_tasks_come_in_their_turn_whichever_replicas_have_them() -> None:
    one, other = Joined().right
    tasks = [dataclasses.replace(task, replica=replica, dest_offset_bytes=at)
             for task, replica, at in ((one, 0, 0), (one, 1, 0), (other, 1, 0), (other, 0, 32))]  # fmt: skip
    assert list(table_of(0, tasks)) == tasks


def test_a_task_longer_than_the_bound_is_refused_and_one_as_long_is_not() -> None:
    joined = Joined()
    tasks = [joined.task("p", *rows_of(0, 1)), *(task for task in joined.right if task.param == "q")]
    assert joined.refused(tasks, max_task_bytes=32) == ""
    assert "the bound 31 bytes" in joined.refused(tasks, max_task_bytes=31)


def test_every_rank_must_hold_all_that_it_packs() -> None:
    """A shard that lacks a row at either end, of one tensor or of the other."""
    joined = Joined()
    for place, tensor in enumerate("tu"):
        for region, wanting in ((((0, 0), (2, 4)), ""), (((1, 0), (1, 4)), "pq"), (((0, 0), (1, 4)), "qp"),
                                (((0, 1), (2, 3)), "pp"), (((0, 0), (2, 3)), "pp")):  # fmt: skip
            is_right = not wanting
            (source,) = joined.sources
            shards = [shard for shard in source.shards if shard.tensor != tensor]
            held = dataclasses.replace(source, shards=(*shards, SourceShard(tensor, Region(*region))))
            said = is_refused(prove_coverage, joined.plan, [[joined.layout]], (held,))
            assert (said == "") == is_right, said
            assert bool(is_refused(prove_by_element, joined.plan, [[joined.layout]], (held,))) != is_right
            assert is_right or (f"is to send {tensor} start" in said and f"to {wanting[place]}, and does not" in said)
    assert "does not hold it" in is_refused(prove_coverage, joined.plan, [[joined.layout]], ())


def test_a_row_that_names_a_replica_twice_or_one_that_is_not_there_is_refused() -> None:
    joined = Joined()
    plan = build_plan(joined.sources, [[joined.layout], [joined.layout]], max_task_bytes=64)
    table = plan.tasks[0]
    twice = dataclasses.replace(table, replica_sets=[(0, 1, 1) for _ in table.replica_sets])
    said = is_refused(
        prove_coverage, dataclasses.replace(plan, tasks={0: twice}), [[joined.layout]] * 2, joined.sources
    )
    assert "written twice: a row names replicas (0, 1, 1)" in said
    once = dataclasses.replace(table, replica_sets=[(0,) for _ in table.replica_sets])
    said = is_refused(prove_coverage, dataclasses.replace(plan, tasks={0: once}), [[joined.layout]] * 2, joined.sources)
    assert said.startswith("replica 1 rank 0") and "tasks and fills end at byte 0 of 32" in said
    for strangers in ((0, 2), (2, 0), (0, 1, 2)):
        wrong = dataclasses.replace(table, replica_sets=[strangers for _ in table.replica_sets])
        wrong_plan = dataclasses.replace(plan, tasks={0: wrong})
        said = is_refused(prove_coverage, wrong_plan, [[joined.layout]] * 2, joined.sources)
        assert "goes to replica 2 rank 0, unknown" in said, strangers


@pytest.mark.parametrize("change", [-4, 4])
def test_bytes_that_are_expected_but_not_needed_are_refused(change: int) -> None:
    joined = Joined()
    expected = {(0, 0): {"p": 32 + change, "q": 32}}
    plan = dataclasses.replace(joined.plan, expected=expected)
    said = is_refused(prove_coverage, plan, [[joined.layout]], joined.sources)
    assert said.startswith("replica 0 rank 0: the expected bytes per parameter differ")
    plan = dataclasses.replace(joined.plan, expected={})
    assert is_refused(prove_coverage, plan, [[joined.layout]], joined.sources)


@pytest.mark.parametrize(("stride", "axes"), [((3, 1), (0, 1)), ((2, 1), (1, 0))])
def test_a_piece_that_is_walked_in_another_order_than_its_elements_lie_in_is_refused(stride, axes) -> None:
    """A matrix, and one whose load turns it: the piece is right but for its order, whatever order the load names."""
    sources, layout = copied({"t": (2, 3)})
    layout = dataclasses.replace(layout, loads=(dataclasses.replace(layout.loads[0], axes=axes, stride=stride),))
    plan = build_plan(sources, [[layout]], max_task_bytes=64)
    (task,) = plan.tasks[0]
    for order in ((0, 1), (1, 0)):
        turned = dataclasses.replace(task, pieces=(Piece("t", Region((0, 0), (2, 3)), order, 0),))
        wrong = dataclasses.replace(plan, tasks={0: table_of(0, [turned])})
        for prove in (prove_coverage, prove_by_element):
            assert (is_refused(prove, wrong, [[layout]], sources) == "") == (order == axes), (prove, order)


def test_a_piece_whose_rows_do_not_lie_one_after_the_other_is_refused() -> None:
    """Two matrices side by side. The first is written as if its second row followed its first, where the other's is."""
    whole, (upper, lower) = Region((0, 0), (2, 2)), (Region((row, 0), (1, 2)) for row in range(2))
    sources, _ = copied(dict.fromkeys("tu", (2, 2)))
    loads = tuple(Load(name, whole, (0, 1), "p", offset, (4, 1)) for name, offset in (("t", 0), ("u", 2)))
    layout = DestLayout(0, (Param("p", (2, 4), "float32"),), loads)
    plan = build_plan(sources, [[layout]], max_task_bytes=64)
    task = next(iter(plan.tasks[0]))
    rows = [Piece("t", lower, (0, 1), 4), Piece("u", lower, (0, 1), 6)]
    for first, is_right in (
        ([Piece("t", upper, (0, 1), 0), Piece("u", upper, (0, 1), 2)], True),
        ([Piece("t", whole, (0, 1), 0)], False),
    ):
        given = dataclasses.replace(task, pieces=(*first, *rows), dest_offset_bytes=0, num_bytes=32)
        given = dataclasses.replace(plan, tasks={0: table_of(0, [given])})
        for prove in (prove_coverage, prove_by_element):
            assert (is_refused(prove, given, [[layout]], sources) == "") == is_right, prove


@pytest.mark.parametrize(("param", "tensor"), [("t", "u"), ("u", "t")])
def test_a_piece_of_a_tensor_that_another_parameter_loads_in_the_same_way_is_refused(param: str, tensor: str) -> None:
    sources, layout = copied(dict.fromkeys("tu", (2, 3)))
    plan = build_plan(sources, [[layout]], max_task_bytes=64)
    piece = Piece(tensor, Region((0, 0), (2, 3)), (0, 1), 0)
    tasks = [dataclasses.replace(one, pieces=(piece,)) if one.param == param else one for one in plan.tasks[0]]
    wrong = dataclasses.replace(plan, tasks={0: table_of(0, tasks)})
    assert f"no load puts {tensor}" in is_refused(prove_coverage, wrong, [[layout]], sources)
    assert "no load puts" in is_refused(prove_by_element, wrong, [[layout]], sources)


def test_rows_of_a_tensor_that_change_places_are_refused() -> None:
    """Each lies inside the load, and where the other one belongs."""
    sources, layout = copied({"t": (2, 4)})
    plan = build_plan(sources, [[layout]], max_task_bytes=16)
    first, second = plan.tasks[0]
    swapped = [dataclasses.replace(one, pieces=other.pieces) for one, other in ((first, second), (second, first))]
    wrong = dataclasses.replace(plan, tasks={0: table_of(0, swapped)})
    for prove in (prove_coverage, prove_by_element):
        assert "no load puts" in is_refused(prove, wrong, [[layout]], sources), prove
