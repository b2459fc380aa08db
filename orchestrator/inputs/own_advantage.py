"""An advantage of the user's own: `algorithm.advantage=FILE.py:function`, with (groups) -> advantages.

Owns: how it is found and called, what it may return, and how it is tried before a run. Does not own: advantages that
ship (loop/advantages.py), or the tokens that get them (loop/samples.py). It runs in the run's own process, in a step.
Invariant: what is wrong with it is one message that names the option.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from conf.errors import ConfigError
from conf.functions import import_function
from orchestrator.errors import TrainingStopped
from rollout.types import Group, Prompt, Rollout

logger = logging.getLogger(__name__)

Penalties = Sequence[Sequence[np.ndarray]]
AdvantageFunction = Callable[[Sequence[Group], Penalties | None], list[list[np.ndarray | None]]]
"""(groups, penalty of KL of each sampled token, None if there is none) -> one number for each sampled token."""

_SIGNATURE = (
    "(groups) -> for each group a list with one number for each response, or one for each of its tokens "
    "(docs/algorithms.md)"
)


def own_advantage(value: str) -> AdvantageFunction:
    """The function that `value`, algorithm.advantage, names.

    Raises:
        ConfigError: It is a function that cannot be imported, or takes other arguments.
    """
    function = import_function("algorithm.advantage", value)
    try:
        inspect.signature(function).bind("groups")
    except TypeError as error:
        raise ConfigError(f"algorithm.advantage={value}: it must be {_SIGNATURE}: {error}") from error
    except ValueError:
        pass  # built-ins have no signature to check

    def call(groups: Sequence[Group], penalties: Penalties | None) -> list[list[np.ndarray | None]]:
        penalized = groups if penalties is None else [_minus(*one) for one in zip(groups, penalties, strict=True)]
        try:
            found = function(penalized)
        except Exception as error:
            logger.exception("algorithm.advantage=%s failed", value)
            raise TrainingStopped(f"algorithm.advantage={value} raised {type(error).__name__}: {error}") from error
        return _checked(found, groups, value)

    return call


def try_advantage(value: str) -> None:
    """Call the function on two made-up groups, one of them with a reward that failed.

    Raises:
        ConfigError: It cannot be used.
    """

    def group(number: int, rewards: list[float | None]) -> Group:
        rollouts = [
            Rollout([5] * (i + 1), [-1.0] * (i + 1), [0] * (i + 1), "text", "stop") for i in range(len(rewards))
        ]
        return Group(Prompt(number, (1, 2), "prompt", {"answer": "a"}), rollouts, rewards, [{}] * len(rewards))

    try:
        own_advantage(value)([group(0, [1.0, 0.0, 0.5]), group(1, [0.0, None, 0.0])], None)
    except TrainingStopped as error:
        raise ConfigError(f"{error} (tried on two made-up groups)") from error


def _checked(found: Any, groups: Sequence[Group], value: str) -> list[list[np.ndarray | None]]:
    def refuse(where: str, what: str) -> TrainingStopped:
        return TrainingStopped(f"algorithm.advantage={value}: {where}{what}: it must be {_SIGNATURE}")

    if not isinstance(found, Sequence) or len(cast("Sequence[Any]", found)) != len(groups):
        raise refuse("", f"it returned no list of {len(groups)} lists, one for each group")
    checked: list[list[np.ndarray | None]] = []
    for i, (of_group, group) in enumerate(zip(cast("Sequence[Any]", found), groups, strict=True)):
        if not hasattr(of_group, "__len__") or len(of_group) != len(group.rollouts):
            raise refuse(f"group {i}: ", f"it returned no list of {len(group.rollouts)} advantages")
        own: list[np.ndarray | None] = []
        for j, (given, reward, rollout) in enumerate(zip(of_group, group.rewards, group.rollouts, strict=True)):
            where, num_tokens = f"group {i}, response {j}: ", len(rollout.token_ids)
            if reward is None:
                own.append(None)
                continue
            try:
                values = np.asarray(given, dtype=np.float64)
            except (TypeError, ValueError):
                raise refuse(where, f"it returned {given!r}") from None
            if values.shape not in ((), (num_tokens,)):
                raise refuse(where, f"it returned numbers of shape {values.shape} for {num_tokens} tokens")
            if not np.isfinite(values).all():
                raise refuse(where, f"it returned {values[~np.isfinite(values)][0] if values.ndim else values}")
            own.append(np.full(num_tokens, float(values)) if values.ndim == 0 else values)
        checked.append(own)
    return checked


def _minus(group: Group, penalties: Sequence[np.ndarray]) -> Group:
    rewards = [
        None if reward is None else reward - float(of_rollout.sum())
        for reward, of_rollout in zip(group.rewards, penalties, strict=True)
    ]
    return replace(group, rewards=rewards)
