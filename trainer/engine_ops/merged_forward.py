"""A decoder's values from the merged weights that engines hold, by the trainer's own kernels.

An engine of weight_sync.mode=merged computes with W + scale B A rounded to its format, and the trainer with W, A and B:
after a few steps this is most of what their log-probabilities differ by (docs/parity.md). Here values come from merged
weights, which end with their use, and gradients from W, A and B, of the same input of a layer and with the same
experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from slipstream.trainer.engine_ops.published_weights import published_experts, published_linears
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.forward import Forward, KeepGateUp, Place
from slipstream.trainer.moe.block import MoeBlock


@dataclass(frozen=True, slots=True)
class MergedForward(Forward):
    @property
    def gradients_by(self) -> Forward | None:
        return Forward(self.adapted, self.rounds_base_first, self.attention)

    def linears(self, linears: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, *published_linears([one], x.dtype, adapted=self.adapted)) for one in linears)

    def experts(
        self, block: MoeBlock, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, keep: KeepGateUp, at: Place
    ) -> Tensor:
        is_merged = self.adapted and block.experts.lora is not None
        merged = published_experts(block.experts, x_TH.dtype) if is_merged else None
        most = at.sequences.most_tokens
        return block.run_experts(x_TH, weights_TK, ids_TK, keep, most_tokens=most, adapted=False, merged=merged)
