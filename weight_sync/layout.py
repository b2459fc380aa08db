"""What a rank holds, in checkpoint coordinates. All plans are built from these classes. Pure data, no torch.

A *checkpoint tensor* is named and shaped as in the Hugging Face checkpoint
(`model.layers.0.mlp.experts.3.up_proj.weight`). Trainer ranks hold rectangles of checkpoint tensors (`SourceShard`). An
engine rank holds parameters, and each parameter is filled from rectangles of checkpoint tensors (`Load`), as the
engine's own loader did it once under `weight_sync.record.recorder`.

    SourceLayout (one per trainer rank)          DestLayout (one per engine rank)
      SourceShard tensor, region                   Param  name, shape, dtype, post_load
                                                   Load   tensor, region, axes  ->  param, offset, stride
                                                   Fill   param, offset, size, value (padding)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from slipstream.conf.architecture.tensors import DTYPE_BYTES, TensorMeta

Destination = tuple[int, int]
"""An engine rank: (replica, its rank in that replica)."""


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A rectangle of a tensor: `start` (inclusive) and `shape`, one entry per dim.

    Example: rows 64..127 of a (512, 64) tensor are Region((64, 0), (64, 64)).
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """Exclusive."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def intersect(self, other: Region) -> Region | None:
        """The common rectangle; None if it is empty."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        if any(b <= a for a, b in zip(start, stop, strict=True)):
            return None
        return Region(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


@dataclass(frozen=True, slots=True)
class SourceShard:
    """A rectangle of a checkpoint tensor that one trainer rank can write out."""

    tensor: str
    region: Region


@dataclass(frozen=True, slots=True)
class SourceLayout:
    """Everything that one trainer rank can write out, and the checkpoint it belongs to.

    `tensors` is the same list, in the same order, on every rank.
    """

    rank: int
    tensors: tuple[TensorMeta, ...]
    shards: tuple[SourceShard, ...]


class PostLoad(StrEnum):
    """What the engine did to a parameter after its loader wrote it. A commit must do it again."""

    identity = "identity"
    """The kernels read the bytes that the loader wrote."""
    repack = "repack"
    """The engine permutes the bytes in place; the receiver's `repack` hook does so at commit."""
    derived = "derived"
    """Computed from other parameters; the receiver's `recompute` hook does so at commit. No byte of it is sent."""


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of an engine rank, contiguous in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    post_load: PostLoad = PostLoad.identity

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Load:
    """One copy that the engine's loader makes: a rectangle of a checkpoint tensor into a strided part of a parameter.

    `axes` orders the tensor's dims as the destination walks them, outermost first: destination dim i is tensor dim
    axes[i]. `offset` and `stride` (in elements of the parameter; stride has one entry per destination dim) say where
    element (i0, i1, ...) of the permuted rectangle lands.
    """

    tensor: str
    region: Region
    axes: tuple[int, ...]
    param: str
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fill:
    """A contiguous run of a parameter that the loader sets to a constant (vocabulary padding); never sent.

    An engine that started from random weights holds random values there until its receiver sets them to `value`.
    """

    param: str
    offset: int
    num_elements: int
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class DestLayout:
    """Everything that one engine rank must receive. `rank` counts inside its replica."""

    rank: int
    params: tuple[Param, ...]
    loads: Sequence[Load]
    """A tuple of loads, or a `columns.LoadTable`, which equals the tuple of the loads that it holds."""
    fills: tuple[Fill, ...] = ()

    def written_ranges(self) -> dict[str, list[tuple[int, int]]]:
        """Parameter -> (start, size) of the byte ranges that a publish writes: all except declared fills, and nothing
        of derived parameters."""
        fills: dict[str, list[Fill]] = {}
        for fill in self.fills:
            fills.setdefault(fill.param, []).append(fill)
        written: dict[str, list[tuple[int, int]]] = {}
        for param in self.params:
            if param.post_load is PostLoad.derived:
                continue
            element_bytes, position = DTYPE_BYTES[param.dtype], 0
            ranges: list[tuple[int, int]] = []
            written[param.name] = ranges
            for fill in sorted(fills.get(param.name, ()), key=lambda fill: fill.offset):
                start = fill.offset * element_bytes
                if start > position:
                    ranges.append((position, start - position))
                position = max(position, start + fill.num_elements * element_bytes)
            if position < param.num_bytes:
                ranges.append((position, param.num_bytes - position))
        return written

    def written_bytes(self) -> dict[str, int]:
        """The sum of each parameter's ranges."""
        return {name: sum(size for _, size in ranges) for name, ranges in self.written_ranges().items()}


@dataclass(frozen=True, slots=True)
class Binding:
    """Where one engine rank's parameters are now. Plans hold no addresses, so every publish asks for these.

    `session` is the transport's name for the process ("127.0.0.1:15017"); `addresses` maps a parameter to its device
    pointer.
    """

    session: str
    addresses: dict[str, int]
    holds: str = ""
    """What the rank held before it began (replica/landing.held_digest); "" if that is not known."""


def first_difference(tensors: Sequence[TensorMeta], wanted: Sequence[TensorMeta]) -> str:
    """The first tensor of which two checkpoints do not say the same, in words; "" if there is none."""
    ours, theirs = ({one.name: one for one in metas} for metas in (tensors, wanted))
    for name in sorted({*ours, *theirs}):
        here, there = ours.get(name), theirs.get(name)
        if here != there:
            said = (f"{one.dtype}{list(one.shape)}" if one else "absent" for one in (here, there))
            return f"{name}: {' instead of '.join(said)}"
    return ""
