"""The updates of one step: a batch's groups, in minibatches, epoch after epoch.

    groups 0 1 2 3, two minibatches, two epochs      update 1: 0 1     2: 2 3     3: 2 0     4: 1 3

Owns: which groups an update learns from, and what the step's row says of all of them. Does not own: samples
(samples.py), or what an update is (trainer/rank.py). All updates of a step make one policy version
(docs/decisions/0022-several-updates-a-batch.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.loop.ports import LoopTrainer, Stopwatch
from slipstream.orchestrator.loop.samples import Draft, denominators_of, scored
from slipstream.trainer.step.microbatches import pack
from slipstream.trainer.types import LossStats, OptimStats, Sample


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
