"""Reads pairs of answers for preference optimization: two token sequences, and which of their tokens are the answers'.

Owns: the forms of a pair, and the check of every row before the run starts. No torch.
Invariant: both sequences begin with the same prompt, and their counted tokens are whole answers with what ends them.

    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}           any of the three may be a list of messages instead
    {"chosen": [..., {"role": "assistant", "content": "4"}], "rejected": [...]}      the common beginning is the prompt

These are TRL's preference formats, explicit and implicit. Text beside messages is a turn: of the user as a prompt, of
the assistant as an answer.
"""

from dataclasses import replace

from slipstream.conf.json_files import JsonObject
from slipstream.orchestrator.data.prompts import chat_of, check_plain_text, check_turns
from slipstream.orchestrator.data.sources import Row, listed, renamed
from slipstream.orchestrator.inputs.rows.answers import num_shared
from slipstream.orchestrator.inputs.rows.conversations import (
    Conversation,
    Lesson,
    RowReader,
    Turns,
    as_turns,
    chat_conversations,
    check_conversation,
    says_something,
    text_or_turns,
    tokenized,
    with_end,
)
from slipstream.rollout.errors import DataError
from slipstream.rollout.text.messages import Chat

ANSWERS = ("chosen", "rejected")
"""Their columns. Others are named by data.columns."""


class PreferenceReader(RowReader):
    def read(self, row: Row, number: int) -> Lesson:
        """Check and tokenize one row. Raises: DataError that names its place: the row is no pair, an answer is empty,
        both are equal, or one is longer with its prompt than data.max_sequence_tokens."""
        where, columns = row.where, renamed(row, self.config.columns)
        chosen, rejected = (self._value(columns, name, f"data.columns.{name}", where) for name in ANSWERS)
        key = self.config.prompt_key
        prompt = None if columns.get(key) is None else self._value(columns, key, "data.prompt_key", where)
        if chosen == rejected:
            raise DataError(f"{where}: columns 'chosen' and 'rejected' are equal: neither is preferred; remove the row")
        if isinstance(chosen, str) and isinstance(rejected, str) and (prompt is None or isinstance(prompt, str)):
            check_plain_text(columns, where, key, *ANSWERS)
            pair = self._of_texts(prompt, chosen, rejected, where)
        else:
            pair = self._of_messages(
                None if prompt is None else as_turns(prompt, "user"),
                as_turns(chosen, "assistant"),
                as_turns(rejected, "assistant"),
                chat_of([], columns, self.config.chat_template_kwargs, where),
                where,
            )
        if pair[0] == pair[1]:
            raise DataError(f"{where}: columns 'chosen' and 'rejected' have the same tokens; remove the row")
        for name, one in zip(ANSWERS, pair, strict=True):
            check_conversation(one, f"{where}: column {name!r}, with its prompt,", self.config.max_sequence_tokens)
            self.check(where, one.token_ids)
        return Lesson(tuple(pair), are_compared=True)

    def _value(self, columns: JsonObject, name: str, option: str, where: str) -> str | Turns:
        if name not in columns:
            raise DataError(
                f"{where}: no column {name!r} ({option}); a row needs 'chosen' and 'rejected', and the columns are "
                f"{listed(columns)}"
            )
        return text_or_turns(columns[name], f"{where}: column {name!r} ({option})")

    def _of_texts(self, prompt: str | None, chosen: str, rejected: str, where: str) -> list[Conversation]:
        """As TRL, answers count from the first token that is not the prompt's alone: tokens may reach across the end of
        the prompt. Tokens that both have cancel in the loss, so without a prompt they are taken as one."""

        def whole(text: str) -> Conversation:
            return tokenized(text, [(0, len(text))], where, self.encoder)

        pair = [whole((prompt or "") + with_end(answer, self.encoder)) for answer in (chosen, rejected)]
        if prompt is None and not chosen[: num_shared(chosen, rejected)].strip():
            raise DataError(_no_prompt(where, self.config.prompt_key))
        before = pair[0] if prompt is None else whole(prompt)
        first = min(num_shared(before.token_ids, one.token_ids) for one in pair)
        return [replace(one, is_taught=(*[False] * first, *one.is_taught[first:])) for one in pair]

    def _of_messages(
        self, prompt: Turns | None, chosen: Turns, rejected: Turns, beside: Chat, where: str
    ) -> list[Conversation]:
        """`beside`: what the template is given beside the messages."""
        answers = [list(chosen), list(rejected)]
        if prompt is None:
            shared = num_shared(chosen, rejected)
            if shared == 0:
                raise DataError(_no_prompt(where, self.config.prompt_key))
            prompt, answers = chosen[:shared], [answer[shared:] for answer in answers]
        for name, turns in zip(ANSWERS, answers, strict=True):
            role = turns[0]["role"] if turns else None
            if role != "assistant":
                raise DataError(
                    f"{where}: column {name!r} goes on after the prompt with "
                    f"{'nothing' if role is None else f'a turn of {role!r}'}, and an answer begins with a turn of "
                    "'assistant'; if 'chosen' and 'rejected' are whole conversations, the prompt is their common "
                    f"beginning: set data.prompt_key, which is {self.config.prompt_key!r}, to no column's name"
                )
            if not says_something([turn for turn in turns if turn["role"] == "assistant"]):
                raise DataError(f"{where}: the answer of column {name!r} is empty; fill it, or remove the row")
        first = len(prompt)
        chats = [replace(beside, messages=[*prompt, *turns]) for turns in answers]
        for chat in chats:
            check_turns(self.encoder, chat, where, is_open=False)
        return [self._in_one(chat, where, first, name) for name, chat in zip(ANSWERS, chats, strict=True)]

    def _in_one(self, chat: Chat, where: str, first: int, name: str) -> Conversation:
        found = chat_conversations(chat, where, self.encoder, first)
        if len(found) > 1:
            raise DataError(
                f"{where}: the chat template writes turns of the answer of column {name!r} in another way once later "
                "turns follow (without their thinking), so that they are no one sequence; give pairs that part at "
                "their last turn"
            )
        return found[0]


def _no_prompt(where: str, key: str) -> str:
    return (
        f"{where}: no column {key!r} (data.prompt_key), and 'chosen' and 'rejected' have no common beginning, which "
        "would be the prompt; add the column, or name it by data.prompt_key"
    )
