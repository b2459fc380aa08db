"""Promises of fleet/waiting.py: deadlines, what is said meanwhile, what is cancelled and what is left behind."""

import asyncio
import gc
import logging
import threading
from typing import Any
from unittest.mock import Mock

import pytest
from fakes.clock import on_jumping_clock

from slipstream.fleet import waiting
from slipstream.fleet.errors import WaitTimeout
from slipstream.fleet.waiting import all_started, finish_first, in_abandoned_thread, last_attempt, together, wait_for

START_S = 1000.0
"""When a test's clock begins."""


def now() -> float:
    return asyncio.get_running_loop().time()


def noted(ended: list[str], name: str, seconds: float, error: BaseException | None = None) -> Any:
    """Work that takes so long, and notes whether it was cancelled."""

    async def work() -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ended.append(name)
            raise
        if error is not None:
            raise error
        return name

    return work()


@on_jumping_clock
async def test_a_wait_ends_at_its_deadline_and_cancels_what_it_waited_for() -> None:
    ended: list[str] = []
    assert await wait_for(noted(ended, "a", 69), "it", timeout_s=70) == "a"
    with pytest.raises(KeyError):
        await wait_for(noted(ended, "a", 1, KeyError("its own")), "it", timeout_s=70)
    began = now()
    with pytest.raises(WaitTimeout, match=r"^gave up after 70 s of waiting for it$"):
        await wait_for(noted(ended, "b", 71), "it", timeout_s=70)
    assert now() == pytest.approx(began + 70)
    caller = asyncio.ensure_future(wait_for(noted(ended, "c", 71), "it", timeout_s=70))
    await asyncio.sleep(1)
    caller.cancel()
    await asyncio.sleep(0.1)
    assert ended == ["b", "c"]


async def test_time_in_which_this_process_was_stopped_is_not_held_against_who_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Timers of a process that goes on after SIGSTOP are due before it has read what was answered meanwhile."""
    loop, stopped_s = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + stopped_s)

    async def answered_meanwhile() -> str:
        nonlocal stopped_s
        stopped_s += 3600
        for _ in range(10):  # as many callbacks as it takes to read it
            await asyncio.sleep(0)
        return "here"

    assert await wait_for(answered_meanwhile(), "it", timeout_s=70) == "here"


async def test_what_fails_as_its_wait_is_cancelled_is_not_told_of_in_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer = asyncio.get_running_loop().create_future()
    waiting_for = asyncio.create_task(wait_for(answer, "it", timeout_s=70))
    await asyncio.sleep(0)
    answer.set_exception(ValueError("the other end is gone"))
    waiting_for.cancel()
    await asyncio.wait({waiting_for})
    assert waiting_for.cancelled()
    del answer, waiting_for
    gc.collect()
    assert not any("the other end is gone" in message for message in caplog.messages)


@on_jumping_clock
async def test_progress_begins_the_deadline_again() -> None:
    """What is counted grows for 100 s; 20 s later it is given up, after 120 s in all."""
    with pytest.raises(WaitTimeout, match=r"^gave up after 120 s of"):
        await wait_for(
            asyncio.sleep(1000), "a batch", timeout_s=20, progress=lambda: min(int(now() - START_S), 100), say_every_s=1
        )
    stays = asyncio.ensure_future(wait_for(asyncio.sleep(1000), "a batch", timeout_s=20, progress=lambda: 7))
    with pytest.raises(WaitTimeout, match=r"^gave up after 20 s of"):
        await stays


@on_jumping_clock
async def test_a_wait_says_every_thirty_seconds_what_for() -> None:
    said: list[tuple[float, str]] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append((now() - START_S, record.getMessage()))

    waiting.logger.addHandler(heard := Heard())
    waiting.logger.setLevel(logging.INFO)
    try:
        late = iter(["a and b", "b"])
        await wait_for(asyncio.sleep(75), lambda: next(late), timeout_s=80)
        await wait_for(asyncio.sleep(29), "nothing worth a word", timeout_s=80)
    finally:
        waiting.logger.removeHandler(heard)
    assert [(round(at), text) for at, text in said] == [
        (30, "waited 30 s for a and b (gives up after 80 s)"),
        (60, "waited 60 s for b (gives up after 80 s)"),
    ]


@on_jumping_clock
async def test_the_first_failure_of_several_ends_the_others() -> None:
    ended: list[str] = []
    assert await together(noted(ended, "slow", 3), noted(ended, "quick", 1)) == ["slow", "quick"]
    with pytest.raises(KeyError):
        await together(noted(ended, "a", 9), noted(ended, "b", 1, KeyError()), noted(ended, "c", 5))
    assert ended == ["a", "c"] and now() == pytest.approx(START_S + 4)
    starts = [noted(ended, "up", 1), noted(ended, "late", 60)]
    with pytest.raises(WaitTimeout, match=r"waiting for the workers to start \(1 of 2 are up\)$"):
        await all_started(starts, "the workers", timeout_s=50)
    assert await all_started([noted(ended, "d", 2), noted(ended, "e", 1)], "them", timeout_s=50) == ["d", "e"]
    assert ended[2:] == ["late"]


@on_jumping_clock
async def test_work_that_should_not_be_torn_ends_before_its_caller_does() -> None:
    ended: list[str] = []
    for seconds, until in ((5, 5), (90, 21)):  # the second one has 20 seconds, from when it was told to end
        began = now()
        caller = asyncio.ensure_future(finish_first(noted(ended, f"{seconds} s", seconds), "a step", timeout_s=20))
        await asyncio.sleep(1)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert now() == pytest.approx(began + until)
    assert ended == ["90 s"]
    assert await finish_first(noted(ended, "done", 30), "a step", timeout_s=20) == "done"


@on_jumping_clock
async def test_a_last_attempt_raises_nothing_and_has_an_end(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []
    await last_attempt(noted(ended, "a", 1, KeyError("x")), "closing", timeout_s=5)
    await last_attempt(noted(ended, "b", 9), "closing again", timeout_s=5)
    assert ended == ["b"] and now() == pytest.approx(START_S + 6)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == ["closing failed with KeyError: 'x'", "closing again failed with TimeoutError: "]


def test_a_calls_result_and_its_error_reach_who_waits() -> None:
    async def both() -> str:
        with pytest.raises(KeyError, match="this one"):
            await in_abandoned_thread(Mock(side_effect=KeyError("this one")))
        return await in_abandoned_thread(lambda: threading.current_thread().name)

    assert asyncio.run(both()) != threading.current_thread().name


def test_a_call_that_blocks_is_left_behind() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def blocks() -> None:
        begun.set()
        may_end.wait()
        ended.set()

    async def gives_up() -> None:
        waiting = asyncio.ensure_future(in_abandoned_thread(blocks))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(gives_up())
    assert not ended.is_set(), "the loop has ended before the call"
    may_end.set()
    assert ended.wait(60)
