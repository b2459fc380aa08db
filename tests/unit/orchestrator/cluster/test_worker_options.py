"""What rollout workers are built from follows the run and its model."""

from dataclasses import replace

import pytest
from cases.tiny_configs import DEEPSEEK, DENSE, GPT_OSS, MIXED

from slipstream.conf.schema import ParityConfig, RunConfig
from slipstream.orchestrator.cluster.rollout_workers import routing_shape
from slipstream.rollout.types import RoutingShape

REPLAYED = replace(RunConfig(), parity=ParityConfig(replay_routing=True))


@pytest.mark.parametrize(
    ("hf_config", "shape"),
    [
        (DEEPSEEK, RoutingShape((1, 2), 3, 8)),  # its first layer is dense
        (MIXED, RoutingShape((0, 2), 2, 8)),
        (GPT_OSS, RoutingShape((0, 1), 3, 8)),
        (DENSE, None),
    ],
)
def test_engines_record_layers_with_experts_when_routing_is_replayed(hf_config, shape) -> None:
    assert routing_shape(REPLAYED, hf_config) == shape
    assert routing_shape(RunConfig(), hf_config) is None
