"""Rectangles of tensors in host or device memory, copied into a staging slot: the host-to-device stage of a publish.

    whole rows, same format      one copy of a run of bytes; runs that follow each other in memory and slot are one
    columns, same format         one 2D copy (the copy engine walks the rows; nothing is gathered on the host)
    another format or order      through a scratch buffer on the slot's device, in pieces that fit it, cast there

Copies from pinned host memory do not block the host. They run on the current stream, which `tensor_source.py` makes one
of their own, so that packing a load's bytes overlaps with hashing and writing the load before it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from slipstream.weight_sync.layout import DTYPE_BYTES, Region
from slipstream.weight_sync.pipeline.packing import PackedRead


@dataclass(frozen=True, slots=True)
class Held:
    """A rectangle of a checkpoint tensor in host or device memory: `data` is its bytes, row-major, as flat uint8."""

    tensor: str
    region: Region
    dtype: str
    data: Tensor


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of a row-major tensor: `height` runs of `width` bytes, the first at `offset`, `pitch` bytes apart."""

    offset: int
    pitch: int
    height: int
    width: int


@dataclass(slots=True)
class Run:
    """Bytes of one storage that go to consecutive bytes of a slot."""

    data: Tensor
    slot_offset: int

    def takes(self, other: Run) -> bool:
        """Take `other`'s bytes into this run if they begin where it ends, in memory and in the slot; say whether."""
        is_next = (
            self.data.untyped_storage().data_ptr() == other.data.untyped_storage().data_ptr()
            and self.data.data_ptr() + self.data.numel() == other.data.data_ptr()
            and self.slot_offset + self.data.numel() == other.slot_offset
        )
        if is_next:
            self.data = self.data.as_strided((self.data.numel() + other.data.numel(),), (1,))
        return is_next

    def copy(self, slot: Tensor, scratch: Tensor | None) -> None:
        slot[self.slot_offset : self.slot_offset + self.data.numel()].copy_(self.data, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Columns:
    """A rectangle that is not contiguous in memory and is row-major in the slot."""

    data: Tensor
    blocks: tuple[Block, ...]
    slot_offset: int

    def copy(self, slot: Tensor, scratch: Tensor | None) -> None:
        copy_blocks(self.data, self.blocks, slot[self.slot_offset :])


@dataclass(frozen=True, slots=True)
class Converted:
    """A rectangle whose format or order differs in the slot."""

    held: Held
    read: PackedRead
    scratch_bytes: int

    def copy(self, slot: Tensor, scratch: Tensor | None) -> None:
        """Per piece: copy bytes into scratch, then cast or permute them into the slot, all on one stream."""
        assert scratch is not None
        out = self.read.view(slot)
        element = DTYPE_BYTES[self.held.dtype]
        for piece in split(self.read.region, self.scratch_bytes // element):
            num_bytes = piece.num_elements * element
            copy_blocks(self.held.data, blocks_of(self.held, piece), scratch[:num_bytes])
            values = scratch[:num_bytes].view(getattr(torch, self.held.dtype)).view(piece.shape)
            start = (a - b for a, b in zip(piece.start, self.read.region.start, strict=True))
            out[tuple(slice(a, a + n) for a, n in zip(start, piece.shape, strict=True))].copy_(values)


Copy = Run | Columns | Converted


def compile_copies(pairs: Sequence[tuple[Held, PackedRead]], scratch_bytes: int) -> list[Copy]:
    """The reads of one load as operations, in the order given; neighbours are joined."""
    copies: list[Copy] = []
    for held, read in pairs:
        blocks = blocks_of(held, read.region)
        if held.dtype != read.dtype or not read.is_row_major:
            copies.append(Converted(held, read, scratch_bytes))
        elif len(blocks) == 1 and blocks[0].height == 1:
            run = Run(held.data[blocks[0].offset : blocks[0].offset + blocks[0].width], read.offset_bytes)
            last = copies[-1] if copies else None
            if not (isinstance(last, Run) and last.takes(run)):
                copies.append(run)
        else:
            copies.append(Columns(held.data, blocks, read.offset_bytes))
    return copies


def blocks_of(held: Held, region: Region) -> tuple[Block, ...]:
    """Where the bytes of `region` are in a held tensor, in row-major order of the region."""
    element, shape, size = DTYPE_BYTES[held.dtype], held.region.shape, region.shape
    if not shape:
        return (Block(0, element, 1, element),)
    start = [a - b for a, b in zip(region.start, held.region.start, strict=True)]
    strides = [element * prod(shape[dim + 1 :]) for dim in range(len(shape))]
    whole = len(shape) - 1  # becomes the outermost dim whose part of the region is one run of bytes
    while whole > 0 and size[whole] == shape[whole]:
        whole -= 1
    first = sum(a * stride for a, stride in zip(start, strides, strict=True))
    width = size[whole] * strides[whole]
    if whole == 0:
        return (Block(first, width, 1, width),)
    outer = itertools.product(*(range(n) for n in size[: whole - 1]))
    return tuple(
        Block(first + sum(i * stride for i, stride in zip(index, strides)), strides[whole - 1], size[whole - 1], width)
        for index in outer
    )


def split(region: Region, max_elements: int) -> Iterator[Region]:
    """Cut a rectangle into row-major pieces of at most `max_elements` elements."""
    if region.num_elements <= max_elements or not region.shape:
        yield region
        return
    row = region.num_elements // region.shape[0]
    rows = max(1, max_elements // row)
    for first in range(0, region.shape[0], rows):
        num = min(rows, region.shape[0] - first)
        if row <= max_elements:
            yield Region((region.start[0] + first, *region.start[1:]), (num, *region.shape[1:]))
            continue
        for piece in split(Region(region.start[1:], region.shape[1:]), max_elements):
            yield Region((region.start[0] + first, *piece.start), (1, *piece.shape))


def copy_blocks(data: Tensor, blocks: Sequence[Block], out: Tensor) -> None:
    """Copy blocks, one after the other, into flat `out`, on the current stream."""
    offset = 0
    for block in blocks:
        size = block.height * block.width
        target = out[offset : offset + size]
        if block.height == 1:
            target.copy_(data[block.offset : block.offset + size], non_blocking=True)
        elif target.is_cuda and not data.is_cuda:
            _copy_2d(data, block, target)
        else:
            rows = data[block.offset :].as_strided((block.height, block.width), (block.pitch, 1))
            target.view(block.height, block.width).copy_(rows)
        offset += size


def _copy_2d(data: Tensor, block: Block, target: Tensor) -> None:
    """Call cudaMemcpy2DAsync. (torch would first gather strided host memory with the CPU, into pageable memory.)"""
    with torch.cuda.device(target.device):
        code = _cudart().cudaMemcpy2DAsync(
            ctypes.c_void_p(target.data_ptr()),
            ctypes.c_size_t(block.width),
            ctypes.c_void_p(data.data_ptr() + block.offset),
            ctypes.c_size_t(block.pitch),
            ctypes.c_size_t(block.width),
            ctypes.c_size_t(block.height),
            ctypes.c_int(1),  # cudaMemcpyHostToDevice
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
    if code != 0:
        raise RuntimeError(f"cudaMemcpy2DAsync of {block.height} x {block.width} bytes failed with code {code}")


@functools.cache
def _cudart() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded, found by its name among the loaded libraries."""
    return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
