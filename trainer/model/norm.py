"""RMSNorm, with the casts that Roundings.norm chooses. They decide the last bits in bfloat16."""

import torch
from torch import Tensor, nn

from slipstream.conf.schema import Rounding
from slipstream.trainer.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim; with `adds_one`, * (1 + weight), which is rounded once in any case."""

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        weight_dtype: torch.dtype,
        rounding: Rounding,
        adds_one: bool = False,
        sums_alone: bool = False,
    ) -> None:
        super().__init__()
        self.fuses_sum = rounding is Rounding.once and not sums_alone
        """Whether it reads a sum before the sum is rounded."""
        self.eps, self.once, self.adds_one = eps, rounding is Rounding.once, adds_one
        self.weight = nn.Parameter(torch.empty(size, dtype=weight_dtype))

    def forward(self, x: Tensor, wide: Tensor | None = None) -> Tensor:
        """The norm, in x's shape and dtype. `wide`: x before it was rounded, which a norm that rounds once reads."""
        if self.adds_one:
            return self._plus_one(x.view_as(x), wide if self.once else None)
        return rms_norm(x, self.weight, self.eps, self.once, wide if self.once else None)

    def after_sum(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm)."""
        if self.adds_one or self.once is not self.fuses_sum:
            total = x + delta
            return total, self(total, (x.float() + delta.float()).detach() if self.fuses_sum else None)
        return add_rms_norm(x, delta, self.weight, self.eps, self.once)

    def _plus_one(self, x: Tensor, wide: Tensor | None) -> Tensor:
        """In torch's operations, because 1 + weight has more digits than a 16-bit weight."""
        normed = x.float()
        if wide is not None:
            normed = normed + (wide - normed).detach()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.to(x.dtype).float())).to(x.dtype)
