"""Locks: a conversation keeps the tokens that the engine sampled, or begins a branch and says why.

The templates are those of models that people train, cut to what renders messages (tests/fakes/chat_templates.py says
where they are from). The engine is random: it samples any text, cuts responses off, and calls tools in odd spellings.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from fakes.chat_templates import SAMPLED_END, TEMPLATES, FakeChatText
from hypothesis import given, settings, strategies as st

from slipstream.rollout.agents.token_tree import (
    CONTINUED,
    EDITED,
    FORK,
    NEW,
    START,
    TEMPLATE,
    TOOLS,
    TokenTree,
    _digests,
)

Messages = list[dict[str, Any]]


class Conversation:
    """A tree, and what the engine was given and sampled in each turn."""

    def __init__(self, template: str) -> None:
        self.chat = FakeChatText(template)
        self.tree = TokenTree(self.chat)
        self.tokens: list[list[int]] = []
        self.parents: list[int | None] = []

    def ask(self, messages: Messages, said: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[dict[str, Any], str]:
        """One turn, in which the engine samples `said`. Returns the reply and the reason."""
        planned = self.tree.plan(messages, tools)
        before = [] if planned.parent is None else self.tokens[planned.parent]
        assert planned.num_tokens == len(before) + len(planned.token_ids)
        sampled = self.chat.encode(said)
        reply = self.chat.reply(sampled, tools)
        number, reason = self.tree.record(planned, sampled, reply)
        assert number == len(self.tokens)
        self.tokens.append([*before, *planned.token_ids, *sampled])
        self.parents.append(planned.parent)
        return reply, reason

    def text(self, number: int = -1) -> str:
        return self.chat.decode(self.tokens[number])


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_conversation_keeps_what_was_sampled(template: str) -> None:
    talk = Conversation(template)
    messages = [user("one")]
    for said in ("first", "second", "third"):
        reply, reason = talk.ask(messages, said + talk.chat.end)
        assert reason == (CONTINUED if len(talk.tokens) > 1 else START)
        messages += [reply, user("more")]
    assert talk.parents == [None, 0, 1]
    assert talk.text() == talk.chat.render(messages[:5], ()) + "third" + talk.chat.end


@pytest.mark.parametrize(
    "ends", [["<|eom_id|>", "<|eot_id|>"], ["<|eot_id|>", "<|eom_id|>"], ["", "<|eot_id|>"]]
)  # the last has one without a text
def test_a_response_that_was_cut_off_ends_at_the_first_of_the_models_ends(ends: list[str]) -> None:
    """Its blanks are trimmed, so that it is looked for; another of the ends stands further on in the conversation."""
    talk = Conversation("llama3")
    talk.chat.stop_texts = {talk.chat._id(end): end for end in ends}
    reply, _ = talk.ask([user("one")], "cut o ")
    _, reason = talk.ask([user("one"), reply, user("what is <|eom_id|>?")], "an end<|eot_id|>")
    assert (reason, talk.parents) == (CONTINUED, [None, 0])
    assert "<|start_header_id|>user<|end_header_id|>\n\nwhat is <|eom_id|>?" in talk.text()


def test_a_sampled_text_that_stands_further_on_is_not_the_sampled_turn() -> None:
    """The template trims the answer; the user repeats it untrimmed."""
    talk = Conversation("llama3")
    reply, _ = talk.ask([user("one")], " four<|eot_id|>")
    _, reason = talk.ask([user("one"), reply, user("why four<|eot_id|>?")], "so<|eot_id|>")
    assert (reason, talk.parents) == (CONTINUED, [None, 0])
    start = "<|start_header_id|>"
    assert f" four<|eot_id|>{start}user<|end_header_id|>\n\nwhy four<|eot_id|>?<|eot_id|>{start}assist" in talk.text()


def test_an_answer_is_compared_with_what_was_sampled_without_the_end_of_its_turn() -> None:
    """By a reader for whom an end is a word like others. The template trims the answer."""

    class Literal(FakeChatText):
        def meaning(self, text: str, tools: Any) -> object:
            return text.split()

    talk = Conversation("llama3")
    talk.chat = Literal("llama3")
    talk.tree = TokenTree(talk.chat)
    reply, _ = talk.ask([user("one")], " four <|eot_id|>")
    _, reason = talk.ask([user("one"), reply, user("two")], "so<|eot_id|>")
    assert (reason, talk.parents) == (CONTINUED, [None, 0])


THOUGHT = "<think>\nhm\n</think>\n\nfirst<|im_end|>"


@pytest.mark.parametrize(
    ("template", "said", "then", "part", "is_kept"),
    [
        ("qwen3", THOUGHT, user("two"), "hm", False),
        ("qwen3", THOUGHT, {"role": "tool", "content": "4"}, "hm", True),
        ("gpt_oss", f"first{SAMPLED_END}", user("two"), SAMPLED_END, False),
    ],
)
def test_what_the_template_writes_in_another_way_begins_a_branch(
    template: str, said: str, then: dict[str, Any], part: str, is_kept: bool
) -> None:
    """The model sees what the template shows, and is trained on that."""
    talk = Conversation(template)
    reply, _ = talk.ask([user("one")], said)
    _, reason = talk.ask([user("one"), reply, then], "second" + talk.chat.end)
    assert (reason, talk.parents) == ((CONTINUED, [None, 0]) if is_kept else (TEMPLATE, [None, None]))
    assert (part in talk.text()) == is_kept


def test_an_answer_that_a_framework_writes_anew_is_the_same() -> None:
    talk = Conversation("qwen3")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = 'well \n<tool_call>{"name":"add","arguments":{"b": 2, "a": [1, "x y"]}}</tool_call><|im_end|>'
    reply, _ = talk.ask([user("one")], call, tools)
    (made,) = reply["tool_calls"]
    function = {"name": "add", "arguments": '{"a":[1,"x y"],"b":2}'}
    again = {"role": "assistant", "content": "well", "refusal": None, "tool_calls": [{**made, "function": function}]}
    result = {"role": "tool", "content": "3"}
    assert talk.ask([user("one"), again, result], "3 <|im_end|>", tools)[1] == CONTINUED
    three = {"role": "assistant", "content": "3"}
    assert talk.ask([user("one"), again, result, three, user("two")], "4<|im_end|>", tools)[1] == CONTINUED
    other = {**again, "tool_calls": [{**made, "function": {**function, "arguments": '{"a":[1,"xy"],"b":2}'}}]}
    assert talk.ask([user("one"), other, result], "3<|im_end|>", tools)[1] == EDITED


def test_edits_forks_tools_and_new_conversations_are_told_apart() -> None:
    talk = Conversation("llama3")
    reply, reason = talk.ask([user("one")], "first" + talk.chat.end)
    assert reason == START
    assert talk.ask([user("one")], "another" + talk.chat.end)[1] == FORK
    assert talk.ask([user("one"), reply, user("two")], "a" + talk.chat.end)[1] == CONTINUED
    assert talk.ask([user("one"), reply, user("three")], "b" + talk.chat.end)[1] == FORK
    assert talk.ask([user("elsewhere")], "c" + talk.chat.end)[1] == NEW
    changed = {**reply, "content": "first, I think"}
    assert talk.ask([user("one"), changed, user("two")], "d" + talk.chat.end)[1] == EDITED
    assert talk.ask([user("one"), changed, user("two")], "e" + talk.chat.end)[1] == FORK
    assert talk.ask([user("one"), reply, user("two")], "e" + talk.chat.end, [{"type": "function"}])[1] == TOOLS


@pytest.mark.parametrize(
    ("requests", "reasons"),
    [
        ([("one", []), ("one", []), ("two", [])], [START, FORK, NEW]),
        ([("one", []), ("two", [])], [START, NEW]),
        ([("one", []), ("one", [{"type": "function"}])], [START, NEW]),  # other tools
    ],
)
def test_requests_that_were_planned_before_the_first_was_sampled_are_forks_or_new(
    requests: list[tuple[str, list[dict[str, Any]]]], reasons: list[str]
) -> None:
    chat = FakeChatText("chatml")
    tree = TokenTree(chat)
    planned = [tree.plan([user(text)], tools) for text, tools in requests]
    assert [one.reason for one in planned] == [START] * len(requests)
    assert [tree.record(one, chat.encode("a<|im_end|>"))[1] for one in planned] == reasons


def test_a_conversation_goes_on_after_an_answer_without_a_token() -> None:
    """An engine that stops at once; the template renders an empty answer."""
    talk = Conversation("chatml")
    reply, _ = talk.ask([user("one")], "")
    _, reason = talk.ask([user("one"), reply, user("two")], "a<|im_end|>")
    assert (reason, talk.parents) == (CONTINUED, [None, 0])
    assert talk.text() == talk.chat.render([user("one"), reply, user("two")], ()) + "a<|im_end|>"


def test_the_newest_of_equal_histories_is_gone_on_from() -> None:
    talk = Conversation("chatml")
    for _ in range(2):
        reply, _ = talk.ask([user("one")], "first<|im_end|>")
    assert talk.ask([user("one"), reply, user("two")], "a<|im_end|>")[1] == CONTINUED
    assert talk.parents == [None, None, 1]


def test_a_longer_history_that_cannot_be_kept_gives_way_to_a_shorter_one() -> None:
    """The template removes the second answer's thinking; the first answer is still as it was sampled."""
    talk = Conversation("qwen3")
    first, _ = talk.ask([user("one")], "plain<|im_end|>")
    second, _ = talk.ask([user("one"), first, user("two")], "<think>\nhm\n</think>\n\nsecond<|im_end|>")
    _, reason = talk.ask([user("one"), first, user("two"), second, user("three")], "third<|im_end|>")
    assert (talk.parents, reason) == ([None, 0, 0], TEMPLATE)
    assert "hm" not in talk.text() and "second" in talk.text()


@pytest.mark.parametrize(
    ("given", "is_same"),
    [
        ({"role": "assistant", "content": "first"}, True),
        ({"role": "assistant", "content": " first\n", "refusal": None, "audio": {}, "name": ""}, True),
        ({"role": "assistant", "content": "first", "tool_calls": []}, True),
        ({"role": "assistant", "content": "fir st"}, False),
        ({"role": "assistant", "content": "first", "name": "Ann"}, False),
        ({"role": "assistant", "content": "first", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}, False),
        ({"role": "assistant", "content": "first", "tool_calls": ["f"]}, False),
        ({"role": "user", "content": "first"}, False),
    ],
)
def test_which_answers_are_those_that_were_given(given: dict[str, Any], is_same: bool) -> None:
    said = {"role": "assistant", "content": "first"}
    one, other = (_digests([user("one"), answer], ())[-1] for answer in (given, said))
    assert (one == other) == is_same


def test_options_that_change_the_text_before_an_answer_begin_a_branch() -> None:
    """Also where that text is as long as it was, so that the answer stands in its place."""

    class Efforts(FakeChatText):
        def render(self, messages: Any, tools: Any, options: Any = None) -> str:
            return f"effort {options['effort']}\n" + super().render(messages, tools)

    chat = Efforts("chatml")
    tree, asked = TokenTree(chat), [user("one")]
    reply = chat.reply(chat.encode("first<|im_end|>"), ())
    tree.record(tree.plan(asked, (), {"effort": "low"}), chat.encode("first<|im_end|>"), reply)
    asked = [*asked, reply, user("two")]
    same, other = (tree.plan(asked, (), {"effort": effort}) for effort in ("low", "max"))
    assert (same.parent, same.reason) == (0, CONTINUED)
    assert (other.parent, other.reason, other.text[:10]) == (None, TEMPLATE, "effort max")


def test_other_tools_are_told_from_another_conversation_however_long_it_was() -> None:
    """And tools are the same whatever the order of their keys."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    same = {"function": {"parameters": {}, "name": "f"}, "type": "function"}
    talk = Conversation("chatml")
    messages = [{"role": "system", "content": "be brief"}, user("one")]
    reply, _ = talk.ask(messages, "first<|im_end|>", [tool])
    messages = [*messages, reply, user("two")]
    assert _digests([user("one")], [tool]) == _digests([user("one")], [same])
    other = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert _digests([user("one")], [tool]) != _digests([user("one")], [other])
    assert talk.ask(messages, "a<|im_end|>", [tool])[1] == CONTINUED
    assert talk.ask(messages, "b<|im_end|>", [])[1] == TOOLS
    assert talk.ask([user("elsewhere"), user("two")], "c<|im_end|>", [])[1] == NEW
    assert talk.parents == [None, 0, None, None]


def test_other_blanks_are_another_message_unless_the_model_wrote_them() -> None:
    for role in ("user", "system", "tool"):
        one, other = (_digests([{"role": role, "content": text}], ())[-1] for text in ("one", "one "))
        assert one != other
    assert _digests([user("one")], [{"type": "function"}])[-1] != one


def specials_of(text: str) -> list[str]:
    return re.findall(r"<\|\w+\|>", text)


texts = st.text("ab {}\n<é", max_size=6)
said = st.one_of(
    texts,
    texts.map("<think>\n{}\n</think>\n\nso".format),
    st.dictionaries(st.sampled_from("xyz"), st.integers(0, 3) | texts, max_size=2).map(
        lambda arguments: f"well<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    ),
)


@settings(max_examples=200)
@given(
    template=st.sampled_from(sorted(TEMPLATES)),
    turns=st.lists(
        st.tuples(said, st.booleans(), st.sampled_from(["user", "tool", "edit", "cut", "again", "other"]), texts),
        min_size=1,
        max_size=6,
    ),
    with_tools=st.booleans(),
)
def test_a_turn_continues_exactly_or_is_what_the_template_renders(
    template: str, turns: list[tuple[str, bool, str, str]], with_tools: bool
) -> None:
    """Of every request: the engine is given an earlier turn's tokens, id for id, or the template's own rendering. With
    blanks and spellings of calls left out, it is the template's rendering in either case.
    """
    talk = Conversation(template)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}] if with_tools else []
    messages = [user("begin")]
    for said_text, is_cut, what, text in turns:
        rendered = talk.chat.render(messages, tools)
        whole = said_text if is_cut else said_text + talk.chat.end
        if not whole:
            continue
        reply, reason = talk.ask(messages, whole, tools)
        prompt = talk.text().removesuffix(whole)
        parent = talk.parents[-1]
        if parent is None:
            assert prompt == rendered
            assert reason != CONTINUED
        else:
            assert prompt.startswith(talk.text(parent)), "what the engine sampled came first"
            assert talk.chat.meaning(prompt, tools) == talk.chat.meaning(rendered, tools)
            assert specials_of(prompt) == specials_of(rendered), "no end of a turn is missing, or there twice"
        if what == "edit":
            messages = [*messages, {**reply, "content": "edited"}, user(text)]
        elif what == "cut":
            messages = [messages[0], reply, user(text)]
        elif what == "other":
            messages = [user("other" + text)]
        elif what != "again":
            messages = [*messages, reply, {"role": what, "content": text}]
