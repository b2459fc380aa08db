"""What a run keeps in the memory of hosts in case a process dies, for `slipstream plan`. Pure.

Owns: the estimate. Does not own: what is kept (trainer/checkpoint/keeper.py, rollout/kept_groups.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.conf.schema import RunConfig
from slipstream.rollout.kept_groups import bytes_kept
from slipstream.rollout.types import RoutingShape
from slipstream.trainer.checkpoint.keeper import num_copies

if TYPE_CHECKING:
    from slipstream.trainer.delivery.planned_layouts import TrainerMemory


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes, beside those of the processes themselves."""

    trainer_states: int
    """For one trainer rank, all copies: parameters and moments in float32. 0 with trainer.max_restarts=0."""
    num_copies: int
    """How many copies of a rank's state there are."""
    responses: int
    """At one rollout worker, of training; 0 where workers end with their controller."""
    most_responses: int
    """The most that evaluations make of it."""


def host_memory(
    config: RunConfig, routing: RoutingShape | None, trainer: TrainerMemory, num_trainer_nodes: int
) -> HostMemory:
    """The estimate of a whole run.

    Args:
        routing: What engines record for each token.
        trainer: Of the fullest rank.
    """
    copies = num_copies(num_trainer_nodes) if config.trainer.max_restarts else 0
    num_tokens = config.max_response_tokens + (0 if routing is None else config.max_prompt_tokens)
    num_responses = config.algorithm.groups_per_step * config.algorithm.group_size
    share = -(-num_responses * num_tokens // config.rollout.least_workers)
    return HostMemory(
        copies * (trainer.gradients + trainer.optimizer), copies, *bytes_kept(config.num_versions_kept, share, routing)
    )
