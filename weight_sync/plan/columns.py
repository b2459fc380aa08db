"""Loads and tasks as columns of integers: a plan for a cluster has millions of each, far too many for objects.

Owns: `LoadTable`, the columnar form of a layout's loads, and the few array operations that planner and proof share.
Does not own: what a load means (layout.py), tasks (transfer_plan.py). Invariant: a table is the sequence of the loads
that its rows describe, in their order, and equals any other sequence of the same loads.

    row i:  tensor, param   positions in `names`
            start, shape    the rectangle, one entry per dim of the tensor (0 and 1 in columns beyond its own dims)
            stride          elements of the parameter per step, one entry per dim of the *tensor*
            offset          first element of the parameter
            axes            the walk order as one number: (0, 1) is digits 2, 0, 1 in base 8, lowest first
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain
from typing import Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from slipstream.conf.json_files import is_sequence
from slipstream.weight_sync.layout import Load, Region

Ints = NDArray[np.int64]
Narrow = NDArray[np.signedinteger]
"""Integers in 64 or, where there are millions of them, in 32 bits."""
Flags = NDArray[np.bool_]
_Int = TypeVar("_Int", bound=np.signedinteger)
_Any = TypeVar("_Any", np.int64, np.bool_)


@dataclass(frozen=True)
class Columns:
    """A table: its fields that are arrays have an entry per row, the others are about all rows."""

    def columns(self) -> dict[str, Narrow]:
        """All columns by name, in the order of the fields, which is also that of digests and files."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}

    def take(self, index: Ints | slice) -> Self:
        """The rows at these positions; those of a slice in the same memory."""
        return replace(self, **{name: column[index] for name, column in self.columns().items()})

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in order; what is about all rows is the first one's."""
        tables = [part.columns() for part in parts]
        return replace(parts[0], **{name: np.concatenate([table[name] for table in tables]) for name in tables[0]})


@dataclass(frozen=True, eq=False)
class LoadTable(Columns, Sequence[Load]):
    """The loads of one layout. Tensors and parameters share `names`, and so do the tables of an engine's ranks.

    Not hashable: its content is arrays.
    """

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
        """Any loads as a table; a table is returned as it is. Regions, axes and strides have one entry per dim."""
        if isinstance(loads, cls):
            return loads
        numbers: dict[str, int] = {}
        tensor = [numbers.setdefault(load.tensor, len(numbers)) for load in loads]
        param = [numbers.setdefault(load.param, len(numbers)) for load in loads]
        by_dim = [[load.stride[load.axes.index(dim)] for dim in range(len(load.axes))] for load in loads]
        return cls(
            tuple(numbers),
            np.array(tensor, np.int64),
            np.array(param, np.int64),
            padded([load.region.start for load in loads], 0),
            padded([load.region.shape for load in loads], 1),
            padded(by_dim, 0),
            np.array([load.offset for load in loads], np.int64),
            np.array([axes_code(load.axes) for load in loads], np.int64),
        )

    def params_in(self, numbers: Mapping[str, int]) -> Ints:
        """Each load's parameter in another numbering; -1 where that numbering lacks the name."""
        known = np.full(len(self.names), -1, np.int64)
        used = np.zeros(len(self.names), np.bool_)
        used[self.param] = True
        for number in as_list(np.flatnonzero(used)):
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
        stride = as_list(self.stride[index])
        return Load(
            self.names[int(self.tensor[index])],
            region_of(as_list(self.start[index]), as_list(self.shape[index]), len(axes)),
            axes,
            self.names[int(self.param[index])],
            int(self.offset[index]),
            tuple(stride[axis] for axis in axes),
        )

    def __iter__(self) -> Iterator[Load]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LoadTable):
            return self is other or (len(self) == len(other) and self._has_the_loads_of(other))
        if not is_sequence(other):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other))

    def _has_the_loads_of(self, other: LoadTable) -> bool:
        """Compare column by column: a reconnect compares a replica's layouts, 140,000 loads per rank."""
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
        dims = num_dims(self.axes)
        width = int(dims.max(initial=0))
        is_used = np.arange(width) < dims[:, None]
        return all(
            np.array_equal(mine[:, :width][is_used], other_one[:, :width][is_used])
            for mine, other_one in ((self.start, other.start), (self.shape, other.shape), (self.stride, other.stride))
        )


def as_list(column: Narrow) -> list[int]:
    """A column as Python's integers."""
    return column.tolist()


def first_true(flags: Flags) -> list[int]:
    """The position of the first true entry; empty where all are false."""
    return np.flatnonzero(flags)[:1].tolist()


def folded(fold: np.ufunc, rows: NDArray[_Any]) -> NDArray[_Any]:
    """Each row's product, sum, ... over its few dims: column after column, because numpy's own reduction over so short
    an axis takes five times as long."""
    found = rows[:, 0].copy()
    for column in range(1, rows.shape[1]):
        fold(found, rows[:, column], out=found)
    return found


def padded(rows: Sequence[Sequence[int]], filler: int) -> Ints:
    """Rows of unequal length as one array, at least one column wide; short rows end with `filler`."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    width = max(1, int(lengths.max(initial=1)))
    flat = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
    if len(flat) == width * len(rows):
        return flat.reshape(len(rows), width)
    found = np.full((len(rows), width), filler, np.int64)
    found[np.arange(width) < lengths[:, None]] = flat
    return found


def widened(rows: NDArray[_Int], width: int, filler: int) -> NDArray[_Int]:
    """The same rows, at least `width` columns wide; columns that are added hold `filler`."""
    missing = width - rows.shape[1]
    return rows if missing <= 0 else np.pad(rows, ((0, 0), (0, missing)), constant_values=filler)


def region_of(start: list[int], shape: list[int], num_dims: int) -> Region:
    """A row's rectangle, without the columns beyond its dims."""
    return Region(tuple(start[:num_dims]), tuple(shape[:num_dims]))


@lru_cache
def axes_code(axes: tuple[int, ...]) -> int:
    """A walk order as one number: the number of dims in the lowest octal digit, the dims above it, outermost first."""
    code = 0
    for axis in reversed(axes):
        code = code * 8 + axis
    return code * 8 + len(axes)


@lru_cache
def axes_of(code: int) -> tuple[int, ...]:
    """Inverse of `axes_code`."""
    return tuple(code >> 3 * (position + 1) & 7 for position in range(code & 7))


def num_dims(codes: Narrow) -> Ints:
    """How many dims each walk order has, which is how many the tensor has."""
    return (codes & 7).astype(np.int64, copy=False)


def walk_orders(codes: Narrow, width: int) -> Ints:
    """(n, width): the dims of each row, outermost first; dims beyond the tensor's own come last."""
    if not len(codes):
        return np.zeros((0, width), np.int64)
    distinct, which = np.unique(codes, return_inverse=True)
    orders = [[*axes_of(code), *range(len(axes_of(code)), width)] for code in as_list(distinct)]
    return np.array(orders, np.int64)[which]


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """Repeat row i counts[i] times: (row, position among its repeats). [2, 0, 1] -> [0, 0, 2], [0, 1, 0]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def starts_of(counts: Ints) -> Ints:
    """Where each part begins when parts of these lengths are laid one behind the other."""
    return np.cumsum(counts) - counts


def changes(*columns: Ints) -> Flags:
    """Whether a row differs from the one before in any column; true for the first row."""
    found = np.zeros(len(columns[0]), np.bool_)
    found[:1] = True
    for column in columns:
        found[1:] |= column[1:] != column[:-1]
    return found
