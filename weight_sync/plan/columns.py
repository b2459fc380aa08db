"""Loads and tasks as columns of integers: a plan for a cluster has millions of each, far too many for objects.

Owns: `LoadTable`, the columnar form of a layout's loads, and the few array operations that planner and proof share.
Does not own: what a load means (layout.py), tasks (tasks.py). Invariant: a table is a sequence of the objects that it
stands for, in their order, and equals any other sequence of them.

    row i:  tensor, param   numbers of names        start, shape, stride   one entry per dim of the *tensor*
            offset          element of the parameter                       (1, 0 beyond the tensor's own dims)
            axes            the walk order as one number: (0, 1) is digits 2, 0, 1 in base 8, lowest first
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from weight_sync.layout import Load, Region

Ints = NDArray[np.int64]
Narrow = NDArray[Any]
"""Integers of 64 or of 32 bits, where there are many."""
Flags = NDArray[np.bool_]

COLUMNS = ("tensor", "param", "start", "shape", "stride", "offset", "axes")
"""Of a LoadTable, beside the names."""


@dataclass(frozen=True, eq=False)
class LoadTable(Sequence[Load]):
    """Loads of one layout. `names` is shared by tensors and parameters, and by the tables of an engine's ranks."""

    names: tuple[str, ...]
    tensor: Ints
    param: Ints
    start: Ints
    shape: Ints
    stride: Ints
    offset: Ints
    axes: Ints

    @classmethod
    def of(cls, loads: Sequence[Load]) -> LoadTable:
        """The columns of any loads whose regions, axes and strides have one entry per dim; a table is itself."""
        if isinstance(loads, cls):
            return loads
        numbers: dict[str, int] = {}
        tensor = [numbers.setdefault(load.tensor, len(numbers)) for load in loads]
        param = [numbers.setdefault(load.param, len(numbers)) for load in loads]
        walks = [load.axes for load in loads]
        by_dim = [[load.stride[load.axes.index(dim)] for dim in range(len(load.axes))] for load in loads]
        return cls(
            tuple(numbers),
            np.array(tensor, np.int64),
            np.array(param, np.int64),
            padded([load.region.start for load in loads], 0),
            padded([load.region.shape for load in loads], 1),
            padded(by_dim, 0),
            np.array([load.offset for load in loads], np.int64),
            np.array([axes_code(walk) for walk in walks], np.int64),
        )

    def params_in(self, numbers: Mapping[str, int]) -> Ints:
        """The parameters in another numbering; -1 where that one lacks the name."""
        known = np.full(len(self.names), -1, np.int64)
        used = np.zeros(len(self.names), np.bool_)
        used[self.param] = True
        for number in np.flatnonzero(used).tolist():
            known[number] = numbers.get(self.names[number], -1)
        return known[self.param]

    def __len__(self) -> int:
        return len(self.tensor)

    @overload
    def __getitem__(self, index: int) -> Load: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Load]: ...
    def __getitem__(self, index: int | slice) -> Load | Sequence[Load]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        axes = axes_of(int(self.axes[index]))
        stride = self.stride[index].tolist()
        return Load(
            self.names[self.tensor[index]],
            region_of(self.start[index].tolist(), self.shape[index].tolist(), len(axes)),
            axes,
            self.names[self.param[index]],
            int(self.offset[index]),
            tuple(stride[axis] for axis in axes),
        )

    def __iter__(self) -> Iterator[Load]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LoadTable):
            return self is other or (len(self) == len(other) and self._has_the_loads_of(other))
        return isinstance(other, Sequence) and len(self) == len(other) and all(a == b for a, b in zip(self, other))

    def _has_the_loads_of(self, other: LoadTable) -> bool:
        """Column by column: at a reconnect a replica's layouts are compared, 140,000 loads a rank."""
        if not np.array_equal(self.axes, other.axes) or not np.array_equal(self.offset, other.offset):
            return False
        own, theirs = np.arange(len(self.names)), np.arange(len(other.names))
        if self.names != other.names:
            numbers: dict[str, int] = {}
            own, theirs = (
                np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
                for names in (self.names, other.names)
            )
        columns = (own[self.tensor], theirs[other.tensor]), (own[self.param], theirs[other.param])
        if not all(np.array_equal(mine, other_one) for mine, other_one in columns):
            return False
        dims = self.axes & 7
        width = int(dims.max(initial=0))
        is_used = np.arange(width) < dims[:, None]
        return all(
            np.array_equal(mine[:, :width][is_used], other_one[:, :width][is_used])
            for mine, other_one in ((self.start, other.start), (self.shape, other.shape), (self.stride, other.stride))
        )

    def __hash__(self) -> int:
        return hash((len(self), self.offset.tobytes()))


def padded(rows: Sequence[Sequence[int]], filler: int) -> Ints:
    """Rows of unequal length as one array, at least one column wide, filled up at the end."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    width = max(1, int(lengths.max(initial=1)))
    flat = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
    if len(flat) == width * len(rows):
        return flat.reshape(len(rows), width)
    found = np.full((len(rows), width), filler, np.int64)
    found[np.arange(width) < lengths[:, None]] = flat
    return found


def widened(rows: Ints, width: int, filler: int) -> Ints:
    """The same rows with more columns."""
    missing = width - rows.shape[1]
    return rows if missing <= 0 else np.pad(rows, ((0, 0), (0, missing)), constant_values=filler)


def region_of(start: list[int], shape: list[int], num_dims: int) -> Region:
    """A row's rectangle, without the columns beyond its dims."""
    return Region(tuple(start[:num_dims]), tuple(shape[:num_dims]))


@lru_cache
def axes_code(axes: tuple[int, ...]) -> int:
    """A walk order as one number."""
    code = 0
    for axis in reversed(axes):
        code = code * 8 + axis
    return code * 8 + len(axes)


@lru_cache
def axes_of(code: int) -> tuple[int, ...]:
    """Inverse of `axes_code`."""
    return tuple(code >> 3 * (position + 1) & 7 for position in range(code & 7))


def walk_orders(codes: Ints, width: int) -> Ints:
    """(n, width): the dims of each row, outermost first; dims beyond the tensor's own come last."""
    if not len(codes):
        return np.zeros((0, width), np.int64)
    distinct, which = np.unique(codes, return_inverse=True)
    orders = [[*axes_of(code), *range(code & 7, width)] for code in distinct.tolist()]
    return np.array(orders, np.int64)[which]


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """Rows repeated `counts` times: (row, position among its repeats). [2, 0, 1] -> [0, 0, 2], [0, 1, 0]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def starts_of(counts: Ints) -> Ints:
    """Where each row's part begins when parts of these lengths are laid one behind the other."""
    return np.cumsum(counts) - counts


def changes(*columns: NDArray[Any]) -> Flags:
    """Whether a row differs from the one before in any column; the first one does."""
    found = np.zeros(len(columns[0]), np.bool_)
    found[:1] = True
    for column in columns:
        found[1:] |= column[1:] != column[:-1]
    return found
