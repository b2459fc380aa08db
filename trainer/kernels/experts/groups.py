"""RowGroups: rows sorted by expert, and the tiles in which kernels walk them.

Owns the table that maps a thread block to its rows: tile i holds rows first..stop of one expert, at most tile_rows of
them. The table has room for the worst case, so the host never reads its size back from the device; thread blocks beyond
the last tile see first = stop and return. Invariant: counts_E sums to at most num_rows; there is no padding between
experts. Rows beyond the counts are nobody's, are not computed, and hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.trainer.kernels.launch import cdiv, next_power_of_2, programs

MAX_ABREAST = 1 << 16
"""The product of two experts' tile counts must fit 32 bits. With at most this many tiles in all, one bit stays free."""


class RowGroups:
    """counts_E rows of each of E experts, one expert after the other."""

    def __init__(
        self, counts_E: Tensor, num_rows: int, ends_E: Tensor | None = None, expected_rows: int | None = None
    ) -> None:
        """Args as the attributes; `ends_E` None: computed here; `expected_rows` None: all."""
        self.counts_E = counts_E
        """int64, on the rows' device."""
        self.num_rows = num_rows
        """Rows that there is memory for."""
        self.expected_rows = num_rows if expected_rows is None else expected_rows
        """About how many experts have in all, to choose kernels by."""
        self.ends_E = counts_E.cumsum(0, dtype=torch.int32) if ends_E is None else ends_E
        """int32: one past each expert's last row."""
        self._tiles: dict[tuple[int, bool], Tensor] = {}

    @property
    def num_experts(self) -> int:
        return self.counts_E.shape[0]

    def taken_apart(self) -> tuple[list[Tensor], Callable[..., RowGroups]]:
        """Its tensors, and a function that builds it from them again; `Dispatch.taken_apart` says why."""
        known, sizes = self.__dict__.get("counts"), tuple(self._tiles)
        num_rows, expected_rows = self.num_rows, self.expected_rows

        def again(counts_E: Tensor, ends_E: Tensor, *tiles: Tensor) -> RowGroups:
            groups = RowGroups(counts_E, num_rows, ends_E, expected_rows)
            groups._tiles.update(zip(sizes, tiles, strict=True))
            if known is not None:
                groups.counts = known
            return groups

        return [self.counts_E, self.ends_E, *self._tiles.values()], again

    @cached_property
    def counts(self) -> list[int]:
        """The counts on the host; waits for the device once."""
        return self.counts_E.tolist()

    def slices(self) -> Iterator[tuple[int, slice]]:
        """(expert, its rows) for every expert that has some."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(start, start + count)
            start += count

    @cached_property
    def expert_of_row_S(self) -> Tensor:
        """int64: the expert of every row; the last one, of nobody's."""
        rows = torch.arange(self.num_rows, device=self.ends_E.device)
        return torch.searchsorted(self.ends_E, rows, right=True).clamp_(max=self.num_experts - 1)

    def tiles(self, tile_rows: int, *, abreast: bool = False) -> Tensor:
        """int32 (number of tiles at most, 3): expert, first row, one past the last row.

        Args:
            tile_rows: The most rows that a tile has.
            abreast: Order tiles by how far along their expert's rows they lie, instead of by expert. An expert's rows
                are in the order of tokens, so neighbouring tiles then read the same tokens, and find them in the cache.
                Ignored beyond MAX_ABREAST tiles.
        """
        max_tiles = self.num_rows // tile_rows + min(self.num_experts, self.num_rows)
        key = (tile_rows, abreast and max_tiles <= MAX_ABREAST)
        if key not in self._tiles:
            tiles_N3 = torch.empty(max_tiles, 3, dtype=torch.int32, device=self.counts_E.device)
            if max_tiles:
                padded = next_power_of_2(self.num_experts)
                programs(_write_tiles, (cdiv(max_tiles, 16),))(
                    self.counts_E, tiles_N3, self.num_experts, max_tiles,
                    EXPERTS=padded, TILE=tile_rows, ABREAST=key[1], BLOCK=16,
                )  # fmt: skip
            self._tiles[key] = tiles_N3
        return self._tiles[key]


@triton.jit(do_not_specialize=["max_tiles"])
def _write_tiles(
    counts_ptr, tiles_ptr, num_experts, max_tiles,
    EXPERTS: tl.constexpr, TILE: tl.constexpr, ABREAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program finds the experts of BLOCK tiles among the running sum of tiles per expert. With `abreast`, tile i
    of an expert's n tiles comes after ceil(i m / n) tiles of an expert that has m. At a tie the earlier expert's tile
    comes first."""
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0).to(tl.int32)
    num_tiles = (counts + TILE - 1) // TILE
    tile_ends, row_ends = tl.cumsum(num_tiles, 0), tl.cumsum(counts, 0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_mine = (tile[:, None] >= (tile_ends - num_tiles)[None, :]) & (tile[:, None] < tile_ends[None, :])
    expert = tl.sum(tl.where(is_mine, experts[None, :], 0), 1)
    first_tile = tl.sum(tl.where(is_mine, (tile_ends - num_tiles)[None, :], 0), 1)
    first_row = tl.sum(tl.where(is_mine, (row_ends - counts)[None, :], 0), 1)
    stop_row = tl.sum(tl.where(is_mine, row_ends[None, :], 0), 1)
    first = first_row + (tile - first_tile) * TILE
    stop = tl.minimum(first + TILE, stop_row)
    exists = tl.sum(is_mine.to(tl.int32), 1) > 0
    inside = tile < max_tiles
    if ABREAST:
        of_mine = tl.maximum(tl.sum(tl.where(is_mine, num_tiles[None, :], 0), 1), 1)
        share = (tile - first_tile)[:, None] * num_tiles[None, :]
        before = (share + of_mine[:, None] - 1) // of_mine[:, None]
        is_tie = (before * of_mine[:, None] == share) & (experts[None, :] < expert[:, None]) & (num_tiles > 0)[None, :]
        tile = tl.where(exists, tl.sum(before + is_tie.to(tl.int32), 1), tile)
    tl.store(tiles_ptr + tile * 3, expert, mask=inside)
    tl.store(tiles_ptr + tile * 3 + 1, tl.where(exists, first, 0), mask=inside)
    tl.store(tiles_ptr + tile * 3 + 2, tl.where(exists, stop, 0), mask=inside)
