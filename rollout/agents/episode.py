"""One episode: its limits, its token tree, and its requests, which an engine samples elsewhere.

    endpoint --messages--> Episode.chat --parent, new tokens--> controller's router --> an engine
                                ^------------- sampled tokens -----------+

Owns: the limits on turns and tokens, enforced here and not by the agent's goodwill, and which turns there were. Does
not own: HTTP (endpoint.py), the deadline (service.py), tokens of a conversation (token_tree.py).
Invariant: a limit that was reached stays reached; every turn that the engine sampled is in `turns`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.conf.json_files import JsonMapping
from slipstream.conf.schema import EpisodesConfig, SamplingConfig
from slipstream.rollout.agents.chat_text import FolderChatText, Reply
from slipstream.rollout.agents.failures import TOKENS, TURNS
from slipstream.rollout.agents.token_tree import Planned, TokenTree
from slipstream.rollout.text.messages import Chat

MAX_CHARACTERS_PER_TOKEN = 64
"""A conversation with more characters per allowed token is refused without being tokenized."""
_TOO_LONG = "this model's maximum context length is {} tokens (rollout.max_model_len)"
"""OpenAI's and vLLM's words, by which clients tell that a conversation has become too long, whatever the code says."""
MODEL = "policy"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one episode may use."""

    max_turns: int
    max_tokens: int
    """Sampled tokens of all turns."""
    max_turn_tokens: int
    """Sampled tokens of one turn."""
    max_model_len: int
    """Prompt and sampled tokens of one turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """What the agents' service is told at its start."""

    agent: str
    folder: Path
    """Model folder: tokenizer and chat template."""
    stop_token_ids: list[int]
    sampling: SamplingConfig
    """rollout.sampling."""
    episodes: EpisodesConfig
    limits: Limits
    blocked_s: float
    environment: dict[str, str]
    log_path: Path | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an engine sampled for one request."""

    request: int
    """The controller's number of it."""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class LimitReached(Exception):
    """The episode may sample no more. `kind` is TURNS or TOKENS."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class EpisodeOver(Exception):
    """The episode has ended: its deadline passed, or its agent returned."""


class EngineFailed(Exception):
    """The engines failed a request for good."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A turn, as the controller is told of it, which makes a rollout.types.Turn of this."""

    request: int
    parent: int | None
    reason: str
    given: str
    said: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client gets of one turn."""

    reply: Reply
    sampled: Sampled
    prompt_token_ids: list[int]
    """All that the engine had before it sampled."""
    decode: Callable[[Sequence[int]], str]

    @property
    def tokens(self) -> list[str]:
        """Text of each sampled token. Decoding them one by one is slow, and only log-probabilities need it."""
        return [self.decode([token]) for token in self.sampled.token_ids]


Generate = Callable[[int | None, list[int], int], Awaitable[Sampled]]
"""(the parent's request, tokens after those of the parent, most tokens to sample) -> what was sampled."""


class Episode:
    """See the module's docstring. `template_options` are for requests that do not give them."""

    def __init__(
        self, chat: FolderChatText, limits: Limits, generate: Generate, template_options: JsonMapping | None = None
    ) -> None:
        self.turns: list[TurnRecord] = []
        self.last_reply = ""
        self.last_finish_reason = "stop"
        self.reached = ""
        """The limit that was reached: TURNS, TOKENS, or ""."""
        self.engine_failed = False
        self.started = time.monotonic()
        self._chat = chat
        self._limits = limits
        self._generate = generate
        self._template_options = template_options or {}
        self._tree = TokenTree(chat)
        self._num_turns = 0
        self._num_tokens = 0
        self._is_over = False
        self._requests: set[asyncio.Task[object]] = set()

    async def chat(
        self,
        messages: Sequence[JsonMapping],
        tools: Sequence[JsonMapping] = (),
        *,
        options: JsonMapping | None = None,
        max_tokens: int | None = None,
        skip_special_tokens: bool = True,
    ) -> Answer:
        """One turn of a conversation. Raises LimitReached: nothing was sampled; EpisodeOver: the episode ended, perhaps
        while this waited; EngineFailed; DataError: a token is none of the model's; Exception: the template refuses the
        messages. Without `skip_special_tokens` the client gets them; the run's reward does not."""
        self._check_size(sum(len(str(value)) for message in messages for value in message.values()))
        planned = self._tree.plan(messages, tools, {**self._template_options, **(options or {})})
        return await self._turn(planned, max_tokens, tools, skip_special_tokens, is_chat=True)

    def check(self, messages: Sequence[JsonMapping], tools: Sequence[JsonMapping], options: JsonMapping) -> None:
        """Refuse tools and template options that would have no effect. Raises: as FolderChatText.check()."""
        self._chat.check(Chat(messages, tools, {**self._template_options, **options}))

    async def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int | None = None, skip_special_tokens: bool = True
    ) -> Answer:
        """One turn after a plain prompt. Raises: as chat()."""
        if not isinstance(prompt, str):
            self._chat.check_tokens(prompt)
        self._check_size(len(prompt))
        return await self._turn(self._tree.plan_text(prompt), max_tokens, (), skip_special_tokens, is_chat=False)

    def end(self) -> None:
        """Refuse further requests and end those in flight. Idempotent."""
        self._is_over = True
        for request in self._requests:
            request.cancel()

    async def _turn(
        self, planned: Planned, max_tokens: int | None, tools: Sequence[JsonMapping], skips: bool, *, is_chat: bool
    ) -> Answer:
        self._chat.check_tokens(planned.token_ids)
        most = self._most_tokens(planned, max_tokens)
        self._num_turns += 1
        self._num_tokens += most  # reserved, so that requests at the same time keep the limit
        parent = None if planned.parent is None else self.turns[planned.parent].request
        request = asyncio.ensure_future(self._generate(parent, planned.token_ids, most))
        self._requests.add(request)
        num_sampled = 0
        try:
            await asyncio.wait({request})
            if self._is_over or request.cancelled():
                raise EpisodeOver("this episode is over")
            sampled = request.result()
            num_sampled = len(sampled.token_ids)
        except EngineFailed:
            self.engine_failed = True
            raise
        finally:
            self._num_tokens -= most - num_sampled
            self._requests.discard(request)
            request.cancel()
        judged = self._chat.reply(sampled.token_ids, tools)
        reply = judged if skips else self._chat.reply(sampled.token_ids, tools, skip_special_tokens=False)
        _, reason = self._tree.record(planned, sampled.token_ids, reply.message if is_chat else None)
        said = self._chat.decode(sampled.token_ids)
        self.turns.append(TurnRecord(sampled.request, planned.parent, reason, planned.text, said))
        self.last_reply, self.last_finish_reason = judged.content, sampled.finish_reason
        return Answer(reply, sampled, self._tree.prompt(planned), self._chat.decode)

    def _check_size(self, num_characters: int) -> None:
        """Refuse a conversation that cannot fit before it is tokenized: megabytes take seconds, in which all wait."""
        most = MAX_CHARACTERS_PER_TOKEN * self._limits.max_model_len
        if num_characters > most:
            self.reached = TOKENS
            raise LimitReached(
                f"{_TOO_LONG.format(self._limits.max_model_len)}: the conversation has {num_characters} characters, "
                "which is more than so many tokens can be",
                TOKENS,
            )

    def _most_tokens(self, planned: Planned, asked: int | None) -> int:
        if self._is_over:
            raise EpisodeOver("this episode is over")
        limits = self._limits
        if self._num_turns >= limits.max_turns:
            self.reached = TURNS
            raise LimitReached(f"this episode has had its {limits.max_turns} turns (rollout.episodes.max_turns)", TURNS)
        room = limits.max_model_len - planned.num_tokens
        left = limits.max_tokens - self._num_tokens
        if room < 1 or left < 1:
            self.reached = TOKENS
            why = (
                f"{_TOO_LONG.format(limits.max_model_len)}: the conversation has {planned.num_tokens}"
                if room < 1
                else f"this episode has sampled its {limits.max_tokens} tokens (rollout.episodes.max_tokens)"
            )
            raise LimitReached(why, TOKENS)
        return min(room, left, limits.max_turn_tokens, *([asked] if asked is not None else []))
