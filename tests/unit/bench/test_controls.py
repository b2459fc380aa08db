from pathlib import Path

import fakes.loop
import numpy as np
import pytest
from fakes.loop import Loop, make_config

from bench.controls import SHUFFLED, AgelessBuffer, UnpublishedController, shuffled
from slipstream.conf.load import load_run_config
from slipstream.conf.schema import AlgorithmConfig
from slipstream.orchestrator.loop import controller
from slipstream.orchestrator.loop.updates import advantage_function
from slipstream.rollout.types import Group, Prompt, Rollout


def a_group(rewards: list[float | None]) -> Group:
    rollouts = [Rollout([5], [-1.0], [0], "t", "stop") for _ in rewards]
    return Group(Prompt(0, (1, 7), "p"), rollouts, rewards)


def test_the_control_permutes_the_advantages_of_each_group() -> None:
    groups = [a_group([1.0, 0.0, 0.5, 0.0]), a_group([1.0, None, 0.0, 0.5])]
    plain = advantage_function(AlgorithmConfig())(groups, None)
    advantages_of, orders = advantage_function(load_run_config(["experiment=quickstart", SHUFFLED]).algorithm), set()
    for _ in range(20):
        found = advantages_of(groups, None)
        for mine, theirs in zip(found, plain, strict=True):
            assert [one is None for one in mine] == [one is None for one in theirs]
            values = [sorted(float(one[0]) for one in of if one is not None) for of in (mine, theirs)]
            assert np.allclose(*values)
        orders.add(tuple(float(one[0]) for one in found[0]))
    assert len(orders) > 3
    assert [len(of_group) for of_group in shuffled(groups)] == [4, 4]


async def test_the_control_that_publishes_nothing_samples_from_version_0_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "GroupBuffer", AgelessBuffer)
    monkeypatch.setattr(fakes.loop, "Controller", UnpublishedController)
    loop = Loop(tmp_path, make_config(num_steps=5))
    await loop.run()
    assert [entry for entry in loop.world.diary if entry[0] == "publish"] == [("publish", 0)]
    assert {entry[2] for entry in loop.world.diary if entry[0] == "sample"} == {0}
    assert [row["staleness/max"] for row in loop.rows[1:]] == [0, 1, 2, 3, 4]
