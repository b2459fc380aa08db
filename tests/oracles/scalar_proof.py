"""The proof of proof.py, task by task and element by element: slow, and short enough to read.

Owns: the rules that a plan must obey, each stated once in plain Python. Does not own: the proof that `build_plan` runs
on every plan (proof.py), which checks the same rules over columns because a cluster's plan has millions of tasks. This
file defines what that one proves: a property test compares their verdicts on right plans and on plans that were broken
on purpose.

The rules:
  1. a task goes to an engine rank that exists, into a parameter that it has and that is not derived;
  2. loads and fills have as many elements as their parameter;
  3. tasks and fills write every byte of a parameter exactly once;
  4. a task has the parameter's dtype, is not longer than the bound, and begins at an element;
  5. its pieces, packed one after the other, are its bytes; each is where one load of the same tensor puts it, and in
     the task's mesh group;
  6. the source rank holds each piece in one of its shards;
  7. the plan expects, per parameter, the bytes that its layout needs.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.layout import DTYPE_BYTES, DestLayout, Load, Param, PostLoad, SourceLayout
from slipstream.weight_sync.plan.transfer_plan import MESH_GROUPS, Piece, Task, TransferPlan, mesh_group_of


def prove_by_element(
    plan: TransferPlan, replicas: Sequence[Sequence[DestLayout]], sources: Sequence[SourceLayout]
) -> None:
    """Check a plan against the layouts that it was made for.

    Raises:
        PlanError: a rule is broken; names the rule's subject.
    """
    layouts = {(replica, layout.rank): layout for replica, ranks in enumerate(replicas) for layout in ranks}
    held = {source.rank: source.shards for source in sources}
    tasks = [task for table in plan.tasks.values() for task in table]
    for task in tasks:
        layout = layouts.get((task.replica, task.dest_rank))
        _require(layout is not None, "an engine rank that does not exist", task)
        assert layout is not None
        param = {param.name: param for param in layout.params}.get(task.param)
        _require(param is not None, "a parameter that the engine rank does not have", task)
        assert param is not None
        _check_task(task, param, layout.loads, plan.max_task_bytes)
        for piece in task.pieces:
            shards = [shard for shard in held.get(task.source_rank, ()) if shard.tensor == piece.tensor]
            is_held = any(shard.region.intersect(piece.region) == piece.region for shard in shards)
            _require(is_held, f"{piece} is not held by its source", task)
    for (replica, rank), layout in layouts.items():
        own = [task for task in tasks if (task.replica, task.dest_rank) == (replica, rank)]
        needed = {
            param.name: _check_parameter(param, layout, [task for task in own if task.param == param.name])
            for param in layout.params
            if param.post_load is not PostLoad.derived
        }
        expected = dict(plan.expected.get((replica, rank), {}))
        _require(expected == needed, f"replica {replica} rank {rank} expects other bytes", expected)


def _check_task(task: Task, param: Param, loads: Sequence[Load], max_task_bytes: int) -> None:
    """Rules 1, 4 and 5."""
    element_bytes = DTYPE_BYTES[param.dtype]
    _require(param.post_load is not PostLoad.derived, "a derived parameter is written", task)
    _require(task.dtype == param.dtype, f"the parameter is {param.dtype}", task)
    _require(0 < task.num_bytes <= max_task_bytes, f"the bound is {max_task_bytes} bytes", task)
    _require(task.dest_offset_bytes % element_bytes == 0, "it begins inside an element", task)
    packed = 0
    for piece in task.pieces:
        _require(piece.offset_elements == packed, f"{piece} is not packed at {packed}", task)
        _require(MESH_GROUPS[mesh_group_of(piece.tensor)] == task.mesh_group, f"{piece} is of another group", task)
        first = task.dest_offset_bytes // element_bytes + packed
        candidates = [load for load in loads if (load.tensor, load.param) == (piece.tensor, task.param)]
        is_loaded = any(
            all(_element_of(load, point) == first + index for index, point in enumerate(_walk(piece)))
            for load in candidates
            if len(load.axes) == len(piece.axes)
        )
        _require(is_loaded and min(piece.region.shape, default=1) > 0, f"no load puts {piece} there", task)
        packed += piece.region.num_elements
    _require(packed * element_bytes == task.num_bytes, f"its pieces have {packed} elements", task)


def _check_parameter(param: Param, layout: DestLayout, tasks: Sequence[Task]) -> int:
    """Rules 2 and 3. Returns the bytes that tasks write."""
    element_bytes = DTYPE_BYTES[param.dtype]
    fills = [fill for fill in layout.fills if fill.param == param.name]
    filled = sum(fill.num_elements for fill in fills)
    loaded = sum(load.region.num_elements for load in layout.loads if load.param == param.name)
    _require(loaded + filled == param.num_elements, f"loads bring {loaded} elements, fills {filled}", param)
    ranges = [(fill.offset * element_bytes, fill.num_elements * element_bytes) for fill in fills]
    ranges += [(task.dest_offset_bytes, task.num_bytes) for task in tasks]
    writes = [0] * param.num_bytes
    for start, size in ranges:
        _require(start >= 0 and start + size <= param.num_bytes, "it is written outside of its memory", param)
        for byte in range(start, start + size):
            writes[byte] += 1
    _require(all(count == 1 for count in writes), "a byte is not written exactly once", param)
    return param.num_bytes - filled * element_bytes


def _walk(piece: Piece) -> Iterator[tuple[int, ...]]:
    """The coordinates of a piece's elements, in the order in which a source packs them."""
    for steps in product(*(range(piece.region.shape[axis]) for axis in piece.axes)):
        point = list(piece.region.start)
        for axis, step in zip(piece.axes, steps, strict=True):
            point[axis] += step
        yield tuple(point)


def _element_of(load: Load, point: tuple[int, ...]) -> int | None:
    """The element of the parameter where a load puts a coordinate of its tensor; None outside its region."""
    inside = [a - b for a, b in zip(point, load.region.start, strict=True)]
    if any(not 0 <= step < size for step, size in zip(inside, load.region.shape, strict=True)):
        return None
    return load.offset + sum(inside[axis] * stride for axis, stride in zip(load.axes, load.stride, strict=True))


def _require(condition: bool, why: str, subject: object) -> None:
    if not condition:
        raise PlanError(f"{subject}: {why}")
