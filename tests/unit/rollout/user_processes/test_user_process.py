"""Questions to one process and its answers, over a real connection to this test, which plays the process."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.conf.errors import ConfigError
from slipstream.rollout.channel import Channel
from slipstream.rollout.user_processes import user_process
from slipstream.rollout.user_processes.outcomes import BLOCKED, DIED, GARBLED, TIMEOUT
from slipstream.rollout.user_processes.user_process import Lost, Program, UserProcess


class Played:
    """What a UserProcess knows of its process; `other` is the process's end."""

    def __init__(self, channel: Channel, other: Channel) -> None:
        self.channel, self.other = channel, other
        self.status: int | None = 3
        self.ended_at_once: list[bool] = []

    async def exit_status(self) -> int | None:
        return self.status

    async def end(self, *, at_once: bool = False) -> None:
        self.ended_at_once.append(at_once)


class World:
    """A process that listens, and its clock."""

    def __init__(self, silence_s: float | None, played: Played) -> None:
        program = Program(
            what="reward", option="o", module="m", first_message=None, error=ConfigError, environment={}, log_path=None,
            max_message_bytes=1 << 16, silence_s=silence_s,
        )  # fmt: skip
        self.played, self.other = played, played.other
        self.process = UserProcess(program, played)  # pyright: ignore[reportArgumentType]
        self.process._tasks = [asyncio.create_task(work) for work in (self.process._listen(), self.process._watch())]

    def ask(self, *message: Any, timeout_s: float | None = 60.0) -> asyncio.Task[Any]:
        """The answer is its values, if the first is no None."""
        read = lambda answer: answer if answer and answer[0] is not None else None  # noqa: E731
        return asyncio.create_task(self.process.ask(message, read, timeout_s, "an hour"))

    async def lost(self, asked: asyncio.Task[Any]) -> tuple[str, str]:
        with pytest.raises(Lost) as caught:
            await asyncio.wait_for(asked, 60)
        return caught.value.kind, caught.value.report


OTHERS = (DIED, "the reward process was ended because of another question")


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    ours, theirs = socket.socketpair()
    made = World(getattr(request, "param", None), Played(await Channel.over(ours), await Channel.over(theirs)))
    yield made
    await made.process.end()
    made.other.close()
    made.played.channel.close()


async def test_answers_reach_their_questions_in_any_order(world: World) -> None:
    first, second = world.ask("a", 1), world.ask("b", 2)
    assert [await world.other.receive() for _ in range(2)] == [[1, "a", 1], [2, "b", 2]]
    world.other.send([2, "of b"])
    assert await second == ["of b"] and not first.done()
    world.other.send([1, "of", "a"])
    assert await first == ["of", "a"]
    assert not world.process._waiting and not world.process.is_over


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1, None], "an answer of another kind"),
        ([7, "x"], "an answer to another question, or to none"),
        ([0], "an answer to another question, or to none"),
        ([True, "x"], "it is no answer"),
        (["1", "x"], "it is no answer"),
        ([], "it is no answer"),
        ({"1": 2}, "it is no answer"),
    ],
)
async def test_whatever_is_no_answer_ends_it(world: World, answer: Any, said: str) -> None:
    asked = [world.ask("a"), world.ask("b")]
    await world.other.receive()
    world.other.send(answer)
    found = [await world.lost(one) for one in asked]
    assert found == [(GARBLED, f"something else than an answer was written to the reward's connection: {said}")] * 2
    assert world.process.is_over and await world.lost(world.ask("c")) == OTHERS
    await world.process.over()
    assert world.played.ended_at_once == [True]


async def test_a_question_that_nobody_waits_for_is_told_and_its_answer_dropped_once(world: World) -> None:
    given_up, waits = world.ask("a"), world.ask("b")
    for _ in range(2):
        await world.other.receive()
    given_up.cancel()
    assert await world.other.receive() == [1]
    world.other.send([1, "late"])
    world.other.send([2, "in time"])
    assert await waits == ["in time"]
    asked = world.ask("c")
    world.other.send([1, "once more"])
    assert (await world.lost(asked))[0] == GARBLED


async def test_a_question_that_takes_too_long_ends_the_process_of_the_others(world: World) -> None:
    other, ending = world.ask("a"), asyncio.create_task(world.process.over())
    await world.other.receive()
    assert not ending.done() and not world.played.ended_at_once
    late = world.ask("b", timeout_s=0.05)
    assert await world.lost(late) == (TIMEOUT, "the reward process gave no answer within an hour")
    assert await world.lost(other) == OTHERS
    await ending
    assert world.played.ended_at_once == [True]


@pytest.mark.parametrize("world", [10.0], indirect=True)
async def test_time_in_which_both_processes_were_stopped_is_not_held_against_the_other_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one goes on first: whatever it waited for is due before the other one can answer."""
    clock, stopped_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock() + stopped_s)
    asked = world.ask("a")
    await world.other.receive()
    stopped_s = 3600.0
    for _ in range(10):
        await asyncio.sleep(0)
    world.other.send([1, "here"])
    assert await asked == ["here"]


async def test_a_question_that_a_process_does_not_read_is_late_and_says_so(world: World) -> None:
    """It is larger than what a socket buffers, and written no further than its reader reads."""
    late = await world.lost(world.ask("x" * (1 << 24), timeout_s=0.2))
    assert late == (TIMEOUT, "the reward process read no question within an hour")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (3, "the reward process ended (exit status 3)"),
        (None, "the reward closed its connection to the run: close no descriptor that you did not open"),
    ],
)
async def test_a_process_that_is_gone_says_how_it_ended(world: World, status: int | None, said: str) -> None:
    world.played.status = status
    asked = world.ask("a")
    await world.other.receive()
    world.other.close()
    assert await world.lost(asked) == (DIED, said)


async def test_the_end_of_the_run_is_no_kill(world: World) -> None:
    asked = world.ask("a")
    await world.other.receive()
    await world.process.end()
    assert await world.lost(asked) == (DIED, "the run ends")
    await world.process.over()
    assert world.played.ended_at_once == [False, False]


@pytest.mark.parametrize("world", [10.0], indirect=True)
async def test_silence_is_a_block_and_any_message_ends_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(user_process, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(user_process, "ALIVE_EVERY_S", 0.001)
    world.process._heard_at = clock.now
    asked = world.ask("a")
    await world.other.receive()

    for _ in range(3):
        clock.now += 10.0  # not longer
        await asyncio.sleep(0.05)
        assert not asked.done()
        world.other.send([0])
        while world.process._heard_at < clock.now:
            await asyncio.sleep(0.001)
    world.other.send([1, "at last"])
    assert await asked == ["at last"]
    asked = world.ask("b")
    clock.now += 10.1
    kind, report = await world.lost(asked)
    assert kind == BLOCKED and "did not turn for 10 s" in report
