"""Checks that a loader wrote every element of every parameter exactly once. Integers and numpy, no torch.

Invariant: the loads and fills that are returned tile every parameter that is not derived.

    fill 0 over a padded block, then copy into a part of it   ->   the load, and fills for what the copy left
    copy, then fill over it                                   ->   RecordError: the loader wipes what it loaded
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.weight_sync.errors import RecordError
from slipstream.weight_sync.layout import Fill, Load, Param, PostLoad

_Ranges = NDArray[np.int64]
"""(n, 2): half-open element ranges, sorted, disjoint."""


@dataclass(frozen=True, slots=True)
class Filled:
    """One write of a loader that is no load: a constant, into a strided block of a parameter."""

    param: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    value: float


def account(params: Sequence[Param], written: Sequence[Load | Filled]) -> tuple[tuple[Load, ...], tuple[Fill, ...]]:
    """Check that the writes, in the order in which they were made, give every element of what is not derived one value;
    else raise RecordError, which names all unwritten parameters."""
    by_param: dict[str, list[Load | Filled]] = {param.name: [] for param in params}
    for write in written:
        by_param[write.param].append(write)
    unwritten = [p.name for p in params if not by_param[p.name] and p.post_load is not PostLoad.derived]
    if unwritten:
        raise RecordError(
            f"the loader never wrote {len(unwritten)} parameter(s): {', '.join(unwritten)}; a checkpoint tensor is "
            "missing, or the parameter is derived and must be declared so"
        )
    fills: list[Fill] = []
    for param in params:
        if by_param[param.name]:
            fills.extend(_account_one(param, by_param[param.name]))
    return tuple(write for write in written if isinstance(write, Load)), tuple(fills)


def _account_one(param: Param, writes: list[Load | Filled]) -> list[Fill]:
    """The fills that remain of one parameter."""
    ranges = [_ranges(write) for write in writes]
    is_load = [isinstance(write, Load) for write in writes]
    none: _Ranges = np.empty((0, 2), dtype=np.int64)
    loaded = np.concatenate([none, *itertools.compress(ranges, is_load)])
    when = np.repeat(np.arange(len(writes)), [len(of) if one else 0 for of, one in zip(ranges, is_load, strict=True)])
    order = np.argsort(loaded[:, 0], kind="stable")
    loaded, when = loaded[order], when[order]
    _check_once(param, loaded, writes)
    taken = loaded
    fills: list[tuple[int, int, float]] = []
    for number, write in reversed(list(enumerate(writes))):  # the last fill of an element counts
        if isinstance(write, Load):
            continue
        filled = _sorted(ranges[number])
        wiped = _intersects(loaded[when < number], filled)
        if wiped is not None:
            raise RecordError(f"{param.name}: the loader fills element {wiped} with a constant after loading it")
        rest = _subtract(filled, taken)
        fills.extend((int(a), int(b), write.value) for a, b in rest)
        taken = _sorted(np.concatenate([taken, rest]))
    gaps = _subtract(np.array([[0, param.num_elements]], dtype=np.int64), taken)
    if len(gaps):
        raise RecordError(
            f"{param.name} of shape {list(param.shape)}: the loader leaves {int((gaps[:, 1] - gaps[:, 0]).sum())} of "
            f"{param.num_elements} elements as they were, the first at {int(gaps[0, 0])}"
        )
    return [Fill(param.name, start, stop - start, value) for start, stop, value in sorted(fills)]


def _ranges(write: Load | Filled) -> _Ranges:
    """The contiguous element ranges of a strided block, unsorted."""
    shape = [write.region.shape[axis] for axis in write.axes] if isinstance(write, Load) else write.shape
    dims = sorted(((step, size) for step, size in zip(write.stride, shape) if size > 1), reverse=True)
    length = 1
    while dims and dims[-1][0] == length:
        length *= dims.pop()[1]
    starts = np.array([write.offset], dtype=np.int64)
    for step, size in dims:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
    return np.stack([starts, starts + length], axis=1)


def _sorted(ranges: _Ranges) -> _Ranges:
    return ranges[np.argsort(ranges[:, 0], kind="stable")]


def _check_once(param: Param, ranges: _Ranges, writes: list[Load | Filled]) -> None:
    """Raise RecordError if two loads write the same element."""
    twice = np.flatnonzero(ranges[1:, 0] < ranges[:-1, 1])
    if len(twice):
        at = int(ranges[twice[0] + 1, 0])
        loads = [(write.tensor, _ranges(write)) for write in writes if isinstance(write, Load)]
        names = [name for name, parts in loads if ((parts[:, 0] <= at) & (at < parts[:, 1])).any()]
        raise RecordError(
            f"{param.name}: element {at} is loaded more than once, from {', '.join(dict.fromkeys(names))}"
        )


def _intersects(first: _Ranges, second: _Ranges) -> int | None:
    """The first element that is in both; None if there is none."""
    if not len(first) or not len(second):
        return None
    rest = _subtract(first, second)
    if (rest[:, 1] - rest[:, 0]).sum() == (first[:, 1] - first[:, 0]).sum():
        return None
    return next(int(max(a, c)) for a, b in first for c, d in second if max(a, c) < min(b, d))


def _subtract(ranges: _Ranges, taken: _Ranges) -> _Ranges:
    """`ranges` without `taken`; both sorted and disjoint."""
    if not len(taken) or not len(ranges):
        return ranges
    # Every taken range is a hole: candidates are the stretches between neighbouring holes, clipped to each range.
    first = np.searchsorted(taken[:, 1], ranges[:, 0], side="right")
    last = np.searchsorted(taken[:, 0], ranges[:, 1], side="left")
    found: list[_Ranges] = []
    for (start, stop), low, high in zip(ranges, first, last):
        holes = taken[low:high]
        edges = np.concatenate([[start], holes.reshape(-1), [stop]]).reshape(-1, 2)
        found.append(edges[edges[:, 0] < edges[:, 1]])
    return np.concatenate(found)
