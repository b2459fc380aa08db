"""Where an answer lies in what a chat template writes: the text that teaches one turn of the assistant.

    before   the template's text of the turns before it and of a generation prompt: what the model is given
    after    the template's text of the turns up to it

The answer is what `after` has beyond `before`. Templates of models that think differ in three ways:

    <assistant> hm </think> 4     `after` lacks the thinking that the row gives      taught: before + the row's answer
    <assistant><think>            `before` has the beginning of a thought, and       taught: what `after` has behind
                                  the row's answer has none                          <assistant>, with a word about it
    the turns before the answer are written in another way once it is there          refused

Does not own: tokens and sequences (conversations.py), what ends an answer (turn_ends.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.conf.json_files import JsonObject
from slipstream.orchestrator.data.prompts import Encoder, rendered
from slipstream.rollout.errors import DataError
from slipstream.rollout.text.messages import Chat

THOUGHT_ENDS = "</think>"
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that templates write as its thinking."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One turn of the assistant, in the text that teaches it."""

    text: str
    """The chat up to this turn, as the template writes it."""
    start: int
    """Where the answer begins in it."""
    unseen: str = ""
    """What a generation prompt has at this place, and the text has not."""


def answer_of(chat: Chat, number: int, where: str, encoder: Encoder) -> Answer:
    """The answer of turn `number`, as the template writes it in the last place. Raises: DataError, where it cannot be
    taught as the model would be asked for it; names the row and the turn."""
    turn, message = f"{where}: turn {number + 1}", chat.messages[number]
    # A template makes something else of no turn at all than of a first one: without its own system prompt, for one.
    before = (
        rendered(encoder, chat.first(number), where, is_open=True) if number else _around(chat, 0, where, encoder)[0]
    )
    after = rendered(encoder, chat.first(number + 1), where, is_open=False)
    for name in THOUGHT_FIELDS:
        thought = message.get(name)
        if isinstance(thought, str) and thought.strip() not in after:
            raise DataError(
                f"{turn} has thinking in its field {name!r}, which the chat template leaves out; write it into "
                "`content`, as the model says it, or remove it"
            )
    shared = num_shared(before, after)
    content: Any = message["content"] or ""
    if (thought := _thought(content)) and thought not in after[shared:]:
        return _as_given(chat, number, before, where, encoder)
    if after.startswith(before):
        return Answer(after, len(before))
    opening, _ = _around(chat, number, where, encoder)
    history = rendered(encoder, chat.first(number), where, is_open=False)
    start = min(shared, num_shared(before, opening))
    if start < len(history) or not before.startswith(history):
        raise DataError(
            f"{turn}: the chat template writes what precedes it in another way once the answer is there, so that the "
            "model would be taught a place at which it is never asked; split the conversation, or give "
            "model.tokenizer=FOLDER with another template"
        )
    return Answer(after, start, before[start:])


def _as_given(chat: Chat, number: int, before: str, where: str, encoder: Encoder) -> Answer:
    """What the model is given, and the row's own words behind it: the template would leave out their thinking."""
    if chat.messages[number].get("tool_calls"):
        raise DataError(
            f"{where}: turn {number + 1} thinks and calls tools, and the chat template leaves out the thinking; remove "
            "it, or give model.tokenizer=FOLDER with another template"
        )
    opening, end = _around(chat, number, where, encoder)
    begun = before[num_shared(before, opening) :]  # such as <think>, which the row's answer has, too
    said: str = chat.messages[number]["content"]
    if begun and said.lstrip().startswith(begun.strip()):
        said = said.lstrip()
        said = said.removeprefix(begun if said.startswith(begun) else begun.strip())
    return Answer(before + said + end, len(before))


def _around(chat: Chat, number: int, where: str, encoder: Encoder) -> tuple[str, str]:
    """(what the template writes before an answer in this place, whatever it says; what it writes after it)."""
    words = ("a", "b")
    said: list[JsonObject] = [{"role": "assistant", "content": word} for word in words]
    chats = (replace(chat, messages=[*chat.messages[:number], one]) for one in said)
    texts = [rendered(encoder, one, where, is_open=False) for one in chats]
    opening = texts[0][: num_shared(*texts)]
    end = texts[0][len(opening) + 1 :]
    if texts != [f"{opening}{word}{end}" for word in words]:
        raise DataError(f"{where}: the chat template writes more of turn {number + 1} than its content once")
    return opening, end


def num_shared(some: Sequence[object], others: Sequence[object]) -> int:
    pairs = enumerate(zip(some, others, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(some), len(others)))


def _thought(content: str) -> str:
    before, found, _ = content.partition(THOUGHT_ENDS)
    return before.rpartition("<think>")[2].strip() if found else ""
