"""The rollouts of a batch that samples.jsonl shows: marked on their way to the trainer, joined with what it returns.

    samples --mark--> trainer --LossStats.logprobs--> join --> TrainedRollout, one entry per sampled token

Owns: which entry of a sample belongs to which token of its rollout. Does not own: which rollouts are shown, or how they
are written (files/samples.py). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from slipstream.orchestrator.files.samples import TrainedRollout
from slipstream.rollout.branches import branches_of
from slipstream.rollout.types import Group
from slipstream.trainer.types import LossStats, Origin, Sample


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
    """What the trainer made of the rollouts whose samples were marked.

    Args:
        policy_version: the version that was trained.
    """
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
