"""A reward's configuration turned into one callable (prompt, response, fields) -> number.

Runs inside reward processes only: a user's module is never imported into the controller.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from conf.schema import RewardConfig
from rollout.errors import RewardError
from rollout.rewards.exact_match import exact_match
from rollout.rewards.regex import regex_match

Reward = Callable[[str, str, dict[str, Any]], Any]
"""(prompt text, response text, fields) -> number. Fields: the row's other columns, and FINISH_REASON."""
FINISH_REASON = "finish_reason"
"""Field that holds the rollout's finish_reason: "stop" or "length"."""


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


def source_file(function: Reward) -> str:
    """Path of the file that defines the function; "" if no file does."""
    try:
        return inspect.getsourcefile(inspect.unwrap(function)) or ""
    except TypeError:  # a built-in, or an object that can be called
        return ""


def import_function(kind: str) -> Reward:
    """The function at `package.module:function` or `FILE.py:function`.

    Raises:
        RewardError: The module does not import, has no such name, or it is not a plain function of three arguments.
    """
    place, _, name = kind.rpartition(":")
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise RewardError(f"reward.kind={kind}: there is no file {Path(place).absolute()}")
    try:
        module = _load_file(Path(place)) if is_file else importlib.import_module(place)
    except Exception as e:
        is_missing = isinstance(e, ModuleNotFoundError) and e.name in (place, place.partition(".")[0])
        cure = (
            "; start the run in the folder that holds it, put that folder on PYTHONPATH, or name the file: "
            f"reward.kind=FOLDER/FILE.py:{name}"
        )
        raise RewardError(
            f"reward.kind={kind}: importing {place!r} failed: {type(e).__name__}: {e}{cure if is_missing else ''}"
        ) from e
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"reward.kind={kind}: {place!r} has no function {name!r}")
    if inspect.iscoroutinefunction(function):
        raise RewardError(
            f"reward.kind={kind}: {name!r} is async; a reward is a plain function, it has a process of its own"
        )
    try:
        inspect.signature(function).bind("prompt", "response", {})
    except TypeError as e:
        raise RewardError(f"reward.kind={kind}: {name!r} must take (prompt, response, fields): {e}") from e
    except ValueError:
        pass  # built-ins have no signature to check
    return function


def _load_file(file: Path) -> ModuleType:
    """Import the file as a module. It can import files beside it, and does not hide an installed module."""
    sys.path.append(str(file.absolute().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file.absolute())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    return module
