"""Reads conversations for supervised fine-tuning: token sequences, and which of their tokens are taught.

Owns: which tokens the model is taught, and the check of every row before the run starts. No torch.
Invariant: the text of a conversation is exactly what the chat template makes of it up to an answer in the last place
(answers.py has the exceptions), or prompt + response; a token counts when one of its characters belongs to an
assistant's turn, or ends it as the next turn's header (turn_ends.py), which is added after the last turn.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    {"prompt": "k 3 a =", "response": "a"}            either may be a list of messages: then the turns of
                                                      the response are taught

    whole      <user> 2 + 2? <end> <assistant> 4 <end>
    template of messages[:1] + generation prompt  --> ends here ^        the span after it in the template of
    messages[:2] is taught, up to the token that ends the answer. A template that writes earlier turns in
    another way later (Qwen3 without their thinking) makes several sequences of a row, each answer in one.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from slipstream.conf.json_files import JsonMapping, JsonObject, is_list, kind_of
from slipstream.conf.schema import DataConfig
from slipstream.orchestrator.data.prompts import (
    Encoder,
    chat_of,
    check_plain_text,
    check_text,
    check_turns,
    messages_in,
    rendered,
)
from slipstream.orchestrator.data.sources import Row, listed, other_names, renamed
from slipstream.orchestrator.inputs.rows.answers import THOUGHT_FIELDS, Answer, answer_of
from slipstream.orchestrator.inputs.rows.turn_ends import end_after
from slipstream.rollout.errors import DataError, RowTooLong
from slipstream.rollout.rewards.answer_text import answer_text
from slipstream.rollout.text.messages import Chat
from slipstream.trainer.types import Sample

Turns = Sequence[JsonObject]
MESSAGES = "messages"
RESPONSES = ("response", "completion", "answer")
"""Columns with what an assistant says; the first that a row has."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One token sequence. Example: Conversation((1, 9, 30, 9, 2), (False, False, False, True, True))."""

    token_ids: tuple[int, ...]
    is_taught: tuple[bool, ...]
    """One per token: whether its prediction counts in the loss. The first token's never does."""
    unseen: str = ""
    """What a generation prompt has before an answer, and this text has not (answers.py)."""

    def sample(self, policy_version: int) -> Sample:
        """As the trainer takes it; fields of rollouts are zeros."""
        mask = np.asarray(self.is_taught, dtype=bool)
        zeros = np.zeros(len(mask), dtype=np.float32)
        return Sample(np.asarray(self.token_ids, dtype=np.int32), mask, zeros, zeros, policy_version)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one row teaches."""

    sequences: tuple[Conversation, ...]
    """Each answer is taught in one; of preferences (preferences.py) there are two, the preferred one first."""
    are_compared: bool = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of all, one after the other; streams tell rows apart by them."""
        return tuple(token for one in self.sequences for token in one.token_ids)

    def samples(self, policy_version: int) -> list[list[Sample]]:
        """Token sequences, those that must be in one microbatch together, in the order in which the loss takes them."""
        samples = [one.sample(policy_version) for one in self.sequences]
        return [samples] if self.are_compared else [[one] for one in samples]


@dataclass(frozen=True, slots=True)
class RowReader:
    """What reads rows that teach."""

    config: DataConfig
    encoder: Encoder
    check: Callable[[str, Sequence[int]], None] = lambda where, token_ids: None
    """Called with a row's place and token ids; raises DataError for ids that the run cannot use."""


class ConversationReader(RowReader):
    def read(self, row: Row, number: int) -> Lesson:
        """Check and tokenize one row. Raises: DataError that names its place: the row is no conversation, teaches
        nothing or an empty answer, or is longer than data.max_sequence_tokens."""
        where, columns = row.where, renamed(row, self.config.columns)
        found = self._tokenized(columns, where)
        for conversation in found:
            check_conversation(conversation, f"{where}: the conversation", self.config.max_sequence_tokens)
            self.check(where, conversation.token_ids)
        if not found:
            raise DataError(
                f"{where}: the conversation has no turn of an assistant: there is nothing to learn from this row"
            )
        return Lesson(tuple(found))

    def _tokenized(self, row: JsonObject, where: str) -> list[Conversation]:
        config, encoder = self.config, self.encoder
        if row.get(MESSAGES) is not None:
            turns, first = messages_in(row[MESSAGES], f"{where}: column {MESSAGES!r}"), 0
        else:
            prompt, response, name = _asked_and_answered(row, where, config)
            if isinstance(prompt, str) and isinstance(response, str):
                check_plain_text(row, where, config.prompt_key, name)
                text = prompt + with_end(response, encoder)
                return [tokenized(text, [(len(prompt), len(text))], where, encoder)]
            before, answer = as_turns(prompt, "user"), as_turns(response, "assistant")
            if answer[0]["role"] != "assistant" or not says_something(answer):
                raise DataError(f"{where}: column {name!r} must begin with a turn of 'assistant' that says something")
            turns, first = [*before, *answer], len(before)
        chat = chat_of(turns, row, config.chat_template_kwargs, where)
        check_turns(encoder, chat, where, is_open=False)
        return chat_conversations(chat, where, encoder, first)


def end_of_text(encoder: Encoder) -> str:
    """What ends an answer that is plain text; empty when the model's files name no end."""
    return next(iter(encoder.ends.values()), "")


def with_end(answer: str, encoder: Encoder) -> str:
    """An answer that is plain text, and what ends it. Text that a template rendered before has its end already."""
    return up_to_its_end(answer, encoder) or answer + end_of_text(encoder)


def up_to_its_end(answer: str, encoder: Encoder) -> str:
    """An answer without blanks behind its end, which are no part of it: nobody samples the line break after ChatML's
    <|im_end|>. Empty if it does not end so."""
    ends = tuple(filter(None, encoder.ends.values()))
    return next((text for text in (answer, answer.rstrip()) if text.endswith(ends)), "")


def check_conversation(conversation: Conversation, what: str, limit: int | None) -> None:
    """Refuse a conversation that is longer than data.max_sequence_tokens, which is `limit`, or teaches nothing."""
    num_tokens = len(conversation.token_ids)
    if limit is not None and num_tokens > limit:
        raise RowTooLong(
            f"{what} has {num_tokens} tokens, data.max_sequence_tokens allows {limit}; shorten "
            "it, raise data.max_sequence_tokens, or set data.drop_too_long=true"
        )
    if not any(conversation.is_taught):
        raise DataError(f"{what} has no token of an assistant: there is nothing to learn from this row")


def tokenized(
    text: str, spans: Sequence[tuple[int, int]], where: str, encoder: Encoder, add_special_tokens: bool = True
) -> Conversation:
    """A conversation of which the characters in `spans`, each (start, stop), are taught: every token that has one of
    them. The first token of an answer may begin within the prompt: " Paris" after one that ends with a space."""
    check_text(text, where)
    token_ids, places = encoder.encode_with_places(text, add_special_tokens)
    taught = [any(start < last and stop > first for first, last in spans) for start, stop in places]
    if taught:
        taught[0] = False  # nothing precedes it that could predict it
    return Conversation(tuple(token_ids), tuple(taught))


def chat_conversations(chat: Chat, where: str, encoder: Encoder, first_taught: int = 0) -> list[Conversation]:
    """Messages as the chat template writes them: the sequences that teach the assistant's turns from number
    `first_taught` on, each as the template writes it in the last place. A turn goes on in the sequence of the one
    before it, unless the template writes the turns up to there in another way by now (without their thinking): then it
    begins one of its own."""
    found: list[list[tuple[int, Answer]]] = []
    for number, message in enumerate(chat.messages):
        if message["role"] != "assistant" or number < first_taught:
            continue
        if not says_something([message]):
            raise DataError(
                f"{where}: turn {number + 1}, of the assistant, is empty, and would teach the model to end at once; "
                "fill it, or remove the row"
            )
        answer = answer_of(chat, number, where, encoder)
        if found and answer.text[: answer.start].startswith(found[-1][-1][1].text):
            found[-1].append((number, answer))
        else:
            found.append([(number, answer)])
    whole = rendered(encoder, chat, where, is_open=False)
    conversations: list[Conversation] = []
    for answers in found:
        text, spans = answers[-1][1].text, list[tuple[int, int]]()
        text = whole if whole.startswith(text) else text
        for number, answer in answers:
            stop = len(answer.text)
            end = end_after(text[answer.start : stop], text[stop:], chat.messages[number], encoder)
            text += end if stop == len(text) else ""
            ended = up_to_its_end(answer.text[answer.start :], encoder)
            spans.append((answer.start, answer.start + len(ended) if ended else stop + len(end)))
        one = tokenized(text, spans, where, encoder, False)  # a chat template brings its own special tokens
        conversations.append(replace(one, unseen=next((answer.unseen for _, answer in answers if answer.unseen), "")))
    return conversations


def text_or_turns(value: object, what: str) -> str | Turns:
    """Text or messages of a column, not empty. Raises: DataError that begins with `what`."""
    if isinstance(value, str):
        found, is_empty = value, not value.strip()
    else:
        if not is_list(value) or not value:
            raise DataError(
                f"{what} must be text or a non-empty list of messages with role and content, got {kind_of(value)}"
            )
        found = messages_in(value, what)
        is_empty = not says_something(found)
    if is_empty:
        raise DataError(f"{what} is empty; fill it, or remove the row")
    return found


def as_turns(value: str | Turns, role: str) -> Turns:
    """Text beside messages is a turn of this role."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def says_something(turns: Sequence[JsonMapping]) -> bool:
    """Whether a turn has words or thoughts, or calls a tool."""
    words = (turn.get(name) for turn in turns for name in ("content", *THOUGHT_FIELDS))
    return any(bool(text.strip() if isinstance(text, str) else text) for text in words) or any(
        turn.get("tool_calls") for turn in turns
    )


def _asked_and_answered(row: JsonObject, where: str, config: DataConfig) -> tuple[str | Turns, str | Turns, str]:
    """(prompt, response, the response's column) of a row without messages. TRL calls the response `completion`, and
    rows for rewards have an answer, which may be a number."""
    name = next((name for name in RESPONSES if name in row), RESPONSES[0])
    keys = ((config.prompt_key, "data.prompt_key"), (name, f"data.columns.{RESPONSES[0]}"))
    for key, option in keys:
        if row.get(key) is None:
            raise DataError(
                f"{where}: needs a column {MESSAGES!r} (data.columns.{MESSAGES}), or text or messages in column "
                f"{key!r} ({option}); the columns are {listed(row)}{other_names(row, with_answers=True)}"
            )
    prompt, response = (row[key] for key, _ in keys)
    if isinstance(response, int | float):
        with suppress(ValueError):
            response = answer_text(response)
    if not (isinstance(prompt, str) and isinstance(response, str) and response.strip()):
        given = zip((prompt, response), keys, strict=True)
        prompt, response = (text_or_turns(one, f"{where}: column {key!r} ({option})") for one, (key, option) in given)
    return prompt, response, name
