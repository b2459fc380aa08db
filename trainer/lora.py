"""Low-rank adapters: y = x W^T + (alpha / rank) * (x A^T) B^T, never W + B A (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

Owns the adapted linear layer. A and B are parameters in trainer.lora.dtype, cast to the compute dtype in forward; under
FSDP2 the cast happens in the all-gather, so that only the smaller format moves. Adapters of routed experts live in
`trainer.moe.experts`.

A layer's weight may be float32 while activations are bfloat16 (full training): the weight follows the activations.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from slipstream.conf.schema import LoraConfig
from slipstream.trainer.kernels.experts.low_rank import add_dense_low_rank


def adapter_dtype(lora: LoraConfig) -> torch.dtype:
    return getattr(torch, lora.dtype.value)


class Adapted(nn.Module):
    lora: LoraConfig | None
    """None: this layer is not adapted."""
    rounding_keys: Mapping[str, int] = MappingProxyType({})
    """Each adapted parameter by its name here -> the key of the thresholds by which its merged values are rounded
    (weight_sync.merging.rounding). Without one they are rounded to nearest."""


class Linear(Adapted):
    """x W^T + b, plus an adapter when `lora` is given. Parameters: weight (out, in), bias (out), lora_A (r, in), lora_B
    (out, r)."""

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
        return apply_together([self], x)[0]

    def base(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weight and bias in the dtype of activations."""
        return self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)


def apply_together(
    linears: Sequence[Linear], x: Tensor, *, adapted: bool = True, rounds_base_first: bool = False
) -> tuple[Tensor, ...]:
    """Apply several linears to one input [..., in]. Adapted ones read it once and sum its gradient in one place.

    Args:
        rounds_base_first: whether the sum of a rounded base product and an adapter's is rounded to nearest, as in
            engines with adapters in slots.
    """
    if not adapted or any(linear.lora is None for linear in linears):
        if len(linears) == 1:
            return (F.linear(x, *linears[0].base(x.dtype)),)
        return tuple(
            apply_together([linear], x, adapted=adapted, rounds_base_first=rounds_base_first)[0] for linear in linears
        )
    factors = (part for linear in linears for part in (*linear.base(x.dtype), linear.lora_A, linear.lora_B))
    scales = {linear.lora.scale for linear in linears if linear.lora is not None}
    assert len(scales) == 1, "linears of one input are adapted alike"
    return _AdaptedLinears.apply(x, scales.pop(), rounds_base_first, *factors)


class _AdaptedLinears(torch.autograd.Function):
    """x W^T + b + scale * (x A^T) B^T for each of some (W, b, A, B), with W and b frozen.

    Products of adapters, and their parts of the gradient of x, are added to products with W that are rounded already.
    In bfloat16 they are, after few steps of training, less than half a step of those, and rounding to nearest would
    take them away again: see weight_sync.merging.rounding.rounded_sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, rounds_base_first: bool, *factors: Any) -> tuple[Tensor, ...]:
        rows_TI = x.flatten(0, -2)
        weights, biases, stored_a, stored_b = (factors[part::4] for part in range(4))
        ctx.scale, ctx.adapter_dtype = scale, stored_a[0].dtype
        ctx.ranks = [a.shape[0] for a in stored_a if a is not None]
        as_ = [a.to(x.dtype) for a in stored_a if a is not None]
        bs = [b.to(x.dtype) for b in stored_b if b is not None]
        a_RI = as_[0] if len(as_) == 1 else torch.cat(as_)
        low_TR = rows_TI @ a_RI.t()
        outs = [
            F.linear(rows_TI, weight, bias).addmm_(low, b.t(), alpha=scale)
            if rounds_base_first
            else add_dense_low_rank(F.linear(rows_TI, weight, bias), low, b, scale)
            for weight, bias, b, low in zip(weights, biases, bs, low_TR.split(ctx.ranks, 1), strict=True)
        ]
        ctx.save_for_backward(rows_TI, a_RI, low_TR, *weights, *bs)
        return tuple(out.view(*x.shape[:-1], out.shape[1]) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        rows_TI, a_RI, low_TR, *rest = ctx.saved_tensors
        weights, bs = rest[: len(douts)], rest[len(douts) :]
        dys = [dout.flatten(0, -2) for dout in douts]
        dlow_TR = torch.empty_like(low_TR)
        for dlow, dy, b in zip(dlow_TR.split(ctx.ranks, 1), dys, bs, strict=True):
            dlow.addmm_(dy, b, beta=0, alpha=ctx.scale)
        dx = None
        if ctx.needs_input_grad[0]:
            dx_TI = dys[0] @ weights[0]
            for dy, weight in zip(dys[1:], weights[1:], strict=True):
                dx_TI.addmm_(dy, weight)
            dx = add_dense_low_rank(dx_TI, dlow_TR, a_RI.t()).view(*douts[0].shape[:-1], a_RI.shape[1])
        das = _product(dlow_TR.t(), rows_TI, ctx.adapter_dtype).split(ctx.ranks)
        lows = low_TR.split(ctx.ranks, 1)
        dbs = [_product(dy.t(), low, ctx.adapter_dtype, ctx.scale) for dy, low in zip(dys, lows, strict=True)]
        return dx, None, None, *(grad for da, db in zip(das, dbs, strict=True) for grad in (None, None, da, db))


def _product(left: Tensor, right: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """scale * left @ right; a float32 result of 16-bit factors is not rounded in between on CUDA."""
    if left.is_cuda and dtype is torch.float32 and left.dtype is not dtype and right.shape[0]:
        out = torch.mm(left, right, out_dtype=dtype)
        return out if scale == 1.0 else out.mul_(scale)
    return left.new_empty(left.shape[0], right.shape[1]).addmm_(left, right, beta=0, alpha=scale).to(dtype)
