"""A softmax router's choice, in one launch each way: scores, the best K experts and their weights.

    s = softmax(logits) in float32;  (w, e) = top K of s;  w / sum(w) where normalized;  rounded to logits' dtype, as
    transformers does, or not (`wide`), as vLLM does

`weigh` is the same for experts that are given: w = s at e.

Owns the casts. Of equal scores, the expert with the lower id comes first. Only logits and choice are kept for backward.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.trainer.kernels.launch import cdiv, is_for_triton, next_power_of_2, programs

TILE = 1024


def route_torch(logits_TE: Tensor, top_k: int, does_normalize: bool, wide: bool = False) -> tuple[Tensor, Tensor]:
    """The definition of `route`, except for the order of equal scores."""
    weights_TK, experts_TK = logits_TE.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    if does_normalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK if wide else weights_TK.to(logits_TE.dtype), experts_TK


def route(logits_TE: Tensor, top_k: int, does_normalize: bool, wide: bool = False) -> tuple[Tensor, Tensor]:
    """weights_TK in logits' dtype, or float32 if `wide`, differentiable, and experts_TK in int64, best first."""
    if not is_for_triton(logits_TE):
        return route_torch(logits_TE, top_k, does_normalize, wide)
    return _Route.apply(logits_TE, None, top_k, does_normalize, wide)


def weigh_torch(logits_TE: Tensor, experts_TK: Tensor, does_normalize: bool, wide: bool = False) -> Tensor:
    weights_TK = logits_TE.softmax(-1, dtype=torch.float32).gather(1, experts_TK)
    if does_normalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK if wide else weights_TK.to(logits_TE.dtype)


def weigh(logits_TE: Tensor, experts_TK: Tensor, does_normalize: bool, wide: bool = False) -> Tensor:
    """The weights that `route` would give to these experts (int64, no expert twice in a row)."""
    if not is_for_triton(logits_TE):
        return weigh_torch(logits_TE, experts_TK, does_normalize, wide)
    return _Route.apply(logits_TE, experts_TK, experts_TK.shape[1], does_normalize, wide)


class _Route(torch.autograd.Function):
    """Weights and experts; of experts that are given, weights alone."""

    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, given_TK: Tensor | None, top_k: int, does_normalize: bool, wide: bool
    ) -> tuple[Tensor, Tensor] | Tensor:
        ctx.does_normalize = does_normalize
        ctx.set_materialize_grads(False)
        if given_TK is not None:
            ctx.save_for_backward(logits_TE, given_TK)
            return weigh_triton(logits_TE, given_TK, does_normalize, wide)
        weights_TK, experts_TK = route_triton(logits_TE, top_k, does_normalize, wide)
        ctx.save_for_backward(logits_TE, experts_TK)
        ctx.mark_non_differentiable(experts_TK)
        return weights_TK, experts_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights_TK: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        logits_TE, experts_TK = ctx.saved_tensors
        return route_backward_triton(logits_TE, experts_TK, dweights_TK, ctx.does_normalize), *[None] * 4


def route_triton(logits_TE: Tensor, top_k: int, does_normalize: bool, wide: bool = False) -> tuple[Tensor, Tensor]:
    experts_TK = logits_TE.new_empty(logits_TE.shape[0], top_k, dtype=torch.int64)
    return _weights(logits_TE, experts_TK, does_normalize, wide, is_given=False), experts_TK


def weigh_triton(logits_TE: Tensor, experts_TK: Tensor, does_normalize: bool, wide: bool = False) -> Tensor:
    """The same as weigh_torch, by route_triton's kernel: equal choices get equal bits."""
    return _weights(logits_TE, experts_TK.contiguous(), does_normalize, wide, is_given=True)


def _weights(logits_TE: Tensor, experts_TK: Tensor, does_normalize: bool, wide: bool, *, is_given: bool) -> Tensor:
    """Experts that are not given are written to experts_TK."""
    logits_TE = logits_TE.contiguous()
    num_tokens, num_experts = logits_TE.shape
    weights_TK = logits_TE.new_empty(experts_TK.shape, dtype=torch.float32 if wide else logits_TE.dtype)
    rows, shape = _shape(num_experts, experts_TK.shape[1], does_normalize)
    programs(_route, (cdiv(num_tokens, rows),))(
        logits_TE, weights_TK, experts_TK, num_tokens, num_experts, int(is_given), **shape
    )
    return weights_TK


def route_backward_triton(logits_TE: Tensor, experts_TK: Tensor, dweights_TK: Tensor, does_normalize: bool) -> Tensor:
    logits_TE = logits_TE.contiguous()
    dlogits_TE = torch.empty_like(logits_TE)
    num_tokens, num_experts = logits_TE.shape
    rows, shape = _shape(num_experts, experts_TK.shape[1], does_normalize)
    programs(_route_backward, (cdiv(num_tokens, rows),))(
        logits_TE, experts_TK.contiguous(), dweights_TK.contiguous(), dlogits_TE, num_tokens, num_experts, **shape
    )
    return dlogits_TE


def _shape(num_experts: int, top_k: int, does_normalize: bool) -> tuple[int, dict[str, Any]]:
    padded = next_power_of_2(num_experts)
    rows = max(1, TILE // padded)
    sizes = {"ROWS": rows, "EXPERTS": padded, "TOP_K": top_k, "CHOICES": next_power_of_2(top_k)}
    return rows, sizes | {"DOES_NORMALIZE": does_normalize, "num_warps": 4}


@triton.jit
def _exponentials(logits_ptr, tokens, experts, num_tokens, num_experts):
    """exp(logits - peak), 0 past the last expert; and logits, -inf there; and peak."""
    is_expert = (experts < num_experts)[None, :]
    at = tokens[:, None] * num_experts + experts[None, :]
    logits = tl.load(logits_ptr + at, mask=is_expert & (tokens < num_tokens)[:, None], other=0.0).to(tl.float32)
    logits = tl.where(is_expert, logits, float("-inf"))
    peak = tl.max(logits, 1)
    return tl.exp(logits - peak[:, None]), logits, peak


@triton.jit(do_not_specialize=["num_tokens", "is_given"])
def _route(
    logits_ptr, weights_ptr, experts_ptr, num_tokens, num_experts, is_given,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, DOES_NORMALIZE: tl.constexpr,
):  # fmt: skip
    """The choice is made among logits: exp keeps their order but may make neighbouring ones equal. Given experts pass
    through the same compiled code: in a kernel of their own sums may be added in another order."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = tokens < num_tokens
    experts, choices = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    exponentials, logits, peak = _exponentials(logits_ptr, tokens, experts, num_tokens, num_experts)  # pyright: ignore[reportGeneralTypeIssues]
    left, total = logits, tl.sum(exponentials, 1)
    weights = tl.zeros([ROWS, CHOICES], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        at = experts_ptr + tokens * TOP_K + choice
        best = tl.min(tl.where(left == tl.max(left, 1)[:, None], experts[None, :], EXPERTS), 1)
        best = tl.minimum(best, num_experts - 1)  # NaN equals nothing, but its id is valid; the step is refused later
        given = tl.load(at, mask=is_token & (is_given != 0), other=0)
        expert = tl.where(is_given != 0, given, best.to(tl.int64))
        tl.store(at, expert, mask=is_token & (is_given == 0))
        is_expert = experts[None, :] == expert[:, None]
        left = tl.where(is_expert, float("-inf"), left)
        chosen = tl.sum(tl.where(is_expert, logits, 0.0), 1)
        weights = tl.where(choices[None, :] == choice, tl.div_rn(tl.exp(chosen - peak), total)[:, None], weights)
    if DOES_NORMALIZE:
        weights = tl.div_rn(weights, tl.broadcast_to(tl.sum(weights, 1)[:, None], [ROWS, CHOICES]))
    inside = is_token[:, None] & (choices < TOP_K)[None, :]
    at = tokens[:, None] * TOP_K + choices[None, :]
    tl.store(weights_ptr + at, weights.to(weights_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_backward(
    logits_ptr, experts_ptr, dweights_ptr, dlogits_ptr, num_tokens, num_experts,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, DOES_NORMALIZE: tl.constexpr,
):  # fmt: skip
    """With n = w / W for scores w: dw = (dn - <dn, n>) / W; for the softmax s: dlogits = s (ds - <ds, s>)."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_token = tokens < num_tokens
    experts = tl.arange(0, EXPERTS)
    scores, _, _ = _exponentials(logits_ptr, tokens, experts, num_tokens, num_experts)  # pyright: ignore[reportGeneralTypeIssues]
    scores /= tl.sum(scores, 1)[:, None]
    dscores = tl.zeros([ROWS, EXPERTS], dtype=tl.float32)
    chosen = tl.zeros([ROWS, EXPERTS], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + tokens * TOP_K + choice, mask=is_token, other=0)
        dweight = tl.load(dweights_ptr + tokens * TOP_K + choice, mask=is_token, other=0.0).to(tl.float32)
        hit = experts[None, :] == expert[:, None]
        dscores = tl.where(hit, dweight[:, None], dscores)
        chosen = tl.where(hit, 1.0, chosen)
    if DOES_NORMALIZE:
        total = tl.sum(chosen * scores, 1)
        mean = tl.sum(dscores * scores, 1) / total
        dscores = (dscores - chosen * mean[:, None]) / total[:, None]
    dlogits = scores * (dscores - tl.sum(dscores * scores, 1)[:, None])
    inside = (experts < num_experts)[None, :] & is_token[:, None]
    at = tokens[:, None] * num_experts + experts[None, :]
    tl.store(dlogits_ptr + at, dlogits.to(dlogits_ptr.dtype.element_ty), mask=inside)
