"""What a process answers that runs a function of the user's, over a real connection; the process is a thread here."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest

from slipstream.conf.errors import ConfigError
from slipstream.rollout.channel import Channel, Disconnected
from slipstream.rollout.user_processes import serve as serve_module
from slipstream.rollout.user_processes.serve import MAX_REASON, _serve


@asynccontextmanager
async def serving(set_up: Callable[[Any], Any], *, tells_alive: bool = False) -> AsyncIterator[Channel]:
    """The pool's end; it is closed at the end, and the other one ends by that."""
    ours, theirs = socket.socketpair()

    def run() -> None:
        with contextlib.suppress(Disconnected):
            _serve(theirs, set_up, tells_alive)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    channel = await Channel.over(ours)
    channel.send([0, {"rank": 3}])
    try:
        yield channel
    finally:
        channel.close()
        await asyncio.to_thread(thread.join, 60)
        assert not thread.is_alive()


async def test_a_plain_function_answers_one_question_after_the_other() -> None:
    def set_up(message: Any) -> Any:
        return (lambda *question: [message["rank"], *question]), ["a fact", 1]

    async with serving(set_up) as channel:
        assert await channel.receive() == [0, "ready", "a fact", 1]
        for question in ([1, "a"], [5, "b", "c"]):
            channel.send(question)
        assert [await channel.receive() for _ in range(2)] == [[1, 3, "a"], [5, 3, "b", "c"]]


async def test_a_function_that_cannot_be_set_up_says_why() -> None:
    async with serving(Mock(side_effect=ConfigError("x" * (MAX_REASON + 1)))) as channel:
        assert await channel.receive() == [0, "refused", "x" * MAX_REASON]


async def test_coroutines_answer_at_the_same_time_and_one_that_nobody_waits_for_is_cancelled() -> None:
    begun: list[str] = []
    ended: list[str] = []

    def set_up(_: Any) -> Any:
        gates = {name: asyncio.Event() for name in "abc"}

        async def answer(what: str, name: str) -> list[str]:
            if what == "open":
                gates[name].set()
                return [what]
            begun.append(name)
            try:
                await gates[name].wait()
            except asyncio.CancelledError:
                ended.append(name)
                raise
            return [name]

        return answer, []

    async with serving(set_up) as channel:
        assert await channel.receive() == [0, "ready"]
        for number, name in enumerate("abc", start=1):
            channel.send([number, "wait", name])
        while len(begun) < 3:
            await asyncio.sleep(0.001)
        channel.send([2])  # nobody waits for b
        channel.send([99])  # which has been answered, or never was asked
        channel.send([4, "open", "c"])
        assert sorted([await channel.receive() for _ in range(2)]) == [[3, "c"], [4, "open"]]
        channel.send([5, "open", "b"])
        channel.send([6, "open", "a"])
        assert sorted([await channel.receive() for _ in range(3)]) == [[1, "a"], [5, "open"], [6, "open"]]
    assert ended == ["b"]


async def test_its_event_loop_says_that_it_turns_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "ALIVE_EVERY_S", 0.001)

    async def answer(question: str) -> list[str]:
        return [question]

    async with serving(lambda _: (answer, []), tells_alive=True) as channel:
        assert [await channel.receive() for _ in range(4)] == [[0, "ready"], [0], [0], [0]]
        channel.send([1, "a"])
        while (said := await channel.receive()) == [0]:
            pass
        assert said == [1, "a"]
