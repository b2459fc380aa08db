"""Estimates of KL(policy || reference) from one sampled token each (Schulman 2020, joschu.net/blog/kl-approx.html).

With x = log pi - log ref of a token that pi sampled:

    k1   x                     unbiased, may be negative. In the loss its expected gradient is 0: use it in the reward
    k2   x^2 / 2               biased, of low variance; its gradient in the loss is that of KL (Tang & Munos 2025,
                               arXiv:2506.09477)
    k3   exp(-x) - 1 + x       unbiased and never negative; GRPO's (Shao et al. 2024, arXiv:2402.03300, eq. 4)

Invariant: log-ratios are bounded before `exp`. Shapes: N counted tokens.
"""

from torch import Tensor

from slipstream.conf.schema import KlEstimator
from slipstream.trainer.step.corrections import LOG_RATIO_BOUND
from slipstream.trainer.step.mismatch import k3


def kl_estimates(logprobs_N: Tensor, ref_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimate of the module's docstring for each token; gradient flows to both arguments."""
    log_ratio_N = (logprobs_N - ref_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if estimator is KlEstimator.k1:
        return log_ratio_N
    if estimator is KlEstimator.k2:
        return 0.5 * log_ratio_N.square()
    return k3(-log_ratio_N)
