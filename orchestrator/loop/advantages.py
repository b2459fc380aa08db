"""Group advantages, and the trainable samples made from them. Pure numpy; randomness comes in as a generator.

Owns: rewards -> advantages -> `trainer.types.Sample`. Does not own: what a response is worth, or the loss.
Invariants: a rollout without a reward never reaches the trainer. A group's advantages sum to zero (up to rounding);
those of its samples may not, because algorithm.mask_truncated leaves some out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conf.schema import AdvantageScale, AlgorithmConfig
from rollout.branches import Branch, branches_of
from rollout.types import Group
from trainer.types import Denominators, Origin, Sample

_STD_EPS = 1e-6


def group_advantages(rewards: Sequence[float | None], scale: AdvantageScale) -> list[float | None]:
    """How much better each sibling is than its group (GRPO, arXiv:2402.03300, 4.1.2; Dr. GRPO, arXiv:2503.20783; RLOO,
    arXiv:2402.14740).

    Args:
        rewards: one per rollout; None where the reward failed, which counts neither in the mean nor in the deviation.
        scale: std divides by the group's (population) standard deviation + 1e-6; none does not; leave_one_out compares
            with the mean of the others: r_i - (S - r_i) / (n - 1) = n / (n - 1) * (r_i - S / n), S the sum of all n.

    Returns:
        One per rollout, None where the reward is None. All zeros when the rewards are equal: nothing to compare.
    """
    known = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    if not is_informative(rewards):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = known.mean()
    if scale is AdvantageScale.std:
        divisor = known.std() + _STD_EPS
    else:
        divisor = (len(known) - 1) / len(known) if scale is AdvantageScale.leave_one_out else 1.0
    return [None if reward is None else float((reward - mean) / divisor) for reward in rewards]


def is_informative(rewards: Sequence[float | None]) -> bool:
    """Whether the group has at least two different rewards, so that its gradient is not zero by construction."""
    return len({reward for reward in rewards if reward is not None}) > 1


def build_samples(groups: Sequence[Group], config: AlgorithmConfig, shuffle_rng: np.random.Generator) -> list[Sample]:
    """Samples of one batch, in group order: one for each response, or for each branch of an agent's episode, which all
    have the episode's advantage. Rollouts without a reward and empty responses are left out, and with
    `algorithm.mask_truncated` those that ended by length, after they counted in their group's advantages. With
    `parity.replay_routing`, tokens that were sampled at a position whose route is missing are left out in the same way.

    `shuffle_rng` is used only by the control experiment `algorithm.shuffle_advantages`, which permutes the advantages
    among the siblings of each group: same rewards, same lengths, same loss scale, and nothing to learn from.
    """
    samples: list[Sample] = []
    for number, group in enumerate(groups):
        advantages = group_advantages(group.rewards, config.advantage_scale)
        kept = [
            i
            for i, (advantage, rollout) in enumerate(zip(advantages, group.rollouts, strict=True))
            if advantage is not None
            and rollout.token_ids
            and not (config.mask_truncated and rollout.finish_reason == "length")
        ]
        values = np.array([advantages[i] for i in kept], dtype=np.float32)
        if config.shuffle_advantages:
            values = shuffle_rng.permutation(values)
        for i, value in zip(kept, values, strict=True):
            branches = enumerate(branches_of(group.prompt, group.rollouts[i]))
            samples += [_build_sample(branch, value, (number, i, which)) for which, branch in branches]
    return [sample for sample in samples if sample.num_valid_tokens]


def denominators_of(samples: Sequence[Sample], policy_version: int, max_response_tokens: int = 0) -> Denominators:
    """What every rank divides its losses by: counts over the batch, so that no layout weighs a token differently.

    Args:
        samples: the whole batch.
        policy_version: the version about to be trained.
        max_response_tokens: RunConfig.max_response_tokens; fine-tuning has none.
    """
    return Denominators(
        num_valid_tokens=sum(sample.num_valid_tokens for sample in samples),
        num_sequences=len(samples),
        policy_version=policy_version,
        num_possible_tokens=len(samples) * max_response_tokens,
    )


def _build_sample(branch: Branch, advantage: float, origin: Origin) -> Sample:
    """Masks and per-token values are zero on tokens that the engine was given."""
    loss_mask = np.array(branch.counts, dtype=bool)
    experts = has_route = None
    if branch.routes is not None:
        experts = np.concatenate([branch.routes.experts, np.zeros_like(branch.routes.experts[:1])])
        has_route = np.append(branch.routes.is_recorded, False)
        loss_mask[1:] &= branch.routes.is_recorded  # token t was sampled at position t - 1
    return Sample(
        token_ids=np.array(branch.token_ids, dtype=np.int32),
        loss_mask=loss_mask,
        rollout_logprobs=np.array(branch.logprobs, dtype=np.float32),
        advantages=np.where(loss_mask, np.float32(advantage), np.float32(0.0)),
        oldest_version=min(branch.policy_versions),
        routed_experts=experts,
        has_route=has_route,
        origin=origin,
    )
