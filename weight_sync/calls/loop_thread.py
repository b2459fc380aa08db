"""An event loop in a thread, for a process that has other work and must call, or be called, meanwhile.

Owns: that thread, and how soon Python's other threads give way to it. Does not own: what runs in the loop.
"""

import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SWITCH_S = 0.0005
"""sys.setswitchinterval() in a process that calls or answers in a thread. With Python's 5 ms, which pass at every call
and after every wait for the device, waiting would be most of a publish into an adapter slot."""
END_TIMEOUT_S = 10.0
"""Longest wait for the end of a thread."""


def give_way_sooner() -> None:
    """Set once and not per call: the thread needs the interpreter even to see that there is a call."""
    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))


class LoopThread:
    """See the module's docstring. Its methods are called from other threads."""

    def __init__(self, name: str) -> None:
        give_way_sooner()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine. Returns what becomes of it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine, and wait for it. (Most coroutines have a deadline of their own.)"""
        return self.start(coroutine).result(timeout_s)

    def close(self) -> None:
        """Cancel what runs, and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        ended = self.start(_cancel_all())
        ended.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        self._thread.join(END_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
