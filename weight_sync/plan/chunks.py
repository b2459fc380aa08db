"""From the loads of one engine rank to chunks: contiguous ranges of its parameters, and who could send each.

All loads of a rank at once, in columns. Does not own: which holder sends a chunk (schedule.py), or whether loads and
fills add up (proof.py).

    loads --cells--> parts --strides--> runs --sort, cut by rows, merge neighbours of the same holders--> chunks

Invariant: a chunk is contiguous in the parameter, its pieces pack to exactly its bytes, and each of its holders has
all of it. Example: rows of a (64, 32) slice that land 64 elements apart are 64 runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.layout import DTYPE_BYTES, DestLayout, Load, Param, PostLoad, TensorMeta
from slipstream.weight_sync.plan.columns import (
    Columns,
    Flags,
    Ints,
    LoadTable,
    as_list,
    axes_code,
    axes_of,
    changes,
    first_true,
    folded,
    num_dims,
    spread,
    walk_orders,
    widened,
)
from slipstream.weight_sync.plan.holders import NOBODY, Holders, check_inside
from slipstream.weight_sync.plan.transfer_plan import PieceColumns

MAX_RUNS = 65536
"""Most contiguous runs that one load may be cut into; more means a transposed layout and tiny writes."""


@dataclass(frozen=True, slots=True)
class Chunks(Columns):
    """Contiguous ranges of parameters, in the order of the parameters and their bytes; offsets in elements."""

    param: Ints
    """Position in its layout."""
    offset: Ints
    num_elements: Ints
    group: Ints
    """Position in MESH_GROUPS."""
    layer: Ints
    holders: Ints
    """Number of the set of ranks that hold every piece."""
    num_pieces: Ints
    pieces: PieceColumns
    """The pieces of all chunks, in order."""


@dataclass(frozen=True, slots=True)
class _Runs(Columns):
    """Parts of loads that are contiguous in the parameter and lie in one source cell."""

    param: Ints
    offset: Ints
    tensor: Ints
    start: Ints
    shape: Ints
    axes: Ints
    holders: Ints


def check_layout(layout: DestLayout, holders: Holders, who: str) -> None:
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
    suspects = _suspects(layout.loads, holders, layout.params)
    metas = {meta.name: meta for meta in holders.metas} if suspects else {}
    for load in suspects:
        _check_load(load, metas, params, who)
    for fill in layout.fills:
        num_elements = params[fill.param].num_elements if fill.param in params else 0
        if fill.offset < 0 or fill.num_elements < 1 or fill.offset + fill.num_elements > num_elements:
            raise PlanError(f"{who}: fill {fill} does not lie inside a parameter")


def _suspects(loads: Sequence[Load], holders: Holders, params: Sequence[Param]) -> Sequence[Load]:
    """The loads that must be looked at one by one: all, or those of a table that do not fit."""
    if not isinstance(loads, LoadTable):
        return loads
    tensor = holders.tensors_of(loads)
    param = loads.params_in({param.name: number for number, param in enumerate(params)})
    width = max(loads.shape.shape[1], holders.shapes.shape[1])
    bounds = widened(holders.shapes, width, 1)[tensor]
    sizes = np.array([param.num_elements for param in params], np.int64)
    last = loads.offset + folded(np.add, (loads.shape - 1) * loads.stride)
    fits = (tensor >= 0) & (param >= 0) & (loads.offset >= 0) & (last < sizes[param])
    fits &= holders.num_dims[tensor] == num_dims(loads.axes)
    fits &= folded(np.logical_and, (loads.start >= 0) & (loads.shape > 0) & (loads.stride >= 0))
    fits &= folded(np.logical_and, widened(loads.start + loads.shape, width, 1) <= bounds)
    return [loads[index] for index in as_list(np.flatnonzero(~fits))]


def _check_load(load: Load, metas: Mapping[str, TensorMeta], params: Mapping[str, Param], who: str) -> None:
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


def cut_layout(layout: DestLayout, holders: Holders, who: str, *, max_task_bytes: int, max_shared_bytes: int) -> Chunks:
    """Cut everything that one engine rank must receive into chunks.

    Args:
        max_task_bytes: bound on every chunk.
        max_shared_bytes: finer bound on a chunk with several holders, so that they can share the work evenly.

    Raises:
        PlanError: nobody holds a part, a row is too scattered, or one element is larger than the bound.
    """
    sizes = np.array([DTYPE_BYTES[param.dtype] for param in layout.params], np.int64)
    wanted = np.array([param.post_load is not PostLoad.derived for param in layout.params], np.bool_)
    for index in first_true(wanted & (sizes > max_task_bytes)):
        raise PlanError(
            f"{who}: one element of {layout.params[index].name} has {sizes[index]} bytes, more than max_task_bytes "
            f"{max_task_bytes}"
        )
    runs = _runs(layout, holders, wanted, who)
    runs = runs.take(np.lexsort((runs.offset, runs.param)))
    limit = (max_task_bytes // sizes)[runs.param]
    shared = np.minimum(limit, (max_shared_bytes // sizes)[runs.param])
    limit = np.where(holders.set_sizes[runs.holders] > 1, shared, limit)
    runs, limit = _cut_by_rows(runs, limit)
    return _merge(runs, limit, holders)


def _runs(layout: DestLayout, holders: Holders, wanted: Flags, who: str) -> _Runs:
    """Cut the loads along the source cells, and each part into runs that are contiguous in the parameter."""
    table = LoadTable.of(layout.loads)
    width: int = holders.shapes.shape[1]
    param = table.params_in({param.name: number for number, param in enumerate(layout.params)})
    rows = np.flatnonzero(wanted[param])
    tensor = holders.tensors_of(table)[rows]
    found = (table.start, 0), (table.shape, 1), (table.stride, 0)  # a table may have columns that none of these needs
    start, shape, stride = (widened(column[rows, :width], width, filler) for column, filler in found)
    axes = _outermost_first(table.axes[rows], shape, stride)

    parts = holders.cover(tensor, start, shape)
    for index in first_true(parts.holders == NOBODY):
        load = table[int(rows[parts.owner[index]])]
        dims = len(load.axes)
        raise PlanError(
            f"{who}: {load.param} needs {load.tensor} start {as_list(parts.start[index, :dims])} shape "
            f"{as_list(parts.shape[index, :dims])}, and no source rank holds it"
        )
    owner = parts.owner
    offset = table.offset[rows][owner] + folded(np.add, (parts.start - start[owner]) * stride[owner])
    runs = _Runs(param[rows][owner], offset, tensor[owner], parts.start, parts.shape, axes[owner], parts.holders)

    order = walk_orders(runs.axes, width)
    walked: Ints = np.take_along_axis(runs.shape, order, axis=1)
    outer = _num_outer_dims(walked, np.take_along_axis(stride[owner], order, axis=1))
    counts: Ints = np.where(np.less(np.arange(width), outer.reshape(-1, 1)), walked, 1)
    num_runs = folded(np.multiply, counts)
    for index in first_true(np.bincount(owner, num_runs, minlength=len(rows)) > MAX_RUNS):
        load = table[int(rows[index])]
        raise PlanError(
            f"{who}: {load.tensor} lands in {load.param} with stride {list(load.stride)}, which cuts it into more "
            f"than {MAX_RUNS} runs; shard the source along the parameter's rows, or keep the parameter untransposed"
        )
    if not outer.any():
        return runs
    part, rest = spread(num_runs)
    runs, row, stride = runs.take(part), np.arange(len(part)), stride[owner][part]
    for position in range(width - 1, -1, -1):
        rest, index = np.divmod(rest, counts[part, position])
        dim, is_walked = order[part, position], position < outer[part]
        runs.start[row, dim] += index
        runs.offset[:] += index * stride[row, dim]
        runs.shape[row, dim] = np.where(is_walked, 1, runs.shape[row, dim])
    return runs


def _outermost_first(axes: Ints, shape: Ints, stride: Ints) -> Ints:
    """The walk orders as the parameter's memory sees them; a loader may list its dims in another order."""
    order = walk_orders(axes, shape.shape[1])
    sizes, steps = np.take_along_axis(shape, order, axis=1), np.take_along_axis(stride, order, axis=1)
    # A dim of one entry takes no step: let it seem as far as the one outside of it.
    for position in range(1, sizes.shape[1]):
        steps[:, position] = np.where(sizes[:, position] > 1, steps[:, position], steps[:, position - 1])
    first = np.where(sizes[:, 0] > 1, steps[:, 0], np.iinfo(np.int64).max)
    for position in range(1, sizes.shape[1]):
        alone = (sizes[:, :position] == 1).all(axis=1) & (sizes[:, position] == 1)
        steps[:, position] = np.where(alone, first, steps[:, position])
    steps[:, 0] = first
    found = axes.copy()
    for row in as_list(np.flatnonzero((np.diff(steps, axis=1) > 0).any(axis=1))):
        dims = as_list(order[row, : len(axes_of(int(axes[row])))])
        found[row] = axes_code(tuple(sorted(dims, key=lambda dim: -int(stride[row, dim]))))
    return found


def _num_outer_dims(shape: Ints, stride: Ints) -> Ints:
    """How many outer dims must be walked one by one until the rest is contiguous; dims in walk order."""
    found = np.zeros(len(shape), np.int64)
    expected = np.ones(len(shape), np.int64)
    for position in range(shape.shape[1] - 1, -1, -1):
        jumps = (found == 0) & (shape[:, position] != 1) & (stride[:, position] != expected)
        found[jumps] = position + 1
        expected *= shape[:, position]
    return found


def _cut_by_rows(runs: _Runs, limit: Ints) -> tuple[_Runs, Ints]:
    """Cut what has more elements than its limit along its outermost dim, and again where one row is too long."""
    while (long := (elements := folded(np.multiply, runs.shape)) > limit).any():
        order = walk_orders(runs.axes, runs.shape.shape[1])
        sizes = np.take_along_axis(runs.shape, order, axis=1)
        dim = np.take_along_axis(order, (sizes > 1).argmax(axis=1)[:, None], axis=1)[:, 0]
        num_rows = runs.shape[np.arange(len(dim)), dim]
        row_elements = elements // num_rows
        step = np.where(long, np.maximum(limit // row_elements, 1), num_rows)
        owner, within = spread(-(-num_rows // step))
        runs, limit, dim, row = runs.take(owner), limit[owner], dim[owner], np.arange(len(owner))
        first = within * step[owner]
        runs.start[row, dim] += first
        runs.shape[row, dim] = np.minimum(step[owner], num_rows[owner] - first)
        runs.offset[:] += first * row_elements[owner]
    return runs, limit


def _merge(runs: _Runs, limit: Ints, holders: Holders) -> Chunks:
    """Join neighbouring runs of the same holders and mesh group up to the limit."""
    length = folded(np.multiply, runs.shape)
    group = holders.groups[runs.tensor]
    begins = changes(runs.param, runs.holders, group)
    begins[1:] |= runs.offset[1:] != runs.offset[:-1] + length[:-1]
    stretches = np.flatnonzero(begins)
    ends = np.append(stretches[1:], len(begins))
    before: Ints = np.append(0, np.cumsum(length))
    too_long = before[ends] - before[stretches] > limit[stretches]
    for first, last in zip(as_list(stretches[too_long]), as_list(ends[too_long])):
        bound, head = int(limit[first]), first
        while (head := int(before.searchsorted(int(before[head]) + bound, side="right")) - 1) < last:
            begins[head] = True
    heads = np.flatnonzero(begins)
    num_pieces = np.diff(np.append(heads, len(begins)))
    at = before[:-1] - np.repeat(before[heads], num_pieces)
    return Chunks(
        runs.param[heads],
        runs.offset[heads],
        np.add.reduceat(length, heads) if len(heads) else heads,
        group[heads],
        holders.layers[runs.tensor[heads]],
        runs.holders[heads],
        num_pieces,
        PieceColumns(
            holders.names,
            runs.tensor.astype(np.int32),
            runs.start.astype(np.int32),
            runs.shape.astype(np.int32),
            runs.axes.astype(np.int32),
            at,
        ),
    )
