"""Locks: fakes and the product's own classes answer to the same calls, those that the loop's protocols declare."""

from __future__ import annotations

import inspect

import pytest
from fakes.loop import FakePrompts, FakeRewards, FakeTrainer, FakeWorker

from orchestrator.cluster.ray_handles import RayRolloutWorker, RayTrainerGroup
from orchestrator.fleet.replicas import RolloutHandle
from orchestrator.loop.ports import Prompts, PublishingTrainer, Rewards, StepTrainer, TaughtTrainer
from rollout.prompts import Shuffled
from rollout.rewards.runner import RewardRunner

PAIRS = [
    (StepTrainer, FakeTrainer),
    (PublishingTrainer, FakeTrainer),
    (PublishingTrainer, RayTrainerGroup),
    (TaughtTrainer, FakeTrainer),
    (TaughtTrainer, RayTrainerGroup),
    (RolloutHandle, FakeWorker),
    (RolloutHandle, RayRolloutWorker),
    (Prompts, FakePrompts),
    (Prompts, Shuffled),
    (Rewards, FakeRewards),
    (Rewards, RewardRunner),
]


@pytest.mark.parametrize(("protocol", "cls"), PAIRS, ids=lambda cls: cls.__name__)
def test_every_call_of_a_protocol_has_the_same_parameters_everywhere(protocol: type, cls: type) -> None:
    calls = {
        name: call
        for base in protocol.__mro__
        for name, call in vars(base).items()
        if inspect.isfunction(call) and (name == "__next__" or not name.startswith("_"))
    }
    assert calls
    for name, call in calls.items():
        own = getattr(cls, name)
        assert inspect.iscoroutinefunction(own) == inspect.iscoroutinefunction(call), name
        declared, has = inspect.signature(call).parameters, inspect.signature(own).parameters
        assert [(p.name, p.default) for p in has.values()] == [(p.name, p.default) for p in declared.values()], name
