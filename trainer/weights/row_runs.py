"""Rows of one parameter on this rank: what one merge or one copy writes.

A parameter's rows are counted through its whole stack (row r of matrix e of a stack of (n, in) matrices is row
e * n + r). Rows that follow each other there are merged by one call, and so are equal bands of rows at equal distances.
Does not know checkpoint names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.trainer.parallel import local_part
from slipstream.weight_sync.merging.merge import marker, merger
from slipstream.weight_sync.merging.merge_operands import MergeOperands

Kept = Mapping[nn.Parameter, Tensor]
"""Values that parameters of adapters had when they were last published, of this rank's part of each."""


def local_rows(parameter: nn.Parameter, kept: Kept | None = None) -> Tensor:
    """A live view, without a graph, of this rank's rows of a parameter; the matrices of a stack one below the other.

    The address is looked up at every read: FSDP2 may move a shard's storage, never the parameter. If there are `kept`
    values, it is of them.
    """
    local = local_part(parameter)[0] if kept is None else kept[parameter]
    return local.flatten(0, 1) if local.dim() == 3 else local


@dataclass(frozen=True, slots=True)
class Rows:
    """Equal bands of rows at a constant pitch; rows that follow each other are one band.

    Example: one of two TP ranks wants the second half of gate and of up (I rows each) of every expert of a stack
    (E, 2I, H): Rows(start=I // 2, height=I // 2, num_bands=2 * E, pitch=I).
    """

    start: int
    height: int
    """Rows of a band."""
    num_bands: int = 1
    pitch: int = 0
    """Rows from one band's start to the next one's; not used for one band."""

    def __len__(self) -> int:
        return self.num_bands * self.height

    def joined(self, following: Rows) -> Rows | None:
        """Join both, if `following` are the next rows of a band, or the next band; else None."""
        if following.num_bands > 1:
            return None
        pitch = self.pitch
        if self.num_bands == 1:
            pitch = following.start - self.start
            if pitch == self.height:
                return replace(self, height=self.height + following.height)
        is_next = following.height == self.height < pitch and following.start == self.start + self.num_bands * pitch
        return replace(self, num_bands=self.num_bands + 1, pitch=pitch) if is_next else None

    def parts(self, max_rows: int) -> Iterator[tuple[int, Rows]]:
        """Cut into parts of at most max_rows rows, each as (rows before it, part). Cuts a band only if it is longer."""
        count, cut = max(1, max_rows // self.height), min(max_rows, self.height)
        for band in range(0, self.num_bands, count):
            bands = replace(self, start=self.start + band * self.pitch, num_bands=min(count, self.num_bands - band))
            for first in range(0, self.height, cut):
                height = min(cut, self.height - first)
                yield band * self.height + first, replace(bands, start=bands.start + first, height=height)

    def of(self, whole: Tensor) -> Tensor:
        """A live view of these rows of `whole`: (num_bands, height, ...)."""
        stop = self.start + (self.num_bands - 1) * self.pitch + self.height
        rows = whole[self.start : stop]
        return rows[None] if self.num_bands == 1 else rows.unfold(0, self.height, self.pitch).movedim(-1, 1)


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """The factors that merge into this rank's rows of one parameter: rows W[i] += scale * B[i] @ A."""

    key: str
    """Name of the parameter A, of `sharded_lora_a` too."""
    a_parameter: nn.Parameter
    """(r, in), or a stack (E, r, in) of which this rank holds all that its rows need."""
    b_parameter: nn.Parameter
    """Has as many local rows as the weight."""
    rows_a_factor: int
    """Rows of the weight under one A."""
    first_row: int
    """Index of this rank's first row among those under its A; not 0 where FSDP2 cuts rows."""
    scale: float
    """alpha / rank."""
    rounding_key: int | None = None
    """See `MergeOperands.key`."""
    stack_row: int = 0
    """Index of this rank's first row under its A, counted through the parameter over all ranks, less `first_row`."""

    @property
    def rank(self) -> int:
        return self.b_parameter.shape[-1]

    @property
    def is_gathered(self) -> bool:
        """Whether A is gathered anew for every publish."""
        return isinstance(self.a_parameter, DTensor) and self.a_parameter.dim() == 2

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """A, if this rank holds all that it needs of it, and B."""
        return (self.b_parameter,) if self.is_gathered else (self.a_parameter, self.b_parameter)

    def a(self, gathered_a: Mapping[str, Tensor], kept: Kept | None = None) -> Tensor:
        """(E, r, in): this rank's own A, or the gathered one as a stack of one."""
        if self.is_gathered:
            return gathered_a[self.key][None]
        local = local_part(self.a_parameter)[0] if kept is None else kept[self.a_parameter]
        return local if local.dim() == 3 else local[None]


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows of one parameter on this rank, some or all columns: what one merge or one copy writes."""

    parameter: nn.Parameter
    delta: LoraDelta | None
    rows: Rows
    """If there are several bands, each lies under one A."""
    columns: slice | None
    """None for a parameter of one dim."""

    def joined(self, following: object) -> RowRun | None:
        """One run of both, if `following` holds the next rows, or the next band, of the same parameter; else None."""
        if (
            not isinstance(following, RowRun)
            or self.parameter is not following.parameter
            or self.columns != following.columns
        ):
            return None
        rows = self.rows.joined(following.rows)
        if rows is None or (rows.num_bands > 1 and not (self._is_under_one_a and following._is_under_one_a)):
            return None
        return replace(self, rows=rows)

    @property
    def _is_under_one_a(self) -> bool:
        """Whether the rows of each band have one A."""
        if self.delta is None or self.rows.num_bands > 1:
            return True
        first = self.delta.first_row + self.rows.start
        return first // self.delta.rows_a_factor == (first + self.rows.height - 1) // self.delta.rows_a_factor

    @property
    def shape(self) -> tuple[int, ...]:
        rows = len(self.rows)
        return (rows,) if self.columns is None else (rows, self.columns.stop - self.columns.start)

    def stack_rows(self) -> Tensor:
        """Index of each adapted row, counted through the parameter over all ranks."""
        assert self.delta is not None
        first = self.delta.stack_row + self.delta.first_row + self.rows.start
        bands = first + self.rows.pitch * torch.arange(self.rows.num_bands)
        return (bands[:, None] + torch.arange(self.rows.height)).flatten()

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """What write() reads."""
        return (self.parameter,) if self.delta is None else (self.parameter, *self.delta.parameters)

    def write(self, out: Tensor, gathered_a: dict[str, Tensor]) -> None:
        """Write the merged values into `out`, of `shape`, any strides, cast to out.dtype. No communication."""
        self.writer(out, gathered_a)()

    def writer(self, out: Tensor, gathered_a: Mapping[str, Tensor]) -> Callable[[], object]:
        """A function that does what write() does, callable as long as parameters and gathered A stay where they are."""
        # A convolution's rows lie as (channels, 1, width) in the checkpoint.
        return self.writer_of_bands(out.view(self.rows.num_bands, self.rows.height, *self.shape[1:]), gathered_a)

    def writer_of_bands(self, out: Tensor, gathered_a: Mapping[str, Tensor]) -> Callable[[], object]:
        """As writer(), but the bands of `out` may have any distance: its first dim counts bands."""
        if self.delta is None:
            return partial(out.copy_, self._base())
        return merger(self.operands(gathered_a), out)

    def marker(
        self, out: Tensor, marks: Tensor, gathered_a: Mapping[str, Tensor], last: tuple[Mapping[str, Tensor], Kept]
    ) -> Callable[[], object]:
        """As writer(), into bfloat16, and marks with 1 where the factors of `last` (gathered A, and this rank's own)
        give other bits, with 0 elsewhere. Where there is no adapter, nothing changes."""
        assert out.dtype is torch.bfloat16
        out, marks = (x.view(self.rows.num_bands, self.rows.height, *self.shape[1:]) for x in (out, marks))
        if self.delta is not None:
            return marker(self.operands(gathered_a), self.operands(*last), out, marks)
        write = self.writer_of_bands(out, gathered_a)
        return lambda: (write(), marks.zero_())

    def operands(self, gathered_a: Mapping[str, Tensor], kept: Kept | None = None) -> MergeOperands:
        """What is merged into these rows of a matrix: factors of the adapter, or of rank 0 if it has none here."""
        assert self.columns is not None
        base = self._base()
        if self.delta is None:
            b, a = base[..., :0], base.new_empty(1, 0, self.columns.stop)
            return MergeOperands(base, b, a, 0.0, 0, self.rows.height, self.rows.pitch, self.columns.start)
        skipped, first_row = divmod(self.delta.first_row + self.rows.start, self.delta.rows_a_factor)
        return MergeOperands(
            base,
            self.rows.of(local_rows(self.delta.b_parameter, kept)),
            self.delta.a(gathered_a, kept)[skipped:],
            self.delta.scale,
            first_row,
            self.delta.rows_a_factor,
            self.rows.pitch,
            self.columns.start,
            self.delta.rounding_key,
            self.delta.stack_row + skipped * self.delta.rows_a_factor,
        )

    def _base(self) -> Tensor:
        base = self.rows.of(local_rows(self.parameter))
        return base if self.columns is None else base[..., self.columns]
