"""A deadline that nobody misses while nobody runs: a job that a batch system suspends, Ctrl-Z, a virtual machine that
moves. Does not own: what follows from a deadline that passed.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

_LOOK_EVERY_S = 1.0
STOPPED_S = 5.0
"""A timer that is so much later than it should says that this process was stopped, and not that somebody is late."""


@asynccontextmanager
async def within(seconds: float | None) -> AsyncGenerator[asyncio.Timeout]:
    """asyncio.timeout(), but for time in which this process was stopped: when it goes on its timers are due before it
    has read what was answered, and whom it asked was perhaps stopped, too."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:

        def look(left_s: float, began: float, asked_s: float, was_late: bool) -> None:
            nonlocal looking
            waited_s = loop.time() - began
            is_late = waited_s > asked_s + STOPPED_S
            left_s -= 0.0 if is_late and not was_late else waited_s  # late twice: the loop is blocked
            if left_s <= 0:
                limit.reschedule(loop.time())
            else:
                looking = look_again(left_s, is_late)

        def look_again(left_s: float, was_late: bool = False) -> asyncio.TimerHandle:
            asked_s = min(left_s, _LOOK_EVERY_S)
            return loop.call_later(asked_s, look, left_s, loop.time(), asked_s, was_late)

        looking = None if seconds is None else look_again(max(0.0, seconds))
        try:
            yield limit
        finally:
            if looking is not None:
                looking.cancel()
