"""What several samples of each prompt say about a policy: pass@k, majority vote, means with standard errors. Pure.

Owns: the formulas. Does not own: what counts as right, or as an answer (rollout/rewards), nor names of figures
(held_out.py). Samples of one prompt are not independent of each other, so every standard error is over prompts.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


def is_informative(rewards: Sequence[float | None]) -> bool:
    """Whether a group has at least two different rewards, so that comparing them says something. None: it failed."""
    return len({reward for reward in rewards if reward is not None}) > 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts. Example: Estimate(0.62, 0.04, 150)."""

    mean: float
    error: float | None
    """Its standard error; None of a single prompt."""
    num_prompts: int


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that at least one of k samples, drawn from these without putting any back, is right: the unbiased estimate
    of pass@k (Chen et al. 2021, arXiv:2107.03374, equation 1), 1 - C(n - c, k) / C(n, k).

    Args:
        num_samples: n, at least k.
        num_right: c, of them.
        k: At least 1.
    """
    if not 0 <= num_right <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples, {num_right} of them right")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_vote(answers: Sequence[str | None], is_right: Sequence[bool]) -> float:
    """Chance that the answer which most samples give is right (Wang et al. 2022, arXiv:2203.11171).

    Of answers with equally many votes each is taken with the same chance. A sample without an answer has no vote, and
    without votes the result is 0. An answer that is judged both ways counts by the share of its samples that are right.

    Args:
        answers: One per sample; None: it has none.
        is_right: One per sample.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    right = Counter(answer for answer, right in zip(answers, is_right, strict=True) if right)
    return sum(right[answer] / votes[answer] for answer in winners) / len(winners)


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of one value per prompt, with standard error sqrt(sum (x - mean)^2 / (m - 1) / m); None without any."""
    num = len(values)
    if not num:
        return None
    mean = math.fsum(values) / num
    if num == 1:
        return Estimate(mean, None, num)
    variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
    return Estimate(mean, math.sqrt(variance / num), num)
