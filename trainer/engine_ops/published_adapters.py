"""Adapters as an engine's slot holds them: what a publish would write there now, for the trainer's own use.

Owns one slot for each group of modules of equal shapes; a call fills it from the parameters. Its values hold until the
next call with modules of these shapes, so layer after layer uses the same memory. The memory itself stays: vLLM's
kernels remember strides by the address of a tensor, so that an address must never get another shape.
Invariant: the bits are those of `trainer.delivery.adapter_source`: rounded to the compute dtype, B then multiplied by
alpha / rank in that dtype, zeros beyond the trainer's rank.

Shapes: R rank of the slots, E experts, H hidden, I width of an expert.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.trainer.lora import Linear
from slipstream.trainer.moe.experts import Experts


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
        """The factors of adapted linears that read one input."""
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
