"""The proof that a plan is right, apart from the code that makes plans.

Owns: checking, from the tasks alone, that every byte of every parameter that is not derived and not a declared fill
is written exactly once, and with the element that the engine's own loader put there. Does not own: how tasks come
about; it shares no code with that.

The argument, per parameter of every engine rank:
  1. loads and fills have as many elements as the parameter, and tasks and fills, sorted by offset, tile it without
     gap or overlap: so every byte is written once;
  2. a piece lies inside the region of a load of the same tensor, and the two affine maps (tensor coordinates ->
     element of the parameter) agree on it: so every byte is the right one. By 1 and 2 the loads do not overlap either;
  3. the source rank holds every piece that it is to pack.

Callers: plan.py, on every plan that it builds; tests, on plans that were broken on purpose.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from weight_sync.errors import PlanError
from weight_sync.layout import DTYPE_BYTES, DestLayout, Load, Param, PostLoad, Region, SourceLayout

if TYPE_CHECKING:
    from weight_sync.chunks import Piece
    from weight_sync.plan import Task, TransferPlan


def prove_coverage(
    plan: TransferPlan, replicas: Sequence[Sequence[DestLayout]], sources: Sequence[SourceLayout] | None = None
) -> None:
    """Check a plan against the layouts that it was made for.

    Args:
        sources: when given, also check that every source rank holds what it is to send.

    Raises:
        PlanError: at the first thing that is wrong; names the replica, rank, parameter, offset and tensor.
    """
    wanted = {(replica, layout.rank): layout for replica, layouts in enumerate(replicas) for layout in layouts}
    tasks: dict[tuple[int, int], dict[str, list[Task]]] = {where: {} for where in wanted}
    for rank, rank_tasks in plan.tasks.items():
        for task in rank_tasks:
            if task.source_rank != rank:
                raise PlanError(f"source rank {rank} is given a task of source rank {task.source_rank}: {task}")
            params = tasks.get((task.replica, task.dest_rank))
            if params is None:
                raise PlanError(
                    f"a task of source rank {rank} goes to replica {task.replica} rank {task.dest_rank}, unknown"
                )
            params.setdefault(task.param, []).append(task)
    proven: dict[DestLayout, set[_Facts]] = {}
    for where, layout in wanted.items():
        _Proof(plan, where, layout, proven.setdefault(layout, set())).run(tasks[where])
    if sources is not None:
        _prove_held(plan, sources)


_Facts = tuple[object, ...]
"""All that the proof of one parameter depends on, besides its rank's layout; pieces by identity."""


class _Proof:
    """The proof for one engine rank. `proven` keeps what was proven of equal ranks of other replicas."""

    def __init__(self, plan: TransferPlan, where: tuple[int, int], layout: DestLayout, proven: set[_Facts]) -> None:
        self.plan = plan
        self.where = where
        self.layout = layout
        self.proven = proven
        self.name = f"replica {where[0]} rank {where[1]}"

    def run(self, tasks: dict[str, list[Task]]) -> None:
        """Check every parameter, and that nothing else is written."""
        loads: dict[str, list[Load]] = {}
        fills: dict[str, list[tuple[int, int]]] = {}
        for load in self.layout.loads:
            loads.setdefault(load.param, []).append(load)
        for fill in self.layout.fills:
            fills.setdefault(fill.param, []).append((fill.offset, fill.num_elements))
        expected: dict[str, int] = {}
        for param in self.layout.params:
            found = tasks.pop(param.name, [])
            if param.post_load is PostLoad.derived:
                if found:
                    raise PlanError(f"{self.name}: {param.name} is derived, and {found[0]} writes it")
                continue
            filled = fills.get(param.name, [])
            found.sort(key=lambda task: task.dest_offset_bytes)
            facts: _Facts = (
                param.name,
                *((t.dest_offset_bytes, t.num_bytes, t.dtype, t.mesh_group, id(t.pieces)) for t in found),
            )
            if facts not in self.proven:
                self.check_tiling(param, loads.get(param.name, []), filled, found)
                self.check_pieces(param, loads.get(param.name, []), found)
                self.proven.add(facts)
            expected[param.name] = param.num_bytes - sum(n for _, n in filled) * DTYPE_BYTES[param.dtype]
        if tasks:
            raise PlanError(f"{self.name}: tasks write parameters that it does not have: {', '.join(sorted(tasks))}")
        if dict(self.plan.expected.get(self.where, {})) != expected:
            raise PlanError(f"{self.name}: the expected bytes per parameter differ from what its layout needs")

    def check_tiling(self, param: Param, loads: list[Load], fills: list[tuple[int, int]], tasks: list[Task]) -> None:
        """Step 1: counts add up, ranges tile."""
        size = DTYPE_BYTES[param.dtype]
        loaded = sum(load.region.num_elements for load in loads)
        filled = sum(count for _, count in fills)
        if loaded + filled != param.num_elements:
            raise PlanError(
                f"{self.name}: {param.name} has {param.num_elements} elements, its loads bring {loaded} "
                f"and its fills {filled}; tensors: {', '.join(sorted({load.tensor for load in loads})) or 'none'}"
            )
        ranges = [(offset * size, count * size, "a fill") for offset, count in fills]
        ranges += [(task.dest_offset_bytes, task.num_bytes, task.pieces[0].tensor) for task in tasks]
        end, previous = 0, "the start"
        for offset, num_bytes, what in sorted(ranges):
            if offset != end:
                kind = "nobody writes" if offset > end else "written twice:"
                raise PlanError(
                    f"{self.name}: {param.name}: {kind} bytes {min(offset, end)}..{max(offset, end) - 1} "
                    f"(between {previous} and {what})"
                )
            end, previous = offset + num_bytes, what
        if end != param.num_bytes:
            raise PlanError(f"{self.name}: {param.name}: tasks and fills end at byte {end} of {param.num_bytes}")

    def check_pieces(self, param: Param, loads: list[Load], tasks: list[Task]) -> None:
        """Step 2: every piece is where a load puts it."""
        size = DTYPE_BYTES[param.dtype]
        by_tensor: dict[str, list[Load]] = {}
        for load in sorted(loads, key=lambda load: load.offset):
            by_tensor.setdefault(load.tensor, []).append(load)
        for task in tasks:
            if task.dtype != param.dtype or task.num_bytes > self.plan.max_task_bytes or task.dest_offset_bytes % size:
                raise PlanError(
                    f"{self.called(task)}: {task.num_bytes} bytes of {task.dtype}, the parameter is {param.dtype}, the "
                    f"bound {self.plan.max_task_bytes} bytes"
                )
            packed = 0
            for piece in task.pieces:
                if piece.offset_elements != packed:
                    raise PlanError(
                        f"{self.called(task)}: {piece.tensor} is packed at {piece.offset_elements}, not at {packed}"
                    )
                if task.mesh_group != ("experts" if ".experts." in piece.tensor else "dense"):
                    raise PlanError(f"{self.called(task)}: {piece.tensor} is sent in mesh group {task.mesh_group}")
                at = task.dest_offset_bytes // size + packed
                if not _is_loaded_at(piece, at, by_tensor.get(piece.tensor, [])):
                    raise PlanError(
                        f"{self.called(task)}: no load puts {piece.tensor} start {list(piece.region.start)} shape "
                        f"{list(piece.region.shape)} axes {list(piece.axes)} at element {at}"
                    )
                packed += piece.region.num_elements
            if packed * size != task.num_bytes:
                raise PlanError(
                    f"{self.called(task)}: its pieces pack to {packed * size} bytes, it says {task.num_bytes}"
                )

    def called(self, task: Task) -> str:
        """How messages call a task."""
        return f"{self.name}: {task.param}: task at byte {task.dest_offset_bytes} of source rank {task.source_rank}"


def _is_loaded_at(piece: Piece, at: int, loads: list[Load]) -> bool:
    """Whether one of the loads (of this tensor, sorted by offset) puts this piece at element `at`, packed."""
    # A load begins at its lowest element, so only loads up to `at` qualify; nearly always the last one does.
    last = bisect_right(loads, at, key=lambda load: load.offset)
    return any(_agree(piece, at, load) for load in reversed(loads[max(last - 8, 0) : last])) or any(
        _agree(piece, at, load) for load in loads[: max(last - 8, 0)]
    )


def _agree(piece: Piece, at: int, load: Load) -> bool:
    """Whether the piece lies inside the load's region and both map it to the same elements of the parameter."""
    if not _is_inside(piece.region, load.region):
        return False
    stride_of = dict(zip(load.axes, load.stride))
    start = load.offset + sum(
        (mine - first) * stride_of[dim] for dim, (mine, first) in enumerate(zip(piece.region.start, load.region.start))
    )
    if start != at or sorted(piece.axes) != sorted(load.axes):
        return False
    shape = [piece.region.shape[axis] for axis in piece.axes]
    return all(
        size == 1 or prod(shape[position + 1 :]) == stride_of[axis]
        for position, (axis, size) in enumerate(zip(piece.axes, shape))
    )


def _is_inside(inner: Region, outer: Region) -> bool:
    """Whether a rectangle lies in another one of the same tensor."""
    return len(inner.start) == len(outer.start) and all(
        low <= first and first + size <= low + bound
        for first, size, low, bound in zip(inner.start, inner.shape, outer.start, outer.shape)
    )


def _prove_held(plan: TransferPlan, sources: Sequence[SourceLayout]) -> None:
    """Step 3: every source holds what it packs."""
    held: dict[tuple[int, str], list[Region]] = {}
    for source in sources:
        for shard in source.shards:
            held.setdefault((source.rank, shard.tensor), []).append(shard.region)
    for rank, tasks in plan.tasks.items():
        previous: tuple[Piece, ...] = ()
        for task in tasks:
            if task.pieces is previous:  # the same block, to another replica
                continue
            previous = task.pieces
            for piece in task.pieces:
                if not any(_is_inside(piece.region, region) for region in held.get((rank, piece.tensor), ())):
                    raise PlanError(
                        f"source rank {rank} is to send {piece.tensor} start {list(piece.region.start)} shape "
                        f"{list(piece.region.shape)} to {task.param}, and does not hold it"
                    )
