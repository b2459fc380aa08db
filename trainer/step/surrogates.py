"""What one token adds to the policy loss, before importance weights and normalization: one pure function per algorithm.

Owns: the four formulas below, and what a loss of the user's own gets (`LossTokens`). Does not own: importance weights
(corrections.py), the penalty of KL (mismatch.py), what a token's loss is divided by (loss.py), or advantages
(orchestrator/loop/advantages.py).

With A the advantage of token t, pi the policy that is trained, q the one in the ratio's denominator
(algorithm.ratio_baseline), r = pi / q, low = algorithm.clip_low, high = algorithm.clip_high, sg = stop-gradient:

    clip    L = -min(r A, clip(r, 1 - low, 1 + high) A)      PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with
            the decoupled bounds of DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 10)
            and with algorithm.dual_clip = c, where A < 0:  L = min(L, -c A)      dual clip (Ye et al. 2020,
            arXiv:1912.09729, eq. 5)
    gspo    the same without dual clip, with s in place of r:  s = sg[g] pi / sg[pi],  g = (prod_u r_u)^(1 / |y|) over
            the tokens u of the response      GSPO (Zheng et al. 2025, arXiv:2507.18071, eq. 7, in the form per token
            of eq. 14, whose gradient is that of eq. 5 where all tokens of a response have one advantage)
    cispo   L = -sg[clip(r, 1 - low, 1 + high)] A log pi      CISPO (MiniMax 2025, arXiv:2506.13585, eq. 4 and 5)
    sapo    L = -f(r) A,  f(r) = 4 / tau sigmoid(tau (r - 1)),  tau = sapo_tau_positive where A > 0, else
            sapo_tau_negative      SAPO (Gao et al. 2025, arXiv:2511.20347, eq. 5 and 6)

At r = 1 all four have the gradient of -A log pi: with one update a batch and ratio_baseline=trainer they are the same
algorithm. Every log-ratio is bounded before `exp`. Shapes: N counted tokens; whole sequences, one after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.conf.schema import AlgorithmConfig
from slipstream.trainer.step.corrections import LOG_RATIO_BOUND, per_sequence


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The N counted tokens of a microbatch, as a loss sees them. Floats are float32; only logprobs_N and entropy_N have
    a gradient."""

    logprobs_N: Tensor
    """log pi of the sampled token."""
    old_logprobs_N: Tensor
    """log q, q the policy in the ratio's denominator: the engine with algorithm.ratio_baseline=rollout, otherwise the
    trainer before the step's first update."""
    rollout_logprobs_N: Tensor
    """The engine's log-probability when it sampled the token."""
    advantages_N: Tensor
    weights_N: Tensor
    """Importance weight of algorithm.correction, by which the loss is multiplied afterwards."""
    entropy_N: Tensor
    """Entropy of pi at the token, in nats. It has a gradient if algorithm.entropy_coef is not 0."""
    ref_logprobs_N: Tensor | None
    """log-probability of the reference; None with algorithm.kl_coef=0."""
    sequence_index_N: Tensor
    """int64; number of the token's sequence in the microbatch, from 0."""
    sequence_lengths_N: Tensor
    """int64; counted tokens of the token's sequence."""
    positions_N: Tensor
    """int64; position of the token in its response, from 0."""
    staleness_N: Tensor
    """int64; steps between the version that is trained and the oldest version in the token's sample."""

    @property
    def log_ratio_N(self) -> Tensor:
        """log r, bounded."""
        return (self.logprobs_N - self.old_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The losses of N tokens, and which ratios were clipped."""

    loss_N: Tensor
    is_clipped_low_N: Tensor
    is_clipped_high_N: Tensor


def clipped_loss(tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLosses:
    return _clipped(tokens.log_ratio_N.exp(), tokens.advantages_N, algorithm, algorithm.dual_clip)


def gspo_loss(tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLosses:
    sums_N = per_sequence((tokens.logprobs_N - tokens.old_logprobs_N).detach(), tokens.sequence_index_N)  # by sequence
    log_mean_N = (sums_N[tokens.sequence_index_N] / tokens.sequence_lengths_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_N = (log_mean_N + tokens.logprobs_N - tokens.logprobs_N.detach()).exp()
    return _clipped(ratio_N, tokens.advantages_N, algorithm, None)


def cispo_loss(tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLosses:
    """`cispo` of the module's docstring. A clipped ratio is a smaller weight, so every token keeps a gradient."""
    ratio_N = tokens.log_ratio_N.detach().exp()
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    loss_N = -ratio_N.clamp(low, high) * tokens.advantages_N * tokens.logprobs_N
    return TokenLosses(loss_N, ratio_N < low, ratio_N > high)


def sapo_loss(tokens: LossTokens, algorithm: AlgorithmConfig) -> TokenLosses:
    """`sapo` of the module's docstring. Nothing is clipped: the gate lets less through, the farther the ratio is."""
    positive, negative = algorithm.sapo_tau_positive, algorithm.sapo_tau_negative
    tau_N = torch.full_like(tokens.advantages_N, negative).masked_fill(tokens.advantages_N > 0, positive)
    gate_N = torch.sigmoid(tau_N * (tokens.log_ratio_N.exp() - 1.0)) * (4.0 / tau_N)
    none_N = torch.zeros_like(tau_N, dtype=torch.bool)
    return TokenLosses(-gate_N * tokens.advantages_N, none_N, none_N)


LOSSES: dict[str, Callable[[LossTokens, AlgorithmConfig], TokenLosses]] = {
    "clip": clipped_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
}
"""By the value of algorithm.loss (conf.schema.SHIPPED_LOSSES)."""


def _clipped(ratio_N: Tensor, advantages_N: Tensor, algorithm: AlgorithmConfig, dual_clip: float | None) -> TokenLosses:
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    loss_N = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    is_clipped_high_N = (ratio_N.detach() > high) & (advantages_N > 0)
    if dual_clip is not None:
        ceiling_N = -dual_clip * advantages_N
        is_dual_N = (advantages_N < 0) & (loss_N.detach() > ceiling_N)
        loss_N = torch.where(is_dual_N, ceiling_N, loss_N)
        is_clipped_high_N = is_clipped_high_N | is_dual_N
    return TokenLosses(loss_N, (ratio_N.detach() < low) & (advantages_N < 0), is_clipped_high_N)
