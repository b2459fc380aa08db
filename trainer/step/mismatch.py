"""How far two policies' log-probabilities of sampled tokens are apart: the trainer's from the engine's, and from the
reference's.

Owns: the figures below, apart for tokens of the version that is trained (no suffix: numerics alone) and of older ones
(`_stale`: numerics and drift). Does not own the thresholds on them (orchestrator/loop/alarms.py).

With d = log pi - log mu of a sampled token, pi the trainer's policy and mu the engine's:

    k3           exp(d) - d - 1 >= 0; its mean estimates KL(mu || pi) (http://joschu.net/blog/kl-approx.html)
    prob_diff    |pi - mu|, the difference of the token's probability
    histogram    tokens by k3, in the bins of mismatch_bins.py: the quantiles of a batch over all ranks
    by position  k3 of tokens of the version that is trained, by their position in the response

Estimates of KL(policy || reference) from one sampled token each (Schulman 2020), with x = log pi - log ref of a token
that pi sampled:

    k1   x                     unbiased, may be negative. In the loss its expected gradient is 0: use it in the reward
    k2   x^2 / 2               biased, of low variance; its gradient in the loss is that of KL (Tang & Munos 2025,
                               arXiv:2506.09477)
    k3   exp(-x) - 1 + x       unbiased and never negative; GRPO's (Shao et al. 2024, arXiv:2402.03300, eq. 4)

Invariant: log-ratios are bounded before `exp`. Shapes: N counted tokens.
"""

import torch
from torch import Tensor

from slipstream.conf.schema import KlEstimator
from slipstream.trainer.parallel import on_device
from slipstream.trainer.step.corrections import LOG_RATIO_BOUND
from slipstream.trainer.step.mismatch_bins import (
    BINS_PER_DECADE,
    HIGHEST_K3_EXPONENT,
    LOWEST_K3_EXPONENT,
    NUM_K3_BINS,
    POSITION_STARTS,
)


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - x - 1 >= 0, x = log p - log q: estimates KL(q || p) from samples of q (Schulman 2020)."""
    return torch.expm1(log_ratio) - log_ratio


def kl_estimates(logprobs_N: Tensor, ref_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimate of the module's docstring for each token; gradient flows to both arguments."""
    log_ratio_N = (logprobs_N - ref_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if estimator is KlEstimator.k1:
        return log_ratio_N
    if estimator is KlEstimator.k2:
        return 0.5 * log_ratio_N.square()
    return k3(-log_ratio_N)


def measure_mismatch(
    log_ratio_N: Tensor,
    trainer_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    staleness_N: Tensor,
    positions_N: Tensor,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The figures of the module's docstring, all float64.

    Args:
        log_ratio_N: log pi - log mu, bounded; no gradient flows through it.
        trainer_logprobs_N: log pi.
        rollout_logprobs_N: log mu.

    Returns:
        Values per token, to be added up; values per token, to have their maximum taken; vectors of sums over tokens.
    """
    exact_N = log_ratio_N.double()  # k3 of a tiny log-ratio is its square, which float32 noise would bury
    k3_N, abs_log_ratio_N = k3(exact_N), exact_N.abs()
    prob_diff_N = (trainer_logprobs_N.detach().double().exp() - rollout_logprobs_N.double().exp()).abs()
    is_stale_N = staleness_N > 0
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    for suffix, chosen_N in (("", ~is_stale_N), ("_stale", is_stale_N)):
        sums[f"parity/num_tokens{suffix}"] = chosen_N
        sums[f"parity/k3_sum{suffix}"] = k3_N * chosen_N
        sums[f"parity/prob_diff_sum{suffix}"] = prob_diff_N * chosen_N
        maxima[f"parity/k3_max{suffix}"] = k3_N * chosen_N
        maxima[f"parity/prob_diff_max{suffix}"] = prob_diff_N * chosen_N
        maxima[f"parity/log_ratio_max{suffix}"] = abs_log_ratio_N * chosen_N
    is_fresh_N = (~is_stale_N).double()
    decades_N = k3_N.log10().nan_to_num(nan=HIGHEST_K3_EXPONENT) - LOWEST_K3_EXPONENT  # an index must be finite
    bins_N = (decades_N * BINS_PER_DECADE).floor().clamp(0, NUM_K3_BINS - 1).long()
    starts = on_device(torch.tensor(POSITION_STARTS[1:]), positions_N.device)
    ranges_N = torch.bucketize(positions_N, starts, right=True)
    vectors = {
        "parity/k3_histogram": _added(bins_N, is_fresh_N, NUM_K3_BINS),
        "parity/k3_histogram_stale": _added(bins_N, is_stale_N.double(), NUM_K3_BINS),
        "parity/k3_by_position": _added(ranges_N, k3_N * is_fresh_N, len(POSITION_STARTS)),
        "parity/num_tokens_by_position": _added(ranges_N, is_fresh_N, len(POSITION_STARTS)),
    }
    return sums, maxima, vectors


def _added(index_N: Tensor, values_N: Tensor, size: int) -> Tensor:
    return values_N.new_zeros(size).index_add(0, index_N, values_N)
