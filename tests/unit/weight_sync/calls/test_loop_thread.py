"""An event loop in a thread: what runs in it answers, and ends with it."""

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from slipstream.weight_sync.calls.loop_thread import LoopThread


def test_what_runs_answers_and_is_cancelled_at_the_end() -> None:
    thread, told = LoopThread("told"), threading.Event()

    async def who() -> str:
        return threading.current_thread().name

    async def waits() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            told.set()

    assert thread.run(who()) == "told"
    with pytest.raises(TimeoutError):
        thread.run(asyncio.sleep(600), 0.01)
    pending = thread.start(waits())
    thread.run(asyncio.sleep(0))
    for _ in range(2):
        thread.close()
    with pytest.raises(CancelledError):
        pending.result(10)
    assert told.is_set()
    assert "told" not in {one.name for one in threading.enumerate()}
