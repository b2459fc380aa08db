"""The conversations of one episode as exact tokens: which earlier turn a request goes on from, and what is new in it.

    request's messages   system, user, assistant 1, tool result
                         +----- turn 0 -----+            turn 0's messages and reply are a prefix: it is the parent
    tokens               turn 0's prompt + what the engine sampled, as it sampled it + the rest of the end of the turn,
                         the tool result, and what precedes the next answer

Owns: the search for the parent, the text that a template adds after a sampled turn, and why a request has no parent.
Does not own: templates and tokenizers (chat_text.py), limits and HTTP, or what the trainer makes of it (branches.py).
Pure: no I/O, no clock.
Invariants: what was sampled is never tokenized again; a request continues a turn only if the template still renders
that turn's prompt, and its reply, as they were. Otherwise the request is rendered and tokenized whole: a new branch.

Reasons (Turn.reason): "" goes on; `start` the episode's first request; `fork` another request has gone on from the same
place; `template` the template writes the history in another way than it was sampled (thinking removed, for example);
`edited` the history has an answer that was never given; `tools` other tools; `new` another conversation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.conf.json_files import JsonMapping
from slipstream.rollout.branches import context_of

if TYPE_CHECKING:
    from slipstream.rollout.agents.chat_text import FolderChatText

CONTINUED = ""
START = "start"
FORK = "fork"
TEMPLATE = "template"
EDITED = "edited"
TOOLS = "tools"
NEW = "new"
REASONS: dict[str, str] = {
    FORK: "several requests went on from the same place",
    TEMPLATE: "the chat template wrote the history in another way than it was sampled",
    EDITED: "the agent changed, cut or compacted the history",
    TOOLS: "the agent offered other tools",
    NEW: "the agent began another conversation",
}
"""Why an episode has more than one branch -> meaning. Each is a metric: rollout/branches_<reason>."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A request, before it is sampled."""

    parent: int | None
    token_ids: list[int]
    """What the engine is given after the parent's tokens."""
    num_tokens: int
    """Tokens of the whole prompt."""
    text: str
    rendered: str
    """The template's text of the whole request."""
    history: tuple[bytes, bytes]
    """Digests of the messages, with the tools and without."""
    reason: str


@dataclass(frozen=True, slots=True)
class _Turn:
    parent: int | None
    tokens: list[int]
    """What the engine was given after the parent's tokens, and what it sampled."""
    rendered: str
    said: str
    """Text of what was sampled, special tokens included."""
    stop_text: str
    """The end of `said` that ended the turn; "" if the response was cut off."""
    num_tokens: int
    """Tokens of prompt and response."""


class TokenTree:
    """See the module's docstring. One per episode."""

    def __init__(self, chat: FolderChatText) -> None:
        self._chat = chat
        self._turns: list[_Turn] = []
        self._of_history: dict[bytes, int] = {}
        """Digest of tools, messages and reply -> the newest turn that has them."""
        self._known: set[bytes] = set()
        """Digests of messages and reply, without the tools."""
        self._went_on_from: set[tuple[int | None, bytes]] = set()

    def plan(
        self, messages: Sequence[JsonMapping], tools: Sequence[JsonMapping] = (), options: JsonMapping | None = None
    ) -> Planned:
        """Find out what a chat request goes on from, and what is new in it. `options` are further variables of the
        template: where others change the history's text, a branch begins. Raises what the template raises."""
        rendered = self._chat.render(messages, tools, options)
        digests = _digests(messages, tools)
        plain = _digests(messages, ())
        reason = self._reason_without_parent(messages, plain)
        for length in range(len(messages) - 1, 0, -1):  # the longest known history first
            number = self._of_history.get(digests[length])
            if number is None:
                continue
            added = self._added(number, rendered, tools)
            if added is not None:
                return self._after(number, added, rendered, (digests[-1], plain[-1]), reason)
            reason = TEMPLATE
        token_ids = self._chat.encode(rendered)
        return Planned(None, token_ids, len(token_ids), rendered, rendered, (digests[-1], plain[-1]), reason)

    def plan_text(self, prompt: str | Sequence[int]) -> Planned:
        """As plan(), of a plain prompt. It goes on from the turn whose text, or tokens, are its longest prefix."""
        text = prompt if isinstance(prompt, str) else self._chat.decode(prompt)
        history = (_digest(b"text", text), _digest(b"text", text))
        newest_first = sorted(range(len(self._turns)), key=lambda number: self._turns[number].num_tokens, reverse=True)
        for number in newest_first:
            turn = self._turns[number]
            before = turn.rendered + turn.said
            if isinstance(prompt, str) and text.startswith(before):
                return self._after(number, text[len(before) :], text, history, CONTINUED)
            if not isinstance(prompt, str) and list(prompt[: turn.num_tokens]) == self._context(number):
                added = list(prompt[turn.num_tokens :])
                return Planned(number, added, len(prompt), self._chat.decode(added), text, history, CONTINUED)
        token_ids = self._chat.encode_prompt(text) if isinstance(prompt, str) else list(prompt)
        return Planned(None, token_ids, len(token_ids), text, text, history, NEW if self._turns else START)

    def record(self, planned: Planned, sampled: Sequence[int], reply: JsonMapping | None = None) -> tuple[int, str]:
        """Note what was sampled. Returns the turn's number, and why it begins a branch. `reply` is the message that the
        client gets; None: plain text."""
        said = self._chat.decode(sampled)
        stop_text = self._chat.stop_texts.get(sampled[-1], "") if sampled else ""
        number = len(self._turns)
        tokens = [*planned.token_ids, *sampled]
        num_tokens = planned.num_tokens + len(sampled)
        turn = _Turn(planned.parent, tokens, planned.rendered, said, stop_text, num_tokens)
        self._turns.append(turn)
        if reply is not None:
            with_tools, without = (_digest(history, _canonical(reply)) for history in planned.history)
            self._of_history[with_tools] = number
            self._known.add(without)
        reason = planned.reason
        place = (planned.parent, planned.history[0] if planned.parent is None else b"")
        if place in self._went_on_from and reason in (CONTINUED, START, NEW, EDITED):
            reason = FORK
        elif reason == START and number > 0:  # both were planned before the first of them was sampled
            reason = NEW
        self._went_on_from.add(place)
        return number, reason

    def prompt(self, planned: Planned) -> list[int]:
        return [*self._context(planned.parent), *planned.token_ids]

    def _context(self, number: int | None) -> list[int]:
        return context_of({i: (turn.parent, turn.tokens) for i, turn in enumerate(self._turns)}, number)

    def _reason_without_parent(self, messages: Sequence[JsonMapping], plain: Sequence[bytes]) -> str:
        if not self._turns:
            return START
        if any(digest in self._known for digest in plain):
            return TOOLS
        return EDITED if any(message.get("role") == "assistant" for message in messages) else NEW

    def _after(self, parent: int, added: str, rendered: str, history: tuple[bytes, bytes], reason: str) -> Planned:
        turn = self._turns[parent]
        token_ids = self._encode_after(turn, added)
        reason = TEMPLATE if reason == TEMPLATE else CONTINUED
        return Planned(parent, token_ids, turn.num_tokens + len(token_ids), added, rendered, history, reason)

    def _encode_after(self, turn: _Turn, added: str) -> list[int]:
        """Tokens of a text that follows a turn. Some tokenizers treat the beginning of a text in a special way, so it
        is encoded behind the token that ended the turn."""
        if turn.stop_text:
            anchor = self._chat.encode(turn.stop_text)
            whole = self._chat.encode(turn.stop_text + added)
            if whole[:1] == anchor:  # a token of its own, also with a text behind it
                return whole[1:]
        return self._chat.encode(added)

    def _added(self, number: int, rendered: str, tools: Sequence[JsonMapping]) -> str | None:
        """The text that the template adds after a turn. None: it renders the turn in another way than it was."""
        turn = self._turns[number]
        if rendered.startswith(turn.rendered + turn.said):
            return rendered[len(turn.rendered) + len(turn.said) :]
        if not rendered.startswith(turn.rendered):
            return None
        # Up to the end of the turn, which for some models is the beginning of the next message.
        ends = [turn.stop_text] if turn.stop_text else list(self._chat.stop_texts.values())
        found = [place for end in ends if end and (place := rendered.find(end, len(turn.rendered))) >= 0]
        if not found:
            return None
        reply = rendered[len(turn.rendered) : min(found)]
        said = turn.said.removesuffix(turn.stop_text) if turn.stop_text else turn.said
        if self._chat.meaning(reply, tools) != self._chat.meaning(said, tools):
            return None
        return rendered[min(found) + len(turn.stop_text) :]


def _digests(messages: Sequence[JsonMapping], tools: Sequence[JsonMapping]) -> list[bytes]:
    """Entry k is the digest of the tools and the first k messages."""
    digests = [_digest(b"chat", json.dumps(tools, sort_keys=True, default=str))]
    for message in messages:
        digests.append(_digest(digests[-1], _canonical(message)))
    return digests


def _canonical(message: JsonMapping) -> str:
    """The message as text, without empty fields, so that it is the same however a client writes it. Frameworks rewrite
    answers, so that blanks around an answer, and spaces in a call's arguments, do not count either."""
    content = message.get("content")
    fields = {**message}
    if message.get("role") == "assistant":
        fields["content"] = content.strip() if isinstance(content, str) else content
        fields["tool_calls"] = [_call(call) for call in message.get("tool_calls") or []]
    kept = {key: value for key, value in fields.items() if value not in (None, "", [], {})}
    return json.dumps(kept, sort_keys=True, default=str)


def _call(call: object) -> object:
    """What a tool call says, its arguments as a value where they are one."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]


def _digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode(errors="surrogatepass"), digest_size=16).digest()
