"""Each piece of a task is one that a load puts there: the proof over columns and that by element refuse all others."""

import dataclasses

import pytest
from cases.joined_plan import Joined, is_refused
from cases.plan_tables import table_of
from oracles.scalar_proof import prove_by_element

from slipstream.weight_sync.layout import DestLayout, Load, Param, Region, SourceLayout, SourceShard, TensorMeta
from slipstream.weight_sync.plan.plan import build_plan
from slipstream.weight_sync.plan.proof import prove_coverage
from slipstream.weight_sync.plan.transfer_plan import Piece


def test_a_piece_that_reaches_beyond_its_load_is_refused() -> None:
    """Offsets and counts are right, and the piece begins where a load does; its second row is another load's."""
    joined = Joined()
    assert joined.refused(joined.right) == ""
    others = [task for task in joined.right if task.param == "q"]
    beyond = joined.task("p", Piece("t", Region((0, 0), (2, 4)), (0, 1), 0))
    assert "no load puts t start [0, 0] shape [2, 4]" in joined.refused([beyond, *others])
    others = [task for task in joined.right if task.param == "p"]
    beyond = joined.task("q", Piece("u", Region((0, 0), (2, 4)), (0, 1), 0))
    assert "no load puts u start [0, 0] shape [2, 4]" in joined.refused([*others, beyond])


def test_a_piece_that_begins_before_its_load_is_refused() -> None:
    """The second row alone is a load's."""
    joined = Joined()
    others = [task for task in joined.right if task.param == "q"]
    first = joined.task("p", Piece("t", Region((0, 0), (1, 4)), (0, 1), 0), num_bytes=16)
    before = joined.task("p", Piece("u", Region((0, 0), (1, 4)), (0, 1), 0), at=16, num_bytes=16)
    assert "no load puts u start [0, 0]" in joined.refused([first, before, *others])


@pytest.mark.parametrize(("stride", "axes"), [((3, 1), (0, 1)), ((2, 1), (1, 0))])
def test_a_piece_that_is_walked_in_another_order_than_its_elements_lie_in_is_refused(stride, axes) -> None:
    """A matrix, and one whose load turns it: the piece is right but for its order, whatever order the load names."""
    whole = Region((0, 0), (2, 3))
    sources = (SourceLayout(0, (TensorMeta("t", (2, 3), "float32"),), (SourceShard("t", whole),)),)
    layout = DestLayout(0, (Param("p", (2, 3), "float32"),), (Load("t", whole, axes, "p", 0, stride),))
    plan = build_plan(sources, [[layout]], max_task_bytes=64)
    (task,) = plan.tasks[0]
    for order in ((0, 1), (1, 0)):
        turned = dataclasses.replace(task, pieces=(Piece("t", whole, order, 0),))
        wrong = dataclasses.replace(plan, tasks={0: table_of(0, [turned])})
        for prove in (prove_coverage, prove_by_element):
            assert (is_refused(prove, wrong, [[layout]], sources) == "") == (order == axes), (prove, order)


def test_a_piece_whose_rows_do_not_lie_one_after_the_other_is_refused() -> None:
    """Two matrices side by side. The first is written as if its second row followed its first, where the other's is."""
    whole, (upper, lower) = Region((0, 0), (2, 2)), (Region((row, 0), (1, 2)) for row in range(2))
    metas = tuple(TensorMeta(name, (2, 2), "float32") for name in "tu")
    sources = (SourceLayout(0, metas, tuple(SourceShard(name, whole) for name in "tu")),)
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


@pytest.mark.parametrize(("param", "tensor"), [("p", "u"), ("q", "t")])
def test_a_piece_of_a_tensor_that_another_parameter_loads_in_the_same_way_is_refused(param: str, tensor: str) -> None:
    whole = Region((0, 0), (2, 3))
    metas = tuple(TensorMeta(name, (2, 3), "float32") for name in "tu")
    sources = (SourceLayout(0, metas, tuple(SourceShard(name, whole) for name in "tu")),)
    loads = tuple(Load(name, whole, (0, 1), into, 0, (3, 1)) for name, into in zip("tu", "pq", strict=True))
    layout = DestLayout(0, tuple(Param(name, (2, 3), "float32") for name in "pq"), loads)
    plan = build_plan(sources, [[layout]], max_task_bytes=64)
    tasks = [
        dataclasses.replace(task, pieces=(Piece(tensor, whole, (0, 1), 0),)) if task.param == param else task
        for task in plan.tasks[0]
    ]
    wrong = dataclasses.replace(plan, tasks={0: table_of(0, tasks)})
    assert f"no load puts {tensor}" in is_refused(prove_coverage, wrong, [[layout]], sources)
    assert "no load puts" in is_refused(prove_by_element, wrong, [[layout]], sources)
