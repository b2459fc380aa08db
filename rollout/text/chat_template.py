"""A tokenizer's chat template: messages to text, for prompts, conversations and agents.

Does not own: tokens, nor how a template alone is rendered (plain_template.py). The folder's own tokenizer class costs
5 s of imports (torch among them), so it renders only where its text may differ from that of transformers' plain class.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from slipstream.conf.errors import ConfigError
from slipstream.conf.failures import outcome_of, raised_as
from slipstream.conf.json_files import JsonMapping, JsonObject
from slipstream.rollout.errors import DataError, TemplateRefused
from slipstream.rollout.text.messages import TEMPLATE_OPTIONS, TOOLS, Chat
from slipstream.rollout.text.plain_template import CLASS_TOKENS, read_plain, variables_of

_GIVEN = frozenset({"messages", "tools", "add_generation_prompt"})
PRESENT = "present"
"""A file of the folder, with the time that a template is to take for the present; without it the clock has it."""

_UNREADABLE = (
    ConfigError,
    "the files of the model's tokenizer (tokenizer_config.json, chat_template.jinja and others beside them) cannot be "
    "used: ",
    "; copy the model's own, whole, or give model.tokenizer=FOLDER",
)


class ChatTemplate:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Any = None
        self._renderer: Any = None
        self._writes_tools = False
        """Whether the template is known to write tools."""

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            import transformers

            loader: Any = transformers.AutoTokenizer
            with raised_as(*_UNREADABLE):
                # Where code of the folder's own is needed, it would ask on the terminal whether to run it.
                self._tokenizer = loader.from_pretrained(self._folder, trust_remote_code=False)
        return self._tokenizer

    def load(self) -> None:
        """Load what render() needs. Without this, its first call does."""
        if self._renderer is None:
            with raised_as(*_UNREADABLE):
                self._renderer = read_plain(self._folder) or self.tokenizer

    def check(self, chat: Chat) -> None:
        """Refuse tools that the template does not write, and options that it does not read: a model would not see them.
        Raises: DataError; TemplateRefused, where the template refuses the messages."""
        self.load()
        if chat.options:
            self.check_options(chat.options)
        if not chat.tools or self._writes_tools:
            return
        with_tools, without = (
            self.render(chat.messages, is_open=True, tools=tools, options=chat.options) for tools in (chat.tools, ())
        )
        if with_tools == without:
            raise DataError(
                f"{TOOLS}: the model's chat template writes none, so that the model would not see them; give "
                "model.tokenizer=FOLDER with a template that does, or write them into a message"
            )
        self._writes_tools = True

    def names(self, role: str) -> bool:
        """Whether the template's source has this role as a text."""
        self.load()
        source = str(self._renderer.chat_template)
        return f"'{role}'" in source or f'"{role}"' in source

    def check_options(self, options: JsonMapping, name: str = TEMPLATE_OPTIONS) -> None:
        """Refuse options that are no variables of the template; messages call them `name`. Raises: DataError."""
        known = self._variables
        for option in options:
            if option in _GIVEN or (known is not None and option not in known):
                read = ", ".join(sorted((known or set()) - _GIVEN - set(CLASS_TOKENS))) or "none"
                raise DataError(f"{name}.{option}: the model's chat template reads no such option; it reads {read}")

    @functools.cached_property
    def _variables(self) -> set[str] | None:
        """Names that the template reads; None where there is none in Jinja."""
        self.load()
        template = self._renderer.chat_template
        texts = list(template.values()) if isinstance(template, dict) else [template]
        if not all(isinstance(text, str) for text in texts):
            return None
        return {name for text in texts for name in variables_of(text)}

    def render(
        self,
        messages: Sequence[JsonMapping],
        *,
        is_open: bool,
        tools: Sequence[JsonMapping] | None = None,
        options: JsonMapping | None = None,
    ) -> str:
        """The template's text, up to where an assistant's answer begins if `is_open`. Raises TemplateRefused: in the
        template's own words.

        Most templates expect the arguments of a tool call as an object, and the protocol sends them as text, so they
        are parsed here; a template that refuses that gets the text. No content, which the protocol has beside tool
        calls, is an empty text for a template that does not ask for it, or refuses it."""
        self.load()
        with_objects = [_with_objects(message) for message in messages]
        filled = [{**one, "content": ""} if one.get("content", "") is None else one for one in with_objects]
        forms = [with_objects] if "is none" in str(self._renderer.chat_template) else []  # else none is as an empty one
        forms.append(filled)
        if any(message.get("tool_calls") for message in messages):
            forms.append([dict(one) for one in messages])  # DeepSeek's templates expect the text
        refusals: list[Exception] = []
        for form in forms:
            text = outcome_of(functools.partial(self._render, form, is_open=is_open, tools=tools, options=options))
            if not isinstance(text, Exception):
                return text
            refusals.append(text)  # the first one is the one to be told
        raise TemplateRefused(str(refusals[0])) from refusals[0]

    @functools.cached_property
    def _present(self) -> dict[str, Callable[[str], str]]:
        """The function by which a template asks for the date, where it is not to be the clock's: several models' write
        it into every system prompt."""
        file = self._folder / PRESENT
        return {"strftime_now": datetime.fromisoformat(file.read_text()).strftime} if file.is_file() else {}

    def _render(
        self,
        messages: list[JsonObject],
        *,
        is_open: bool,
        tools: Sequence[JsonMapping] | None,
        options: JsonMapping | None,
    ) -> str:
        return str(
            self._renderer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=is_open,
                **self._present,
                **(options or {}),
            )
        )


def _with_objects(message: JsonMapping) -> JsonObject:
    """The message with every tool call's arguments as an object, where they are one."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_object(call) for call in calls]} if calls else dict(message)


def _with_object(call: JsonMapping) -> JsonObject:
    """A call as the protocol has it, or its function alone: templates take that, too, if there is no `function`."""
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _with_object(function)}
    with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):  # else the model's own words
        return {**call, "arguments": json.loads(call["arguments"])}
    return dict(call)
