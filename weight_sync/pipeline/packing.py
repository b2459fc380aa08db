"""What goes into one staging slot, and how it gets there: reads compiled once, replayed at every publish.

The pipeline knows where bytes go in a slot, a source where they come from. A plan is static and has tens of thousands
of pieces, so Python's cost per piece is paid once, at connect. A source may join pieces that are neighbours in its own
memory and in the slot into few large operations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from math import prod
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from slipstream.weight_sync.layout import DTYPE_BYTES, Region
from slipstream.weight_sync.plan.budget import Staging, aligned
from slipstream.weight_sync.plan.transfer_plan import Task
from slipstream.weight_sync.source import WeightSource

FillSlot = Callable[[], None]
"""Writes all bytes of one load into its slot, on the current stream. Call it only between begin() and end()."""
CompiledReads = Callable[[Tensor], FillSlot]
"""Slot (flat uint8) -> the function that fills it. Holds no slot, so a plan survives freeing the staging buffers."""
CompiledMarks = Callable[[Tensor, Tensor], FillSlot]
"""(slot, marks) -> the function that fills the slot and marks what changed; see MarkingSource."""


@dataclass(frozen=True, slots=True)
class Packet:
    """Bytes that are packed once, and all tasks that send them (they differ only in the replica)."""

    offset_bytes: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class PackedRead:
    """A rectangle of a checkpoint tensor and its place in a slot: permuted by `axes`, row-major, from `offset_bytes`.

    Example: PackedRead("norm.weight", Region((0,), (64,)), (0,), "bfloat16", 1024).
    """

    tensor: str
    region: Region
    axes: tuple[int, ...]
    dtype: str
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.region.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def is_row_major(self) -> bool:
        """Whether the slot holds the rectangle in the tensor's own order."""
        return self.axes == tuple(range(len(self.axes)))

    def view(self, slot: Tensor) -> Tensor:
        """The part of a slot that this fills, as a view with the shape of the region.

        Packed dim i is tensor dim axes[i], so the view is the inverse permutation of the packed, row-major block.
        """
        packed_shape = [self.region.shape[axis] for axis in self.axes]
        block = view_as(slot, self.offset_bytes, self.dtype, packed_shape)
        return block if self.is_row_major else block.permute([self.axes.index(dim) for dim in range(len(self.axes))])


@runtime_checkable
class CompilingSource(Protocol):
    """A WeightSource that plans many reads at once."""

    def compile_reads(self, reads: Sequence[PackedRead]) -> CompiledReads:
        """Turn the reads of one load into one function per slot. May be called before any begin()."""
        ...


@runtime_checkable
class MarkingSource(CompilingSource, Protocol):
    """A CompilingSource that knows what it gave at the last publish."""

    def compile_marked_reads(self, reads: Sequence[PackedRead]) -> CompiledMarks:
        """As compile_reads; the function also writes a mark per two bytes of the slot (uint8), where the format is one
        of changes.DTYPES: not 0 where they differ from what keep() knows. Call that function only after keep()."""
        ...

    def keep(self) -> None:
        """Keep what the present values are computed from, as the published ones. Rank-local."""
        ...


def compile_reads(source: WeightSource, reads: Sequence[PackedRead]) -> CompiledReads:
    """The source's own function to fill a slot or, if it has none, one read() per piece."""
    if isinstance(source, CompilingSource):
        return source.compile_reads(reads)

    def fill(slot: Tensor) -> None:
        for read in reads:
            source.read(read.tensor, read.region, read.view(slot))

    return lambda slot: partial(fill, slot)


def view_as(slot: Tensor, offset_bytes: int, dtype: str, shape: Sequence[int]) -> Tensor:
    """A row-major block of a slot."""
    num_bytes = prod(shape) * DTYPE_BYTES[dtype]
    return slot[offset_bytes : offset_bytes + num_bytes].view(getattr(torch, dtype)).view(shape)


def packed_reads(packets: Sequence[Packet]) -> list[PackedRead]:
    """Every piece of a load and its place in the slot."""
    reads: list[PackedRead] = []
    for packet in packets:
        dtype, pieces = packet.tasks[0].dtype, packet.tasks[0].pieces
        for piece in pieces:
            offset_bytes = packet.offset_bytes + piece.offset_elements * DTYPE_BYTES[dtype]
            reads.append(PackedRead(piece.tensor, piece.region, piece.axes, dtype, offset_bytes))
    return reads


def same_bytes(tasks: Sequence[Task]) -> list[list[Task]]:
    """Runs of consecutive tasks that differ only in the replica: packed and hashed once, written once per replica."""
    groups: list[list[Task]] = []
    for task in tasks:
        if groups and replace(groups[-1][0], replica=task.replica) == task:
            groups[-1].append(task)
        else:
            groups.append([task])
    return groups


def cut_into_packets(tasks: Sequence[Task], limits: Staging) -> tuple[list[tuple[Packet, ...]], int]:
    """Slot loads in schedule order, and the size of a slot. Raises: as Staging.cut()."""
    groups = same_bytes(tasks)
    sizes = np.array([group[0].num_bytes for group in groups], np.int64)
    edges, slot_bytes = limits.cut(sizes, lambda number: groups[number][0].param)
    return [_laid_out(groups[first:last]) for first, last in pairwise(edges)], slot_bytes


def _laid_out(groups: Sequence[list[Task]]) -> tuple[Packet, ...]:
    """A load's packets, with those of one parameter and destination next to each other, so that one launch fills them.

    The schedule alternates between destinations, so that every load has bytes for all of them. Packets may be reordered
    within a load, because nothing of it is written before all of it is packed.
    """
    turns: dict[tuple[str, int, int], list[list[Task]]] = {}
    for group in groups:
        turns.setdefault((group[0].param, group[0].replica, group[0].dest_rank), []).append(group)
    packets: list[Packet] = []
    offset = 0
    for group in chain.from_iterable(turns.values()):
        packets.append(Packet(offset, tuple(group)))
        offset += aligned(group[0].num_bytes)
    return tuple(packets)
