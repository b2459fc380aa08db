"""Promise of `in_abandoned_thread`: a blocked call holds up neither who waits for it nor the end of the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fleet.waiting import in_abandoned_thread


def test_a_calls_result_and_its_error_reach_who_waits() -> None:
    def fails() -> None:
        raise KeyError("this one")

    async def both() -> str:
        with pytest.raises(KeyError, match="this one"):
            await in_abandoned_thread(fails)
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
