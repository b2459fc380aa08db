"""What a publish sends of a chunk of which few elements changed: where they are, and their bits.

On CUDA the kernels of `change_kernels.py` do what the torch functions here do. An element is two bytes of the
parameter: one bfloat16 value, or two neighbours in FP8.

    chunk     elements 0 .. n-1 of consecutive bytes of an engine's parameter, in tiles of TILE elements
    stream    int32   start_0, count_0, start_1, count_1, ...     per tile: its first record, and how many it has
                      record, record, ...                         position in the tile << 16 | the element's bits

Tiles may have their records in any order. Values are not differences, so applying a stream twice is harmless. A stream
takes 4 bytes per changed element and 8 per tile, so it is smaller than its chunk where less than half of it changed; a
sender has room for a quarter of the chunk, and sends what does not fit whole.

Invariant: `apply` writes nothing outside its chunks, whatever the streams hold: it reads every count and every position
before it writes the first element.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from slipstream.weight_sync.change_kernels import Launch

TILE = 4096
"""Elements. Positions in a tile fit 15 bits, so that records are positive."""
ELEMENT_BYTES, RECORD_BYTES, TILE_BYTES = 2, 4, 8
DTYPES = frozenset({"bfloat16", "float8_e4m3fn"})
"""Formats of values that change one by one. Block scales, float32, all change at once, and always go whole."""
STREAM_SHARE = 4
"""A chunk of so many bytes has room for one byte of its stream."""
_BITS = 0xFFFF


def num_tiles(num_bytes: int) -> int:
    return -(-num_bytes // (TILE * ELEMENT_BYTES))


def stream_bytes(num_bytes: int, num_records: int) -> int:
    """Size of the stream of a chunk."""
    return num_tiles(num_bytes) * TILE_BYTES + num_records * RECORD_BYTES


def max_records(num_bytes: int) -> int:
    """Records for which a chunk's stream has room at the sender; 0 or less: the chunk always goes whole."""
    return (num_bytes // STREAM_SHARE - num_tiles(num_bytes) * TILE_BYTES) // RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk at the sender: its bytes, a mark per element (1 where it changed, else 0), and room for its stream."""

    values: Tensor
    """int16, flat."""
    marks: Tensor
    """uint8, flat."""
    stream: Tensor
    """int32, flat."""


class Packer:
    """Packs many chunks of one device, which stay where they are, any number of times: on CUDA in a few launches."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = list(chunks)
        self._launches: tuple[Launch, ...] = ()
        if self._chunks and self._chunks[0].values.is_cuda:
            from slipstream.weight_sync import change_kernels  # needs Triton, which a CPU host may lack

            rows = [
                [c.values.data_ptr(), c.marks.data_ptr(), c.stream.data_ptr(), c.values.numel(), c.stream.numel()]
                for c in self._chunks
            ]
            assert not any(address % 16 for row in rows for address in row[:2]), "as change_kernels.ALIGNMENT says"
            tiles = [num_tiles(ELEMENT_BYTES * c.values.numel()) for c in self._chunks]
            self._launches = change_kernels.launches_of(rows, tiles, self._chunks[0].values.device)

    def pack_to(self, counts: Tensor) -> None:
        """Write every chunk's stream, and its number of records to counts[i], int32. If that is more than there is room
        for, the stream is not to be used. Does not wait for the device."""
        counts.zero_()
        if self._launches:
            from slipstream.weight_sync import change_kernels

            change_kernels.pack(self._launches, counts, TILE)
            return
        for index, chunk in enumerate(self._chunks):
            counts[index] = _pack_with_torch(chunk)


def _pack_with_torch(chunk: Chunk) -> int:
    """The reference of change_kernels.pack, for one chunk."""
    (places,) = chunk.marks.nonzero(as_tuple=True)
    tiles = num_tiles(ELEMENT_BYTES * chunk.values.numel())
    counts = torch.bincount(places // TILE, minlength=tiles)
    if 2 * tiles + len(places) <= chunk.stream.numel():
        starts = counts.cumsum(0) - counts
        chunk.stream[: 2 * tiles].copy_(torch.stack([starts, counts], dim=1).flatten())
        records = (places % TILE << 16) | (chunk.values[places].long() & _BITS)
        chunk.stream[2 * tiles :][: len(places)].copy_(records)
    return len(places)


@dataclass(frozen=True, slots=True)
class Landed:
    """A stream where it landed, and the chunk of a live parameter that it is for."""

    stream: Tensor
    """int32, flat, as long as its number of records says."""
    values: Tensor
    """int16, flat."""

    @property
    def num_records(self) -> int:
        return self.stream.numel() - 2 * num_tiles(ELEMENT_BYTES * self.values.numel())


def apply(landed: Sequence[Landed]) -> int | None:
    """Write all streams' elements, if every one of them is sound. Waits for the device once, before the first write.
    Should a late write change a stream after its check, what is written still lies in its chunk.

    Returns:
        None, or the number of the first stream that is not sound; then nothing was written.
    """
    if not landed:
        return None
    if not landed[0].values.is_cuda:
        found = [_placed(one) for one in landed]
        if None in found:
            return found.index(None)
        for one, (places, bits) in zip(landed, filter(None, found), strict=True):
            one.values[places] = bits
        return None
    from slipstream.weight_sync import change_kernels

    rows = [[one.stream.data_ptr(), one.values.data_ptr(), one.values.numel(), one.num_records] for one in landed]
    tiles = [num_tiles(ELEMENT_BYTES * one.values.numel()) for one in landed]
    launches = change_kernels.launches_of(rows, tiles, landed[0].values.device)
    counted = change_kernels.check(launches, TILE).cpu().numpy()
    wrong = [i for i, (count, one) in enumerate(zip(counted, landed, strict=True)) if count != one.num_records]
    if wrong:
        return wrong[0]
    change_kernels.apply(launches, TILE)
    return None


def _placed(one: Landed) -> tuple[Tensor, Tensor] | None:
    """Places and bits of a stream's records; None unless each belongs to one tile, and lies in it and in the chunk."""
    tiles = num_tiles(ELEMENT_BYTES * one.values.numel())
    if one.num_records < 0:
        return None
    starts, counts = one.stream[: 2 * tiles].view(tiles, 2).long().unbind(1)
    is_wrong = (starts < 0) | (counts < 0) | (starts + counts > one.num_records)
    if bool(is_wrong.any()) or int(counts.sum()) != one.num_records:
        return None
    tile = torch.arange(tiles).repeat_interleave(counts)
    order = (starts - (counts.cumsum(0) - counts)).repeat_interleave(counts) + torch.arange(one.num_records)
    records = one.stream[2 * tiles :].long()[order]
    places, bits = (records >> 16) + TILE * tile, records & _BITS
    if not bool(((places // TILE == tile) & (places < one.values.numel())).all()):
        return None
    return places, torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16)
