"""A clock that goes on only while everybody waits: tests of deadlines take no time, and a busy machine changes nothing.

For tests whose waits are all asyncio's own; a thread's or a process's answer would come too late for it.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


async def turns(number: int = 30) -> None:
    """Let every ready task run."""
    for _ in range(number):
        await asyncio.sleep(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Where nothing is ready, it is the time of the next timer at once."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self))
        self.now = 1000.0

    def time(self) -> float:
        """Seconds, which nothing but waiting makes more."""
        return self.now


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        """What is ready now; None: nothing will be, but for what comes from outside."""
        found = super().select(timeout if timeout is None else 0)
        if not found and timeout is not None and timeout > 0:
            self._loop.now += timeout
        return found


def on_jumping_clock(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on a JumpingLoop."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
