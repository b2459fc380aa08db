"""A reward's configuration turned into one callable, and how that is called.

Runs inside reward processes only: a user's module is never imported into the controller.

    (prompt, response, fields) -> number                       judges one response
    (prompt, responses, fields) -> one number per response     judges a whole group: its second parameter is `responses`
    async def of either                                        is awaited, with others of its process meanwhile
    (..., messages) of any                                     gets the prompt's chat messages, too; None of a text
    (messages, response, fields)                               gets them in place of the prompt's text
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any

from slipstream.conf.errors import ConfigError
from slipstream.conf.functions import file_of, has_form, import_function as find_function
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import RewardPart
from slipstream.rollout.errors import RewardError
from slipstream.rollout.rewards.answer_text import compile_pattern, exact_match, regex_match
from slipstream.rollout.rewards.code_tests import code_reward

FINISH_REASON = "finish_reason"
"""Field that holds the rollout's finish_reason, "stop" or "length"; a list of them for a reward of a whole group."""
GROUP_PARAMETER = "responses"
"""Name of the second parameter of a reward that judges a whole group."""
MESSAGES_PARAMETER = "messages"
INSTEAD, BESIDE = "instead", "beside"
"""Where a reward is given the prompt's chat messages: in place of its text, or as a further argument."""
FOREIGN_PARAMETERS = (
    "data_source", "solution_str", "ground_truth", "extra_info",  # verl
    "prompts", "completions", "completion_ids",  # TRL
)  # fmt: skip
"""Names that other libraries give the first parameters of a reward. Called as ours, such a function takes a prompt for
a source and the row's columns for the answer, and finds every response wrong.
"""


@dataclass(frozen=True, slots=True)
class Form:
    """How a reward wants to be called."""

    is_async: bool
    is_of_group: bool
    """Whether it gets the responses of a whole group at once."""
    source: str = ""
    """Path of the file that defines it; "" if no file does."""
    messages: str = ""
    """INSTEAD, BESIDE, or "": it is not given the chat messages."""


@dataclass(frozen=True, slots=True)
class Reward:
    function: Callable[..., Any]
    form: Form

    def call(self, prompt: object, responses: Sequence[str], fields: JsonObject, messages: object = None) -> Any:
        given = responses if self.form.is_of_group else responses[0]
        if self.form.messages == INSTEAD:
            return self.function(messages, given, fields)
        also = {MESSAGES_PARAMETER: messages} if self.form.messages == BESIDE else {}
        return self.function(prompt, given, fields, **also)


def load_reward(config: RewardPart, section: str = "reward", folder: Path | None = None) -> Reward:
    """The reward that `config` names, for the run in `folder`. Raises RewardError, which calls the configuration
    `section`: the pattern does not compile or has no group; the function cannot be imported or called."""
    function = _shipped(config, section, folder) if ":" not in config.kind else import_function(config.kind, section)
    parameters = _parameters(function)
    form = Form(
        is_async=has_form(inspect.iscoroutinefunction, function),
        is_of_group=[*parameters][1:2] == [GROUP_PARAMETER],
        source=file_of(function),
        messages=_asks_messages(parameters),
    )
    return Reward(function, form)


def _shipped(config: RewardPart, section: str, folder: Path | None) -> Callable[..., Any]:
    if config.kind == "exact_match":
        return lambda prompt, response, fields: exact_match(response, fields)
    if config.kind == "math":
        from slipstream.rollout.rewards.math_answer import math_reward  # imports SymPy

        return math_reward(timeout_s=config.timeout_s)
    if config.kind == "code":
        return code_reward(config.code, section=section, timeout_s=config.timeout_s)
    if config.kind == "judge":
        from slipstream.rollout.rewards.judge import Judge  # imports httpx

        return Judge(config, section, folder).judge
    if config.kind == "none":
        return lambda prompt, response, fields: 0.0
    pattern = compile_pattern(config.pattern, f"{section}.pattern")
    return lambda prompt, response, fields: regex_match(response, fields, pattern)


def import_function(kind: str, section: str) -> Callable[..., Any]:
    """The function at `package.module:function` or `FILE.py:function`. Raises RewardError: the module does not import,
    has no such name, or it is not a function of three arguments, or it has the parameters of another library."""
    try:
        function = find_function(f"{section}.kind", kind)
    except ConfigError as e:
        raise RewardError(str(e)) from e
    name = kind.rpartition(":")[2]
    ours = (
        f"{section}.kind={kind}: {name!r} must take (prompt, response, fields), or (prompt, {GROUP_PARAMETER}, fields) "
        "for a whole group"
    )
    parameters = _parameters(function)
    if foreign := [one for one in [*parameters][:3] if one in FOREIGN_PARAMETERS]:
        raise RewardError(
            f"{ours}, but takes {', '.join(foreign)}, as rewards of another library do; docs/coming_from.md has the "
            "few lines that wrap such a function"
        )
    if inspect.isclass(function):
        raise RewardError(f"{ours}, and is a class; name a function, or an object with __call__")
    if has_form(inspect.isgeneratorfunction, function) or has_form(inspect.isasyncgenfunction, function):
        raise RewardError(f"{ours} and return what they are worth, but yields")
    try:
        also = {MESSAGES_PARAMETER: None} if _asks_messages(parameters) == BESIDE else {}
        inspect.signature(function).bind("prompt", "response", {}, **also)
    except TypeError as e:
        raise RewardError(f"{ours}: {e}") from e
    except ValueError:
        pass  # built-ins have no signature to check
    return function


def _parameters(function: Callable[..., Any]) -> Mapping[str, Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # a built-in
        return {}


def _asks_messages(parameters: Mapping[str, Parameter]) -> str:
    """How a reward asks for them: its second and third argument are others, whatever their names are."""
    asked = parameters.get(MESSAGES_PARAMETER)
    if asked is None or asked.kind is Parameter.VAR_POSITIONAL:
        return ""
    place = [*parameters].index(MESSAGES_PARAMETER)
    if place == 0:
        return INSTEAD
    is_positional = asked.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return "" if is_positional and place < 3 else BESIDE
