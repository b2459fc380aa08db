"""From the loads of one engine rank to chunks: contiguous ranges of its parameters, and who could send each.

Owns: cutting a load along the source cells and into contiguous runs of the parameter; merging neighbours; cutting
what is too long by rows. Does not own: which holder sends a chunk (plan.py), or whether loads and fills add up
(coverage.py).

    load --cells--> parts --strides--> runs --sort, cut by rows, merge neighbours of the same holders--> chunks

Invariant: a chunk is contiguous in the parameter, its pieces pack to exactly its bytes, and each of its holders has
all of it.

Callers: plan.py. Example of a column-split load: rows of a (64, 32) slice that land 64 elements apart are 64 runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from weight_sync.errors import PlanError
from weight_sync.holders import Holders, check_inside
from weight_sync.layout import DTYPE_BYTES, DestLayout, Load, Param, PostLoad, Region, TensorMeta

MAX_RUNS = 65536
"""Most contiguous runs that one load may be cut into; more means a transposed layout and tiny writes."""

_INTEGER_COMPONENT = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a checkpoint tensor inside a task: permuted by `axes`, row-major, from `offset_elements` on.

    Example: rows 0..31 of an up projection behind 32 x 64 elements of gate:
    Piece("model.layers.0.mlp.experts.3.up_proj.weight", Region((0, 0), (32, 64)), (0, 1), 2048).
    """

    tensor: str
    region: Region
    axes: tuple[int, ...]
    offset_elements: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous range of a parameter, `offset` and `num_elements` in elements of the parameter."""

    param_index: int
    """Position of the parameter in its layout."""
    offset: int
    num_elements: int
    is_expert: bool
    layer: int
    pieces: tuple[Piece, ...]
    holders: tuple[int, ...]
    """The ranks that hold every piece, ascending, at least one."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A part of a load that is contiguous in the parameter and lies in one source cell."""

    offset: int
    tensor: str
    region: Region
    axes: tuple[int, ...]
    holders: tuple[int, ...]


def is_expert(tensor: str) -> bool:
    """Whether a checkpoint tensor belongs to the routed experts' mesh group."""
    return ".experts." in tensor


def layer_of(tensor: str) -> int:
    """The layer number in a checkpoint name: its first integer component; -1 (sent first) when there is none."""
    match = _INTEGER_COMPONENT.search(tensor)
    return int(match.group(1)) if match else -1


def check_layout(layout: DestLayout, metas: Mapping[str, TensorMeta], who: str) -> None:
    """Raise PlanError unless every load and fill of the layout names real things and stays inside them."""
    params = {param.name: param for param in layout.params}
    if len(params) != len(layout.params):
        raise PlanError(f"{who} lists a parameter name twice")
    for param in layout.params:
        if param.dtype not in DTYPE_BYTES:
            raise PlanError(f"{who}: {param.name} has dtype {param.dtype}; known are {', '.join(DTYPE_BYTES)}")
        if param.num_elements == 0:
            raise PlanError(
                f"{who}: {param.name} is empty (shape {list(param.shape)}); its engine hides the real weight"
            )
    for load in layout.loads:
        where = f"{who}, load of {load.tensor} into {load.param}"
        meta, param = metas.get(load.tensor), params.get(load.param)
        if meta is None or param is None:
            raise PlanError(f"{where}: no such {'tensor in the checkpoint' if meta is None else 'parameter'}")
        check_inside(load.region, meta, where)
        if sorted(load.axes) != list(range(len(meta.shape))) or len(load.stride) != len(load.axes):
            raise PlanError(f"{where}: axes {load.axes} and stride {load.stride} do not order {len(meta.shape)} dims")
        shape = [load.region.shape[axis] for axis in load.axes]
        last = load.offset + sum((size - 1) * stride for size, stride in zip(shape, load.stride))
        if 0 in shape or min(load.stride, default=0) < 0 or load.offset < 0 or last >= param.num_elements:
            raise PlanError(
                f"{where}: offset {load.offset}, shape {shape}, stride {list(load.stride)} leaves the parameter's "
                f"{param.num_elements} elements"
            )
    for fill in layout.fills:
        param = params.get(fill.param)
        if (
            param is None
            or fill.offset < 0
            or fill.num_elements < 1
            or fill.offset + fill.num_elements > param.num_elements
        ):
            raise PlanError(f"{who}: fill {fill} does not lie inside a parameter")


def cut_layout(
    layout: DestLayout, holders: Mapping[str, Holders], who: str, *, max_task_bytes: int, max_shared_bytes: int
) -> list[Chunk]:
    """Cut everything that one engine rank must receive into chunks, in the order of its parameters and their bytes.

    Args:
        max_task_bytes: bound on every chunk.
        max_shared_bytes: finer bound on a chunk with several holders, so that they can share the work evenly.

    Raises:
        PlanError: nobody holds a part, a row is too scattered, or one element is larger than the bound.
    """
    loads: dict[str, list[Load]] = {}
    for load in layout.loads:
        loads.setdefault(load.param, []).append(load)
    chunks: list[Chunk] = []
    for index, param in enumerate(layout.params):
        if param.post_load is PostLoad.derived:
            continue
        size = DTYPE_BYTES[param.dtype]
        if size > max_task_bytes:
            raise PlanError(
                f"{who}: one element of {param.name} has {size} bytes, more than max_task_bytes {max_task_bytes}"
            )
        runs = [run for load in loads.get(param.name, ()) for run in _runs(load, holders[load.tensor], who)]
        runs.sort(key=lambda run: run.offset)
        chunks.extend(_merge(index, param, runs, max_task_bytes // size, max(1, max_shared_bytes // size)))
    return chunks


def _runs(load: Load, holders: Holders, who: str) -> Iterator[_Run]:
    """Cut one load along the source cells, and each part into runs that are contiguous in the parameter."""
    # Outermost first as the parameter's memory sees it; a loader may list its dims in another order.
    order = sorted(zip(load.stride, load.axes), key=lambda dim: -dim[0]) if _is_unordered(load) else None
    axes = tuple(axis for _, axis in order) if order else load.axes
    stride = tuple(step for step, _ in order) if order else load.stride
    num_runs = 0
    for part, ranks in holders.cover(load.region):
        if not ranks:
            raise PlanError(
                f"{who}: {load.param} needs {load.tensor} start {list(part.start)} shape {list(part.shape)}, "
                "and no source rank holds it"
            )
        offset = load.offset + sum(
            (part.start[axis] - load.region.start[axis]) * step for axis, step in zip(axes, stride)
        )
        outer = _num_outer_dims([part.shape[axis] for axis in axes], stride)
        num_runs += prod(part.shape[axis] for axis in axes[:outer])
        if num_runs > MAX_RUNS:
            raise PlanError(
                f"{who}: {load.tensor} lands in {load.param} with stride {list(load.stride)}, which cuts it into more "
                f"than {MAX_RUNS} runs; shard the source along the parameter's rows, or keep the parameter untransposed"
            )
        if outer == 0:
            yield _Run(offset, load.tensor, part, axes, ranks)
            continue
        for index in product(*(range(part.shape[axis]) for axis in axes[:outer])):
            start, shape, at = list(part.start), list(part.shape), offset
            for step, axis, i in zip(stride, axes, index):
                start[axis] += i
                shape[axis] = 1
                at += i * step
            yield _Run(at, load.tensor, Region(tuple(start), tuple(shape)), axes, ranks)


def _is_unordered(load: Load) -> bool:
    """Whether a dim of the load that has several entries steps further than a dim outside of it."""
    steps = [step for step, axis in zip(load.stride, load.axes) if load.region.shape[axis] > 1]
    return any(a < b for a, b in pairwise(steps))


def _num_outer_dims(shape: list[int], stride: tuple[int, ...]) -> int:
    """How many outer dims must be walked one by one until the rest is contiguous."""
    expected = 1
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] == 1:
            continue
        if stride[dim] != expected:
            return dim + 1
        expected *= shape[dim]
    return 0


def _merge(index: int, param: Param, runs: Iterable[_Run], limit: int, shared_limit: int) -> Iterator[Chunk]:
    """Join neighbouring runs of the same holders and mesh group up to the limit, cutting longer ones by rows."""
    pieces: list[Piece] = []
    offset = length = bound = 0
    holders: tuple[int, ...] = ()
    expert = False

    def chunk() -> Chunk:
        return Chunk(index, offset, length, expert, layer_of(pieces[0].tensor), tuple(pieces), holders)

    for run in runs:
        run_expert = is_expert(run.tensor)
        run_bound = min(limit, shared_limit) if len(run.holders) > 1 else limit
        at = run.offset
        for region in cut_by_rows(run.region, run.axes, run_bound):
            num_elements = region.num_elements
            joins = (
                pieces
                and at == offset + length
                and run.holders == holders
                and run_expert == expert
                and length + num_elements <= bound
            )
            if not joins:
                if pieces:
                    yield chunk()
                pieces, offset, length = [], at, 0
                holders, expert, bound = run.holders, run_expert, run_bound
            pieces.append(Piece(run.tensor, region, run.axes, length))
            length += num_elements
            at += num_elements
    if pieces:
        yield chunk()


def cut_by_rows(region: Region, axes: tuple[int, ...], limit: int) -> Iterator[Region]:
    """Cut a region into parts of at most `limit` elements that follow each other in its packed order."""
    if region.num_elements <= limit:
        yield region
        return
    axis = next(axis for axis in axes if region.shape[axis] > 1)
    num_rows = region.shape[axis]
    rows = limit // (region.num_elements // num_rows)
    for first in range(0, num_rows, max(rows, 1)):
        start, shape = list(region.start), list(region.shape)
        start[axis] += first
        shape[axis] = min(max(rows, 1), num_rows - first)
        part = Region(tuple(start), tuple(shape))
        if rows:
            yield part
        else:  # one row is longer than the limit
            yield from cut_by_rows(part, axes, limit)
