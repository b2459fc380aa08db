"""The policy loss on one microbatch, and the sums from which every loss metric of a step is made.

Owns the formulas below. Does not own advantages (orchestrator/loop/advantages.py), log-probabilities
(trainer/model/logprobs.py), importance weights (corrections.py), the figures of the mismatch (mismatch.py) or
reductions over ranks: it divides by counts of the *global* batch, so gradients and sums of ranks and microbatches
simply add up.

With pi the trainer's policy, mu the engine's, A the advantage of token t, d = log pi - log mu (`log_ratio`),
sg = stop-gradient:

    ratio_baseline=trainer   L_t = - w_t * A * exp(log pi - sg(log pi))
        PPO's old policy is the policy before this step. With one step per batch its ratio is 1 and no clip acts.
        The importance weight w_t (corrections.py) corrects for staleness and for the engine's mismatch.
    ratio_baseline=rollout   L_t = - min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),   r = exp(d)
        PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with DAPO's decoupled bounds (Yu et al. 2025,
        arXiv:2503.14476, eq. 10).
    + kl_coef * (exp(x) - x - 1),   x = log ref - log pi       GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4)
    token normalization      sum_t L_t / (counted tokens of the batch)                      DAPO, eq. 8
    sequence normalization   sum_i (1 / |o_i|) sum_t L_t / (sequences of the batch)         GRPO, eq. 3
    constant normalization   sum_t L_t / (sequences of the batch * longest possible)        Dr. GRPO (Liu et al. 2025,
                             arXiv:2503.20783)

parity.mask_log_ratio leaves tokens out of L_t with either baseline. Every log-ratio is clamped to +-LOG_RATIO_BOUND
before `exp`. Shapes: N counted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from conf.schema import AlgorithmConfig, Normalization, RatioBaseline
from trainer.step.corrections import LOG_RATIO_BOUND, correction_sums, importance_weights
from trainer.step.mismatch import k3, measure_mismatch
from trainer.types import Denominators, LossStats, Origin, Sample


@dataclass(frozen=True, slots=True)
class CountedTokens:
    """What the loss needs to know of a microbatch's N counted tokens, besides the policy's log-probabilities."""

    rollout_logprobs_N: Tensor
    """float32; log mu."""
    advantages_N: Tensor
    """float32."""
    sequence_lengths_N: Tensor
    """int64; counted tokens of the token's sequence, |o_i|."""
    sequence_index_N: Tensor
    """int64; number of the token's sequence in the microbatch, from 0."""
    positions_N: Tensor
    """int64; position of the token in its response, from 0."""
    staleness_N: Tensor
    """int64; steps."""
    ref_logprobs_N: Tensor | None = None
    """float32; log ref. Needed when kl_coef > 0."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """One microbatch's share of the batch's loss (scalar, differentiable), its metric sums and maxima
    (float64 scalars) and vectors of sums (float64).
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    vectors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def policy_loss(
    logprobs_N: Tensor,
    entropy_N: Tensor,
    tokens: CountedTokens,
    algorithm: AlgorithmConfig,
    denominators: Denominators,
    mask_log_ratio: float = 0.0,
) -> PolicyLoss:
    """The loss of the module docstring, summed over the microbatch's counted tokens and divided by the batch's counts.

    Args:
        logprobs_N: log pi, float32, differentiable. N may be 0: the loss is then a zero that still has a graph.
        entropy_N: entropy of pi at those positions, in nats.
        tokens: see CountedTokens.
        algorithm: which ratio, bounds and normalization.
        denominators: counts over the whole batch, the same for every microbatch of every rank.
        mask_log_ratio: parity.mask_log_ratio; tokens beyond it have no policy term. 0: all have.
    """
    log_ratio_N = (logprobs_N.detach() - tokens.rollout_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    advantages_N = tokens.advantages_N
    zeros_N = torch.zeros_like(log_ratio_N)
    weights = importance_weights(
        log_ratio_N, tokens.sequence_lengths_N, tokens.sequence_index_N, algorithm, mask_log_ratio
    )
    clipped_low_N = clipped_high_N = zeros_N
    if algorithm.ratio_baseline is RatioBaseline.rollout:
        bounded_N = (logprobs_N - tokens.rollout_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio_N = bounded_N.exp()
        clipped_ratio_N = ratio_N.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
        surrogate_N = torch.minimum(ratio_N * advantages_N, clipped_ratio_N * advantages_N)
        clipped_low_N = (ratio_N.detach() < 1.0 - algorithm.clip_low) & (advantages_N < 0)
        clipped_high_N = (ratio_N.detach() > 1.0 + algorithm.clip_high) & (advantages_N > 0)
    else:
        surrogate_N = (logprobs_N - logprobs_N.detach()).exp() * advantages_N
    policy_N = -weights.weight_N * surrogate_N

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

    mismatch = measure_mismatch(
        log_ratio_N, logprobs_N, tokens.rollout_logprobs_N, tokens.staleness_N, tokens.positions_N
    )
    sums = {
        "loss/total_sum": loss,
        "loss/policy_sum": policy,
        "policy/num_tokens": torch.ones_like(log_ratio_N),
        "policy/entropy_sum": entropy_N,
        "policy/ratio_sum": log_ratio_N.double().exp(),
        "policy/num_clipped_low": clipped_low_N,
        "policy/num_clipped_high": clipped_high_N,
        "kl/ref_k3_sum": kl_N,
        **correction_sums(weights, tokens.sequence_lengths_N, tokens.sequence_index_N),
        **mismatch.sums,
    }
    return PolicyLoss(
        loss,
        {name: value.detach().double().sum() for name, value in sums.items()},
        {name: torch.cat([value, value.new_zeros(1)]).max() for name, value in mismatch.maxima.items()},
        mismatch.vectors,
    )


def sft_loss(
    logprobs_N: Tensor,
    entropy_N: Tensor,
    tokens: CountedTokens,
    algorithm: AlgorithmConfig,
    denominators: Denominators,
    mask_log_ratio: float = 0.0,
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
    return PolicyLoss(loss, {name: value.detach().double().sum() for name, value in sums.items()})


def _token_shares(sequence_lengths_N: Tensor, normalization: Normalization, denominators: Denominators) -> Tensor:
    """The factor of each token's loss, float32. Over the whole batch they add up to 1; with constant normalization, to
    at most 1."""
    if normalization is Normalization.sequence:
        return 1.0 / (sequence_lengths_N.float() * denominators.num_sequences)
    is_constant = normalization is Normalization.constant
    divisor = denominators.num_possible_tokens if is_constant else denominators.num_valid_tokens
    return torch.full_like(sequence_lengths_N, 1.0 / divisor, dtype=torch.float32)


class LossAccumulator:
    """Adds up the sums, vectors and maxima of a call's microbatches on the device; one copy to the host at the end, and
    one more of log-probabilities that are to be shown."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._vectors: dict[str, Tensor] = {}
        self._shown: dict[Origin, Tensor] = {}

    def show(self, samples: Sequence[Sample], logprobs_N: Tensor) -> None:
        """Keep the log-probabilities of those samples of one microbatch that are to be shown."""
        if any(sample.is_shown for sample in samples):
            of_samples = logprobs_N.detach().float().split([sample.num_valid_tokens for sample in samples])
            for sample, own_N in zip(samples, of_samples, strict=True):
                if sample.is_shown and sample.origin is not None:
                    self._shown[sample.origin] = own_N

    def add(self, part: PolicyLoss) -> None:
        """Add one microbatch."""
        for name, value in part.sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in part.vectors.items():
            self._vectors[name] = self._vectors[name] + value if name in self._vectors else value
        for name, value in part.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def result(self) -> LossStats:
        """Plain floats, for this rank."""
        parts = [*self._sums.values(), *self._maxima.values(), *self._vectors.values()]
        if not parts:
            return LossStats({}, {})
        values = iter(torch.cat([part.reshape(-1) for part in parts]).tolist())
        return LossStats(
            {name: next(values) for name in self._sums},
            {name: next(values) for name in self._maxima},
            {name: list(islice(values, vector.numel())) for name, vector in self._vectors.items()},
            self._logprobs(),
        )

    def _logprobs(self) -> dict[Origin, np.ndarray]:
        if not self._shown:
            return {}
        on_host = torch.cat(list(self._shown.values())).cpu().numpy()
        ends = np.cumsum([own_N.numel() for own_N in self._shown.values()])
        return dict(zip(self._shown, np.split(on_host, ends[:-1]), strict=True))
