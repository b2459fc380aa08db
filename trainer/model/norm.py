"""RMSNorm, with the casts that Roundings.norm chooses. They decide the last bits in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from conf.schema import Rounding
from trainer.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim."""

    def __init__(self, size: int, *, eps: float, weight_dtype: torch.dtype, rounding: Rounding) -> None:
        super().__init__()
        self.eps, self.once = eps, rounding is Rounding.once
        self.weight = nn.Parameter(torch.empty(size, dtype=weight_dtype))

    def forward(self, x: Tensor, wide: Tensor | None = None) -> Tensor:
        """Same shape and dtype as x, which is `wide`, rounded, if that is given."""
        return rms_norm(x, self.weight, self.eps, self.once, wide if self.once else None)

    def after_sum(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm)."""
        return add_rms_norm(x, delta, self.weight, self.eps, self.once)
