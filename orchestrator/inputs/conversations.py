"""Reads conversations for supervised fine-tuning: token sequences, and which of their tokens are taught.

Owns: which tokens the model is taught, and the check of every row before the run starts. Does not own files
(data/sources.py reads rows) nor the loop (finetuner.py). No torch.
Invariant: the text of a conversation is exactly what the chat template makes of the whole of it, or prompt + response;
a token counts when its first character belongs to an assistant's turn.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    {"prompt": "k 3 a =", "response": "a"}            columns: data.prompt_key, data.response_key

    whole      <user> 2 + 2? <end> <assistant> 4 <end>
    template of messages[:1] + generation prompt  --> ends here ^        the span after it, to the end of the template
    of messages[:2], is taught: the answer and the token that ends a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from conf.schema import DataConfig
from orchestrator.data.prompts import check_text
from orchestrator.data.sources import Row, listed, renamed
from rollout.errors import DataError, RowTooLong
from trainer.types import Sample


class ConversationEncoder(Protocol):
    """What turns text into tokens; orchestrator.inputs.text_encoder.TextEncoder in a run."""

    @property
    def end_of_text(self) -> str:
        """The end-of-sequence token's text; empty when the tokenizer has none."""
        ...

    def encode_with_places(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """(token ids, place of each token's first character in `text`; -1 for a special token that was added)."""
        ...

    def render_messages(self, messages: Sequence[dict[str, Any]], *, is_open: bool) -> str:
        """The chat template's text; `is_open` adds what precedes an assistant's answer."""
        ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row, tokenized. Example: Conversation((1, 9, 30, 9, 2), (False, False, False, True, True))."""

    token_ids: tuple[int, ...]
    is_taught: tuple[bool, ...]
    """One per token: whether its prediction counts in the loss. The first token's never does."""

    def sample(self, policy_version: int) -> Sample:
        """As the trainer takes it; fields of rollouts are zeros."""
        mask = np.asarray(self.is_taught, dtype=bool)
        zeros = np.zeros(len(mask), dtype=np.float32)
        return Sample(np.asarray(self.token_ids, dtype=np.int32), mask, zeros, zeros, policy_version)


class ConversationReader:
    """Makes conversations of rows.

    Args:
        check: Called with a row's place and token ids; raises DataError for ids that the run cannot use.
    """

    def __init__(
        self,
        config: DataConfig,
        encoder: ConversationEncoder,
        check: Callable[[str, Sequence[int]], None] = lambda where, token_ids: None,
    ) -> None:
        self._config = config
        self._encoder = encoder
        self._check = check

    def read(self, row: Row, number: int) -> Conversation:
        """Check and tokenize one row.

        Raises:
            DataError: the row is no conversation, teaches nothing, or is longer than data.max_sequence_tokens. Names
                its place.
        """
        limit, where = self._config.max_sequence_tokens, row.where
        conversation = _tokenize(renamed(row, self._config.columns), where, self._encoder, self._config)
        num_tokens = len(conversation.token_ids)
        if limit is not None and num_tokens > limit:
            raise RowTooLong(
                f"{where}: the conversation has {num_tokens} tokens, data.max_sequence_tokens allows {limit}; shorten "
                "it, raise data.max_sequence_tokens, or set data.drop_too_long=true"
            )
        if not any(conversation.is_taught):
            raise DataError(f"{where}: no token of an assistant: there is nothing to learn from this row")
        self._check(where, conversation.token_ids)
        return conversation


def _tokenize(row: dict[str, Any], where: str, encoder: ConversationEncoder, config: DataConfig) -> Conversation:
    is_chat = config.messages_key in row
    text, spans = (
        _chat(row[config.messages_key], where, encoder) if is_chat else _plain(row, where, encoder.end_of_text, config)
    )
    check_text(text, where)
    # A chat template brings its own special tokens.
    token_ids, places = encoder.encode_with_places(text, config.add_special_tokens and not is_chat)
    taught = [any(first <= place < last for first, last in spans) for place in places]
    if taught:
        taught[0] = False  # nothing precedes it that could predict it
    return Conversation(tuple(token_ids), tuple(taught))


def _chat(messages: Any, where: str, encoder: ConversationEncoder) -> tuple[str, list[tuple[int, int]]]:
    """Text of the whole conversation, and the (start, stop) of every assistant's turn in it."""
    turns = cast("list[Any]", messages) if isinstance(messages, list) else []
    if not turns or not all(isinstance(m, dict) and "role" in m and "content" in m for m in turns):
        raise DataError(f"{where}: messages must be a non-empty list of objects with role and content")
    try:
        whole = encoder.render_messages(turns, is_open=False)
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(turns):
            if message["role"] == "assistant":
                before = encoder.render_messages(turns[:number], is_open=True)
                after = encoder.render_messages(turns[: number + 1], is_open=False)
                if not (whole.startswith(before) and whole.startswith(after)):
                    raise DataError(
                        f"{where}: the chat template writes turn {number + 1} in another way once later turns follow, "
                        "so its tokens cannot be told apart; split the conversation, one row for each answer"
                    )
                spans.append((len(before), len(after)))
    except DataError:
        raise
    except Exception as error:  # the edge to a tokenizer's own template code
        raise DataError(f"{where}: the tokenizer's chat template refuses the messages: {error}") from error
    return whole, spans


def _plain(row: dict[str, Any], where: str, end: str, config: DataConfig) -> tuple[str, list[tuple[int, int]]]:
    for key, option in ((config.prompt_key, "data.prompt_key"), (config.response_key, "data.response_key")):
        if not isinstance(row.get(key), str):
            raise DataError(
                f"{where}: needs a column {config.messages_key!r} (data.messages_key), or text in column {key!r} "
                f"({option}); the columns are {listed(row)}"
            )
    prompt, response = row[config.prompt_key], row[config.response_key] + end
    return prompt + response, [(len(prompt), len(prompt) + len(response))]
