"""The functions of `changes.py` as Triton kernels; it is their only caller, and says what a stream is.

A launch does many chunks, which a table on the device describes, one row each; a program does some tiles of one chunk.
Chunks with few tiles and with many have launches of their own: a launch has programs for as many tiles of every chunk
as its largest one has.
"""

# pyright: basic
# Triton is untyped.
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl

TILES_A_PROGRAM = 2
"""What a program waits for (its chunk, its place in the stream, its records) it waits for once. At most 4, because a
note has 14 bits for a place among the program's elements; 2 with four warps were quickest on an H200."""
NUM_WARPS, NOTES = 4, 512
"""Warps of a program that packs; words of marks that become records at once."""
BLOCK = 128
"""Records of a tile that are read at once: in most, all of them."""
MAX_ROWS = 65535
"""CUDA takes at most so many rows in one launch, as the grid's second dim."""
ALIGNMENT = 16
"""A sender's values and marks begin at multiples of so many bytes; otherwise every byte would be loaded on its own."""


@triton.jit
def _pack(
    table_ptr, counts_ptr, TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr
):  # fmt: skip
    """Write the records of TILES tiles. Rows: addresses of values, marks and stream, elements, int32 of room, the
    chunk's number.

    Marks are taken four at a time, as a word. Most words are 0; the others are noted where the records will be, in the
    order of their elements: which word, which of its marks are 1, how many come before them. Then notes become records,
    the last ones first: as every word has at least one record, none overwrites a note that was not read.
    """
    WORDS: tl.constexpr = TILE // 4
    row = table_ptr + tl.program_id(1) * 6
    num_elements = tl.load(row + 3)
    tiles = tl.program_id(0) * TILES + tl.arange(0, TILES)
    first = tl.program_id(0).to(tl.int64) * (TILES * TILE)
    if first < num_elements:
        stream_ptr = tl.load(row + 2).to(tl.pointer_type(tl.int32), bitcast=True)
        marks_ptr = tl.multiple_of(tl.load(row + 1), ALIGNMENT).to(tl.pointer_type(tl.uint32), bitcast=True)
        word = tl.arange(0, TILES)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        if first + TILES * TILE <= num_elements:  # a mask would make every load one of a word
            marks = tl.load(marks_ptr + first // 4 + word)
        else:
            left = tl.maximum(num_elements - first - 4 * word, 0)
            marks = tl.load(marks_ptr + first // 4 + word, mask=left > 0, other=0)
            marks = tl.where(left < 4, marks & ((1 << (8 * left)) - 1).to(tl.uint32), marks)
        ones = ((marks * 0x01010101) >> 24).to(tl.int32) + ((marks != 0).to(tl.int32) << 16)  # marks, and words
        of_tiles = tl.sum(ones, 1)
        total = tl.sum(of_tiles, 0)
        before = tl.cumsum(of_tiles, 0) - of_tiles
        start = tl.atomic_add(counts_ptr + tl.load(row + 5), total & 0xFFFF, sem="relaxed")
        is_tile = tiles.to(tl.int64) * TILE < num_elements
        tl.store(stream_ptr + 2 * tiles, start + (before & 0xFFFF), mask=is_tile)
        tl.store(stream_ptr + 2 * tiles + 1, of_tiles & 0xFFFF, mask=is_tile)
        table = 2 * ((num_elements + TILE - 1) // TILE)
        if (total > 0) & (table + start + (total & 0xFFFF) <= tl.load(row + 4)):
            records_ptr = stream_ptr + table + start
            values_ptr = tl.multiple_of(tl.load(row), ALIGNMENT).to(tl.pointer_type(tl.int64), bitcast=True)
            so_far = before[:, None] + tl.cumsum(ones, 1) - ones
            which = ((marks | (marks >> 7) | (marks >> 14) | (marks >> 21)) & 15).to(tl.int32)
            notes = (word << 18) | (which << 14) | (so_far & 0xFFFF)
            tl.store(records_ptr + (so_far >> 16), notes, mask=marks != 0)
            tl.debug_barrier()
            num_blocks = tl.cdiv(total >> 16, BLOCK)
            for done in range(num_blocks):
                at = (num_blocks - 1 - done) * BLOCK + tl.arange(0, BLOCK)
                note = tl.load(records_ptr + at, mask=at < total >> 16, other=0)
                values = tl.load(values_ptr + first // 4 + (note >> 18), mask=at < total >> 16, other=0)
                place = records_ptr + (note & 0x3FFF)
                tl.debug_barrier()
                for one in tl.static_range(4):
                    is_one = (note >> (14 + one)) & 1
                    element = (4 * (note >> 18) + one) % TILE
                    record = (element << 16) | ((values >> (16 * one)) & 0xFFFF).to(tl.int32)
                    tl.store(place, record, mask=is_one != 0)
                    place += is_one


@triton.jit
def _tiles_of(row, tiles, num_elements, TILE: tl.constexpr):
    """Where the records of some tiles of one chunk are, how many each tile has, and how many elements."""
    stream_ptr = tl.load(row).to(tl.pointer_type(tl.int32), bitcast=True)
    is_tile = tiles.to(tl.int64) * TILE < num_elements
    starts = tl.load(stream_ptr + 2 * tiles, mask=is_tile, other=0).to(tl.int64)
    counts = tl.load(stream_ptr + 2 * tiles + 1, mask=is_tile, other=0).to(tl.int64)
    records_ptr = stream_ptr + 2 * ((num_elements + TILE - 1) // TILE) + starts
    return starts, counts, records_ptr, tl.minimum(num_elements - tiles.to(tl.int64) * TILE, TILE)


@triton.jit
def _check(table_ptr, found_ptr, TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """found += the records of TILES tiles, or a large negative number if one is out of bounds. Rows: addresses of
    stream and values, elements, records, the chunk's number."""
    row = table_ptr + tl.program_id(1) * 5
    num_elements = tl.load(row + 2)
    tiles = tl.program_id(0) * TILES + tl.arange(0, TILES)
    if tl.program_id(0).to(tl.int64) * (TILES * TILE) < num_elements:
        starts, counts, records_ptr, most = _tiles_of(row, tiles, num_elements, TILE)  # pyright: ignore[reportGeneralTypeIssues]
        is_wrong = (starts < 0) | (counts < 0) | (counts > TILE) | (starts + counts > tl.load(row + 3))
        counts = tl.where(is_wrong, 0, counts)
        found = tl.sum(counts, 0) - (tl.sum(is_wrong.to(tl.int64), 0) << 40)
        for done in range(0, tl.max(counts, 0), BLOCK):
            at = done + tl.arange(0, BLOCK)[None, :]
            is_one = at < counts[:, None]
            place = tl.load(records_ptr[:, None] + at, mask=is_one, other=0) >> 16
            is_outside = is_one & ((place < 0) | (place >= most[:, None]))
            found -= tl.sum(tl.sum(is_outside.to(tl.int64), 1), 0) << 40
        tl.atomic_add(found_ptr + tl.load(row + 4), found, sem="relaxed")


@triton.jit
def _apply(table_ptr, TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Write the elements of TILES tiles. Rows: as of _check, which has passed; whatever has changed since, nothing
    outside the chunk is written."""
    row = table_ptr + tl.program_id(1) * 5
    num_elements = tl.load(row + 2)
    tiles = tl.program_id(0) * TILES + tl.arange(0, TILES)
    if tl.program_id(0).to(tl.int64) * (TILES * TILE) < num_elements:
        starts, counts, records_ptr, most = _tiles_of(row, tiles, num_elements, TILE)  # pyright: ignore[reportGeneralTypeIssues]
        counts = tl.where((starts >= 0) & (starts + counts <= tl.load(row + 3)), counts, 0)
        values_ptr = tl.load(row + 1).to(tl.pointer_type(tl.int16), bitcast=True) + tiles.to(tl.int64) * TILE
        for done in range(0, tl.max(counts, 0), BLOCK):
            at = done + tl.arange(0, BLOCK)[None, :]
            record = tl.load(records_ptr[:, None] + at, mask=at < counts[:, None], other=0)
            place = record >> 16
            is_inside = (at < counts[:, None]) & (place >= 0) & (place < most[:, None])
            tl.store(values_ptr[:, None] + place, record.to(tl.int16), mask=is_inside)


@dataclass(frozen=True, slots=True)
class Launch:
    """Chunks of about as many tiles."""

    table: torch.Tensor
    """int64, a row each."""
    max_tiles: int

    @property
    def grid(self) -> tuple[int, int]:
        return -(-self.max_tiles // TILES_A_PROGRAM), len(self.table)


def launches_of(
    rows: Sequence[Sequence[int]], num_tiles: Sequence[int], device: torch.device | str
) -> tuple[Launch, ...]:
    """Launches that do all chunks once. Rows are those that the kernels take, without the chunks' numbers."""
    launches: list[Launch] = []
    for _, alike in groupby(sorted(range(len(rows)), key=num_tiles.__getitem__), lambda n: num_tiles[n].bit_length()):
        numbers = list(alike)
        for first in range(0, len(numbers), MAX_ROWS):
            some = numbers[first : first + MAX_ROWS]
            table = torch.tensor([[*rows[number], number] for number in some], dtype=torch.int64).to(device)
            launches.append(Launch(table, num_tiles[some[-1]]))
    return tuple(launches)


def pack(launches: Sequence[Launch], counts: torch.Tensor, tile: int) -> None:
    """Write the streams of all chunks, and add their records to `counts` (int32, zeros)."""
    for one in launches:
        launch: Any = _pack[one.grid]
        launch(
            one.table, counts, TILE=tile, TILES=TILES_A_PROGRAM, BLOCK=NOTES, ALIGNMENT=ALIGNMENT, num_warps=NUM_WARPS
        )


def check(launches: Sequence[Launch], tile: int) -> torch.Tensor:
    """Per chunk the number of its tiles' records; negative if a count or a position is out of bounds."""
    num_chunks = sum(len(one.table) for one in launches)
    found = torch.zeros(num_chunks, dtype=torch.int64, device=launches[0].table.device)
    for one in launches:
        _check[one.grid](one.table, found, TILE=tile, TILES=TILES_A_PROGRAM, BLOCK=BLOCK)  # pyright: ignore[reportArgumentType]
    return found


def apply(launches: Sequence[Launch], tile: int) -> None:
    """Write the elements of all chunks into the parameters."""
    for one in launches:
        _apply[one.grid](one.table, TILE=tile, TILES=TILES_A_PROGRAM, BLOCK=BLOCK)  # pyright: ignore[reportArgumentType]
