"""Locks: which messages, tools and options of a template are taken, and that each way to be none of them is refused."""

from types import MappingProxyType

import pytest

from slipstream.rollout.errors import DataError
from slipstream.rollout.text.messages import Chat, template_options, text_messages, tools_of

CALLS = [{"id": "1", "function": {"name": "add"}}]


def said(content: object, **more: object) -> list[dict[str, object]]:
    """A message of the user's."""
    return [{"role": "user", "content": content, **more}]


@pytest.mark.parametrize(
    ("value", "contents"),
    [
        (said("hi"), ["hi"]),
        (said(""), [""]),
        (said([]), [""]),
        (said([{"type": "text", "text": "2+"}, {"type": "text", "text": "2", "image": None}]), ["2+2"]),
        (said([MappingProxyType({"type": "text", "text": "a"})]), ["a"]),
        (said(None, tool_calls=CALLS), [None]),
        ([{"role": "assistant", "tool_calls": CALLS}], [None]),
        ([MappingProxyType({"role": "system", "content": "a"}), *said("b")], ["a", "b"]),
    ],
)
def test_content_becomes_text_and_the_rest_stays(value: list, contents: list[str | None]) -> None:
    found = text_messages(value)
    assert [message["content"] for message in found] == contents
    assert [{**message, "content": 0} for message in found] == [{**message, "content": 0} for message in value]


def test_fields_that_say_nothing_are_left_out() -> None:
    """As clients of OpenAI's protocol send an answer back that calls no tool."""
    nothing = {"refusal": None, "function_call": None, "annotations": None}
    for calls in (None, [], ()):
        assert text_messages(said("hi", tool_calls=calls, **nothing)) == said("hi")
    assert text_messages(said(None, tool_calls=CALLS, **nothing)) == said(None, tool_calls=CALLS)
    assert text_messages(said("hi", name="", weight=0)) == said("hi", name="", weight=0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "a non-empty list of messages"),
        ("hi", "a non-empty list of messages"),
        (said("hi")[0], "a non-empty list of messages"),
        ((), "a non-empty list of messages"),
        ([], "a non-empty list of messages"),
        (["hi"], "message 1 must be an object with a role and content, got 'hi'"),
        ([{"content": "hi"}], "message 1 must be an object with a role"),
        ([{"from": "human", "value": "hi"}], r"ShareGPT's form are written anew first \(docs/data\.md#columns\)"),
        ([*said("a"), {"role": 3, "content": "b"}], "message 2 must be an object with a role"),
        (said(None), r"content of message 1 \(user\) must be text.* got null or nothing"),
        (said(None, tool_calls=[]), r"content of message 1 \(user\) must be text.* got null or nothing"),
        (said(3, tool_calls=CALLS), r"content of message 1 \(user\) must be text.* got int 3"),
        *(
            (said("a", tool_calls=calls), r"tool_calls of message 1 must be a list of objects with a function")
            for calls in ('[{"name": "add"}]', {"name": "add"}, ["add"], [*CALLS, {"function": "add"}])
        ),
        (said({"type": "text", "text": "a"}), r"content of message 1 \(user\) must be text.* got dict"),
        (said(said("a")), r"content of message 1 \(user\) is a list of messages"),
        (said([3]), "only parts of type text, with their text, can be read, got 3"),
        (said(["a role"]), "only parts of type text, with their text, can be read, got 'a role'"),
        (said([{"text": "a"}]), "only parts of type text"),
        (said([{"type": "image", "text": "a"}]), "only parts of type text"),
        (said([{"type": "text"}]), "only parts of type text"),
        (said([{"type": "text", "text": 3}]), "only parts of type text"),
        (said([{"type": "text", "text": "a"}, {"type": "image"}]), "only parts of type text.* got {'type': 'image'}"),
    ],
)
def test_other_messages_are_refused_with_what_they_are(value: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        text_messages(value)


@pytest.mark.parametrize(
    ("value", "tools"),
    [(None, []), ("null", []), ([], []), ([{"type": "f"}], [{"type": "f"}]), ('[{"type": "f"}]', [{"type": "f"}])],
)
def test_tools_may_be_text(value: object, tools: list[dict[str, object]]) -> None:
    assert tools_of(value) == tools


@pytest.mark.parametrize("value", [3, {"name": "f"}, ["f"], [{}], [{"type": "f"}, "f"], "3", "f", "", "[" * 9999])
def test_other_tools_are_refused(value: object) -> None:
    with pytest.raises(DataError, match=r"tools (must be a list of objects|is text that is not JSON)"):
        tools_of(value)


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (None, {}),
        ("null", {}),
        ({}, {}),
        ({"a": None, "b": 0, "c": False, "d": ""}, {"b": 0, "c": False, "d": ""}),
        ('{"a": null, "b": [1]}', {"b": [1]}),
    ],
)
def test_options_without_a_value_are_none(value: object, options: dict[str, object]) -> None:
    assert template_options(value) == options


@pytest.mark.parametrize("value", [3, [1], "[1]", "a", ""])
def test_other_options_are_refused(value: object) -> None:
    with pytest.raises(DataError, match=r"chat_template_kwargs (must be an object|is text that is not JSON)"):
        template_options(value)


def test_the_first_messages_keep_tools_and_options() -> None:
    chat = Chat([*said("a"), *said("b")], [{"type": "f"}], {"mood": "calm"})
    assert chat.first(1) == Chat(said("a"), [{"type": "f"}], {"mood": "calm"})
