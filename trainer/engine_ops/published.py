"""Weights and adapters as engines hold them: what a publish would write there now, for the trainer's own use.

Merged weights: every call merges anew, into memory that is freed after use. The bits are those of
`trainer.delivery.merged_source`, because both merge with `weight_sync.merging.merge` and round once, to the compute
dtype.
Adapters: one slot for each group of modules of equal shapes, filled from the parameters by a call. Its values hold
until the next call with modules of these shapes, so layer after layer uses the same memory. The memory itself stays:
vLLM's kernels remember strides by the address of a tensor, so that an address must never get another shape. The bits
are those of `trainer.delivery.adapter_source`: rounded to the compute dtype, B then multiplied by alpha / rank in that
dtype, zeros beyond the trainer's rank.

Shapes: R rank of the slots, E experts, H hidden, I width of an expert.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.trainer.lora import Linear
from slipstream.trainer.moe.experts import Experts
from slipstream.weight_sync.merging.merge import merger
from slipstream.weight_sync.merging.merge_operands import MergeOperands


def published_linears(
    linears: Sequence[Linear], dtype: torch.dtype, *, adapted: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Weights of linears of one input, one below the other, and their biases; None where they have none. Adapters are
    in the weights if `adapted`."""
    parts = [linear.base(dtype) for linear in linears]
    biases = [bias for _, bias in parts if bias is not None]
    if adapted and any(linear.lora is not None for linear in linears):
        rows = [linear.weight.shape[0] for linear in linears]
        weight = linears[0].weight.new_empty(sum(rows), linears[0].weight.shape[1], dtype=dtype)
        for linear, out in zip(linears, weight.split(rows), strict=True):
            if linear.lora is None:
                out.copy_(linear.weight)
            else:
                _write(linear, "weight", linear.weight, linear.lora_A, linear.lora_B, out)
    else:
        weight = parts[0][0] if len(parts) == 1 else torch.cat([weight for weight, _ in parts])
    return weight.detach(), torch.cat(biases).detach() if biases else None


def published_experts(bank: Experts, dtype: torch.dtype, *, adapted: bool = True) -> tuple[Tensor, Tensor]:
    """gate_up (E, 2I, H) and down (E, H, I) of all experts of a layer. Adapters as above."""
    gate_up, down = bank.gate_up_proj, bank.down_proj
    assert gate_up is not None and down is not None, "packed experts have no merged weights, and others' shapes"
    if not adapted or bank.lora is None:
        return gate_up.detach().to(dtype), down.detach().to(dtype)
    outs = torch.empty_like(gate_up, dtype=dtype), torch.empty_like(down, dtype=dtype)
    _write(bank, "gate_up_proj", gate_up, bank.gate_up_lora_A, bank.gate_up_lora_B, outs[0])
    _write(bank, "down_proj", down, bank.down_lora_A, bank.down_lora_B, outs[1])
    return outs


@torch.no_grad()
def _write(module: Linear | Experts, leaf: str, base: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Merge the parameter `leaf`, a matrix or a stack of them, into `out`."""
    assert module.lora is not None
    rows, columns, rank = base.shape[-2], base.shape[-1], a.shape[-2]
    operands = MergeOperands(
        base.detach().view(1, -1, columns),
        b.detach().view(1, -1, rank),
        a.detach().view(-1, rank, columns),
        module.lora.scale,
        first_row=0,
        rows_a_factor=rows,
        key=module.rounding_keys.get(leaf),
    )
    merger(operands, out.view(1, -1, columns))()


class Factors(NamedTuple):
    """A and B of matrices of one input, in their order, each with a leading dim of one slot."""

    a: tuple[Tensor, ...]
    """(1, R, in) each; of experts (1, E, R, in)."""
    b: tuple[Tensor, ...]
    """(1, out, R) each; of experts (1, E, out, R)."""


class PublishedAdapters:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._slots: dict[tuple[object, ...], Factors] = {}

    @torch.no_grad()
    def linears(self, linears: Sequence[Linear], dtype: torch.dtype) -> Factors:
        a, b = [linear.lora_A for linear in linears], [linear.lora_B for linear in linears]
        scales = {linear.lora.scale for linear in linears if linear.lora is not None}
        assert len(scales) == 1, "linears of one input are adapted alike"
        return self._filled(a, b, scales.pop(), dtype)

    @torch.no_grad()
    def experts(self, bank: Experts, dtype: torch.dtype) -> tuple[Factors, Factors]:
        """The factors of gate and up, which share A, and those of down."""
        assert bank.lora is not None
        gate_b, up_b = bank.gate_up_lora_B.chunk(2, dim=1)
        gate_up = self._filled([bank.gate_up_lora_A], [gate_b, up_b], bank.lora.scale, dtype)
        down = self._filled([bank.down_lora_A], [bank.down_lora_B], bank.lora.scale, dtype)
        return Factors(gate_up.a * 2, gate_up.b), down

    def _filled(self, a: Sequence[Tensor], b: Sequence[Tensor], scale: float, dtype: torch.dtype) -> Factors:
        key = (dtype, *(tuple(one.shape) for one in (*a, *b)))
        if key not in self._slots:
            self._slots[key] = Factors(
                tuple(one.new_zeros(1, *one.shape[:-2], self._rank, one.shape[-1], dtype=dtype) for one in a),
                tuple(one.new_zeros(1, *one.shape[:-1], self._rank, dtype=dtype) for one in b),
            )
        slot = self._slots[key]
        for out, one in zip(slot.a, a, strict=True):
            out[0, ..., : one.shape[-2], :].copy_(one)
        for out, one in zip(slot.b, b, strict=True):
            held = out[0, ..., : one.shape[-1]].copy_(one)
            if scale != 1.0:
                held.mul_(scale)
        return slot
