"""Controls of experiments: what a run must not learn from.

slipstream train ... algorithm.advantage=bench/controls.py:shuffled
python -m bench.controls train ...        the same command, but engines keep version 0, however old it is; not resumed
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from slipstream.orchestrator.loop import controller
from slipstream.orchestrator.loop.advantages import batch_advantages
from slipstream.orchestrator.loop.buffer import Batch, GroupBuffer
from slipstream.orchestrator.metrics.step_rows import StepRecord
from slipstream.rollout.types import Group

SHUFFLED = f"algorithm.advantage={Path(__file__).resolve()}:shuffled"
"""The option that chooses it, whatever the working directory."""
_DRAWS = np.random.default_rng(0x5A)


def shuffled(groups: Sequence[Group]) -> list[list[float | None]]:
    """GRPO's advantages, permuted among the responses of each group: the same rewards, lengths and scale of the loss,
    and nothing to learn from.
    """
    counts = [[1] * len(group.rollouts) for group in groups]
    found = batch_advantages([group.rewards for group in groups], counts, "group_std")
    return [_permuted([None if one is None else float(one[0]) for one in of_group]) for of_group in found]


def _permuted(advantages: list[float | None]) -> list[float | None]:
    known = iter(_DRAWS.permutation([one for one in advantages if one is not None]).tolist())
    return [None if one is None else next(known) for one in advantages]


class AgelessBuffer(GroupBuffer):
    """Lets groups be as old as they are: all are of version 0."""

    async def take_batch(self, policy_version: int) -> Batch:
        batch = await super().take_batch(0)
        return replace(batch, staleness_steps=[group.staleness_steps(policy_version) for group in batch.groups])


class UnpublishedController(controller.Controller):
    """Publishes version 0, before the first step, and no other."""

    async def _publish_into(self, record: StepRecord) -> None:
        pass


if __name__ == "__main__":
    from slipstream.orchestrator import training
    from slipstream.orchestrator.cli.main import main

    controller.GroupBuffer = AgelessBuffer
    training.Controller = UnpublishedController
    # A worker that came back would get the trainer's version.
    sys.exit(main([*sys.argv[1:], "rollout.max_restarts=0"]))
