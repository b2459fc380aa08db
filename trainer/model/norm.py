"""RMSNorm (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467) with transformers' order of casts.

Normalize in float32, cast to the compute dtype, then multiply by the weight: the order decides the last bit in
bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim."""

    def __init__(self, size: int, *, eps: float, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=weight_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)
