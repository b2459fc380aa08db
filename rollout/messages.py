"""What chat messages must be, in rows and in requests: objects with a role, whose content is text.

Owns: the form of messages. Does not own: what a chat template makes of them (chat_template.py). Callers: the readers of
rows (orchestrator/data/prompts.py) and the agents' endpoint (agents/endpoint.py), so that both take the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import DataError


def text_messages(value: object) -> list[dict[str, Any]]:
    """The messages of a value, each with its content as text.

    Content may be a list of parts of type text, which are joined. It may be null or missing beside tool calls, and is
    None then.

    Raises:
        DataError: It is no list of messages, or a content is no text. Names the message by its number, from 1.
    """
    if not isinstance(value, list) or not value:
        raise DataError("must be a non-empty list of messages with role and content")
    found: list[dict[str, Any]] = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"message {number} must be an object with a role and content, got {message!r:.60}")
        what = f"content of message {number} ({message['role']})"
        found.append({**message, "content": _text(message.get("content"), what, bool(message.get("tool_calls")))})
    return found


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
