"""How much better a response is than others: rewards -> advantages. Pure numpy.

Owns the formulas below. Does not own: what a response is worth (rollout/rewards), the samples that are made of it
(updates.py), or the loss. With r the reward of a response, S its group's rewards that are known, n their number:

    group_std        (r - mean S) / (std S + 1e-6)      GRPO (Shao et al. 2024, arXiv:2402.03300, 4.1.2)
    group            r - mean S                         Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)
    leave_one_out    r - mean of the others = n / (n - 1) (r - mean S)
                     RLOO (Ahmadian et al. 2024, arXiv:2402.14740)
    group_mean       (r - mean S) / mean S, for rewards >= 0      MaxRL (Tajwar et al. 2026, arXiv:2602.02710): with
                     rewards of 0 and 1 its expected gradient is that of log P(success), expanded up to order n
    batch_std        (R_t - mean) / std over all tokens of the batch, R_t = r - the penalties of KL from token t on
                     REINFORCE++ (Hu et al. 2025, arXiv:2501.03262)
    group_batch_std  the same of r - mean S in place of R_t      REINFORCE++ with baseline, of the same paper

std S is the population's; over tokens it is the sample's, as in verl, with 1e-8 added to the variance. Where rewards
are penalized (algorithm.kl_in=reward), r is the reward minus the penalties of all its tokens.

Invariants: a rollout without a reward has no advantage and counts in nothing. A group whose rewards are all equal has
advantages of exactly 0 by every formula that compares within the group.

With a teacher, algorithm.distill_coef times log teacher - log mu is added to each token's advantage, mu being the
policy that sampled it. Its mean over samples is minus the reverse KL(mu || teacher) at that position: on-policy
distillation (Agarwal et al. 2023, GKD, arXiv:2306.13649, with its reverse KL and on-policy data alone; Gu et al. 2023,
MiniLLM, arXiv:2306.08543). A token is not credited with later tokens' terms.
"""

from collections.abc import Sequence

import numpy as np

from slipstream.orchestrator.errors import TrainingStopped
from slipstream.orchestrator.metrics.held_out import is_informative

_STD_EPS = 1e-6
_VARIANCE_EPS = 1e-8

Rewards = Sequence[float | None]
"""Rewards of a group's rollouts; None where the reward failed."""


def group_advantages(rewards: Rewards, kind: str) -> list[float | None]:
    """One per rollout, None where the reward is None: a formula of the module's docstring within one group. `kind`:
    group_std, group, leave_one_out or group_mean. Raises TrainingStopped: group_mean, and the mean is not above 0."""
    known = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    if not is_informative(rewards):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = known.mean()
    if kind == "group_mean" and mean <= 0:
        raise TrainingStopped(
            f"algorithm.advantage=group_mean divides by a group's mean reward, and one has {mean:g}: it is for rewards "
            "that are never negative; choose algorithm.advantage=group_std, or other rewards"
        )
    divisor = {
        "group_std": known.std() + _STD_EPS,
        "group": 1.0,
        "leave_one_out": (len(known) - 1) / len(known),
        "group_mean": mean,
    }[kind]
    return [None if reward is None else float((reward - mean) / divisor) for reward in rewards]


def teacher_term(logprobs: Sequence[float], teacher_logprobs: Sequence[float]) -> np.ndarray:
    """log teacher - log mu of each sampled token, float64; mu is the policy that sampled them."""
    return np.asarray(teacher_logprobs, np.float64) - np.asarray(logprobs, np.float64)


def whitened(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(values - mean) / sqrt(variance + 1e-8) over all of them together; zeros where there are fewer than two."""
    flat = np.concatenate([np.zeros(0), *values])
    if len(flat) < 2:
        return [np.zeros_like(value) for value in values]
    scale = 1.0 / np.sqrt(flat.var(ddof=1) + _VARIANCE_EPS)
    return [(value - flat.mean()) * scale for value in values]


def batch_advantages(
    rewards: Sequence[Rewards],
    num_tokens: Sequence[Sequence[int]],
    kind: str,
    penalties: Sequence[Sequence[np.ndarray]] | None = None,
) -> list[list[np.ndarray | None]]:
    """One number for each sampled token of each rollout of each group; None where the reward is None.

    Args:
        rewards: by group and rollout.
        num_tokens: the same of sampled tokens.
        kind: any formula of the module's docstring.
        penalties: the same of each token's penalty of KL, which is subtracted from the reward. None: there is none.
    """
    if kind == "none":
        counted = (zip(*group, strict=True) for group in zip(rewards, num_tokens, strict=True))
        return [[None if r is None else np.zeros(count) for r, count in group] for group in counted]
    if penalties is None:
        penalties = [[np.zeros(count) for count in counts] for counts in num_tokens]
    if kind == "batch_std":
        returns = [
            [None if r is None else r - np.cumsum(kl[::-1])[::-1] for r, kl in zip(*group, strict=True)]
            for group in zip(rewards, penalties, strict=True)
        ]
        return _whitened_groups(returns)
    totals = [
        [None if r is None else r - float(kl.sum()) for r, kl in zip(*group, strict=True)]
        for group in zip(rewards, penalties, strict=True)
    ]
    inner = "group" if kind == "group_batch_std" else kind
    spread = [
        [None if a is None else np.full(n, a) for a, n in zip(group_advantages(rs, inner), counts, strict=True)]
        for rs, counts in zip(totals, num_tokens, strict=True)
    ]
    return _whitened_groups(spread) if kind == "group_batch_std" else spread


def _whitened_groups(values: Sequence[Sequence[np.ndarray | None]]) -> list[list[np.ndarray | None]]:
    known = iter(whitened([value for group in values for value in group if value is not None]))
    return [[None if value is None else next(known) for value in group] for group in values]
