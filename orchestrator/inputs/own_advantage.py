"""An advantage of the user's own: `algorithm.advantage=FILE.py:function`, with (groups) -> advantages.

Owns: how it is found and called, what it may return, and how it is tried before a run. It runs in the run's own
process, in a step. Invariant: what is wrong with it is one message that names the option.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from slipstream.conf.errors import ConfigError
from slipstream.conf.functions import import_function
from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.rollout.rewards.runner import chosen_rewards
from slipstream.rollout.types import Group, Prompt, Rollout

logger = logging.getLogger(__name__)

Penalties = Sequence[Sequence[np.ndarray]]
AdvantageFunction = Callable[[Sequence[Group], Penalties | None], list[list[np.ndarray | None]]]
"""(groups, penalty of KL of each sampled token, None if there is none) -> one number for each sampled token."""

_SIGNATURE = (
    "(groups) -> for each group a list or an array with one number for each response, or one for each of its tokens "
    "(docs/algorithms.md)"
)


def own_advantage(value: str) -> AdvantageFunction:
    """The function that `value`, algorithm.advantage, names. Raises: ConfigError."""
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
            found: Any = function(penalized)
            if hasattr(found, "__next__"):  # it yields them
                found = list(found)
        except Exception as error:  # the user's own function
            logger.exception("algorithm.advantage=%s failed", value)
            raise TrainingStopped(f"algorithm.advantage={value} raised {type(error).__name__}: {error}") from error
        return _checked(found, groups, value)

    return call


def try_advantage(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Call the function on a group of each prompt. A group has the size and the reward parts of the run's; what its
    responses say and are worth is made up, and one reward failed. Without prompts, it is only looked at how the
    function can be called. Raises: ConfigError."""
    function = own_advantage(config.algorithm.advantage)
    groups = [_made_up(config, prompt, has_failure=prompt is prompts[-1]) for prompt in prompts]
    try:
        if groups:
            function(groups, None)
    except TrainingStopped as error:
        raise ConfigError(
            f"{error} (tried on {len(groups)} groups of the first rows; their responses and rewards are made up, and "
            "the last group has one reward that failed, None)"
        ) from error


def _made_up(config: RunConfig, prompt: Prompt, *, has_failure: bool) -> Group:
    reward, most_tokens = config.reward, config.rollout.sampling.max_tokens
    weights = {name: reward.by_name[name].weight for name in chosen_rewards(reward, prompt)}
    rollouts: list[Rollout] = []
    rewards: list[float | None] = []
    parts: list[dict[str, float | None]] = []
    for i in range(config.algorithm.group_size):
        length, value = min(i + 1, most_tokens), float(i % 2)
        rollouts.append(Rollout([5] * length, [-1.0] * length, [0] * length, "text", "stop"))
        is_failed = has_failure and i == 0
        rewards.append(None if is_failed else value * sum(weights.values()))
        parts.append(dict.fromkeys(weights, None if is_failed else value) | dict.fromkeys(reward.shapings, 0.0))
    return Group(prompt, rollouts, rewards, parts)


def _checked(found: object, groups: Sequence[Group], value: str) -> list[list[np.ndarray | None]]:
    def refuse(where: str, what: str) -> TrainingStopped:
        return TrainingStopped(f"algorithm.advantage={value}: {where}{what}: it must be {_SIGNATURE}")

    def listed(given: Any, count: int, where: str, what: str) -> Any:
        """It, if it is a list of that many, or an array or a tensor whose first dimension has them."""
        try:
            kind = f"{type(given).__name__} of {len(given)}"
            if len(given) == count:
                return given
        except TypeError:  # a number; an array without dimensions
            kind = repr(given)
        raise refuse(where, f"it returned {kind:.200}, not {count} {what}")

    checked: list[list[np.ndarray | None]] = []
    of_groups = listed(found, len(groups), "", "lists, one for each group")
    for i, (of_group, group) in enumerate(zip(of_groups, groups, strict=True)):
        own: list[np.ndarray | None] = []
        numbers = listed(of_group, len(group.rollouts), f"group {i}: ", "advantages, one for each response")
        for j, (given, reward, rollout) in enumerate(zip(numbers, group.rewards, group.rollouts, strict=True)):
            where, num_tokens = f"group {i}, response {j}: ", len(rollout.token_ids)
            if reward is None:
                own.append(None)
                continue
            try:
                values = np.asarray(given, dtype=np.float64)
            except (TypeError, ValueError, RuntimeError):  # the last: a tensor with a gradient
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
