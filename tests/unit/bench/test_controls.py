import numpy as np

from bench.controls import SHUFFLED, shuffled
from slipstream.conf.load import load_run_config
from slipstream.conf.schema import AlgorithmConfig
from slipstream.orchestrator.loop.samples import advantage_function
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
