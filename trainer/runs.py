"""Rows of one parameter on this rank: what one merge or one copy writes.

Owns the coordinates inside a parameter: its rows are counted through its whole stack (row r of matrix e of a stack of
(n, in) matrices is row e * n + r), and rows that follow each other there merge in one go. Does not know checkpoint
names. Callers: trainer.shards, trainer.fused, trainer.weight_source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.merge import merger
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

    @property
    def is_gathered(self) -> bool:
        """Whether A is gathered anew for every publish."""
        return isinstance(self.a_parameter, DTensor) and self.a_parameter.dim() == 2

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """A, where it is this rank's own, and B."""
        return (self.b_parameter,) if self.is_gathered else (self.a_parameter, self.b_parameter)

    def a(self, gathered_a: dict[str, Tensor]) -> Tensor:
        """(E, r, in): this rank's own, else the gathered one as a stack of one."""
        if self.is_gathered:
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

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All that write() reads here."""
        return (self.parameter,) if self.delta is None else (self.parameter, *self.delta.parameters)

    def write(self, out: Tensor, gathered_a: dict[str, Tensor]) -> None:
        """Write the merged values into `out`, of `shape`, any strides, cast to out.dtype. No communication."""
        self.writer(out, gathered_a)()

    def writer(self, out: Tensor, gathered_a: dict[str, Tensor]) -> Callable[[], object]:
        """write(), to be called as often as wanted while the parameters and the gathered A stay where they are."""
        base = local_rows(self.parameter)[self.start : self.stop]
        if self.columns is not None:
            base = base[:, self.columns]
        if self.delta is None:
            return partial(out.copy_, base)
        assert self.columns is not None
        skipped, first_row = divmod(self.delta.first_row + self.start, self.delta.rows_a_factor)
        return merger(
            base,
            local_rows(self.delta.b_parameter)[self.start : self.stop],
            self.delta.a(gathered_a)[skipped:],
            self.delta.scale,
            out,
            first_row=first_row,
            rows_a_factor=self.delta.rows_a_factor,
            first_column=self.columns.start,
        )
