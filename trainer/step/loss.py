"""The policy loss on one microbatch, and the sums from which every loss metric of a step is made.

Owns the formulas below. Does not own advantages (orchestrator/loop/advantages.py), log-probabilities (logprobs.py) or
reductions over ranks: it divides by counts of the *global* batch, so gradients and sums of ranks and microbatches
simply add up.

With pi the trainer's policy, mu the engine's, A the advantage of token t, d = log pi - log mu (`log_ratio`),
sg = stop-gradient:

    ratio_baseline=trainer   L_t = - w_t * A * exp(log pi - sg(log pi)),   w_t = min(exp(sg(d)), tis_max)
        PPO's old policy is the policy before this step. With one step per batch its ratio is 1 and no clip acts.
        Truncated importance sampling corrects for staleness and for the engine's mismatch (Yao et al. 2025, "Your
        Efficient RL Framework Secretly Brings You Off-Policy RL Training",
        https://fengyao.notion.site/off-policy-rl; truncation: Ionides 2008). tis_max=0 gives w_t = 1.
    ratio_baseline=rollout   L_t = - min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),   r = exp(d)
        PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with DAPO's decoupled bounds (Yu et al. 2025,
        arXiv:2503.14476, eq. 10).
    + kl_coef * (exp(x) - x - 1),   x = log ref - log pi       GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4)
    token normalization      sum_t L_t / (counted tokens of the batch)                      DAPO, eq. 8
    sequence normalization   sum_i (1 / |o_i|) sum_t L_t / (sequences of the batch)         GRPO, eq. 3
    constant normalization   sum_t L_t / (sequences of the batch * longest possible)        Dr. GRPO (Liu et al. 2025,
                             arXiv:2503.20783)
    mismatch KL(mu || pi)    mean of exp(d) - d - 1 ("k3", http://joschu.net/blog/kl-approx.html), reported separately
                             for staleness 0 and > 0

Every log-ratio is clamped to +-LOG_RATIO_BOUND before `exp`. Shapes: N counted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from conf.schema import AlgorithmConfig, Normalization, RatioBaseline
from trainer.types import Denominators, LossStats

LOG_RATIO_BOUND = 20.0
"""exp overflows float32 at 88.7, and inf * 0 (a zero advantage) or inf - inf would turn one bad token into a
NaN for the whole step. exp(20) = 4.9e8 is far outside any trust region, so the clamp changes no token that an
update should learn from; beyond it the gradient of the ratio is zero."""


@dataclass(frozen=True, slots=True)
class CountedTokens:
    """What the loss needs to know of a microbatch's N counted tokens, besides the policy's log-probabilities."""

    rollout_logprobs_N: Tensor
    """float32; log mu."""
    advantages_N: Tensor
    """float32."""
    sequence_lengths_N: Tensor
    """int64; counted tokens of the token's sequence, |o_i|."""
    staleness_N: Tensor
    """int64; steps."""
    ref_logprobs_N: Tensor | None = None
    """float32; log ref. Needed when kl_coef > 0."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """One microbatch's share of the batch's loss (scalar, differentiable) and its metric sums and maxima
    (float64 scalars).
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - x - 1 >= 0: the low-variance estimate of KL(q || p) from samples of q, x = log p - log q
    (Schulman 2020).
    """
    return torch.expm1(log_ratio) - log_ratio


def policy_loss(
    logprobs_N: Tensor,
    entropy_N: Tensor,
    tokens: CountedTokens,
    algorithm: AlgorithmConfig,
    denominators: Denominators,
) -> PolicyLoss:
    """The loss of the module docstring, summed over the microbatch's counted tokens and divided by the batch's counts.

    Args:
        logprobs_N: log pi, float32, differentiable. N may be 0: the loss is then a zero that still has a graph.
        entropy_N: entropy of pi at those positions, in nats.
        tokens: see CountedTokens.
        algorithm: which ratio, bounds and normalization.
        denominators: counts over the whole batch, the same for every microbatch of every rank.
    """
    log_ratio_N = (logprobs_N.detach() - tokens.rollout_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    advantages_N = tokens.advantages_N
    zeros_N = torch.zeros_like(log_ratio_N)

    if algorithm.ratio_baseline is RatioBaseline.rollout:
        bounded_N = (logprobs_N - tokens.rollout_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio_N = bounded_N.exp()
        clipped_ratio_N = ratio_N.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
        policy_N = -torch.minimum(ratio_N * advantages_N, clipped_ratio_N * advantages_N)
        clipped_low_N = (ratio_N.detach() < 1.0 - algorithm.clip_low) & (advantages_N < 0)
        clipped_high_N = (ratio_N.detach() > 1.0 + algorithm.clip_high) & (advantages_N > 0)
        weight_N, truncated_N = zeros_N + 1.0, zeros_N
    else:
        ratio_N = (logprobs_N - logprobs_N.detach()).exp()
        is_corrected = algorithm.tis_max > 0
        weight_N = log_ratio_N.exp().clamp(max=algorithm.tis_max) if is_corrected else zeros_N + 1.0
        truncated_N = (log_ratio_N.exp() > algorithm.tis_max) if is_corrected else zeros_N
        policy_N = -weight_N * advantages_N * ratio_N
        clipped_low_N = clipped_high_N = zeros_N

    if algorithm.kl_coef > 0:
        if tokens.ref_logprobs_N is None:
            raise ValueError(f"algorithm.kl_coef={algorithm.kl_coef} needs the reference policy's log-probabilities")
        ref_log_ratio_N = (tokens.ref_logprobs_N - logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        kl_N = k3(ref_log_ratio_N)
    else:
        kl_N = zeros_N

    share_N = _token_shares(tokens.sequence_lengths_N, algorithm.normalization, denominators)
    policy = (policy_N * share_N).sum()
    loss = policy + algorithm.kl_coef * (kl_N * share_N).sum()

    exact_N = log_ratio_N.double()  # k3 of a tiny log-ratio is about its square, less than float32's error
    k3_N = k3(exact_N)
    stale_N = tokens.staleness_N > 0
    sums = {
        "loss/total_sum": loss,
        "loss/policy_sum": policy,
        "policy/num_tokens": torch.ones_like(exact_N),
        "policy/entropy_sum": entropy_N,
        "policy/ratio_sum": exact_N.exp(),
        "policy/num_clipped_low": clipped_low_N,
        "policy/num_clipped_high": clipped_high_N,
        "tis/weight_sum": weight_N,
        "tis/num_truncated": truncated_N,
        "kl/ref_k3_sum": kl_N,
        "parity/k3_sum": k3_N * ~stale_N,
        "parity/num_tokens": ~stale_N,
        "parity/k3_stale_sum": k3_N * stale_N,
        "parity/num_stale_tokens": stale_N,
    }
    abs_log_ratio_N = exact_N.abs()
    maxima = {
        "parity/max_abs_log_ratio": abs_log_ratio_N * ~stale_N,
        "parity/max_abs_log_ratio_stale": abs_log_ratio_N * stale_N,
    }
    return PolicyLoss(
        loss,
        {name: value.detach().double().sum() for name, value in sums.items()},
        {name: torch.cat([value, value.new_zeros(1)]).max() for name, value in maxima.items()},
    )


def sft_loss(
    logprobs_N: Tensor,
    entropy_N: Tensor,
    tokens: CountedTokens,
    algorithm: AlgorithmConfig,
    denominators: Denominators,
) -> PolicyLoss:
    """Negative log-likelihood of the counted tokens, divided by the batch's counts. Arguments as in policy_loss."""
    share_N = _token_shares(tokens.sequence_lengths_N, algorithm.normalization, denominators)
    loss = -(logprobs_N * share_N).sum()
    sums = {
        "loss/total_sum": loss,
        "policy/num_tokens": torch.ones_like(logprobs_N),
        "policy/entropy_sum": entropy_N,
        "sft/nll_sum": -logprobs_N,
    }
    return PolicyLoss(loss, {name: value.detach().double().sum() for name, value in sums.items()}, {})


def _token_shares(sequence_lengths_N: Tensor, normalization: Normalization, denominators: Denominators) -> Tensor:
    """The factor of each token's loss, float32. Over the whole batch they add up to 1; with constant normalization, to
    at most 1."""
    if normalization is Normalization.sequence:
        return 1.0 / (sequence_lengths_N.float() * denominators.num_sequences)
    is_constant = normalization is Normalization.constant
    divisor = denominators.num_possible_tokens if is_constant else denominators.num_valid_tokens
    return torch.full_like(sequence_lengths_N, 1.0 / divisor, dtype=torch.float32)


class LossAccumulator:
    """Adds up the sums and maxima of a call's microbatches on the device; one copy to the host at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, part: PolicyLoss) -> None:
        """Add one microbatch."""
        for name, value in part.sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in part.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def result(self) -> LossStats:
        """Plain floats, for this rank."""
        names = [*self._sums, *self._maxima]
        if not names:
            return LossStats({}, {})
        values = torch.stack([*self._sums.values(), *self._maxima.values()]).tolist()
        stats = dict(zip(names, values, strict=True))
        return LossStats({name: stats[name] for name in self._sums}, {name: stats[name] for name in self._maxima})
