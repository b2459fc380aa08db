"""Judged groups -> what the trainer learns from -> the updates of one step. Randomness comes in as a generator.

    groups --draft_samples--> drafts --(log-probabilities: TrainerRank.score)--> filled --> samples, group by group

    samples of groups 0 1 2 3, two minibatches, two epochs      update 1: 0 1     2: 2 3     3: 2 0     4: 1 3

    samples --mark--> trainer --LossStats.logprobs--> join --> TrainedRollout, of the rollouts that are shown

Owns: which responses become samples, where each token's advantage goes, which entry of a sample belongs to which token
of its rollout; which groups an update learns from, and what the step's row says of all updates. Does not own:
advantages (advantages.py), the token sequences of an episode (rollout/branches.py), what an update is
(trainer/rank.py), or which rollouts are shown (metrics/samples.py).
Invariants: a rollout without a reward never reaches the trainer. Per-token values are zero on tokens that the engine
was given. All updates of a step make one policy version (docs/decisions/0022-several-updates-a-batch.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.conf.functions import is_function_path
from slipstream.conf.schema import AlgorithmConfig, RunConfig
from slipstream.orchestrator.inputs.own_advantage import AdvantageFunction, own_advantage
from slipstream.orchestrator.loop.advantages import batch_advantages, teacher_term
from slipstream.orchestrator.loop.ports import LoopTrainer, Stopwatch
from slipstream.orchestrator.metrics.samples import TrainedRollout
from slipstream.rollout.branches import Branch, branches_of
from slipstream.rollout.types import Group
from slipstream.trainer.step.microbatches import pack
from slipstream.trainer.types import Denominators, LossStats, OptimStats, Origin, Sample, Scores


@dataclass(frozen=True, slots=True)
class Draft:
    """A sample whose advantages are still zeros."""

    group: int
    """Its number in the batch."""
    rollout: int
    """Its number in the group."""
    sample: Sample
    numbers: np.ndarray
    """[T] int64; which of its rollout's sampled tokens each token is. -1: none that counts."""


def draft_samples(groups: Sequence[Group], config: AlgorithmConfig) -> list[Draft]:
    """In group order: one for each response, or for each branch of an agent's episode. Rollouts without a reward and
    empty responses are left out, and with `algorithm.mask_truncated` those that ended by length. With
    `parity.replay_routing`, tokens that were sampled at a position whose route is missing are left out in the same way.
    """
    drafts: list[Draft] = []
    for i, group in enumerate(groups):
        for j, (reward, rollout) in enumerate(zip(group.rewards, group.rollouts, strict=True)):
            if reward is None or (config.mask_truncated and rollout.finish_reason == "length"):
                continue
            branches = enumerate(branches_of(group.prompt, rollout))
            drafts += [_draft(branch, (i, j, which)) for which, branch in branches]
    return [draft for draft in drafts if draft.sample.num_valid_tokens]


def advantage_function(config: AlgorithmConfig) -> AdvantageFunction:
    """The advantage that algorithm.advantage names: one that ships, or a function of the user's own. Raises
    ConfigError: the function cannot be imported, or takes other arguments."""
    if is_function_path(config.advantage):
        return own_advantage(config.advantage)
    return lambda groups, penalties: batch_advantages(
        [group.rewards for group in groups], _num_tokens(groups), config.advantage, penalties
    )


def filled(
    drafts: Sequence[Draft], groups: Sequence[Group], config: AlgorithmConfig, advantages_of: AdvantageFunction
) -> list[list[Sample]]:
    """The samples of each group, with advantages: all branches of an episode have the episode's."""
    num_tokens = _num_tokens(groups)
    penalties = _penalties(drafts, num_tokens, config) if config.penalizes_rewards else None
    advantages = advantages_of(groups, penalties)
    if config.distill_coef > 0:
        advantages = [_taught(*one, config.distill_coef) for one in zip(advantages, groups, strict=True)]
    samples: list[list[Sample]] = [[] for _ in groups]
    for draft in drafts:
        values = advantages[draft.group][draft.rollout]
        assert values is not None, "a rollout without a reward has no draft"
        chosen = np.where(draft.sample.loss_mask, values[draft.numbers], 0.0).astype(np.float32)
        samples[draft.group].append(replace(draft.sample, advantages=chosen))
    return samples


def scored(draft: Draft, scores: Scores) -> Draft:
    """The draft with what the trainer computed before the step's first update."""
    mask = draft.sample.loss_mask

    def spread(values: np.ndarray | None) -> np.ndarray | None:
        if values is None:
            return None
        found = np.zeros(len(mask), np.float32)
        found[mask] = values
        return found

    sample = replace(
        draft.sample,
        old_logprobs=spread(scores.logprobs),
        ref_logprobs=spread(scores.ref_logprobs),
        kl_estimates=spread(scores.kl_estimates),
    )
    return replace(draft, sample=sample)


def denominators_of(samples: Sequence[Sample], policy_version: int, max_response_tokens: int = 0) -> Denominators:
    """What every rank divides its losses by: counts over all that one update learns from, so that no layout weighs a
    token differently. `max_response_tokens`: fine-tuning has none."""
    return Denominators(
        num_valid_tokens=sum(sample.num_valid_tokens for sample in samples),
        num_sequences=len(samples),
        policy_version=policy_version,
        num_possible_tokens=len(samples) * max_response_tokens,
    )


def _taught(advantages: Sequence[np.ndarray | None], group: Group, coef: float) -> list[np.ndarray | None]:
    """Each token's advantage plus what the teacher makes of it; a rollout without the teacher's word has no reward."""
    return [
        None if values is None else values + coef * teacher_term(rollout.logprobs, rollout.teacher_logprobs or [])
        for values, rollout in zip(advantages, group.rollouts, strict=True)
    ]


def _num_tokens(groups: Sequence[Group]) -> list[list[int]]:
    return [[len(rollout.token_ids) for rollout in group.rollouts] for group in groups]


def _penalties(
    drafts: Sequence[Draft], num_tokens: Sequence[Sequence[int]], config: AlgorithmConfig
) -> list[list[np.ndarray]]:
    """kl_coef times the estimate of each sampled token; 0 for tokens that are not trained on."""
    found = [[np.zeros(count) for count in counts] for counts in num_tokens]
    for draft in drafts:
        mask, estimates = draft.sample.loss_mask, draft.sample.kl_estimates
        assert estimates is not None, "rewards are penalized with what the trainer estimated before"
        found[draft.group][draft.rollout][draft.numbers[mask]] = config.kl_coef * estimates[mask]
    return found


def _draft(branch: Branch, origin: Origin) -> Draft:
    loss_mask = np.array(branch.counts, dtype=bool)
    numbers = np.full(len(loss_mask), -1, dtype=np.int64)
    numbers[loss_mask] = list(branch.places)
    experts = has_route = None
    if branch.routes is not None:
        experts = np.concatenate([branch.routes.experts, np.zeros_like(branch.routes.experts[:1])])
        has_route = np.append(branch.routes.is_recorded, False)
        loss_mask[1:] &= branch.routes.is_recorded  # token t was sampled at position t - 1
    sample = Sample(
        token_ids=np.array(branch.token_ids, dtype=np.int32),
        loss_mask=loss_mask,
        rollout_logprobs=np.array(branch.logprobs, dtype=np.float32),
        advantages=np.zeros(len(loss_mask), dtype=np.float32),
        oldest_version=min(branch.policy_versions),
        routed_experts=experts,
        has_route=has_route,
        origin=origin,
    )
    return Draft(origin[0], origin[1], sample, numbers)


def mark(samples: Sequence[Sample], places: Sequence[tuple[int, int]]) -> list[Sample]:
    """The samples, with `is_shown` where they come from the rollouts at these places."""
    wanted = set(places)
    return [
        replace(sample, is_shown=True) if sample.origin is not None and sample.origin[:2] in wanted else sample
        for sample in samples
    ]


def join(
    groups: Sequence[Group], samples: Sequence[Sample], stats: Sequence[LossStats], policy_version: int
) -> dict[tuple[int, int], TrainedRollout]:
    """What the trainer made of the rollouts whose samples were marked."""
    logprobs: dict[Origin, np.ndarray] = {}
    for rank in stats:
        logprobs = rank.logprobs | logprobs  # of several updates on a batch, the first one's
    found: dict[tuple[int, int], TrainedRollout] = {}
    for sample in samples:
        if sample.is_shown and sample.origin is not None:
            number, which, branch = sample.origin
            rollout = groups[number].rollouts[which]
            if (number, which) not in found:
                nothing: list[float | None] = [None] * len(rollout.token_ids)
                oldest = min(rollout.policy_versions)
                found[number, which] = TrainedRollout(policy_version - oldest, list(nothing), list(nothing))
            part = branches_of(groups[number].prompt, rollout)[branch]
            _put(found[number, which], sample, part.counts, part.places, logprobs)
    return found


def _put(
    trained: TrainedRollout,
    sample: Sample,
    counts: Sequence[bool],
    places: Sequence[int],
    logprobs: Mapping[Origin, np.ndarray],
) -> None:
    """Note one sample's figures at the places of its tokens. Tokens whose route is missing are in no loss."""
    in_loss = sample.loss_mask[np.array(counts, dtype=bool)]
    own = [place for place, is_counted in zip(places, in_loss, strict=True) if is_counted]
    for place, advantage in zip(own, sample.advantages[sample.loss_mask].tolist(), strict=True):
        trained.advantages[place] = advantage
    of_trainer = logprobs.get(sample.origin) if sample.origin is not None else None
    for place, logprob in zip(own, [] if of_trainer is None else of_trainer.tolist(), strict=of_trainer is not None):
        trained.trainer_logprobs[place] = logprob


@dataclass(frozen=True, slots=True)
class Updated:
    loss: list[LossStats]
    """One for each rank and update; sums add up over both."""
    optim: OptimStats
    num_microbatches: int
    """Microbatches of one rank, all updates together."""
    num_tokens: int
    """Prompt and response tokens, those of each epoch."""
    num_applied: int
    """Updates that the trainer did not refuse."""


def minibatches(
    num_groups: int, num_minibatches: int, num_epochs: int, shuffle_rng: np.random.Generator
) -> list[list[int]]:
    """The groups of each update: every group once an epoch; in order in the first, shuffled in the others.

    Sizes differ by one at most.
    """
    order = np.arange(num_groups)
    found: list[list[int]] = []
    for epoch in range(num_epochs):
        if epoch:
            order = shuffle_rng.permutation(num_groups)
        found += [part.tolist() for part in np.array_split(order, num_minibatches)]
    return found


async def score(trainer: LoopTrainer, drafts: Sequence[Draft], config: RunConfig, policy_version: int) -> list[Draft]:
    """The drafts with the trainer's log-probabilities before the step's first update."""
    samples = [draft.sample for draft in drafts]
    plan = _plan(samples, trainer, config)
    found = await trainer.score(_batches(samples, plan), policy_version)
    by_sample = {
        index: one
        for of_rank, scores in zip(plan, found, strict=True)
        for indices, of_microbatch in zip(of_rank, scores, strict=True)
        for index, one in zip(indices, of_microbatch, strict=True)
    }
    return [scored(draft, by_sample[i]) for i, draft in enumerate(drafts)]


async def update(
    trainer: LoopTrainer,
    groups: Sequence[Sequence[Sample]],
    config: RunConfig,
    policy_version: int,
    shuffle_rng: np.random.Generator,
    clock: Stopwatch,
) -> Updated:
    """Every update of the step. At least one group has a sample."""
    algorithm = config.algorithm
    plans = minibatches(len(groups), algorithm.minibatches_per_step, algorithm.epochs_per_step, shuffle_rng)
    parts = [part for part in ([sample for i in plan for sample in groups[i]] for plan in plans) if part]
    losses: list[LossStats] = []
    steps: list[OptimStats] = []
    num_microbatches = num_tokens = 0
    for number, samples in enumerate(parts, start=1):
        plan = _plan(samples, trainer, config)
        denominators = denominators_of(samples, policy_version, config.max_response_tokens)
        stats = await trainer.forward_backward(_batches(samples, plan), denominators)
        losses += [_share_of(one, len(parts)) for one in stats]
        clock.lap("trainer/forward_backward_s")
        steps.append(await trainer.optimizer_step(ends_version=number == len(parts)))  # refuses what is not finite
        clock.lap("trainer/optimizer_s")
        num_microbatches += len(plan[0])
        num_tokens += sum(sample.num_tokens for sample in samples)
    return Updated(losses, combined(steps), num_microbatches, num_tokens, sum(step.is_finite for step in steps))


def combined(steps: Sequence[OptimStats]) -> OptimStats:
    """The step's: its last version and learning rate, the mean norm of applied updates; not finite if none was."""
    applied = [step for step in steps if step.is_finite]
    if not applied:
        return steps[-1]
    norm = sum(step.grad_norm for step in applied) / len(applied)
    return OptimStats(steps[-1].policy_version, norm, steps[-1].lr, is_finite=True)


def _share_of(stats: LossStats, num_updates: int) -> LossStats:
    """The stats of one of several updates: losses are divided, so that they add up to their mean."""
    losses = {name: stats.sums[name] / num_updates for name in ("loss/total_sum", "loss/policy_sum")}
    return replace(stats, sums=stats.sums | losses)


def _plan(samples: Sequence[Sample], trainer: LoopTrainer, config: RunConfig) -> list[list[list[int]]]:
    lengths, options = [sample.num_tokens for sample in samples], config.trainer
    return pack(lengths, trainer.num_ranks, options.max_microbatch_tokens, cp_size=options.cp_size)


def _batches(samples: Sequence[Sample], plan: Sequence[list[list[int]]]) -> list[list[list[Sample]]]:
    return [[[samples[i] for i in indices] for indices in of_rank] for of_rank in plan]
