"""A batch's samples, made as the controller makes them where their log-probabilities are not needed first."""

from collections.abc import Sequence

from slipstream.conf.schema import AlgorithmConfig
from slipstream.orchestrator.loop.updates import advantage_function, draft_samples, filled
from slipstream.rollout.types import Group
from slipstream.trainer.types import Sample


def build_samples(groups: Sequence[Group], config: AlgorithmConfig) -> list[Sample]:
    by_group = filled(draft_samples(groups, config), groups, config, advantage_function(config))
    return [sample for group in by_group for sample in group]
