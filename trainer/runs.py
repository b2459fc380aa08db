"""Rows of one parameter on this rank: what one merge or one copy writes.

Owns the coordinates inside a parameter: its rows are counted through its whole stack (row r of matrix e of a stack of
(n, in) matrices is row e * n + r), and rows that follow each other there merge in one go. Does not know checkpoint
names. Callers: trainer.shards, trainer.fused, trainer.weight_source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.merge import merge_rows
from trainer.parallel import local_part


def local_rows(parameter: nn.Parameter) -> Tensor:
    """A live view, without a graph, of this rank's rows of a parameter; the matrices of a stack one below the other.

    Looked up when read: FSDP2 may move a shard's storage, never the parameter.
    """
    local = local_part(parameter)[0]
    return local.flatten(0, 1) if local.dim() == 3 else local


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """The factors that merge into this rank's rows of one parameter: rows W[i] += scale * B[i] @ A."""

    key: str
    """Name of the parameter A; the key of its whole in `gather_lora_a`'s result."""
    a_parameter: nn.Parameter
    """(r, in), or a stack (E, r, in) of which this rank holds all that its rows need."""
    b_parameter: nn.Parameter
    """Has as many local rows as the weight."""
    rows_a_factor: int
    """Rows of the weight under one A."""
    first_row: int
    """Which row under its A this rank's first one is; not 0 where FSDP2 cuts rows."""
    scale: float
    """alpha / rank."""

    @property
    def rank(self) -> int:
        """r."""
        return self.b_parameter.shape[-1]

    def a(self, gathered_a: dict[str, Tensor]) -> Tensor:
        """(E, r, in): this rank's own, else the gathered one as a stack of one."""
        if isinstance(self.a_parameter, DTensor) and self.a_parameter.dim() == 2:
            return gathered_a[self.key][None]
        local = local_part(self.a_parameter)[0]
        return local if local.dim() == 3 else local[None]


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows of one parameter on this rank, some or all columns: what one merge or one copy writes."""

    parameter: nn.Parameter
    delta: LoraDelta | None
    start: int
    stop: int
    columns: slice | None
    """None for a parameter of one dim."""

    def joins(self, following: object) -> bool:
        """Whether `following` are the next rows of the same."""
        return (
            isinstance(following, RowRun)
            and self.parameter is following.parameter
            and self.columns == following.columns
            and self.stop == following.start
        )

    def join(self, stop: int) -> RowRun:
        """As far as `stop`."""
        return replace(self, stop=stop)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        rows = self.stop - self.start
        return (rows,) if self.columns is None else (rows, self.columns.stop - self.columns.start)

    def write(self, out: Tensor, gathered_a: dict[str, Tensor]) -> None:
        """Write the merged values into `out`, of `shape`, any strides, cast to out.dtype. No communication."""
        base = local_rows(self.parameter)[self.start : self.stop]
        if self.columns is not None:
            base = base[:, self.columns]
        if self.delta is None:
            out.copy_(base)
            return
        assert self.columns is not None
        skipped, first_row = divmod(self.delta.first_row + self.start, self.delta.rows_a_factor)
        merge_rows(
            base,
            local_rows(self.delta.b_parameter)[self.start : self.stop],
            self.delta.a(gathered_a)[skipped:],
            self.delta.scale,
            out,
            first_row=first_row,
            rows_a_factor=self.delta.rows_a_factor,
            first_column=self.columns.start,
        )
