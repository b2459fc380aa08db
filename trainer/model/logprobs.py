"""Log-probabilities and entropy of chosen tokens without the logits of a whole microbatch.

Owns the head's mathematics, forward and backward. Does not own the head's weight: the decoder hands it over, gathered.

    frozen head   forward   logits; log-probability; d_t = head^T (onehot(target) - p_t) / temperature
                  backward  dhidden_t = g_t d_t                       (g_t: the gradient of the log-probability)
    otherwise     forward   logits; log-probability, entropy and log-normalizer
                  backward  the logits again; their gradient; dhidden and dhead

A frozen head thus multiplies twice instead of three times. A gradient of the head, or through the entropy, needs more
than one vector per row.

Invariant: the logits of at most `chunk_tokens` rows exist at a time, forward and backward, and nothing of vocabulary
size is kept in between.
Logits are rounded to the weight's format before they become float32: the engine rounds there too, and agreeing with it
matters more than the last bits. A soft cap's three operations are rounded there, too.

Shapes: T rows, H hidden, V vocabulary, C rows of one chunk.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.trainer.kernels.log_softmax import log_softmax, logits_gradient


class Head(Protocol):
    """Computes logits and log-probabilities in place of the operations here; gradients stay those here."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """[T, V] in the inputs' dtype, of [T, H] and [V, H]."""
        ...

    def token_logprobs(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        """[T] float32, at temperature 1."""
        ...


def token_logprobs(
    hidden_TH: Tensor,
    head_weight_VH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    head: Head | None = None,
    differentiate_entropy: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ head^T / temperature) at the targets, and the entropy of that distribution.

    Args:
        hidden_TH: rows that predict; float32 or bfloat16. T may be 0.
        head_weight_VH: the head, in the same dtype.
        targets_T: int64 token ids in [0, V).
        temperature: > 0, the sampling temperature.
        chunk_tokens: rows whose logits exist at once, >= 1.
        head: computes the values, at temperature 1.
        differentiate_entropy: whether gradient flows through entropy_T, too.
        softcap: as ModelSpec.logit_softcap; applied before the temperature.

    Returns:
        logprobs_T and entropy_T (nats), float32. Gradient flows from logprobs_T to hidden_TH, and to
        head_weight_VH when that requires grad.
    """
    assert head is None or (temperature == 1.0 and softcap is None)
    call = _Call(temperature, chunk_tokens, head, softcap)
    if hidden_TH.requires_grad and not head_weight_VH.requires_grad and not differentiate_entropy:
        return _FrozenHead.apply(hidden_TH, head_weight_VH, targets_T, call)
    return _TokenLogprobs.apply(hidden_TH, head_weight_VH, targets_T, call, differentiate_entropy)


class _Call(NamedTuple):
    """The arguments of token_logprobs that have no gradient."""

    temperature: float
    chunk_tokens: int
    head: Head | None
    softcap: float | None


def soft_capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits as an engine computes them."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _slope(capped_CV: Tensor, softcap: float | None) -> Tensor | None:
    return None if softcap is None else 1 - (capped_CV / softcap).square()


class _FrozenHead(torch.autograd.Function):
    """token_logprobs where hidden states alone get a gradient, and from log-probabilities alone."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, head_weight_VH: Tensor, targets_T: Tensor, call: _Call
    ) -> tuple[Tensor, Tensor]:
        logprobs_T, entropy_T = torch.empty(2, hidden_TH.shape[0], device=hidden_TH.device).unbind()
        directions_TH = torch.empty_like(hidden_TH)
        for start in range(0, hidden_TH.shape[0], call.chunk_tokens):
            rows = slice(start, start + call.chunk_tokens)
            logits_CV, (logprobs_T[rows], normalizers_C, entropy_T[rows]) = _chunk(
                hidden_TH[rows], head_weight_VH, targets_T[rows], call
            )
            slope_CV, ones_C = _slope(logits_CV, call.softcap), torch.ones_like(normalizers_C)
            logits_CV = logits_gradient(logits_CV, targets_T[rows], normalizers_C, ones_C, call.temperature)
            if slope_CV is not None:
                logits_CV.mul_(slope_CV)
            torch.mm(logits_CV, head_weight_VH, out=directions_TH[rows])
            del logits_CV
        ctx.save_for_backward(directions_TH)
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logprobs_T: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (directions_TH,) = ctx.saved_tensors
        grads_TH = (grad_logprobs_T.float()[:, None] * directions_TH).to(directions_TH.dtype)
        return grads_TH, None, None, None


class _TokenLogprobs(torch.autograd.Function):
    """Chunked log-softmax at the targets; see `token_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, head_weight_VH: Tensor, targets_T: Tensor, call: _Call, differentiate_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs_T = torch.empty(hidden_TH.shape[0], dtype=torch.float32, device=hidden_TH.device)
        log_normalizers_T, entropy_T = torch.empty_like(logprobs_T), torch.empty_like(logprobs_T)
        for start in range(0, hidden_TH.shape[0], call.chunk_tokens):
            rows = slice(start, start + call.chunk_tokens)
            logits_CV, (logprobs_T[rows], log_normalizers_T[rows], entropy_T[rows]) = _chunk(
                hidden_TH[rows], head_weight_VH, targets_T[rows], call
            )
            del logits_CV  # before the next chunk's exist
        kept = [entropy_T] if differentiate_entropy else []
        ctx.save_for_backward(hidden_TH, head_weight_VH, targets_T, log_normalizers_T, *kept)
        ctx.call = call
        if not differentiate_entropy:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logprobs_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        """d logprob(target) / d logits = (onehot(target) - p) / temperature, with p recomputed chunk by chunk."""
        hidden_TH, head_weight_VH, targets_T, log_normalizers_T, *kept = ctx.saved_tensors
        call: _Call = ctx.call
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_TH = torch.empty_like(hidden_TH) if needs_hidden else None
        # float32 across chunks: a bfloat16 running sum would drop the small chunks.
        grad_weight_VH = torch.zeros_like(head_weight_VH, dtype=torch.float32) if needs_weight else None
        for start in range(0, hidden_TH.shape[0], call.chunk_tokens):
            rows = slice(start, start + call.chunk_tokens)
            logits_CV = soft_capped(hidden_TH[rows] @ head_weight_VH.t(), call.softcap)
            slope_CV = _slope(logits_CV, call.softcap)
            grad_logits_CV = logits_gradient(
                logits_CV,
                targets_T[rows],
                log_normalizers_T[rows],
                grad_logprobs_T[rows].float(),
                call.temperature,
                (kept[0][rows], grad_entropy_T[rows].float()) if kept else None,
            )
            del logits_CV
            if slope_CV is not None:
                grad_logits_CV.mul_(slope_CV)
            if grad_hidden_TH is not None:
                grad_hidden_TH[rows] = grad_logits_CV @ head_weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH += grad_logits_CV.t() @ hidden_TH[rows]
            del grad_logits_CV
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(head_weight_VH.dtype)
        return grad_hidden_TH, grad_weight, None, None, None


def _chunk(
    hidden_CH: Tensor, head_weight_VH: Tensor, targets_C: Tensor, call: _Call
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Logits, and their log-probabilities at the targets, log-normalizers and entropies."""
    if call.head is None:
        logits_CV = soft_capped(hidden_CH @ head_weight_VH.t(), call.softcap)
        return logits_CV, log_softmax(logits_CV, targets_C, call.temperature)
    logits_CV = call.head.linear(hidden_CH, head_weight_VH)
    values_C = call.head.token_logprobs(logits_CV, targets_C)
    return logits_CV, (values_C, *log_softmax(logits_CV, targets_C, call.temperature)[1:])
