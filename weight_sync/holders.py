"""Which trainer ranks hold which part of a checkpoint tensor: disjoint cells, each with its holders.

Owns: turning the ranks' rectangles, which may repeat, overlap or leave holes, into a grid of disjoint cells. Does not
own: which holder sends (plan.py). Invariant: the parts that `cover` yields are disjoint and make up the region.

    rank 0 holds rows 0..7, rank 1 rows 4..11       cuts 0, 4, 8, 12   ->   [0,4): {0}   [4,8): {0, 1}   [8,12): {1}

Callers: plan.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from weight_sync.errors import PlanError
from weight_sync.layout import Region, SourceLayout, TensorMeta


class Holders:
    """The holders of one checkpoint tensor. A lookup bisects the cuts of each dim: its cost is that of its answer."""

    def __init__(self, meta: TensorMeta, shards: Iterable[tuple[int, Region]]) -> None:
        shards = [(rank, region) for rank, region in shards if region.num_elements]
        self._cuts: list[list[int]] = []
        for dim, size in enumerate(meta.shape):
            edges = {0, size}
            for _, region in shards:
                edges.add(region.start[dim])
                edges.add(region.start[dim] + region.shape[dim])
            self._cuts.append(sorted(edges))
        found: dict[tuple[int, ...], set[int]] = {}
        for rank, region in shards:
            for cell in product(*self._cells_of(region)):
                found.setdefault(cell, set()).add(rank)
        self._ranks = {cell: tuple(sorted(ranks)) for cell, ranks in found.items()}

    def _cells_of(self, region: Region) -> list[range]:
        """The grid indices that a region touches, per dim."""
        return [
            range(bisect_right(cuts, start) - 1, bisect_left(cuts, start + size))
            for cuts, start, size in zip(self._cuts, region.start, region.shape)
        ]

    def cover(self, region: Region) -> Iterator[tuple[Region, tuple[int, ...]]]:
        """Cut a region of the tensor along the cells: (part, ranks that hold it, ascending; empty when nobody does)."""
        for cell in product(*self._cells_of(region)):
            start: list[int] = []
            shape: list[int] = []
            for index, cuts, first, size in zip(cell, self._cuts, region.start, region.shape):
                low = max(cuts[index], first)
                start.append(low)
                shape.append(min(cuts[index + 1], first + size) - low)
            yield Region(tuple(start), tuple(shape)), self._ranks.get(cell, ())


def find_holders(sources: Sequence[SourceLayout]) -> dict[str, Holders]:
    """Check the trainer ranks' layouts and index them by checkpoint tensor.

    Raises:
        PlanError: the ranks are not distinct, disagree on the checkpoint, or hold something outside of it.
    """
    if not sources:
        raise PlanError("a plan needs at least one source rank, got none")
    tensors = sources[0].tensors
    metas = {meta.name: meta for meta in tensors}
    if len(metas) != len(tensors):
        raise PlanError("the checkpoint lists a tensor name twice")
    shards: dict[str, list[tuple[int, Region]]] = {name: [] for name in metas}
    ranks: set[int] = set()
    for source in sources:
        if source.rank in ranks:
            raise PlanError(f"two source layouts claim rank {source.rank}")
        ranks.add(source.rank)
        if source.tensors != tensors:
            raise PlanError(_first_difference(sources[0], source))
        for shard in source.shards:
            meta = metas.get(shard.tensor)
            if meta is None:
                raise PlanError(f"source rank {source.rank} holds {shard.tensor!r}, which the checkpoint does not have")
            check_inside(shard.region, meta, f"source rank {source.rank}")
            shards[shard.tensor].append((source.rank, shard.region))
    return {name: Holders(metas[name], found) for name, found in shards.items()}


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


def _first_difference(first: SourceLayout, other: SourceLayout) -> str:
    """Say how two ranks' checkpoints differ."""
    if len(first.tensors) != len(other.tensors):
        detail = f"{len(first.tensors)} tensors against {len(other.tensors)}"
    else:
        detail = next(f"{a} against {b}" for a, b in zip(first.tensors, other.tensors) if a != b)
    return f"source ranks {first.rank} and {other.rank} disagree on the checkpoint: {detail}"
