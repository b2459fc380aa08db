"""Locks: an episode's limits, what its engine is asked for, and what becomes of a request that nobody waits for."""

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.chat_templates import FakeChatText
from fakes.clock import turns
from hypothesis import given, settings, strategies as st

from slipstream.rollout.agents import episode as episode_module
from slipstream.rollout.agents.chat_text import Reply
from slipstream.rollout.agents.episode import (
    MAX_CHARACTERS_PER_TOKEN,
    EngineFailed,
    Episode,
    EpisodeOver,
    LimitReached,
    Limits,
    Sampled,
    TurnRecord,
)
from slipstream.rollout.agents.failures import TOKENS, TURNS
from slipstream.rollout.errors import DataError

END = "<|im_end|>"
AMPLE = Limits(max_turns=100, max_tokens=10_000, max_turn_tokens=10_000, max_model_len=10_000)


class Chat(FakeChatText):
    """Its replies are those of the real one."""

    num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += 1
        return super().decode(token_ids)

    def reply(self, sampled: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Any:
        return Reply(super().reply(sampled, tools)["content"])


class Engine:
    """Samples the texts that it is given, in order; waits while `gate` is closed."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.says: list[str | Exception] = []
        self.asked: list[tuple[int | None, str, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_cancelled = 0

    async def generate(self, parent: int | None, token_ids: list[int], most: int) -> Sampled:
        number = len(self.asked)
        self.asked.append((parent, self.chat.decode(token_ids), most))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        said = self.says.pop(0) if self.says else "so" + END
        if isinstance(said, Exception):
            raise said
        tokens = self.chat.encode(said)
        return Sampled(70 + number, tokens, [-1.0] * len(tokens), "stop" if said.endswith(END) else "length")


class Table:
    """One episode and its engine."""

    def __init__(self, limits: Limits = AMPLE) -> None:
        self.chat = Chat("chatml")
        self.engine = Engine(self.chat)
        self.episode = Episode(self.chat, limits, self.engine.generate)  # type: ignore[arg-type]

    def say(self, *texts: str | Exception) -> None:
        self.engine.says += texts


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_a_turn_is_what_was_given_and_said() -> None:
    table = Table()
    table.say("first" + END, "cut o")
    answer = await table.episode.chat([user("one")])
    assert table.chat.num_decoded < 6, "no token is decoded by itself before somebody wants its text"
    first = f"<|im_start|>user\none{END}\n<|im_start|>assistant\n"
    assert (answer.reply.content, answer.tokens) == ("first", [*"first", END])
    assert answer.prompt_token_ids == table.chat.encode(first)
    assert answer.sampled.request == 70
    assert table.episode.last_reply == "first", "as the client got it"
    messages = [user("one"), answer.reply.message, user("two")]
    second = f"\n<|im_start|>user\ntwo{END}\n<|im_start|>assistant\n"
    answer = await table.episode.chat(messages)
    whole = table.chat.encode(first + "first" + END + second)
    assert table.engine.asked == [
        (None, first, 10_000 - len(table.chat.encode(first))), (70, second, 10_000 - len(whole))
    ]  # fmt: skip
    assert answer.prompt_token_ids == whole, "with what earlier turns had and said"
    assert table.episode.turns == [
        TurnRecord(70, None, "start", first, "first" + END), TurnRecord(71, 0, "", second, "cut o")
    ]  # fmt: skip
    assert (table.episode.last_reply, table.episode.last_finish_reason) == ("cut o", "length")
    assert (table.episode.reached, table.episode.engine_failed) == ("", False)


def test_an_episode_begins_on_the_clock_by_which_its_seconds_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """service.py subtracts it from time.monotonic()."""
    monkeypatch.setattr(episode_module, "time", SimpleNamespace(monotonic=lambda: 5.0))
    assert Table().episode.started == 5.0


async def test_a_request_is_rendered_with_its_tools_and_its_options_before_those_of_the_episode() -> None:
    class Noting(Chat):
        def render(self, messages: Any, tools: Any, options: Any = None) -> str:
            noted.append((tools, options))
            return super().render(messages, tools, options)

        def reply(self, sampled: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Any:
            noted.append((tools, "in the answer"))
            return super().reply(sampled, tools)

        def check(self, chat: Any) -> None:
            noted.append((chat.tools, dict(chat.options)))

    noted: list[Any] = []
    chat, tools, both = Noting("chatml"), [{"type": "function"}], {"one": "x", "two": "b"}
    episode = Episode(chat, AMPLE, Engine(chat).generate, {"one": "a", "two": "b"})  # type: ignore[arg-type]
    episode.check([user("one")], (), {"one": "x"})
    await episode.chat([user("one")], tools, options={"one": "x"})
    await episode.chat([user("one")])
    assert noted == [
        ((), both), (tools, both), (tools, "in the answer"), ((), {"one": "a", "two": "b"}), ((), "in the answer")
    ]  # fmt: skip


NOBODYS = 1 << 33


@pytest.mark.parametrize("prompt", [[1, NOBODYS], "a text of that token"])
async def test_a_token_that_the_model_does_not_have_is_refused_and_costs_no_turn(prompt: str | list[int]) -> None:
    class Small(Chat):
        def encode_prompt(self, text: str) -> list[int]:
            return [NOBODYS]

        def check_tokens(self, token_ids: Sequence[int]) -> None:
            if NOBODYS in token_ids:
                raise DataError("no such token")

        def decode(self, token_ids: Sequence[int]) -> str:
            if NOBODYS in token_ids:
                raise OverflowError("as a tokenizer says it")
            return super().decode(token_ids)

    chat = Small("chatml")
    engine = Engine(chat)
    episode = Episode(chat, AMPLE, engine.generate)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no such token"):
        await episode.complete(prompt)
    assert engine.asked == [] and (episode.turns, episode.reached) == ([], "")


async def test_a_plain_prompt_goes_on_too_and_leaves_no_message_behind() -> None:
    table = Table()
    table.say(" a time", " there")
    await table.episode.complete("once upon")
    await table.episode.complete(table.chat.encode("once upon a time, then"))
    assert [(parent, text) for parent, text, _ in table.engine.asked] == [(None, "once upon"), (70, ", then")]
    assert [turn.said for turn in table.episode.turns] == [" a time", " there"]


small = st.integers(1, 6)


@settings(max_examples=150, deadline=None)
@given(
    limits=st.tuples(st.integers(1, 5), st.integers(1, 12), small, st.integers(3, 12)),
    steps=st.lists(
        st.tuples(st.sampled_from(["ask", "ask for fewer", "answer", "give up", "fail"]), small, small), max_size=14
    ),
)
def test_limits_are_kept_whatever_is_asked_at_once_given_up_or_fails(
    limits: tuple[int, int, int, int], steps: list[tuple[str, int, int]]
) -> None:
    """Beside it: turns count from their request on, and so do the tokens that it may sample, until it has fewer."""
    max_turns, max_tokens, max_turn_tokens, max_model_len = limits

    async def play() -> None:
        table = Table(Limits(*limits))
        asked: list[tuple[int, asyncio.Future[Sampled]]] = []

        async def generate(parent: int | None, token_ids: list[int], most: int) -> Sampled:
            asked.append((most, asyncio.get_running_loop().create_future()))
            return await asked[-1][1]

        table.episode._generate = generate
        under_way: list[tuple[asyncio.Task[Any], int, asyncio.Future[Sampled]]] = []
        num_turns = num_tokens = num_sampled = 0
        reached, has_failed = "", False
        for what, size, number in steps:
            if what.startswith("ask"):
                fewer = number if what == "ask for fewer" else None
                request = asyncio.create_task(table.episode.complete("x" * size, max_tokens=fewer))
                await turns()
                room, left = max_model_len - size, max_tokens - num_tokens
                if num_turns == max_turns or room < 1 or left < 1:
                    with pytest.raises(LimitReached) as error:
                        request.result()  # it waits for no engine
                    reached = TURNS if num_turns == max_turns else TOKENS
                    told = f"has sampled its {max_tokens} tokens" if room > 0 else f"the conversation has {size}"
                    assert (f"has had its {max_turns} turns" if reached == TURNS else told) in str(error.value)
                    assert error.value.kind == reached
                    continue
                most, answered = asked[-1]
                assert most == min(room, left, max_turn_tokens, fewer or 99)
                under_way.append((request, most, answered))
                num_turns, num_tokens = num_turns + 1, num_tokens + most
            elif under_way:
                request, most, answered = under_way.pop(number % len(under_way))
                num_tokens -= most
                if what == "answer":
                    tokens = [ord("a")] * min(size, most)
                    answered.set_result(Sampled(70, tokens, [-1.0] * len(tokens), "stop"))
                    num_tokens, num_sampled = num_tokens + len(tokens), num_sampled + 1
                elif what == "give up":
                    request.cancel()
                else:
                    answered.set_exception(EngineFailed("all of them"))
                    has_failed = True
                await turns()
                assert request.done() and answered.done(), "nobody waits for it any more"
                assert request.cancelled() or (request.exception() is not None) == (what == "fail")
        assert (table.episode.reached, table.episode.engine_failed) == (reached, has_failed)
        assert (len(asked), len(table.episode.turns)) == (num_turns, num_sampled)
        table.episode.end()
        await asyncio.gather(*(request for request, *_ in under_way), return_exceptions=True)

    asyncio.run(play())


async def test_the_end_of_an_episode_ends_its_requests_and_refuses_others() -> None:
    table = Table()
    table.engine.gate.clear()
    requests = [asyncio.create_task(table.episode.complete(prompt, max_tokens=9)) for prompt in "xyz"]
    await turns()
    table.episode.end()
    await turns()
    assert all(request.done() for request in requests) and table.engine.num_cancelled == 3
    for request in requests:
        with pytest.raises(EpisodeOver):
            await request
    table.engine.gate.set()
    for _ in range(2):
        table.episode.end()
        with pytest.raises(EpisodeOver):
            await table.episode.chat([user("one")])
    assert table.episode.turns == [] and len(table.engine.asked) == 3


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_what_is_sampled_while_the_episode_ends_is_no_turn_nor_a_cancellation_of_the_agents(
    is_cancelled: bool,
) -> None:
    table = Table()

    async def ends_meanwhile(*_: Any) -> Sampled:
        if is_cancelled:
            raise asyncio.CancelledError
        table.episode._is_over = True
        return Sampled(70, [], [], "stop")

    table.episode._generate = ends_meanwhile
    with pytest.raises(EpisodeOver):
        await table.episode.complete("x")
    assert table.episode.turns == []


@pytest.mark.parametrize("excess", [0, 1])
async def test_what_cannot_fit_is_refused_before_it_is_read(excess: int) -> None:
    """All characters of all messages count, or those of a plain prompt."""
    table = Table(Limits(max_turns=9, max_tokens=100, max_turn_tokens=9, max_model_len=10))
    most = MAX_CHARACTERS_PER_TOKEN * 10
    messages = [user("x" * 100), user("y" * (most - 100 - 8 + excess))]  # with twice "user"
    for request in (lambda: table.episode.chat(messages), lambda: table.episode.complete("x" * (most + excess))):
        table.episode.reached = ""
        with pytest.raises(LimitReached) as error:
            await request()
        assert error.value.kind == table.episode.reached == TOKENS
        assert ("characters, which is more than" in str(error.value)) == bool(excess)
    assert table.engine.asked == []
