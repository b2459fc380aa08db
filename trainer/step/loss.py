"""The losses of one microbatch, and the sums from which every loss metric of a step is made.

Owns the sums below. Does not own the loss of a token (surrogates.py), the estimate of KL and the figures of the
mismatch (mismatch.py), advantages (orchestrator/loop/advantages.py), log-probabilities (trainer/model/logprobs.py),
importance weights (corrections.py), which tokens are of an answer (orchestrator/inputs/rows/preferences.py), or
reductions over ranks: it divides by counts of all that the update learns from, so gradients and sums of ranks and
microbatches simply add up.

With pi the trainer's policy, mu the engine's, q the one in the denominator of a ratio pi / q:

    ratio_baseline=trainer   q = pi before the step's first update. With one update of a batch the ratio is 1 and no
        clip acts. The importance weight w_t = weight(q / mu) (corrections.py) corrects for staleness and the engine's
        mismatch.
    ratio_baseline=rollout   q = mu, and w_t = 1
    L_t = w_t * (the loss of the token: surrogates.py) + kl_coef * (estimate of KL) - entropy_coef * entropy
    token normalization      sum_t L_t / (counted tokens)                     DAPO (arXiv:2503.14476, eq. 8)
    sequence normalization   sum_i (1 / |o_i|) sum_t L_t / (sequences)        GRPO (arXiv:2402.03300, eq. 3)
    constant normalization   sum_t L_t / (sequences * longest possible)       Dr. GRPO (arXiv:2503.20783)

With several updates of a batch, w_t and the figures of the mismatch are those of the policy before the first, in all of
them. parity.mask_log_ratio sets w_t to 0 with either baseline. Every log-ratio is clamped to +-LOG_RATIO_BOUND before
`exp`.

Direct preference optimization, with y_c the chosen and y_r the rejected answer to a prompt x (Rafailov et al. 2023,
arXiv:2305.18290, eq. 7):

    reward r(y) = dpo_beta * (log pi(y | x) - log ref(y | x))        a sum over the answer's tokens
    loss        = -log sigmoid(r(y_c) - r(y_r))                      the mean over pairs

There sequences 2 p and 2 p + 1 of a microbatch are the chosen and the rejected one of its pair p (microbatches.pack
takes a pair as one item), and both have tokens that count. Shapes: N counted tokens; there are at most N pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slipstream.conf.schema import AlgorithmConfig, KlEstimator, KlPlace, Normalization, Objective, RatioBaseline
from slipstream.trainer.step.corrections import LOG_RATIO_BOUND, correction_sums, importance_weights, per_sequence
from slipstream.trainer.step.mismatch import kl_estimates, measure_mismatch
from slipstream.trainer.step.own_loss import loss_function
from slipstream.trainer.step.surrogates import LossTokens
from slipstream.trainer.types import Denominators, LossStats, Origin, Sample


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """One microbatch's share of the batch's loss (scalar, differentiable), its metric sums and maxima
    (float64 scalars) and vectors of sums (float64)."""

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    vectors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def uncounted(self) -> PolicyLoss:
        """The same with sums of 0, where another rank has the same tokens and counts them."""
        sums = {name: torch.zeros_like(value) for name, value in self.sums.items()}
        vectors = {name: torch.zeros_like(value) for name, value in self.vectors.items()}
        return replace(self, sums=sums, vectors=vectors)


def policy_loss(
    tokens: LossTokens, algorithm: AlgorithmConfig, denominators: Denominators, mask_log_ratio: float = 0.0
) -> PolicyLoss:
    """The loss of the module docstring, summed over the microbatch's counted tokens and divided by the batch's counts.

    Args:
        tokens: old_logprobs_N are the trainer's before the step's first update, without a graph; weights_N are not
            read. N may be 0: the loss is then a zero that still has a graph.
        denominators: counts over the whole batch, the same for every microbatch of every rank.
        mask_log_ratio: parity.mask_log_ratio; tokens beyond it have no policy term. 0: all have.
    """
    first_N, logprobs_N, entropy_N = tokens.old_logprobs_N, tokens.logprobs_N, tokens.entropy_N
    log_ratio_N = (first_N - tokens.rollout_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weights = importance_weights(
        log_ratio_N, tokens.sequence_lengths_N, tokens.sequence_index_N, algorithm, mask_log_ratio
    )
    is_from_rollout = algorithm.ratio_baseline is RatioBaseline.rollout
    old_N = tokens.rollout_logprobs_N if is_from_rollout else first_N
    losses = loss_function(algorithm.loss)(replace(tokens, old_logprobs_N=old_N, weights_N=weights.weight_N), algorithm)
    share_N = _token_shares(tokens.sequence_lengths_N, algorithm.normalization, denominators)
    policy = (weights.weight_N * losses.loss_N * share_N).sum()
    loss, ref_k3_N = policy, torch.zeros_like(log_ratio_N)
    if algorithm.kl_coef > 0:
        assert tokens.ref_logprobs_N is not None, "AlgorithmConfig.needs_reference"
        kl_N = kl_estimates(logprobs_N, tokens.ref_logprobs_N, algorithm.kl_estimator)
        ref_k3_N = kl_estimates(logprobs_N.detach(), tokens.ref_logprobs_N, KlEstimator.k3)
        if algorithm.kl_in is KlPlace.loss:
            loss = loss + algorithm.kl_coef * (kl_N * share_N).sum()
    if algorithm.entropy_coef != 0:
        loss = loss - algorithm.entropy_coef * (entropy_N * share_N).sum()

    mismatch_sums, maxima, vectors = measure_mismatch(
        log_ratio_N, first_N, tokens.rollout_logprobs_N, tokens.staleness_N, tokens.positions_N
    )
    sums = {
        "loss/total_sum": loss,
        "loss/policy_sum": policy,
        "policy/num_tokens": torch.ones_like(log_ratio_N),
        "policy/entropy_sum": entropy_N,
        "policy/ratio_sum": log_ratio_N.exp(),
        "policy/num_clipped_low": losses.is_clipped_low_N,
        "policy/num_clipped_high": losses.is_clipped_high_N,
        "kl/ref_k3_sum": ref_k3_N,
        **correction_sums(weights, tokens.sequence_lengths_N, tokens.sequence_index_N),
        **mismatch_sums,
    }
    return PolicyLoss(
        loss,
        _summed(sums),
        {name: torch.cat([value, value.new_zeros(1)]).max() for name, value in maxima.items()},
        vectors,
    )


def sft_loss(
    tokens: LossTokens, algorithm: AlgorithmConfig, denominators: Denominators, mask_log_ratio: float = 0.0
) -> PolicyLoss:
    """Negative log-likelihood of the counted tokens, divided by the batch's counts. Arguments as in policy_loss."""
    share_N = _token_shares(tokens.sequence_lengths_N, algorithm.normalization, denominators)
    loss = -(tokens.logprobs_N * share_N).sum()
    sums = {
        "loss/total_sum": loss,
        "policy/num_tokens": torch.ones_like(tokens.logprobs_N),
        "policy/entropy_sum": tokens.entropy_N,
        "sft/nll_sum": -tokens.logprobs_N,
    }
    return PolicyLoss(loss, _summed(sums))


def dpo_loss(
    tokens: LossTokens, algorithm: AlgorithmConfig, denominators: Denominators, mask_log_ratio: float = 0.0
) -> PolicyLoss:
    """Direct preference optimization, summed over the microbatch's pairs and divided by the batch's number of pairs.
    Sums are float64. Arguments as in policy_loss."""
    assert tokens.ref_logprobs_N is not None, "AlgorithmConfig.needs_reference"
    pair_N = tokens.sequence_index_N // 2
    is_chosen_N = tokens.sequence_index_N % 2 == 0
    reward_N = algorithm.dpo_beta * (tokens.logprobs_N - tokens.ref_logprobs_N).double()
    chosen_P = per_sequence(reward_N * is_chosen_N, pair_N)
    rejected_P = per_sequence(reward_N * ~is_chosen_N, pair_N)
    is_pair_P = per_sequence(torch.ones_like(reward_N), pair_N) > 0  # zeros lie behind the last one
    margin_P = chosen_P - rejected_P
    loss_P = -logsigmoid(margin_P) * is_pair_P
    loss = loss_P.sum() / (denominators.num_sequences / 2)
    sums = {
        "loss/total_sum": loss,
        "policy/num_tokens": torch.ones_like(tokens.logprobs_N),
        "policy/entropy_sum": tokens.entropy_N,
        "dpo/num_pairs": is_pair_P,
        "dpo/loss_sum": loss_P,
        "dpo/num_preferred": margin_P > 0,
        "dpo/margin_sum": margin_P,
        "dpo/chosen_reward_sum": chosen_P,
        "dpo/rejected_reward_sum": rejected_P,
    }
    return PolicyLoss(loss, _summed(sums))


Loss = Callable[[LossTokens, AlgorithmConfig, Denominators, float], PolicyLoss]
LOSSES: dict[Objective, Loss] = {Objective.policy: policy_loss, Objective.sft: sft_loss, Objective.dpo: dpo_loss}


def _summed(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().double().sum() for name, value in values.items()}


def _token_shares(sequence_lengths_N: Tensor, normalization: Normalization, denominators: Denominators) -> Tensor:
    """The factor of each token's loss, float32. Over the batch they add up to 1, or less (constant normalization)."""
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
            of_samples = logprobs_N.detach().split([sample.num_valid_tokens for sample in samples])
            for sample, own_N in zip(samples, of_samples, strict=True):
                if sample.is_shown and sample.origin is not None:
                    self._shown[sample.origin] = own_N

    def add(self, part: PolicyLoss) -> None:
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
