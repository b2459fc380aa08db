"""What chat messages must be, in rows and in requests, and what a chat template takes beside them.

    messages               a list of objects with a role, whose content is text
    tools                  a list of what the assistant may call
    chat_template_kwargs   further variables of the template, such as enable_thinking

Rows (orchestrator/data/prompts.py) and requests of agents (agents/endpoint.py) are read by the same rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from slipstream.conf.json_files import JsonMapping, JsonObject
from slipstream.rollout.errors import DataError

TOOLS, TEMPLATE_OPTIONS = "tools", "chat_template_kwargs"
"""Names of columns, and of fields of a request."""


@dataclass(frozen=True, slots=True)
class Chat:
    """What a chat template takes."""

    messages: Sequence[JsonMapping]
    tools: Sequence[JsonMapping] = ()
    options: JsonMapping = field(default_factory=JsonObject)

    def first(self, count: int) -> Chat:
        return replace(self, messages=self.messages[:count])


def text_messages(value: object) -> list[JsonObject]:
    """The messages of a value, each with its content as text. Raises DataError that names the message by its number,
    from 1.

    Content may be a list of parts of type text, which are joined. It may be null or missing beside tool calls, and is
    None then. Other fields that say nothing are left out, null and a list of no tool calls: templates ask whether they
    are there, and write calls, or drop the message's text, where there are none."""
    if not isinstance(value, list) or not value:
        raise DataError("must be a non-empty list of messages with role and content")
    found: list[JsonObject] = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            is_sharegpt = isinstance(message, Mapping) and "from" in message and "value" in message
            cure = "; rows in ShareGPT's form are written anew first (docs/data.md#columns)" if is_sharegpt else ""
            raise DataError(f"message {number} must be an object with a role and content, got {message!r:.60}{cure}")
        what = f"content of message {number} ({message['role']})"
        says = {name: one for name, one in message.items() if one is not None and (one or name != "tool_calls")}
        if not _are_calls(says.get("tool_calls", ())):
            raise DataError(
                f"tool_calls of message {number} must be a list of objects with a function, as OpenAI's protocol has "
                f"them, got {says['tool_calls']!r:.60}"
            )
        found.append({**says, "content": _text(message.get("content"), what, "tool_calls" in says)})
    return found


def _are_calls(value: object) -> bool:
    """A call may also be what the protocol has under `function` alone; a function of null is none."""
    return isinstance(value, list | tuple) and all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping | None) for call in value
    )


def _text(content: object, what: str, has_calls: bool) -> str | None:
    if isinstance(content, str) or (content is None and has_calls):
        return content
    if not isinstance(content, list):
        got = "null or nothing" if content is None else f"{type(content).__name__} {content!r:.60}"
        raise DataError(f"{what} must be text, or a list of parts of type text, got {got}")
    if content and isinstance(content[0], Mapping) and "role" in content[0]:
        raise DataError(f"{what} is a list of messages, such as a row's prompt may be: give those as messages")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{what}: only parts of type text, with their text, can be read, got {part!r:.60}")
    return "".join(part["text"] for part in content)


def tools_of(value: object) -> list[JsonObject]:
    """The tools of a column, which may be JSON text: Parquet mixes up the fields of several tools. null: none. Raises:
    DataError."""
    found = _parsed(value, TOOLS) or []
    if not isinstance(found, list) or not all(isinstance(tool, dict) and tool for tool in found):
        raise DataError(f"{TOOLS} must be a list of objects, as OpenAI's protocol has them, got {value!r:.60}")
    return found


def template_options(value: object) -> JsonObject:
    """The further variables of the template in a column or a request; may be JSON text. null: none. Raises:
    DataError."""
    found = _parsed(value, TEMPLATE_OPTIONS) or {}
    if not isinstance(found, dict):
        raise DataError(f"{TEMPLATE_OPTIONS} must be an object such as {{'enable_thinking': false}}, got {value!r:.60}")
    return {name: one for name, one in found.items() if one is not None}


def _parsed(value: object, what: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as e:
        raise DataError(f"{what} is text that is not JSON ({e}): {value!r:.60}") from e
