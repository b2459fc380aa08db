"""Advantages that verl computes too: the same rewards, lengths and penalties for both."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from slipstream.orchestrator.loop.advantages import batch_advantages

REWARDS = ((1.0, 0.0, 0.0, 0.5), (0.25, 0.75, 1.0, 0.0), (0.0, 1.0, 1.0, 0.0))
NUM_TOKENS = ((3, 5, 2, 4), (1, 2, 6, 3), (4, 4, 1, 2))


@dataclass(frozen=True)
class AdvantageCase:
    """One comparison: our formula, verl's estimator, and whether rewards are penalized."""

    kind: str
    estimator: str
    is_penalized: bool = False


ADVANTAGE_CASES = {
    "verl grpo advantage": AdvantageCase("group_std", "grpo"),
    "verl dr_grpo advantage": AdvantageCase("group", "grpo"),
    "verl rloo advantage": AdvantageCase("leave_one_out", "rloo"),
    "verl reinforce++ advantage": AdvantageCase("batch_std", "reinforce_plus_plus"),
    "verl reinforce++ baseline advantage": AdvantageCase("group_batch_std", "reinforce_plus_plus_baseline"),
    "verl kl in reward, rloo": AdvantageCase("leave_one_out", "rloo", is_penalized=True),
    "verl kl in reward, reinforce++": AdvantageCase("batch_std", "reinforce_plus_plus", is_penalized=True),
    "verl kl in reward, reinforce++ baseline": AdvantageCase(
        "group_batch_std", "reinforce_plus_plus_baseline", is_penalized=True
    ),
}


def penalties() -> list[list[np.ndarray]]:
    """Each token's penalty of KL."""
    draw = np.random.default_rng(3)
    return [[0.1 * draw.normal(size=count) for count in counts] for counts in NUM_TOKENS]


def our_advantages(case: AdvantageCase) -> Tensor:
    """All tokens, response after response."""
    found = batch_advantages(REWARDS, NUM_TOKENS, case.kind, penalties() if case.is_penalized else None)
    return torch.tensor(np.concatenate([one for group in found for one in group if one is not None]))


def their_advantages(case: AdvantageCase) -> Tensor:
    """verl's estimator. Its GRPO divides by the sample's deviation and ours by the population's, which is smaller by
    sqrt((n - 1) / n)."""
    from verl.trainer.ppo import core_algos

    counts = [count for group in NUM_TOKENS for count in group]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n, dtype=torch.float64) for n in counts], batch_first=True)
    rewards = torch.zeros_like(mask)
    for row, reward in enumerate(reward for group in REWARDS for reward in group):
        rewards[row, counts[row] - 1] = reward
    if case.is_penalized:
        flat = [torch.tensor(one) for group in penalties() for one in group]
        rewards = rewards - torch.nn.utils.rnn.pad_sequence(flat, batch_first=True)
    index = np.repeat(np.arange(len(REWARDS)), len(REWARDS[0]))
    extra = {"norm_adv_by_std_in_grpo": case.kind == "group_std"} if case.estimator == "grpo" else {}
    found, _ = core_algos.get_adv_estimator_fn(case.estimator)(
        token_level_rewards=rewards, response_mask=mask, index=index, config=SimpleNamespace(gamma=1.0), **extra
    )
    if case.kind == "group_std":
        n = len(REWARDS[0])
        found = found * (n / (n - 1)) ** 0.5
    return found[mask.bool()]
