"""Build: what the constructors of a decoder's parts need to know, and the norm that several of them have."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.schema import LoraConfig, Rounding, Roundings
from slipstream.trainer.kernels.rms_norm import add_rms_norm, rms_norm
from slipstream.trainer.lora import Linear
from slipstream.trainer.moe.bank import UnpackBuffers
from slipstream.trainer.parallel import ParallelLayout


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim; with `adds_one`, * (1 + weight), which is rounded once in any case.
    Roundings.norm chooses the casts, which decide the last bits in bfloat16."""

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


@dataclass(frozen=True, slots=True)
class Build:
    spec: ModelSpec
    compute_dtype: torch.dtype
    weight_dtype: torch.dtype
    lora: LoraConfig | None
    checkpointing: bool
    gate_up_kept: float
    """Share of the expert layers that keep the product of gate and up although they are recomputed."""
    numerics: Roundings
    layout: ParallelLayout
    unpacked: UnpackBuffers
    """Buffers into which all layers unpack their packed experts."""

    def linear(self, in_features: int, out_features: int) -> Linear:
        """A projection that never has an adapter."""
        return Linear(in_features, out_features, weight_dtype=self.weight_dtype, lora=None)

    def norm(self) -> RMSNorm:
        """A norm of the residual stream."""
        return RMSNorm(
            self.spec.hidden_size,
            eps=self.spec.rms_norm_eps,
            weight_dtype=self.weight_dtype,
            rounding=self.numerics.norm,
            adds_one=self.spec.norms_add_one,
            sums_alone=self.spec.scales_layers,
        )
