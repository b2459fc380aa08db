"""Build: what the constructors of a decoder's parts need to know, and the parts that several of them have."""

from dataclasses import dataclass

import torch

from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.schema import LoraConfig, Roundings
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.norm import RMSNorm
from slipstream.trainer.moe.bank import UnpackBuffers
from slipstream.trainer.parallel import ParallelLayout


@dataclass(frozen=True, slots=True)
class Build:
    """What every part's constructor needs to know."""

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

    def linear(self, in_features: int, out_features: int, *, bias: bool = False) -> Linear:
        """A projection that never has an adapter."""
        return Linear(in_features, out_features, bias=bias, weight_dtype=self.weight_dtype, lora=None)

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
