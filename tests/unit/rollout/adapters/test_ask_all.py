"""Promises of calls to the ranks of an engine that samples: they reach every rank, errors keep their class, and silence
has a deadline. Over the real sockets, to threads of this process; the engine that dies is a process of its own.
"""

import asyncio
import contextlib
import multiprocessing
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from slipstream.rollout.adapters.adapter_replica import ask_all
from slipstream.rollout.errors import EngineDied, EngineError
from slipstream.rollout.worker_verbs import EngineConnection
from slipstream.weight_sync.calls.loop_thread import SWITCH_S
from slipstream.weight_sync.calls.server import serve_in_thread
from slipstream.weight_sync.errors import IntegrityError

KEY = b"k" * 32
LIMIT_S = 20.0


class Verbs(Protocol):
    def add(self, number: int, data: bytes = b"") -> tuple[int, bytes, str]: ...

    def fail(self, how: int) -> None: ...

    def stall(self) -> str: ...

    def interval(self) -> float: ...


class Rank:
    """Does what is declared."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.errors = (IntegrityError(f"a bit of {number}"), ValueError("odd"), KeyError("x"))
        self.go_on = threading.Event()

    def add(self, number: int, data: bytes = b"") -> tuple[int, bytes, str]:
        return number + self.number, data, threading.current_thread().name

    def fail(self, how: int) -> None:
        raise self.errors[how]

    def stall(self) -> str:
        return "late" if self.go_on.wait(60) else ""

    def interval(self) -> float:
        return sys.getswitchinterval()


def served(rank: Rank) -> str:
    return serve_in_thread(rank, KEY, Verbs, contextlib.nullcontext)


@contextlib.asynccontextmanager
async def asking(*addresses: str, key: bytes = KEY) -> AsyncIterator[list[EngineConnection]]:
    asked = [EngineConnection(address, key) for address in addresses]
    try:
        yield asked
    finally:
        for connection in asked:
            connection.close()


async def test_a_call_reaches_every_rank_and_returns_by_rank():
    async with asking(*(served(Rank(number)) for number in range(3))) as ranks:
        answers = [(10 + rank, b"x", "Verbs") for rank in range(3)]
        assert await ask_all(ranks, LIMIT_S, Verbs.add, 10, data=b"x") == answers
        with pytest.raises(EngineError, match="add failed with ValidationError: Expected `int`, got `str`"):
            await ask_all(ranks, LIMIT_S, Verbs.add, "ten", b"x")


@pytest.mark.parametrize(
    ("how", "arrives", "says"),
    [
        (0, IntegrityError, "^a bit of 0$"),
        (1, EngineError, "fail failed with ValueError: odd"),
        (2, EngineError, "x"),
    ],
)
async def test_the_first_ranks_error_arrives_as_its_own_class_and_the_thread_goes_on(how: int, arrives: Any, says: str):
    async with asking(served(Rank(0)), served(Rank(1))) as ranks:
        with pytest.raises(arrives, match=says):
            await ask_all(ranks, LIMIT_S, Verbs.fail, how)
        assert [number for number, _, _ in await ask_all(ranks, LIMIT_S, Verbs.add, 1)] == [1, 2]


async def test_a_rank_that_is_late_is_not_waited_for_and_its_late_answer_is_not_taken_for_another():
    """Two callers come after one that gave up: a publish, and a restarted worker that asks for an offer."""
    rank = Rank()
    async with asking(served(rank)) as ranks:
        with pytest.raises(EngineDied, match=r"did not answer stall within 0\.1 s"):
            await ask_all(ranks, 0.1, Verbs.stall)
        both = asyncio.gather(*(ask_all(ranks, LIMIT_S, Verbs.add, number) for number in (1, 2)))
        await asyncio.sleep(0)  # both have begun
        rank.go_on.set()
        assert [number for ((number, _, _),) in await both] == [1, 2]


def serve(sender: Any) -> None:
    """In a process of its own: a rank that never answers."""
    sender.send(served(Rank()))
    threading.Event().wait(600)


async def test_the_death_of_the_engine_ends_a_call_at_once():
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(sender,), daemon=True)
    process.start()
    async with asking(await asyncio.to_thread(receiver.recv)) as ranks:
        waits = asyncio.create_task(ask_all(ranks, 600, Verbs.stall))
        await asyncio.sleep(0.2)
        process.kill()
        for call in (waits, ask_all(ranks, 600, Verbs.add, 1)):
            with pytest.raises(EngineDied, match="the engine's process died; this rollout worker must be restarted"):
                await asyncio.wait_for(call, LIMIT_S)
    process.join()


async def test_who_does_not_know_the_runs_key_is_not_answered():
    async with asking(served(Rank()), key=b"o" * 32) as ranks:
        with pytest.raises(EngineDied):
            await ask_all(ranks, 1.0, Verbs.add, 1)


async def test_the_engine_gives_way_to_a_call_before_it_is_known_and_after_others():
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        async with asking(served(Rank())) as ranks:
            assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
            assert await ask_all(ranks, LIMIT_S, Verbs.interval) == [pytest.approx(SWITCH_S)]
            assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    finally:
        sys.setswitchinterval(usual_s)
