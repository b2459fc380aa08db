"""The functions of `changes.py` as Triton kernels; it is their only caller, and says what a stream is.

A launch does many chunks, which a table on the device describes, one row each; a program does one tile of one chunk.
Chunks with few tiles and with many have launches of their own: a launch has programs for as many tiles of every chunk
as its largest one has.
"""

# pyright: basic
# Triton is untyped.
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import triton
import triton.language as tl

NUM_WARPS = 8
MAX_ROWS = 65535
"""Of a launch: what CUDA takes for a grid's second dim."""
ALIGNMENT = 16
"""Of a sender's values and marks, in bytes: without it every byte is loaded on its own."""


@triton.jit
def _pack(table_ptr, counts_ptr, TILE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Write one tile's records. Rows: addresses of values, marks and stream, elements, int32 of room, the
    chunk's number."""
    row = table_ptr + tl.program_id(1) * 6
    num_elements = tl.load(row + 3)
    tile = tl.program_id(0)
    first = tile.to(tl.int64) * TILE
    if first < num_elements:
        values_ptr = tl.multiple_of(tl.load(row), ALIGNMENT).to(tl.pointer_type(tl.int16), bitcast=True)
        marks_ptr = tl.multiple_of(tl.load(row + 1), ALIGNMENT).to(tl.pointer_type(tl.uint8), bitcast=True)
        stream_ptr = tl.load(row + 2).to(tl.pointer_type(tl.int32), bitcast=True)
        room = tl.load(row + 4)
        place = tl.arange(0, TILE)
        if first + TILE <= num_elements:  # a mask would make every load one of a byte
            marks = tl.load(marks_ptr + first + place)
        else:
            marks = tl.load(marks_ptr + first + place, mask=first + place < num_elements, other=0)
        changed = marks != 0
        ones = changed.to(tl.int32)
        before = tl.cumsum(ones, 0) - ones
        count = tl.sum(ones, 0)
        start = tl.atomic_add(counts_ptr + tl.load(row + 5), count, sem="relaxed")
        tl.store(stream_ptr + 2 * tile, start)
        tl.store(stream_ptr + 2 * tile + 1, count)
        table = 2 * ((num_elements + TILE - 1) // TILE)
        if table + start + count <= room:
            values = tl.load(values_ptr + first + place, mask=changed, other=0)
            record = (place << 16) | (values.to(tl.int32) & 0xFFFF)
            tl.store(stream_ptr + table + start + before, record, mask=changed)


@triton.jit
def _check(table_ptr, found_ptr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """found += the tile's records, or a large negative number if one is out of bounds. Rows: addresses of stream and
    values, elements, records, the chunk's number."""
    row = table_ptr + tl.program_id(1) * 5
    num_elements = tl.load(row + 2)
    tile = tl.program_id(0)
    first = tile.to(tl.int64) * TILE
    if first < num_elements:
        stream_ptr = tl.load(row).to(tl.pointer_type(tl.int32), bitcast=True)
        num_records = tl.load(row + 3)
        start = tl.load(stream_ptr + 2 * tile).to(tl.int64)
        count = tl.load(stream_ptr + 2 * tile + 1).to(tl.int64)
        found = count
        if (start < 0) | (count < 0) | (count > TILE) | (start + count > num_records):
            found = tl.full((), -(1 << 40), tl.int64)
        else:
            records_ptr = stream_ptr + 2 * ((num_elements + TILE - 1) // TILE) + start
            most = tl.minimum(num_elements - first, TILE)
            for done in range(0, count, BLOCK):
                at = done + tl.arange(0, BLOCK)
                place = tl.load(records_ptr + at, mask=at < count, other=0) >> 16
                outside = ((place < 0) | (place >= most)) & (at < count)
                found -= tl.sum(outside.to(tl.int64), 0) << 40
        tl.atomic_add(found_ptr + tl.load(row + 4), found, sem="relaxed")


@triton.jit
def _apply(table_ptr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Write one tile's elements. Rows: as of _check, which has passed; whatever has changed since, nothing outside the
    chunk is written."""
    row = table_ptr + tl.program_id(1) * 5
    num_elements = tl.load(row + 2)
    tile = tl.program_id(0)
    first = tile.to(tl.int64) * TILE
    if first < num_elements:
        stream_ptr = tl.load(row).to(tl.pointer_type(tl.int32), bitcast=True)
        values_ptr = tl.load(row + 1).to(tl.pointer_type(tl.int16), bitcast=True)
        start = tl.load(stream_ptr + 2 * tile).to(tl.int64)
        count = tl.load(stream_ptr + 2 * tile + 1).to(tl.int64)
        if (start >= 0) & (count >= 0) & (start + count <= tl.load(row + 3)):
            records_ptr = stream_ptr + 2 * ((num_elements + TILE - 1) // TILE) + start
            most = tl.minimum(num_elements - first, TILE)
            for done in range(0, count, BLOCK):
                at = done + tl.arange(0, BLOCK)
                record = tl.load(records_ptr + at, mask=at < count, other=0)
                place = record >> 16
                inside = (at < count) & (place >= 0) & (place < most)
                tl.store(values_ptr + first + place, record.to(tl.int16), mask=inside)


@dataclass(frozen=True, slots=True)
class Launch:
    """Chunks of about as many tiles."""

    table: torch.Tensor
    """int64, a row each."""
    max_tiles: int

    @property
    def grid(self) -> tuple[int, int]:
        """Programs."""
        return self.max_tiles, len(self.table)


def launches_of(
    rows: Sequence[Sequence[int]], num_tiles: Sequence[int], device: torch.device | str
) -> tuple[Launch, ...]:
    """Launches that do all chunks once.

    Args:
        rows: As the kernels take them, without the chunks' numbers.
        num_tiles: Of each chunk.
        device: Where tables go.
    """
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
        _pack[one.grid](one.table, counts, TILE=tile, ALIGNMENT=ALIGNMENT, num_warps=NUM_WARPS)  # pyright: ignore[reportCallIssue, reportArgumentType]


def check(launches: Sequence[Launch], tile: int) -> torch.Tensor:
    """Per chunk the number of its tiles' records; negative if a count or a position is out of bounds."""
    num_chunks = sum(len(one.table) for one in launches)
    found = torch.zeros(num_chunks, dtype=torch.int64, device=launches[0].table.device)
    for one in launches:
        _check[one.grid](one.table, found, TILE=tile, BLOCK=256)  # pyright: ignore[reportArgumentType]
    return found


def apply(launches: Sequence[Launch], tile: int) -> None:
    """Write the elements of all chunks into the parameters."""
    for one in launches:
        _apply[one.grid](one.table, TILE=tile, BLOCK=256)  # pyright: ignore[reportArgumentType]
