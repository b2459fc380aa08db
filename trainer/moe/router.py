"""The router decides which experts see a token, and with what weight.

Owns the numerics that decide routing. They must match transformers, because one flipped expert is a different model:

    softmax   logits in the compute dtype, softmax over all experts in float32, top-k, renormalization in float32
              (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538), weights as Roundings.router_weights says
    sigmoid   logits as Roundings.router_logits says, and from there on in float32: scores, choice by score +
              correction bias inside the best groups, weights from the scores alone (DeepSeek-V3,
              https://arxiv.org/abs/2412.19437, section 2.1.2)

Gemma 4's is the first with float32 logits, of tokens in unit length; its weights have factors of experts.
gpt-oss's router, a softmax over its top-k logits, is the first with renormalization: the same weights, and of equal
logits (of 32 in bfloat16 the fourth and fifth are equal for some tokens in a hundred) vLLM's choice in vLLM's order.
The softmax router's arithmetic is trainer.kernels.experts.route's. A recorded choice (trainer.moe.replay) replaces the
router's own, and gets the weights that the router would have given to it.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from slipstream.conf.architecture.moe_spec import MoeSpec, RouterScore
from slipstream.conf.schema import Roundings, RoutedScale, RouterFormat, RouterLogits
from slipstream.trainer.kernels.experts.route import route, weigh
from slipstream.trainer.moe.replay import LayerRoutes

NORM_EPS = 1e-20
"""Added to the sum of a sigmoid router's top-k scores before the scores are divided by it."""


class Routing(NamedTuple):
    """The experts chosen for T tokens, K each, best first."""

    weights_TK: Tensor
    """float32, or the compute dtype (a softmax router's, if trainer.numerics says so); differentiable."""
    experts_TK: Tensor
    """int64, ids in the whole model."""
    num_flipped: Tensor | None = None
    """With recorded routes: how many of them the router would not have chosen."""


class Router(nn.Module):
    """Parameters: weight (num_experts, H); e_score_correction_bias (num_experts), float32, of a sigmoid router; bias
    (num_experts) of gpt-oss's; scale (H) and per_expert_scale (num_experts) of Gemma 4's. The correction bias balances
    load in pre-training; no gradient reaches it and the trainer leaves it alone."""

    def __init__(
        self, moe: MoeSpec, hidden_size: int, *, weight_dtype: torch.dtype, numerics: Roundings, norm_eps: float = 0.0
    ) -> None:
        """Args: `norm_eps` is that of the unit length in which Gemma 4's router reads tokens."""
        super().__init__()
        self.moe, self.eps = moe, norm_eps
        self.wide = numerics.router_weights is RouterFormat.float32
        as_engine = RouterLogits.model if moe.engine_rounds_logits else RouterLogits.float32
        chosen = as_engine if numerics.router_logits is RouterLogits.engine else numerics.router_logits
        self.narrow_logits = chosen is RouterLogits.model
        self.scales_output = numerics.routed_scale is RoutedScale.output
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size, dtype=weight_dtype))
        self.e_score_correction_bias: nn.Parameter | None = None
        if moe.score is RouterScore.sigmoid:
            self.e_score_correction_bias = nn.Parameter(
                torch.empty(moe.num_experts, dtype=torch.float32), requires_grad=False
            )
        self.bias: nn.Parameter | None = None
        if moe.has_router_bias:
            self.bias = nn.Parameter(torch.empty(moe.num_experts, dtype=weight_dtype))
        self.scale: nn.Parameter | None = None
        self.per_expert_scale: nn.Parameter | None = None
        if moe.is_beside_dense:
            self.scale = nn.Parameter(torch.empty(hidden_size, dtype=weight_dtype))
            self.per_expert_scale = nn.Parameter(torch.empty(moe.num_experts, dtype=weight_dtype))

    def forward(self, x_TH: Tensor, recorded: LayerRoutes | None = None) -> Routing:
        """Route every token. A recorded route decides the experts of its token, the scores decide their weights."""
        scores_TE = self._scores(x_TH)
        if recorded is None:
            return self._choose(scores_TE)
        own_TK = self._choose(scores_TE.detach()).experts_TK
        experts_TK, num_flipped = recorded.instead_of(own_TK)
        return Routing(self._weights_of(scores_TE, experts_TK), experts_TK, num_flipped)

    def _scores(self, x_TH: Tensor) -> Tensor:
        """The numbers that experts are chosen and weighed by: sigmoids, or logits if a softmax follows."""
        weight = self.weight.to(x_TH.dtype)  # the engine's format; frozen weights have it already
        if self.scale is not None:
            root = torch.tensor(x_TH.shape[1] ** -0.5, dtype=x_TH.dtype)  # vLLM rounds it, and each product
            return _wide_logits(unit_rows(x_TH, self.eps) * root * self.scale.to(x_TH.dtype), weight)
        if self.moe.score is RouterScore.sigmoid:
            logits_TE = F.linear(x_TH, weight).float() if self.narrow_logits else _wide_logits(x_TH, weight)
            return logits_TE.sigmoid()
        return F.linear(x_TH, weight, None if self.bias is None else self.bias.to(x_TH.dtype))

    def _choose(self, scores_TE: Tensor) -> Routing:
        if self.moe.score is RouterScore.softmax:
            weights_TK, experts_TK = route(scores_TE, self.moe.top_k, self.moe.norm_topk_prob, self.wide)
            return Routing(self._scaled(weights_TK, experts_TK), experts_TK)
        assert self.e_score_correction_bias is not None
        choice_TE = self._mask_groups(scores_TE.detach() + self.e_score_correction_bias)
        experts_TK = choice_TE.topk(self.moe.top_k, dim=-1).indices
        return Routing(self._weights_of(scores_TE, experts_TK), experts_TK)

    def _weights_of(self, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """The weights that these scores give to these experts, whether or not they are the best."""
        moe = self.moe
        if moe.score is RouterScore.softmax:
            return self._scaled(weigh(scores_TE, experts_TK, moe.norm_topk_prob, self.wide), experts_TK)
        scores_TK = scores_TE.gather(1, experts_TK)
        if moe.norm_topk_prob:
            scores_TK = scores_TK / (scores_TK.sum(-1, keepdim=True) + NORM_EPS)
        return scores_TK * self.factor_of_weights

    def _scaled(self, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        if self.per_expert_scale is None:
            return weights_TK
        return weights_TK * self.per_expert_scale.float()[experts_TK]

    @property
    def factor_of_weights(self) -> float:
        return 1.0 if self.scales_output else self.moe.scaling_factor

    @property
    def factor_of_output(self) -> float:
        """What the sum of a token's routed experts is multiplied by, because their weights were not."""
        return self.moe.scaling_factor if self.scales_output else 1.0

    def _mask_groups(self, choice_TE: Tensor) -> Tensor:
        """Put -inf outside each token's best groups. A group's score is the sum of its best two experts' scores."""
        groups, kept = self.moe.num_groups, self.moe.top_groups
        if kept == groups:
            return choice_TE
        choice_TGM = choice_TE.unflatten(1, (groups, -1))
        best_TG = choice_TGM.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
        allowed_TG = torch.zeros_like(choice_TGM[..., 0], dtype=torch.bool).scatter(1, best_TG, True)
        return choice_TGM.masked_fill(~allowed_TG[..., None], -torch.inf).flatten(1)


def unit_rows(x: Tensor, eps: float) -> Tensor:
    """Every row divided by its root mean square, without a weight; rounded once."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _wide_logits(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """x weight^T in float32. If the weight is frozen, bfloat16 factors are not copied."""
    is_narrow = x_TH.dtype is weight_EH.dtype is torch.bfloat16 and not weight_EH.requires_grad and x_TH.shape[0] > 0
    if not is_narrow:
        return F.linear(x_TH.float(), weight_EH.float())
    return _NarrowLogits.apply(x_TH, weight_EH)


class _NarrowLogits(torch.autograd.Function):
    """Multiplies 16-bit factors on tensor cores. Each product is exact in float32, and sums are float32, too. Float32
    factors would take eight times as long, three times per checkpointed layer. vLLM's GateLinear does the same."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor) -> Tensor:
        ctx.save_for_backward(weight_EH)
        if x_TH.is_cuda:
            return torch.mm(x_TH, weight_EH.t(), out_dtype=torch.float32)
        return x_TH.float() @ weight_EH.float().t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits_TE: Tensor) -> tuple[Tensor, None]:
        """Split the gradient into the nearest bfloat16 and a bfloat16 of the rest: together 16 of its 24 bits."""
        (weight_EH,) = ctx.saved_tensors
        near_TE = dlogits_TE.to(weight_EH.dtype)
        rest_TE = (dlogits_TE - near_TE.float()).to(weight_EH.dtype)
        return torch.cat((near_TE, rest_TE), dim=1) @ torch.cat((weight_EH, weight_EH)), None
