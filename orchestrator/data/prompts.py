"""Prompts: one row of a source, checked and tokenized.

Owns: which rows can be prompts. Does not own: rules between a row and the run's other options
(inputs/rows/prompt_rows.py). No torch.

A row is an object with a `prompt` column (text, or a list of chat messages) and any further columns, which rewards see:

    {"prompt": "k 3 a =", "answer": "a"}
    {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}
"""

import contextlib
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, Protocol
from uuid import UUID

from slipstream.conf.json_files import JsonMapping, JsonObject, is_list, is_object, kind_of
from slipstream.conf.schema import DataConfig
from slipstream.orchestrator.data.sources import Row, listed, other_names, renamed
from slipstream.rollout.errors import DataError, RowTooLong, TemplateRefused
from slipstream.rollout.text.messages import TEMPLATE_OPTIONS, TOOLS, Chat, template_options, text_messages, tools_of
from slipstream.rollout.types import Prompt

_HEAD_CHARACTERS_PER_TOKEN = 16
"""A text with more characters per allowed token is tokenized only after its beginning alone was not too long."""
_MESSAGES_AS_TEXT = re.compile(r"""\[\{['"](role|content)['"]: ?['"]""")


class Encoder(Protocol):
    """What turns text into token ids; `orchestrator.inputs.text_encoder.TextEncoder` in a run, ten lines in tests.

    `ends` are tokens at which a response ends, with their texts: the first is what ends an answer that is plain text.
    encode() with special tokens is rollout.text.plain_text.encode_open, for a text that is to go on, and
    encode_with_places() is encode_text there; render() gives a chat as the model sees it, with `is_open` up to where
    its answer begins; check_turns() raises DataError if that is not what the chat has.
    """

    @property
    def ends(self) -> Mapping[int, str]: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def encode_with_places(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]: ...
    def render(self, chat: Chat, *, is_open: bool) -> str: ...
    def check_turns(self, chat: Chat, *, is_open: bool) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    data: DataConfig
    encoder: Encoder
    max_prompt_tokens: int
    is_for_agent: bool = False
    """The columns are an agent's task. It offers tools of its own, and its chats are rendered request by request."""
    left_out: dict[str, str] = field(default_factory=dict[str, str], init=False)
    """Columns of rows so far whose values JSON cannot hold, and the type of such a value: {"image": "bytes"}."""

    def prompt(self, row: Row, prompt_id: int) -> Prompt:
        """Check and tokenize one row. Raises: DataError, which names its place."""
        where = row.where
        columns = self._as_json(renamed(row, self.data.columns), where)
        text, messages = self._text_of(columns, where)
        limit = self.max_prompt_tokens
        encode = partial(self.encoder.encode, add_special_tokens=messages is None)  # chat templates bring their own
        token_ids, is_whole = encode_up_to(limit, text, encode)
        if len(token_ids) > limit:
            count = f"{len(token_ids)}" if is_whole else f"{len(text)} characters, more than {limit}"
            raise RowTooLong(
                f"{where}: the prompt has {count} tokens, data.max_prompt_tokens allows {limit}; shorten it, raise "
                "data.max_prompt_tokens (and rollout.max_model_len with it), or set data.drop_too_long=true"
            )
        if not token_ids:
            raise DataError(f"{where}: the prompt has no tokens")
        fields = {key: value for key, value in columns.items() if key != self.data.prompt_key}
        return Prompt(prompt_id, tuple(token_ids), text, fields, messages)

    def _as_json(self, columns: JsonObject, where: str) -> JsonObject:
        """The columns as JSON, in which rewards, agents and checkpoints get them."""
        found = JsonObject()
        for name, value in columns.items():
            try:
                found[name] = json.loads(json.dumps(value, default=_text_of_value))
            except TypeError as e:
                if name == self.data.prompt_key:
                    raise DataError(f"{where}: column {name!r} holds {e}; a prompt is text, or messages of text") from e
                self.left_out.setdefault(name, str(e))
        return found

    def _text_of(self, row: JsonObject, where: str) -> tuple[str, list[JsonObject] | None]:
        """(the prompt's text, the messages that it was rendered from)."""
        key = self.data.prompt_key
        if key not in row:
            raise DataError(
                f"{where}: no column {key!r} (data.prompt_key); the columns are {listed(row)}"
                f"{other_names(row, with_answers=False)}"
            )
        value: Any = row[key]
        used = {name: column for name, column in row.items() if not (self.is_for_agent and name == TOOLS)}
        messages = None
        if isinstance(value, str):
            if self.is_for_agent:
                chat_of([], used, {}, where)
            else:
                check_plain_text(row, where, key)
            text = value
            is_empty = not value.strip()
        elif is_list(value) and value:
            messages = messages_in(value, f"{where}: column {key!r}")
            chat = chat_of(messages, used, self.data.chat_template_kwargs, where)
            if not self.is_for_agent:
                check_turns(self.encoder, chat, where, is_open=True)
            text = rendered(self.encoder, chat, where, is_open=True)
            is_empty = not any(message["content"] for message in messages)
        else:
            raise DataError(
                f"{where}: column {key!r} must be text or a non-empty list of messages with role and content, "
                f"got {kind_of(value)}"
            )
        if is_empty:
            raise DataError(f"{where}: the prompt is empty (column {key!r}); fill it, or remove the row")
        check_text(text, where)
        return text, messages


def encode_up_to(limit: int, text: str, encode: Callable[[str], list[int]]) -> tuple[list[int], bool]:
    """(token ids, whether they are the whole text's). If a text is far longer than the limit, only its beginning is
    tokenized, because megabytes take minutes."""
    head = text[: _HEAD_CHARACTERS_PER_TOKEN * (limit + 1)]
    if len(head) < len(text):
        token_ids = encode(head)
        if len(token_ids) > limit + 1:  # the cut may have added one token
            return token_ids, False
    return encode(text), True


def check_text(text: str, where: str) -> None:
    """Refuse what JSON allows but a text cannot contain: half of a surrogate pair, which tokenizers refuse, and NUL.
    Raises: DataError."""
    if (nul := text.find("\0")) >= 0:
        raise DataError(f"{where}: character {nul + 1} of the text is NUL; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise DataError(
            f"{where}: character {e.start + 1} of the text is {text[e.start]!a}, half of a surrogate pair; an "
            "escape was cut in two, or is of another encoding"
        ) from e


def _text_of_value(value: object) -> str:
    """What stands in JSON for a value that Parquet has and JSON has not."""
    if isinstance(value, date | time | timedelta | Decimal | UUID):
        return str(value)
    raise TypeError(type(value).__name__)


def messages_in(value: object, what: str) -> list[JsonObject]:
    """The chat messages of a column. A field that is null counts as missing: Parquet gives all structs all fields.
    Raises: DataError that begins with `what`."""
    try:
        return [{**without_nulls(message), "content": message["content"]} for message in text_messages(value)]
    except DataError as e:
        raise DataError(f"{what}: {e}") from e


def without_nulls(value: Any) -> Any:
    """The value without fields that are null, at any depth."""
    if is_object(value):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    return [without_nulls(one) for one in value] if is_list(value) else value


def chat_of(messages: Sequence[JsonObject], columns: JsonMapping, options: JsonMapping, where: str) -> Chat:
    """What the chat template is given of a row: its messages, its tools, and its options on top of the run's.
    Raises: DataError."""
    try:
        given, own = columns.get(TOOLS), template_options(columns.get(TEMPLATE_OPTIONS))
        tools = tools_of(given)
        return Chat(messages, tools if isinstance(given, str) else without_nulls(tools), {**options, **own})
    except DataError as e:
        raise DataError(f"{where}: column {e}") from e


def rendered(encoder: Encoder, chat: Chat, where: str, *, is_open: bool) -> str:
    """The text of a row's chat. Raises: DataError, where the template refuses it."""
    with _refusals_of(where):
        return encoder.render(chat, is_open=is_open)


def check_turns(encoder: Encoder, chat: Chat, where: str, *, is_open: bool) -> None:
    """Refuse a row whose turns the chat template refuses, or writes in another way than the row has them. Raises:
    DataError."""
    with _refusals_of(where):
        encoder.check_turns(chat, is_open=is_open)


@contextlib.contextmanager
def _refusals_of(where: str) -> Generator[None]:
    try:
        yield
    except DataError as e:
        raise DataError(f"{where}: {e}") from e
    except TemplateRefused as e:
        raise DataError(f"{where}: the tokenizer's chat template refuses the messages: {e}") from e


def check_plain_text(columns: JsonMapping, where: str, *names: str) -> None:
    """Refuse what is for chat templates, through which plain text does not go: columns beside it, and messages that
    were made text, as CSV does, in the columns `names`."""
    for name in (TOOLS, TEMPLATE_OPTIONS):
        if columns.get(name):
            raise DataError(
                f"{where}: column {name!r} is for the chat template, and text goes through none; give the row as chat "
                "messages, or remove the column (rename it, if it means something else)"
            )
    for name in names:
        if isinstance(text := columns.get(name), str) and _MESSAGES_AS_TEXT.match(text):
            raise DataError(
                f"{where}: column {name!r} is the text of messages, {text[:40]!r}..., which the model would get as "
                "it stands; make it a list (json.loads, or ast.literal_eval of Python's own form)"
            )
