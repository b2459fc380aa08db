"""The end of an answer in a template that ends no turn: the next turn's header.

    GLM    <|user|>2 + 2?<|assistant|>4<|user|>     a model of it samples <|user|>, or <|observation|> after tool calls

Owns: which text after an answer is taught with it, and whether a template's answers end as responses do. Does not own:
which tokens are ends (rollout/text/ends.py).
"""

import functools
from collections.abc import Iterable

from slipstream.conf.json_files import JsonMapping, JsonObject
from slipstream.orchestrator.data.prompts import Encoder
from slipstream.rollout.errors import DataError, TemplateRefused
from slipstream.rollout.text.messages import Chat

_CALL = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TURNS: dict[str, tuple[JsonObject, JsonObject]] = {
    "user": ({"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}),
    "tool": (
        {"role": "assistant", "content": "a", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call-1", "name": "f", "content": "b"},
    ),
}
_MARK = "an answer of no row"


def end_after(answer: str, following: str, message: JsonMapping, encoder: Encoder) -> str:
    """The text after an answer that ends it; empty if the answer has its end, or none is known. `following` is what the
    template writes after it; empty after the last turn, whose next header is asked for."""
    texts = [text for text in encoder.ends.values() if text]
    if any(text in answer for text in texts):
        return ""
    next_role = "tool" if message.get("tool_calls") else "user"
    return _beginning(following, texts) or ("" if following else _next_header(encoder, next_role))


def unknown_end(encoder: Encoder) -> str | None:
    """What the template writes after an answer, where it is no end of a response, nor is the next turn's header; "" if
    it writes nothing. None if answers end as responses do, or the template refuses a question and an answer."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _MARK}]
    try:
        closed = encoder.render(Chat(turns), is_open=False)
    except (DataError, TemplateRefused):  # rows that it takes are read one by one
        return None
    _, mark, after = closed.rpartition(_MARK)
    is_known = any(end and end in after for end in encoder.ends.values()) or _next_header(encoder, "user")
    return None if is_known or not mark else after.strip()


@functools.lru_cache(maxsize=8)
def _next_header(encoder: Encoder, role: str) -> str:
    """The end that begins a turn of this role after an answer; empty if none does."""
    answer, following = _TURNS[role]
    turns = [{"role": "user", "content": "q"}, answer]
    try:
        closed = encoder.render(Chat(turns), is_open=False)
        longer = encoder.render(Chat([*turns, following]), is_open=False)
    except (DataError, TemplateRefused):  # a template that knows no such turn
        return ""
    return _beginning(longer[len(closed) :], encoder.ends.values()) if longer.startswith(closed) else ""


def _beginning(text: str, ends: Iterable[str]) -> str:
    return next((end for end in ends if end and text.startswith(end)), "")
