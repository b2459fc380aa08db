"""Router: which experts see a token, and with what weight.

Owns the numerics that decide routing; they match transformers and must, because one flipped expert is a different
model: logits in the compute dtype, softmax over all experts in float32, top-k, renormalization in float32, weights
rounded to the compute dtype. Callers: trainer.moe.block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.spec import MoeSpec


@dataclass(frozen=True, slots=True)
class Routing:
    """The choice for T tokens, K experts each, best first."""

    weights_TK: Tensor
    """Compute dtype; differentiable."""
    experts_TK: Tensor
    """int64, ids in the whole model."""


class Router(nn.Module):
    """Top-k softmax router (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538).

    Parameter: weight (num_experts, H).
    """

    def __init__(self, moe: MoeSpec, hidden_size: int, *, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = moe.top_k
        self.norm_topk_prob = moe.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size, dtype=weight_dtype))

    def forward(self, x_TH: Tensor) -> Routing:
        """Route every token."""
        logits_TE = F.linear(x_TH, self.weight.to(x_TH.dtype))
        probs_TE = logits_TE.softmax(-1, dtype=torch.float32)
        weights_TK, experts_TK = probs_TE.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return Routing(weights_TK.to(x_TH.dtype), experts_TK)
