"""Low-rank adapters: y = x W^T + (alpha / rank) * (x A^T) B^T, never W + B A (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

Owns the adapted linear layer and the switch that turns adapters off. A and B are parameters in trainer.lora.dtype, cast
to the compute dtype in forward; under FSDP2 the cast happens in the all-gather, so that only the smaller format moves.
Adapters of routed experts live in `trainer.moe.experts`.

A layer's weight may be float32 while activations are bfloat16 (full training): the weight follows the activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from conf.schema import LoraConfig


def adapter_dtype(lora: LoraConfig) -> torch.dtype:
    """Format of the adapters' parameters."""
    return getattr(torch, lora.dtype.value)


class Adapted(nn.Module):
    """A layer that may carry an adapter."""

    lora: LoraConfig | None
    """None: this layer is not adapted."""
    adapters_enabled: bool = True


class Linear(Adapted):
    """x W^T + b, plus an adapter when `lora` is given.

    Parameters: weight (out, in), bias (out), lora_A (r, in), lora_B (out, r).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        weight_dtype: torch.dtype,
        lora: LoraConfig | None,
    ) -> None:
        super().__init__()
        self.lora = lora
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=weight_dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=weight_dtype)) if bias else None
        if lora is not None:
            dtype = adapter_dtype(lora)
            self.lora_A = nn.Parameter(torch.empty(lora.rank, in_features, dtype=dtype))
            self.lora_B = nn.Parameter(torch.empty(out_features, lora.rank, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        if self.lora is None or not self.adapters_enabled:
            return F.linear(x, weight, bias)
        return _AdaptedLinear.apply(x, weight, bias, self.lora_A, self.lora_B, self.lora.scale)  # type: ignore[return-value]


class _AdaptedLinear(torch.autograd.Function):
    """x W^T + b + scale * (x A^T) B^T with W and b frozen: each adapter product ends in the accumulator of the base's,
    forward and for the gradient of x."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        rows_TI = x.flatten(0, -2)
        ctx.scale, ctx.adapter_dtype = scale, a.dtype
        a, b = a.to(x.dtype), b.to(x.dtype)
        low_TR = rows_TI @ a.t()
        y_TO = F.linear(rows_TI, weight, bias).addmm_(low_TR, b.t(), alpha=scale)
        ctx.save_for_backward(rows_TI, weight, a, b, low_TR)
        return y_TO.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows_TI, weight, a, b, low_TR = ctx.saved_tensors
        dy_TO = dy.flatten(0, -2)
        dlow_TR = (dy_TO @ b).mul_(ctx.scale)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dy_TO @ weight).addmm_(dlow_TR, a).view(*dy.shape[:-1], weight.shape[1])
        da = _product(dlow_TR.t(), rows_TI, ctx.adapter_dtype)
        db = _product(dy_TO.t(), low_TR, ctx.adapter_dtype).mul_(ctx.scale)
        return dx, None, None, da, db, None


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right; a float32 result of 16-bit factors is not rounded in between on CUDA."""
    if left.is_cuda and dtype is torch.float32 and left.dtype is not dtype and right.shape[0]:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


@contextmanager
def disabled_adapters(decoder: nn.Module) -> Iterator[None]:
    """Run the base policy (the reference): adapters add nothing inside the block. Use under torch.no_grad().

    Not for a forward whose backward runs after the block: recomputed activations would see the adapters again.
    """
    adapted = [module for module in decoder.modules() if isinstance(module, Adapted)]
    before = [module.adapters_enabled for module in adapted]
    for module in adapted:
        module.adapters_enabled = False
    try:
        yield
    finally:
        for module, enabled in zip(adapted, before, strict=True):
            module.adapters_enabled = enabled
