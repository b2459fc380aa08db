"""Errors cross process boundaries whole."""

import inspect
import pickle

import pytest

import slipstream.rollout.errors
from slipstream.conf.errors import ConfigError
from slipstream.weight_sync.errors import ReplicaDirty

CLASSES = [
    cls
    for _, cls in inspect.getmembers(slipstream.rollout.errors, inspect.isclass)
    if cls.__module__ == "slipstream.rollout.errors"
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_survives_pickling_and_is_a_stdlib_error_too(cls):
    error = pickle.loads(pickle.dumps(cls("rank 1: what, got, expected")))
    assert type(error) is cls
    assert str(error) == "rank 1: what, got, expected"
    assert issubclass(cls, slipstream.rollout.errors.RolloutError)


def test_the_router_and_the_command_line_recognize_ours():
    assert issubclass(slipstream.rollout.errors.ReplicaNotServing, ReplicaDirty)
    assert issubclass(slipstream.rollout.errors.RewardError, ConfigError)
