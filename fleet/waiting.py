"""How the controller waits: with a deadline, and saying every 30 seconds what for."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from slipstream.conf.deadlines import STOPPED_S
from slipstream.conf.failures import in_daemon_thread, in_words, outcome_when_done
from slipstream.fleet.errors import WaitTimeout

logger = logging.getLogger(__name__)
T = TypeVar("T")

SAY_EVERY_S = 30.0


async def wait_for(
    awaitable: Awaitable[T],
    what: str | Callable[[], str],
    *,
    timeout_s: float,
    progress: Callable[[], int] | None = None,
    say_every_s: float = SAY_EVERY_S,
) -> T:
    """Await with a deadline and a line in the log every `say_every_s`. Raises WaitTimeout, naming what was waited for.

    Args:
        awaitable: cancelled when the deadline passes or the caller is cancelled.
        what: completes the sentence "waited for ..."; a function when it changes (who is late).
        timeout_s: the deadline, counted from the start or from the last progress.
        progress: a counter; whenever it has grown the deadline starts again.
    """
    task, now = asyncio.ensure_future(awaitable), asyncio.get_running_loop().time
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # also if nobody asks any more
    started = since = now()
    seen = progress() if progress else 0
    try:
        while True:
            began, look_in_s = now(), max(0.0, min(say_every_s, since + timeout_s - now()))
            await asyncio.wait({task}, timeout=look_in_s)
            if task.done():
                return task.result()
            if now() - began > look_in_s + STOPPED_S:
                since += now() - began  # this process did not run: answers may be there that it has not read yet
            if progress and progress() != seen:
                since, seen = now(), progress()
            waited_s = now() - started
            sentence = what if isinstance(what, str) else what()
            if now() - since >= timeout_s:
                raise WaitTimeout(f"gave up after {waited_s:.0f} s of waiting for {sentence}")
            if waited_s >= say_every_s:
                logger.info("waited %.0f s for %s (gives up after %.0f s)", waited_s, sentence, timeout_s)
    finally:
        if not task.done():
            task.cancel()


async def together(*awaitables: Awaitable[T]) -> list[T]:
    """Run all at once; results in order. The first failure cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()  # nothing, to one that is done
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_started(starts: Iterable[Awaitable[T]], what: str, *, timeout_s: float) -> list[T]:
    """Await all of several starts. Log lines and WaitTimeout say how many of them are up."""
    tasks = [asyncio.ensure_future(start) for start in starts]

    def late() -> str:
        return f"{what} to start ({sum(task.done() for task in tasks)} of {len(tasks)} are up)"

    return await wait_for(together(*tasks), late, timeout_s=timeout_s)


async def in_abandoned_thread(call: Callable[[], T]) -> T:
    """Await a blocking call in a thread of its own. When the caller is cancelled, nothing waits for the thread any
    more, not even the end of the process, which does wait for threads of asyncio.to_thread."""
    return await asyncio.wrap_future(in_daemon_thread(call))


async def finish_first(work: Awaitable[T], what: str, *, timeout_s: float) -> T:
    """Await work that should not be cut short. When the caller is cancelled, the work gets `timeout_s` to end before it
    is cancelled, too. What it returns then is lost, and what it raises is logged."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            logger.info("told to end: waiting for %s, for at most %.0f s", what, timeout_s)
            await asyncio.wait({task}, timeout=timeout_s)
        task.cancel()
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s failed while the run was told to end: %s", what, error)
        raise


async def last_attempt(work: Awaitable[object], what: str, *, timeout_s: float) -> None:
    """Await on the way out. What it raises is logged and not raised: the caller reports why the run ends."""
    failure = await outcome_when_done(asyncio.wait_for(work, timeout_s))
    if isinstance(failure, Exception):
        logger.error("%s failed with %s", what, in_words(failure))
        logger.debug("where it failed:", exc_info=failure)
