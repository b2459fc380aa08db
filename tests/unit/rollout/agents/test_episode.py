"""Locks: an episode's limits, what its engine is asked for, and what becomes of a request that nobody waits for."""

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fakes.chat_templates import FakeChatText
from fakes.clock import turns

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
        self.episode = Episode(3, self.chat, limits, self.engine.generate)  # type: ignore[arg-type]

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


async def test_options_of_a_request_go_before_those_of_the_episode() -> None:
    class Noting(Chat):
        def render(self, *args: Any) -> str:
            noted.append(dict(args[2]))
            return super().render(*args)

        def check(self, chat: Any) -> None:
            noted.append(dict(chat.options))

    noted: list[dict[str, Any]] = []
    chat = Noting("chatml")
    episode = Episode(3, chat, AMPLE, Engine(chat).generate, {"one": "a", "two": "b"})  # type: ignore[arg-type]
    await episode.chat([user("one")], options={"one": "x"})
    episode.check([user("one")], (), {"one": "x"})
    await episode.chat([user("one")])
    assert noted == [{"one": "x", "two": "b"}] * 2 + [{"one": "a", "two": "b"}]


async def test_tools_are_rendered_and_looked_for_in_the_answer() -> None:
    class Noting(Chat):
        def render(self, messages: Any, tools: Any, options: Any = None) -> str:
            noted.append(tools)
            return super().render(messages, tools, options)

        def reply(self, sampled: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Any:
            noted.append(tools)
            return super().reply(sampled, tools)

    noted: list[Any] = []
    chat, tools = Noting("chatml"), [{"type": "function", "function": {"name": "add"}}]
    episode = Episode(3, chat, AMPLE, Engine(chat).generate)  # type: ignore[arg-type]
    await episode.chat([user("one")], tools)
    assert noted == [tools] * 2


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
    episode = Episode(3, chat, AMPLE, engine.generate)  # type: ignore[arg-type]
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


async def test_a_later_turn_has_the_room_that_the_whole_conversation_leaves() -> None:
    """Of the 20 tokens of the model, the conversation takes 5 + 3, then 8 + 4 + 2."""
    table = Table(Limits(max_turns=9, max_tokens=100, max_turn_tokens=50, max_model_len=20))
    table.say("abc", "de")
    await table.episode.complete("01234")
    await table.episode.complete("01234abc....")
    await table.episode.complete("01234abc....de")
    assert [most for _, _, most in table.engine.asked] == [15, 8, 6]
    with pytest.raises(
        LimitReached, match=r"is 20 tokens \(rollout\.max_model_len\): the conversation has 20$"
    ) as error:
        await table.episode.complete("01234abc....deABCDEF")
    assert (error.value.kind, table.episode.reached) == (TOKENS, TOKENS)
    await table.episode.complete("01234abc....deABCDE")
    assert table.engine.asked[-1][2] == 1


@pytest.mark.parametrize(
    ("limits", "asked", "most"),
    [
        ((9, 100, 50, 30), None, 30 - 5),
        ((9, 100, 20, 30), None, 20),
        ((9, 15, 20, 30), None, 15),
        ((9, 100, 50, 30), 7, 7),
        ((9, 15, 20, 30), 99, 15),
        ((9, 100, 20, 30), 99, 20),
    ],
)
async def test_a_turn_may_sample_what_the_narrowest_limit_leaves(limits, asked: int | None, most: int) -> None:
    table = Table(Limits(*limits))
    await table.episode.complete("01234", max_tokens=asked)
    assert table.engine.asked[0][2] == most


@pytest.mark.parametrize(("says", "most"), [(["abc", "abcd"], [4, 4]), (["abc", "abc", "a"], [4, 4, 1])])
async def test_sampled_tokens_add_up_to_the_limit_and_no_further(says: list[str], most: list[int]) -> None:
    table = Table(Limits(max_turns=99, max_tokens=7, max_turn_tokens=4, max_model_len=100))
    table.say(*says)
    for prompt in "xyz"[: len(says)]:
        await table.episode.complete(prompt)
    assert [one for _, _, one in table.engine.asked] == most
    for _ in range(2):
        with pytest.raises(LimitReached, match="sampled its 7 tokens") as error:
            await table.episode.complete("z")
        assert (error.value.kind, table.episode.reached) == (TOKENS, TOKENS)
    assert len(table.engine.asked) == len(says)


async def test_requests_at_the_same_time_share_the_limit_and_give_back_what_they_did_not_use() -> None:
    table = Table(Limits(max_turns=99, max_tokens=7, max_turn_tokens=4, max_model_len=100))
    table.engine.gate.clear()
    table.say("a", "bc")
    both = [asyncio.create_task(table.episode.complete(prompt)) for prompt in ("x", "y")]
    await turns()
    assert [most for _, _, most in table.engine.asked] == [4, 3]
    with pytest.raises(LimitReached):
        await table.episode.complete("z")
    table.engine.gate.set()
    await asyncio.gather(*both)
    await table.episode.complete("z")
    assert table.engine.asked[-1][2] == 7 - 3


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("at_once", [False, True])
async def test_turns_end_at_their_limit(limit: int, at_once: bool) -> None:
    """A turn counts from its request on."""
    table = Table(Limits(max_turns=limit, max_tokens=100, max_turn_tokens=4, max_model_len=100))
    if at_once:
        table.engine.gate.clear()
    requests = [asyncio.create_task(table.episode.complete("x")) for _ in range(limit)]
    await turns()
    if not at_once:
        await asyncio.gather(*requests)
    for _ in range(2):
        further = asyncio.create_task(table.episode.complete("x"))
        await turns()
        assert further.done(), "it waits for no engine"
        with pytest.raises(LimitReached, match=f"has had its {limit} turns") as error:
            await further
        assert (error.value.kind, table.episode.reached) == (TURNS, TURNS)
    table.engine.gate.set()
    await asyncio.gather(*requests)
    assert len(table.episode.turns) == limit


async def test_a_request_that_is_abandoned_samples_no_further_and_gives_its_tokens_back() -> None:
    table = Table(Limits(max_turns=99, max_tokens=7, max_turn_tokens=5, max_model_len=100))
    table.engine.gate.clear()
    request = asyncio.create_task(table.episode.complete("x"))
    await turns()
    request.cancel()
    await turns()
    assert request.cancelled()
    assert table.engine.num_cancelled == 1, "nobody waits for it"
    table.engine.gate.set()
    for _ in range(2):
        table.say("abc")
        await table.episode.complete("x")
    assert [most for _, _, most in table.engine.asked] == [5, 5, 4]
    assert len(table.episode.turns) == 2


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


async def test_what_was_sampled_when_the_episode_ended_is_no_turn() -> None:
    """The engine answers in the moment in which the episode ends."""
    table = Table()
    generate = table.engine.generate

    async def ends_meanwhile(*args: Any) -> Sampled:
        sampled = await generate(*args)
        table.episode._is_over = True
        return sampled

    table.episode._generate = ends_meanwhile
    with pytest.raises(EpisodeOver):
        await table.episode.complete("x")
    assert table.episode.turns == []


async def test_engines_that_fail_are_noted_and_the_tokens_given_back() -> None:
    table = Table(Limits(max_turns=99, max_tokens=4, max_turn_tokens=4, max_model_len=100))
    table.say(EngineFailed("all of them"), ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        table.engine.says.reverse()
        await table.episode.complete("x")
    assert not table.episode.engine_failed
    with pytest.raises(EngineFailed):
        await table.episode.complete("x")
    assert table.episode.engine_failed
    await table.episode.complete("x")
    assert table.engine.asked[-1][2] == 4


async def test_a_request_that_was_cancelled_underneath_is_over_and_no_cancellation_of_the_agents() -> None:
    table = Table()

    table.episode._generate = AsyncMock(side_effect=asyncio.CancelledError)
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
