"""Which trainer ranks hold which part of a checkpoint tensor: disjoint cells, each with its holders.

The ranks' rectangles, which may repeat, overlap or leave holes, become a grid of disjoint cells per tensor. Does not
own: which holder sends (schedule.py). Invariant: the parts that `cover` yields are disjoint and make up the regions.

    rank 0 holds rows 0..7, rank 1 rows 4..11       cuts 0, 4, 8, 12   ->   [0,4): {0}   [4,8): {0, 1}   [8,12): {1}
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.layout import Region, SourceLayout, TensorMeta, first_difference
from slipstream.weight_sync.plan.columns import Ints, LoadTable, as_list, changes, first_true, folded, padded, spread
from slipstream.weight_sync.plan.transfer_plan import layer_of, mesh_group_of

NOBODY = -1
"""Number of the empty set of holders."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Disjoint parts of regions: which region, where, and the number of the holders' set."""

    owner: Ints
    start: Ints
    shape: Ints
    holders: Ints


class Holders:
    """The holders of every tensor of a checkpoint.

    Cuts of dim d of all tensors lie in one sorted array, each as tensor * span + coordinate, so that one binary search
    finds the cells of any number of regions.
    """

    def __init__(self, metas: Sequence[TensorMeta], shapes: Ints, rank: Ints, tensor: Ints, shards: Ints) -> None:
        """`shapes` (tensors, D); shard i, with start and shape in shards[i] (2, D), is held by rank[i]."""
        self.metas = metas
        self.shapes = shapes
        self.num_dims = np.array([len(meta.shape) for meta in metas], np.int64)
        self.sets: list[tuple[int, ...]] = []
        """The ranks that hold a cell, ascending; cells refer to them by number."""
        self._known: dict[int, tuple[Sequence[str], Ints]] = {}
        self._span = int(shapes.max(initial=0)) + 1
        filled = (shards[:, 1] > 0).all(axis=1)
        rank, tensor, start, stop = rank[filled], tensor[filled], shards[filled, 0], shards[filled].sum(axis=1)
        all_tensors = np.arange(len(metas)) * self._span
        at = tensor * self._span
        self._cuts = [
            np.unique(np.concatenate([all_tensors, all_tensors + shapes[:, d], at + start[:, d], at + stop[:, d]]))
            for d in range(shapes.shape[1])
        ]
        first = [np.searchsorted(cuts, all_tensors) for cuts in self._cuts]
        last = [np.searchsorted(cuts, all_tensors + shapes[:, d]) for d, cuts in enumerate(self._cuts)]
        self._first = np.stack(first, axis=1).astype(np.int64)
        counts = np.stack(last, axis=1) - self._first
        self._step = np.ones_like(counts)
        for d in range(counts.shape[1] - 2, -1, -1):
            self._step[:, d] = self._step[:, d + 1] * counts[:, d + 1]
        cells = counts.prod(axis=1)
        self._base = np.cumsum(cells) - cells
        owner, cell, _ = self._cells(tensor, start, stop)
        self._set_of_cell = self._sets_of(cell, rank[owner], int(cells.sum()))

    def _cells(self, tensor: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, list[Ints]]:
        """The cells that regions touch: which region, number of the cell, and its cut per dim."""
        at = tensor * self._span
        low = [cuts.searchsorted(at + start[:, d], side="right") - 1 for d, cuts in enumerate(self._cuts)]
        counts = [cuts.searchsorted(at + stop[:, d], side="left") - low[d] for d, cuts in enumerate(self._cuts)]
        owner, rest = spread(np.prod(counts, axis=0))
        cell = self._base[tensor][owner]
        cuts_of: list[Ints] = [np.zeros(0, np.int64)] * len(low)
        for d in range(len(low) - 1, -1, -1):
            rest, index = np.divmod(rest, counts[d][owner])
            cuts_of[d] = low[d][owner] + index
            cell = cell + (cuts_of[d] - self._first[tensor[owner], d]) * self._step[tensor[owner], d]
        return owner, cell, cuts_of

    def _sets_of(self, cell: Ints, rank: Ints, num_cells: int) -> Ints:
        """Number the sets of ranks that share cells. Nearly always one rank holds a cell."""
        order = np.lexsort((rank, cell))
        cell, rank = cell[order], rank[order]
        once = changes(cell, rank)
        cell, rank = cell[once], rank[once]
        begins = np.flatnonzero(changes(cell))
        sizes = np.diff(np.append(begins, len(cell)))
        found = np.full(num_cells, NOBODY, np.int64)
        alone = sizes == 1
        ranks, which = np.unique(rank[begins[alone]], return_inverse=True)
        self.sets = [(one,) for one in as_list(ranks)]
        found[cell[begins[alone]]] = which
        numbers: dict[tuple[int, ...], int] = {}
        for begin, size in zip(as_list(begins[~alone]), as_list(sizes[~alone])):
            members = tuple(as_list(rank[begin : begin + size]))
            number = numbers.get(members)
            if number is None:
                number = numbers[members] = len(self.sets)
                self.sets.append(members)
            found[cell[begin]] = number
        return found

    @cached_property
    def set_sizes(self) -> Ints:
        return np.array([len(members) for members in self.sets], np.int64)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(meta.name for meta in self.metas)

    @cached_property
    def groups(self) -> Ints:
        """Each tensor's mesh group."""
        return np.array([mesh_group_of(name) for name in self.names], np.int64)

    @cached_property
    def layers(self) -> Ints:
        return np.array([layer_of(name) for name in self.names], np.int64)

    @cached_property
    def _number_of(self) -> dict[str, int]:
        return {meta.name: number for number, meta in enumerate(self.metas)}

    def tensors_of(self, loads: LoadTable) -> Ints:
        """The position in the checkpoint of each load's tensor; -1 where it has none. Names are looked up once."""
        known = self._known.get(id(loads.names))
        if known is None:
            numbers = np.array([self._number_of.get(name, -1) for name in loads.names], np.int64)
            known = self._known[id(loads.names)] = (loads.names, numbers)
        return known[1][loads.tensor]

    def cover(self, tensor: Ints, start: Ints, shape: Ints) -> Parts:
        """Cut non-empty regions of the tensors along the cells, region by region, cells in row-major order."""
        owner, cell, cuts_of = self._cells(tensor, start, start + shape)
        at, begin, stop = (tensor * self._span)[owner], start[owner], (start + shape)[owner]
        low, high = np.empty_like(begin), np.empty_like(begin)
        for d, (cuts, index) in enumerate(zip(self._cuts, cuts_of)):
            low[:, d] = np.maximum(cuts[index] - at, begin[:, d])
            high[:, d] = np.minimum(cuts[index + 1] - at, stop[:, d])
        return Parts(owner, low, high - low, self._set_of_cell[cell])


def find_holders(sources: Sequence[SourceLayout]) -> Holders:
    """Check the trainer ranks' layouts and index them by checkpoint tensor.

    Raises:
        PlanError: the ranks are not distinct, disagree on the checkpoint, or hold something outside of it.
    """
    if not sources:
        raise PlanError("a plan needs at least one source rank, got none")
    tensors = sources[0].tensors
    numbers = {meta.name: number for number, meta in enumerate(tensors)}
    if len(numbers) != len(tensors):
        raise PlanError("the checkpoint lists a tensor name twice")
    shapes = padded([meta.shape for meta in tensors], 1)
    dims_of = np.array([len(meta.shape) for meta in tensors], np.int64)
    seen: set[int] = set()
    columns: list[tuple[Ints, Ints, Ints]] = []
    for source in sources:
        if source.rank in seen:
            raise PlanError(f"two source layouts claim rank {source.rank}")
        seen.add(source.rank)
        if source.tensors is not tensors and source.tensors != tensors:
            detail = first_difference(source.tensors, tensors) or "the order of its tensors"
            raise PlanError(f"source ranks {source.rank} and {sources[0].rank} disagree on the checkpoint: {detail}")
        columns.append(_shards_of(source, numbers, shapes, dims_of))
    rank, tensor, shards = (np.concatenate(column) for column in zip(*columns))
    return Holders(tensors, shapes, rank, tensor, shards)


def _shards_of(source: SourceLayout, numbers: dict[str, int], shapes: Ints, dims_of: Ints) -> tuple[Ints, Ints, Ints]:
    """(rank, tensor, [start, shape]) of one rank's shards, checked."""
    regions = [shard.region for shard in source.shards]
    tensor = np.array([numbers.get(shard.tensor, -1) for shard in source.shards], np.int64)
    for index in first_true(tensor < 0):
        name = source.shards[index].tensor
        raise PlanError(f"source rank {source.rank} holds {name!r}, which the checkpoint does not have")
    found = np.empty((len(tensor), 2, shapes.shape[1]), np.int64)
    found[:, 0], found[:, 1] = 0, 1
    num_dims = np.fromiter((len(region.start) for region in regions), np.int64, len(regions))
    for index in first_true(num_dims != dims_of[tensor]):
        check_inside(regions[index], source.tensors[int(tensor[index])], f"source rank {source.rank}")
    start, shape = padded([region.start for region in regions], 0), padded([region.shape for region in regions], 1)
    found[:, 0, : start.shape[1]], found[:, 1, : shape.shape[1]] = start, shape
    outside = folded(np.logical_or, (found[:, 0] < 0) | (found[:, 1] < 0))
    outside |= folded(np.logical_or, found[:, 0] + found[:, 1] > shapes[tensor])
    for index in first_true(outside):
        shard = source.shards[index]
        check_inside(shard.region, source.tensors[numbers[shard.tensor]], f"source rank {source.rank}")
    return np.full(len(tensor), source.rank), tensor, found


def check_inside(region: Region, meta: TensorMeta, who: str) -> None:
    """Raise PlanError unless the region has the tensor's number of dims and lies inside it."""
    ok = len(region.start) == len(region.shape) == len(meta.shape) and all(
        first >= 0 and size >= 0 and first + size <= bound
        for first, size, bound in zip(region.start, region.shape, meta.shape)
    )
    if not ok:
        raise PlanError(
            f"{who}: region start {list(region.start)} shape {list(region.shape)} does not lie inside "
            f"{meta.name} of shape {list(meta.shape)}"
        )
