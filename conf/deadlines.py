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

        def look(left_s: float, began: float, asked_s: float) -> None:
            nonlocal looking
            waited_s = loop.time() - began
            left_s -= waited_s if waited_s <= asked_s + STOPPED_S else 0.0
            if left_s <= 0:
                limit.reschedule(loop.time())
            else:
                looking = look_again(left_s)

        def look_again(left_s: float) -> asyncio.TimerHandle:
            asked_s = min(left_s, _LOOK_EVERY_S)
            return loop.call_later(asked_s, look, left_s, loop.time(), asked_s)

        looking = None if seconds is None else look_again(max(0.0, seconds))
        try:
            yield limit
        finally:
            if looking is not None:
                looking.cancel()
