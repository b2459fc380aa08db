"""Importance weights of tokens that the engine sampled with other probabilities than the trainer gives them.

Owns: the weight of each token (algorithm.correction), and which tokens it cuts or leaves out. Does not own the loss
that it multiplies (loss.py) nor the figures of the mismatch (mismatch.py).

With r_t = pi(y_t) / mu(y_t) the ratio of trainer to engine at token t of a response y of |y| counted tokens,
low = algorithm.correction_min, high = algorithm.correction_max:

    none            w_t = 1
    tis             w_t = min(r_t, high)                          truncated importance sampling: Yao et al. 2025, "Your
                    Efficient RL Framework Secretly Brings You Off-Policy RL Training",
                    https://fengyao.notion.site/off-policy-rl; truncation: Ionides 2008
    mis             w_t = r_t where low <= r_t <= high, else 0    masked importance sampling: Liu, Li et al. 2025, "When
                    Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
                    https://richardli.xyz/rl-collapse (there low = 0)
    icepop          the same with both bounds                     Ling Team 2025, "Every Step Evolves: Scaling
                    Reinforcement Learning for Trillion-Scale Thinking Model", arXiv:2510.18855 (low 0.5, high 5):
                    M(k) = k for k in [alpha, beta], else 0
    sequence_tis    w_t = min(prod_s r_s, high)                   Liu, Li et al. 2025; unbiased but for the cut
    sequence_mis    w_t = prod_s r_s where within the bounds, else 0        the same
    geometric_mis   w_t = g where low <= g <= high, else 0, g = (prod_s r_s)^(1 / |y|)      the mask of whole responses
                    by their mean log-ratio, of the same authors (verl, rollout_is_level=geometric); g is GSPO's
                    length-normalised ratio (Zheng et al. 2025, arXiv:2507.18071, eq. 7), here against the engine

Invariants: weights carry no gradient. Tokens of weight 0 still count in what the loss is divided by, as in arXiv
2510.18855, so that a step shrinks with what is left out. Every log-ratio is bounded before `exp`, a product's as well.
Shapes: N counted tokens; whole sequences, one after the other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.conf.schema import AlgorithmConfig, Correction

LOG_RATIO_BOUND = 20.0
"""exp overflows float32 at 88.7, and inf * 0 (a zero advantage) or inf - inf would turn one bad token into a
NaN for the whole step. exp(20) = 4.9e8 is far outside any trust region, so the clamp changes no token that an
update should learn from; beyond it the gradient of the ratio is zero."""
TRUNCATING = frozenset({Correction.tis, Correction.sequence_tis})


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    weight_N: Tensor
    is_truncated_N: Tensor
    """bool; the weight is algorithm.correction_max because the ratio is above it."""
    is_masked_N: Tensor
    """bool; the weight is 0."""


def importance_weights(
    log_ratio_N: Tensor,
    sequence_lengths_N: Tensor,
    sequence_index_N: Tensor,
    algorithm: AlgorithmConfig,
    mask_log_ratio: float = 0.0,
) -> ImportanceWeights:
    """The weights of the module's docstring.

    Args:
        log_ratio_N: log pi - log mu, within +-LOG_RATIO_BOUND, without a graph.
        mask_log_ratio: parity.mask_log_ratio; also tokens with a larger |log-ratio| get a weight of 0. 0: none.
    """
    low, high = algorithm.correction_bounds
    ratio_N = _level_log_ratios(log_ratio_N, sequence_lengths_N, sequence_index_N, algorithm.correction).exp()
    is_masked_N = torch.zeros_like(log_ratio_N, dtype=torch.bool)
    is_truncated_N = is_masked_N
    weight_N = ratio_N.clamp(max=high)
    if algorithm.correction is Correction.none:
        weight_N = torch.ones_like(log_ratio_N)
    elif algorithm.correction in TRUNCATING:
        is_truncated_N = ratio_N > high
    else:
        is_masked_N = (ratio_N < low) | (ratio_N > high)
    if mask_log_ratio > 0:
        is_masked_N = is_masked_N | (log_ratio_N.abs() > mask_log_ratio)
    return ImportanceWeights(weight_N.masked_fill(is_masked_N, 0.0), is_truncated_N & ~is_masked_N, is_masked_N)


def _level_log_ratios(
    log_ratio_N: Tensor, sequence_lengths_N: Tensor, sequence_index_N: Tensor, correction: Correction
) -> Tensor:
    """The log-ratio that a token is weighed by: its own, its sequence's, or its sequence's mean."""
    if correction not in (Correction.sequence_tis, Correction.sequence_mis, Correction.geometric_mis):
        return log_ratio_N
    sums_N = per_sequence(log_ratio_N.double(), sequence_index_N)  # by sequence; there are at most N
    total_N = sums_N[sequence_index_N]
    if correction is Correction.geometric_mis:
        total_N = total_N / sequence_lengths_N
    return total_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).to(log_ratio_N.dtype)


def per_sequence(values_N: Tensor, sequence_index_N: Tensor) -> Tensor:
    """[N] sums over the tokens of each sequence, by the sequence's number; zeros behind the last sequence."""
    return torch.zeros_like(values_N).index_add(0, sequence_index_N, values_N)


def correction_sums(
    weights: ImportanceWeights, sequence_lengths_N: Tensor, sequence_index_N: Tensor
) -> dict[str, Tensor]:
    """What the metrics of area `correction` are made of, to be added over tokens. `correction/weight_square_sum` gives
    the effective sample size, (sum w)^2 / (n * sum w^2) (Kish 1965) as a share."""
    weight_N = weights.weight_N.double()
    return {
        "policy/num_sequences": 1.0 / sequence_lengths_N.double(),
        "correction/weight_sum": weight_N,
        "correction/weight_square_sum": weight_N.square(),
        "correction/num_truncated": weights.is_truncated_N,
        "correction/num_masked": weights.is_masked_N,
        "correction/num_truncated_sequences": per_sequence(weights.is_truncated_N.double(), sequence_index_N) > 0,
        "correction/num_masked_sequences": per_sequence(weights.is_masked_N.double(), sequence_index_N) > 0,
    }
