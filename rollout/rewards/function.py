"""A reward's configuration turned into one callable (prompt, response, fields) -> number.

Runs inside reward processes only: a user's module is never imported into the controller.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

from conf.schema import RewardConfig
from rollout.errors import RewardError
from rollout.rewards.exact_match import exact_match
from rollout.rewards.regex import regex_match

Reward = Callable[[str, str, dict[str, Any]], Any]
"""(prompt text, response text, fields) -> number. Fields: the row's other columns, and FINISH_REASON."""
FINISH_REASON = "finish_reason"
"""Field with the rollout's: "stop" or "length"."""


def load_reward(config: RewardConfig) -> Reward:
    """The callable that `config` names.

    Raises:
        RewardError: The pattern does not compile or has no group; the function cannot be imported or called.
    """
    if config.kind == "exact_match":
        match = functools.partial(exact_match, answer_key=config.answer_key)
        return lambda _prompt, response, fields: match(response, fields)
    if config.kind == "regex":
        try:
            pattern = re.compile(config.pattern)
        except re.error as e:
            raise RewardError(f"reward.pattern={config.pattern!r} is not a regular expression: {e}") from e
        if pattern.groups < 1:
            raise RewardError(f"reward.pattern={config.pattern!r} has no group; put parentheses around the answer")
        match = functools.partial(regex_match, pattern=pattern, answer_key=config.answer_key)
        return lambda _prompt, response, fields: match(response, fields)
    return import_function(config.kind)


def import_function(path: str) -> Reward:
    """The function at `package.module:function`.

    Raises:
        RewardError: The module does not import, has no such name, or it is not a plain function of three arguments.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as e:  # a user's module may raise anything
        is_missing = isinstance(e, ModuleNotFoundError) and e.name in (module_name, module_name.partition(".")[0])
        cure = "; start the run in the folder that holds it, or put that folder on PYTHONPATH" if is_missing else ""
        raise RewardError(f"reward.kind={path}: importing {module_name!r} failed: {type(e).__name__}: {e}{cure}") from e
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"reward.kind={path}: {module_name!r} has no function {name!r}")
    if inspect.iscoroutinefunction(function):
        raise RewardError(
            f"reward.kind={path}: {name!r} is async; a reward is a plain function, it has a process of its own"
        )
    try:
        inspect.signature(function).bind("prompt", "response", {})
    except TypeError as e:
        raise RewardError(f"reward.kind={path}: {name!r} must take (prompt, response, fields): {e}") from e
    except ValueError:
        pass  # built-ins have no signature to check
    return function
