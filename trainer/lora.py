"""Low-rank adapters: y = x W^T + (alpha / rank) * (x A^T) B^T, never W + B A (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

Owns the adapted linear layer and the switch that turns adapters off. A and B are parameters in trainer.lora.dtype, cast
to the compute dtype in forward; under FSDP2 the cast happens in the all-gather, so that only the smaller format moves.
Adapters of routed experts live in `trainer.moe.experts`.

A layer's weight may be float32 while activations are bfloat16 (full training): the weight follows the activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = F.linear(x, self.weight.to(x.dtype), bias)
        if self.lora is None or not self.adapters_enabled:
            return y
        low_rank = F.linear(F.linear(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))
        return torch.add(y, low_rank, alpha=self.lora.scale)


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
