"""Experts that a checkpoint fuses: where their elements lie in the trainer's stacks, and how an adapter merges.

    checkpoint (gpt-oss)                                       trainer (trainer.moe.experts)
    gate_up_proj      (E, H, 2I)  columns gate0 up0 gate1 ..   gate_up_proj (E, 2I, H)  rows gate0 gate1 .. up0 up1 ..
    gate_up_proj_bias (E, 2I)     the same turns               gate_up_bias (E, 2I)
    down_proj         (E, I, H)                                down_proj    (E, H, I)
    down_proj_bias    (E, H)                                   down_bias    (E, H)

    checkpoint (Gemma 4)          the same tensors without biases, and in the trainer's layout

The trainer has one layout for all families, as its kernels and an engine's w13 need it. Loading separates the
alternating columns, and writing interleaves them again. Column c of the checkpoint is row (c % P) * R / P + c // P of
R, where P is the number of alternating parts (gate and up: 2, down: 1).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.parallel import local_part
from slipstream.trainer.weights.row_runs import LoraDelta, RowRun, Rows, local_rows
from slipstream.weight_sync.layout import Region


@dataclass(frozen=True, slots=True)
class FusedRun:
    """A rectangle of a fused checkpoint tensor that one read or one load touches."""

    parameter: nn.Parameter
    delta: LoraDelta | None
    num_parts: int
    start: tuple[int, ...]
    """Place in the checkpoint tensor, with experts counted from this rank's first one."""
    shape: tuple[int, ...]

    def write(self, out: Tensor, gathered_a: dict[str, Tensor]) -> None:
        """Write the merged values into `out`, of `shape`, any strides, cast to out.dtype. No communication."""
        for rows, part in self._parts(out):
            if part.dim() == 2:
                part.copy_(rows.of(self._held))
            else:
                RowRun(self.parameter, self.delta, rows, self._columns).writer_of_bands(part, gathered_a)()

    def fill(self, values: Tensor) -> None:
        """Load the rectangle: the inverse of write()."""
        for rows, part in self._parts(values):
            held = rows.of(self._held)
            (held if part.dim() == 2 else held[..., self._columns]).copy_(part)

    def joined(self, following: object) -> None:
        """Nothing is joined."""

    @property
    def _held(self) -> Tensor:
        """This rank's rows, or elements of a bias, of all experts one below the other."""
        return local_part(self.parameter)[0].flatten(0, 1)

    @property
    def _columns(self) -> slice:
        return slice(self.start[1], self.start[1] + self.shape[1])

    def _parts(self, whole: Tensor) -> Iterator[tuple[Rows, Tensor]]:
        """Pairs of rows of the parameter, one band per expert, and the columns of `whole` that they hold."""
        rows_an_expert = self.parameter.shape[1]
        first, count = self.start[-1], self.shape[-1]
        for part in range(self.num_parts):
            skipped = (part - first) % self.num_parts
            if skipped < count:
                columns = whole[..., skipped :: self.num_parts]
                start = part * (rows_an_expert // self.num_parts) + (first + skipped) // self.num_parts
                start += self.start[0] * rows_an_expert
                yield Rows(start, columns.shape[-1], self.shape[0], rows_an_expert), columns.movedim(-1, 1)


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """This rank's experts of a fused checkpoint tensor."""

    tensor: str
    region: Region
    parameter: nn.Parameter
    num_parts: int
    """Read if it is turned."""
    delta: LoraDelta | None
    is_turned: bool
    """As gpt-oss; else as the trainer."""

    @property
    def base(self) -> Tensor:
        """Live, in the trainer's layout."""
        return local_rows(self.parameter)

    def fill(self, values: Tensor) -> None:
        if self.is_turned:
            self._turned(self.region).fill(values)
        else:
            self.base.view(self.region.shape).copy_(values)

    def run(self, region: Region) -> FusedRun | RowRun:
        """Where `region`, a part of self.region in coordinates of the checkpoint tensor, lies in the parameter."""
        if self.is_turned:
            return self._turned(region)
        pitch = self.parameter.shape[1]
        start = (region.start[0] - self.region.start[0]) * pitch + region.start[1]
        rows = Rows(start, region.shape[1], region.shape[0], pitch)
        return RowRun(self.parameter, self.delta, rows, slice(region.start[2], region.stop[2]))

    def _turned(self, region: Region) -> FusedRun:
        start = (region.start[0] - self.region.start[0], *region.start[1:])
        return FusedRun(self.parameter, self.delta, self.num_parts, start, region.shape)


def fused_experts(
    name: str, bank: Experts, deltas: dict[str, LoraDelta | None], *, is_turned: bool
) -> Iterator[FusedTensor]:
    """The tensors of one layer that are not packed; `name` is the bank's module in the checkpoint."""
    for leaf, parameter, num_parts, delta in (
        ("gate_up_proj", bank.gate_up_proj, 2, deltas["gate_up"]),
        ("gate_up_proj_bias", bank.gate_up_bias, 2, None),
        ("down_proj", bank.down_proj, 1, deltas["down"]),
        ("down_proj_bias", bank.down_bias, 1, None),
    ):
        if parameter is None:  # packed (packed_experts.py), or a family without biases
            continue
        local, start = local_part(parameter)
        rest = local.shape[:0:-1] if is_turned else local.shape[1:]  # a bias has one dim here and stays as it is
        region = Region((bank.first_expert + start,) + (0,) * len(rest), (local.shape[0], *rest))
        yield FusedTensor(f"{name}.{leaf}", region, parameter, num_parts, delta, is_turned)


def interleave(rows_EN: Tensor) -> Tensor:
    """(E, 2I, ...) rows, gate first -> gate and up alternating, as the checkpoint's columns."""
    return torch.stack(rows_EN.chunk(2, dim=1), dim=2).flatten(1, 2)


def deinterleave(rows_EN: Tensor) -> Tensor:
    return torch.cat((rows_EN[:, 0::2], rows_EN[:, 1::2]), dim=1)
