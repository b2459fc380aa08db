"""From strides back to rectangles: which part of a checkpoint tensor a view is. Integers only, no torch.

Invariant: together, the rectangles map exactly the elements that the copy maps; a view for which that is impossible
raises.

Example, a (6, 4) tensor seen as 2 heads of 3 rows, copied into rows 0..5 of a (6, 4) parameter:
dims (2, 3, 4), strides (12, 4, 1) on both sides, are one rectangle, Region((0, 0), (6, 4)).
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from slipstream.weight_sync.layout import Region

MAX_RECTANGLES = 4096
"""The most rectangles that one copy may consist of; a loader that scatters more is not copying shards."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """`region` of the tensor, walked in the order of `axes`, lands at `offset` with `stride` (one per walked dim)."""

    region: Region
    axes: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dim of both views: `size` entries, `source` elements apart in the tensor, `dest` apart in the parameter."""

    size: int
    source: int
    dest: int


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array. Example: (2, 3, 4) -> (12, 4, 1)."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


@functools.lru_cache(maxsize=1024)  # layers, experts and slots are copied alike, each to a place of its own
def rectangles(
    tensor_shape: tuple[int, ...],
    view_shape: tuple[int, ...],
    source_stride: tuple[int, ...],
    source_offset: int,
    dest_stride: tuple[int, ...],
) -> tuple[Rectangle, ...]:
    """The copy of a view of a row-major tensor into a view that starts at 0, as rectangles of the tensor.

    Raises ValueError if the view repeats elements, or runs across the tensor's rows; the message says which.
    """
    dims = [_Dim(*dim) for dim in zip(view_shape, source_stride, dest_stride, strict=True)]
    found: list[Rectangle] = []
    for rectangle in _read(tensor_shape, [dim for dim in dims if dim.size > 1], source_offset, 0):
        found.append(rectangle)
        if len(found) > MAX_RECTANGLES:
            raise ValueError(f"it falls into more than {MAX_RECTANGLES} rectangles")
    return tuple(found)


def _read(shape: Sequence[int], dims: list[_Dim], source_offset: int, dest_offset: int) -> Iterator[Rectangle]:
    """One rectangle if no tensor dim is walked with jumps on either side; or else one per entry of a dim that jumps."""
    strides = row_major(shape)
    pieces = _split_at_rows(shape, strides, dims)
    extent, step = [1] * len(shape), [0] * len(shape)
    for axis, dim in pieces:  # innermost first inside each axis
        stride = dim.source // strides[axis]
        if stride == extent[axis] and (extent[axis] == 1 or dim.dest == step[axis] * extent[axis]):
            if extent[axis] == 1:
                step[axis] = dim.dest
            extent[axis] *= dim.size
            continue
        rest = [other for _, other in pieces if other is not dim]
        for index in range(dim.size):
            yield from _read(shape, rest, source_offset + index * dim.source, dest_offset + index * dim.dest)
        return
    start: list[int] = []
    for size, stride in zip(shape, strides):
        start.append(source_offset // stride % size if size else 0)
    if any(first + count > size for first, count, size in zip(start, extent, shape)):
        raise ValueError("it runs across the rows of the tensor")
    yield _rectangle(start, extent, step, dest_offset)


def _split_at_rows(shape: Sequence[int], strides: Sequence[int], dims: list[_Dim]) -> list[tuple[int, _Dim]]:
    """The tensor dim of every dim of the view, of which those that cover several are cut. Smallest step first."""
    found: list[tuple[int, _Dim]] = []
    todo = list(dims)
    while todo:
        dim = todo.pop()
        if dim.source == 0:
            raise ValueError("it repeats elements (an expanded view)")
        axis = next(i for i, stride in enumerate(strides) if shape[i] > 1 and stride <= dim.source)
        jump, remainder = divmod(dim.source, strides[axis])
        if remainder:
            raise ValueError("it steps across the rows of the tensor")
        if (dim.size - 1) * jump < shape[axis]:
            found.append((axis, dim))
            continue
        inner = shape[axis] // jump
        if shape[axis] % jump or inner < 2 or dim.size % inner:
            raise ValueError("it runs across the rows of the tensor")
        todo.append(_Dim(dim.size // inner, dim.source * inner, dim.dest * inner))
        todo.append(_Dim(inner, dim.source, dim.dest))
    return sorted((item for item in found if item[1].size > 1), key=lambda item: item[1].source)


def _rectangle(start: list[int], extent: list[int], step: list[int], dest_offset: int) -> Rectangle:
    """Order the walked dims by their step in the parameter; keep the tensor's order if it is already such an order."""
    walked = [axis for axis, size in enumerate(extent) if size > 1]
    by_step = sorted(walked, key=lambda axis: -step[axis])
    thin = [axis for axis, size in enumerate(extent) if size == 1]
    axes = list(range(len(extent))) if by_step == walked else thin + by_step
    stride = [step[axis] for axis in axes]
    for position in range(len(axes) - 1, -1, -1):  # a dim of one entry steps over all that is inside of it
        if extent[axes[position]] == 1:
            inside = position + 1
            stride[position] = stride[inside] * extent[axes[inside]] if inside < len(axes) else 1
    return Rectangle(Region(tuple(start), tuple(extent)), tuple(axes), dest_offset, tuple(stride))
