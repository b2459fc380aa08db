"""Processes that run one function of the user's, so that it can fail in any way and cost only what it was doing.

    ask(message) --[number, message]--> the process with the fewest questions --[number, answer]--> answer
                                           |  it answers that it failed:       the process goes on
                                           +- too late, died, garbled, blocked: the process is killed, its questions are
                                                                                lost, and another one takes its place

Owns: which question is where, replacement and end of the processes, and their environment. Does not own: one process
and its deadlines (user_process.py), what is asked and answered (rewards/reward_pool.py, agents/agent_pool.py).
Invariant: every ask() gets an answer, or Lost, or is cancelled.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slipstream.conf.errors import ConfigError
from slipstream.rollout.user_processes.outcomes import DIED
from slipstream.rollout.user_processes.user_process import Lost, Program, UserProcess

logger = logging.getLogger(__name__)
T = TypeVar("T")

PASSED_ON = (
    *("PATH", "HOME", "USER", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE"),  # what any program expects
    *("LD_LIBRARY_PATH", "OMP_NUM_THREADS"),  # what its libraries are
)
"""Variables that the user's code gets in addition to those that its options name; PYTHONPATH is made from sys.path."""


@dataclass(slots=True, eq=False)
class _Place:
    """One process, or its successor."""

    process: UserProcess | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_questions: int = 0

    @property
    def is_up(self) -> bool:
        return self.process is not None and not self.process.is_over


class UserPool:
    """See the module's docstring. All methods belong to one event loop."""

    def __init__(self, program: Program, num_processes: int) -> None:
        self._program = program
        self._places = [_Place() for _ in range(num_processes)]
        self._most: float = float("inf")
        self._room: asyncio.Semaphore | None = None
        self._alive: set[UserProcess] = set()
        """Also those that are over, and have not ended yet."""
        self._tasks: set[asyncio.Task[object]] = set()
        self.is_closed = False

    async def start(self) -> list[Any]:
        """Start every process. Returns what the first one says when it is ready. Raises ConfigError: of the program's
        class: the function cannot be set up."""
        started = await asyncio.gather(*(self._process_of(place) for place in self._places))
        return started[0].ready

    def limit(self, num_questions: int) -> None:
        """Let a process have so many questions at once; without a limit, any number. Call it before ask()."""
        self._most = num_questions
        self._room = asyncio.Semaphore(num_questions * len(self._places))

    async def ask(
        self,
        message: Sequence[object],
        read: Callable[[list[Any]], T | None],
        timeout_s: float | None = None,
        limit: str = "",
    ) -> T:
        """Ask one process, and wait for its answer. Cancelled, it tells the process, and waits for nothing. Raises
        Lost: there will be no answer. The process has ended, and everything that it started.

        Args:
            read: The answer as a value; None: it is none, and the process is killed.
            timeout_s: A process that has not answered by then is killed, too; messages call that `limit`.
        """
        async with self._room or contextlib.nullcontext():
            place = min(self._places, key=self._preference)
            place.num_questions += 1
            try:
                process = await self._process_of(place)
                try:
                    return await process.ask(message, read, timeout_s, limit)
                except Lost:
                    await process.over()
                    raise
            except self._program.error as e:  # it could be set up when the run began: this one is lost, the next tries
                raise Lost(DIED, f"the {self._program.what} process could not be replaced: {e}") from e
            finally:
                place.num_questions -= 1

    def _preference(self, place: _Place) -> tuple[bool, bool, int]:
        """The least is asked: one with room, that is up, with the fewest questions."""
        return place.num_questions >= self._most, not place.is_up, place.num_questions

    async def close(self) -> None:
        """End the processes and everything that they started. Idempotent."""
        self.is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in self._alive))

    async def _process_of(self, place: _Place) -> UserProcess:
        """The process of a place, started again if it is over. Raises ConfigError: of the program's class: it does not
        start."""
        async with place.starting:
            if place.process is None or place.process.is_over:
                if self.is_closed:
                    raise self._program.error("the run ends")
                try:
                    place.process = await self._begin(self._started())
                except asyncio.CancelledError:
                    if self.is_closed:
                        raise self._program.error("the run ends") from None
                    raise
                self._begin(self._replace(place, place.process))
            return place.process

    async def _started(self) -> UserProcess:
        process = await UserProcess.start(self._program)
        self._alive.add(process)  # here, so that close() knows it even if nobody waits for it any more
        return process

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _replace(self, place: _Place, process: UserProcess) -> None:
        """Start a successor as soon as a process is over."""
        await process.over()
        self._alive.discard(process)
        if not self.is_closed:
            try:
                await self._process_of(place)
            except self._program.error as e:
                if self.is_closed:
                    return
                logger.warning("the %s process could not be replaced: %s", self._program.what, e)


def user_environment(
    option: str, names: Sequence[str], environ: Mapping[str, str], error: type[ConfigError], *, also: Sequence[str] = ()
) -> dict[str, str]:
    """The environment of the user's code: the variables of PASSED_ON, `names` and `also`, and PYTHONPATH. Raises
    ConfigError: of class `error`: the option names a variable that is not set."""
    if missing := [name for name in names if name not in environ]:
        raise error(
            f"{option} names {', '.join(missing)}, which is not set where the run starts; export it, or remove it "
            f"from {option}"
        )
    path = os.pathsep.join([*(entry for entry in sys.path if entry), os.getcwd()])
    return {name: environ[name] for name in (*PASSED_ON, *also, *names) if name in environ} | {"PYTHONPATH": path}
