"""A model folder's chat template, tokenizer and tool calls, as the token tree and the endpoint call them.

Owns: what the client gets of a sampled turn (its text, and the tool calls in it). Does not own: which tokens a request
is made of (token_tree.py) nor vLLM's parsers (tool_calls.py).
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.conf.json_files import JsonMapping, JsonObject
from slipstream.rollout.agents.tool_calls import ToolCallParser
from slipstream.rollout.errors import DataError
from slipstream.rollout.text.chat_template import ChatTemplate
from slipstream.rollout.text.ends import vocab_size
from slipstream.rollout.text.messages import Chat
from slipstream.rollout.text.plain_text import encode_open, load_tokenizer
from slipstream.rollout.text.turns import TurnCheck


@dataclass(frozen=True, slots=True)
class Reply:
    """What a sampled turn says. Example: Reply("", [{"id": "call-1", "type": "function", "function": {...}}])."""

    content: str
    tool_calls: list[JsonObject] = field(default_factory=list[JsonObject])

    @property
    def message(self) -> JsonObject:
        """The assistant's message, as OpenAI's protocol has it."""
        message: JsonObject = {"role": "assistant", "content": self.content or None}
        if self.tool_calls:
            return message | {"tool_calls": self.tool_calls}
        return message | {"content": self.content}


class FolderChatText:
    """See the module's docstring. `tool_parser` is one of vLLM's; None: tools are refused."""

    def __init__(self, folder: Path, stop_token_ids: Sequence[int], tool_parser: str | None = None) -> None:
        self._template = ChatTemplate(folder)
        self._turns = TurnCheck(self._template)
        self._tokenizer = load_tokenizer(folder)
        self.stop_texts: Mapping[int, str] = {token: self.decode([token]) for token in stop_token_ids}
        """Tokens that end a turn, with their texts."""
        self._specials = sorted(
            {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special},
            key=len,
            reverse=True,
        )
        self._parser = None if tool_parser is None else ToolCallParser(tool_parser, self._template.tokenizer)
        self._vocab_size = vocab_size(folder)

    def load(self) -> None:
        """Load what render() needs. Without this, its first call does."""
        self._template.load()

    def render(
        self, messages: Sequence[JsonMapping], tools: Sequence[JsonMapping], options: JsonMapping | None = None
    ) -> str:
        """The template's text, and what precedes an answer. `options`: further variables of the template. Raises what
        the template raises."""
        return self._template.render(messages, is_open=True, tools=tools, options=options)

    def check(self, chat: Chat) -> None:
        """Refuse messages, tools and options that the model would not see, and tools whose calls the agent would not.
        Raises DataError: there is no parser, or the template does not write or read them; Exception: the template
        refuses the messages."""
        if chat.tools and self._parser is None:
            raise DataError(
                "tools: rollout.episodes.tool_parser is null, so that no call would be found in what the model says; "
                "give the parser of the model's family, such as hermes"
            )
        self._template.check(chat)
        self._turns.check_shown(chat)

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Refuse what is no row of the model's embedding: an engine would end of it, and with it the run. Raises
        DataError: such a token."""
        if self._vocab_size is not None and max(token_ids, default=0) >= self._vocab_size:
            raise DataError(
                f"token {max(token_ids)}: the model has vocab_size={self._vocab_size}; give ids of its own tokenizer"
            )

    def encode(self, text: str) -> list[int]:
        """Token ids; nothing is added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a plain prompt, those that a row with this text has."""
        return encode_open(self._tokenizer, text, self.stop_texts)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def reply(
        self, token_ids: Sequence[int], tools: Sequence[JsonMapping], *, skip_special_tokens: bool = True
    ) -> Reply:
        """What the client gets of a sampled turn. The token that ended it is left out, as vLLM does."""
        said = list(token_ids[:-1]) if token_ids and token_ids[-1] in self.stop_texts else list(token_ids)
        if self._parser is None or not tools:
            return Reply(self._tokenizer.decode(said, skip_special_tokens=skip_special_tokens))
        skips = skip_special_tokens and self._parser.skips_special_tokens(tools)
        return Reply(*self._parser.parse(self._tokenizer.decode(said, skip_special_tokens=skips), tools))

    def meaning(self, text: str, tools: Sequence[JsonMapping]) -> object:
        """What a sampled text says: without blanks and special tokens, and its tool calls as values. Two texts that
        differ only in how a call is written are equal in it."""
        calls: list[JsonObject] = []
        if self._parser is not None and tools:
            text, calls = self._parser.parse(text, tools)
        for special in self._specials:
            text = text.replace(special, "")
        return "".join(text.split()), [_call_meaning(call["function"]) for call in calls]


def _call_meaning(function: JsonMapping) -> tuple[str, str]:
    arguments = function["arguments"]
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.dumps(json.loads(arguments), sort_keys=True)
    return function["name"], arguments
