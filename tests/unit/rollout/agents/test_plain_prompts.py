"""Locks: plain prompts go on from turns like conversations do, and no tokenizer's habit changes what was sampled."""

from typing import Any

import pytest
from fakes.chat_templates import FakeChatText

from slipstream.rollout.agents.chat_text import _call_meaning
from slipstream.rollout.agents.token_tree import CONTINUED, FORK, NEW, START, Planned, TokenTree, _digests


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("as_tokens", [False, True])
def test_a_plain_prompt_goes_on_from_the_longest_of_the_turns_that_it_begins_with(as_tokens: bool) -> None:
    """Three of five turns are prefixes of it, the longest neither the first nor the last."""
    chat = FakeChatText("llama3")
    tree = TokenTree(chat)

    def plan(text: str) -> Planned:
        return tree.plan_text(chat.encode(text) if as_tokens else text)

    for prompt, said in (("on", "ce"), ("once", " upon"), ("once upon", " a time"), ("once upon", " a"), ("two", "ce")):
        tree.record(plan(prompt), chat.encode(said))
    planned = plan("once upon a time there")
    assert (planned.parent, chat.decode(planned.token_ids), planned.text) == (2, " there", " there")
    assert planned.num_tokens == len("once upon a time there")
    assert (plan("once upon an").parent, plan("once more").parent, plan("twenty").parent) == (3, 0, None)
    assert plan("once upon a time").token_ids == []


def test_a_prompt_of_tokens_goes_on_from_those_tokens_and_not_from_their_text() -> None:
    chat = FakeChatText("llama3")
    tree = TokenTree(chat)
    tree.record(tree.plan_text(chat.encode("once")), chat.encode(" upon<|eot_id|>"))
    spelled = [ord(character) for character in "once upon<|eot_id|> a time"]
    assert chat.decode(spelled) == "once upon<|eot_id|> a time"
    planned = tree.plan_text(spelled)
    assert (planned.parent, planned.token_ids, planned.reason) == (None, spelled, NEW)


def test_reasons_of_plain_prompts() -> None:
    chat = FakeChatText("llama3")
    tree = TokenTree(chat)

    def ask(prompt: str, said: str) -> str:
        return tree.record(tree.plan_text(prompt), chat.encode(said))[1]

    assert [ask("once", " upon"), ask("once upon a", " time"), ask("once upon the", " sea")] == [START, CONTINUED, FORK]
    assert [ask("twice", " upon"), ask("twice", " more"), ask("once", " again")] == [NEW, FORK, FORK]


def test_texts_and_arguments_that_nobody_expects_are_no_errors() -> None:
    """Half of a pair of UTF-16, and brackets that no parser follows."""
    chat = FakeChatText("chatml")
    tree = TokenTree(chat)
    tree.record(tree.plan_text("a\ud800"), chat.encode("b"))
    assert tree.plan_text("a\ud800bc").parent == 0
    call = {"id": "1", "function": {"name": "f", "arguments": "[" * 200_000}}
    assert _call_meaning(call["function"]) == ("f", "[" * 200_000)
    one, other = (
        _digests([{"role": "assistant", "content": "", "tool_calls": [{**call, "id": number}]}], ())[-1]
        for number in "12"
    )
    assert one != other


def test_a_tokenizer_that_treats_beginnings_in_a_special_way_encodes_behind_the_end_of_the_turn() -> None:
    """As SentencePiece does, it puts a token before each text; behind a special token it puts none."""

    class Marked(FakeChatText):
        def encode(self, text: str) -> list[int]:
            plain = super().encode(text)
            return plain if text.startswith("<|") else [1, *plain]

    for said, is_marked in (("first<|im_end|>", False), ("cut o", True)):
        chat = Marked("chatml")
        tree = TokenTree(chat)
        sampled = FakeChatText.encode(chat, said)
        reply = chat.reply(sampled, ())
        tree.record(tree.plan([user("one")]), sampled, reply)
        planned = tree.plan([user("one"), reply, user("two")])
        assert planned.parent == 0
        end = "" if said.endswith(">") else "<|im_end|>"
        added = f"{end}\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
        assert chat.decode(planned.token_ids).lstrip("\x01") == added
        assert (planned.token_ids[0] == 1) == (is_marked and not added.startswith("<|"))


@pytest.mark.parametrize("is_spelled", [False, True])
def test_a_tokenizer_that_joins_or_spells_the_end_of_a_turn_loses_nothing_of_what_follows(is_spelled: bool) -> None:
    class Spelling(FakeChatText):
        def encode(self, text: str) -> list[int]:
            return [ord(character) for character in text]

    class Joining(FakeChatText):
        def encode(self, text: str) -> list[int]:
            joined = self.end + "\n"
            return [1, *super().encode(text.removeprefix(joined))] if text.startswith(joined) else super().encode(text)

    chat = (Spelling if is_spelled else Joining)("chatml")
    tree = TokenTree(chat)
    sampled = FakeChatText.encode(chat, "first<|im_end|>")
    reply = chat.reply(sampled, ())
    tree.record(tree.plan([user("one")]), sampled, reply)
    planned = tree.plan([user("one"), reply, user("two")])
    assert (planned.parent, planned.text[0]) == (0, "\n")
    assert planned.token_ids == chat.encode(planned.text)
