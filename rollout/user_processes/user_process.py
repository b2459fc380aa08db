"""One process that runs a function of the user's, from its start to its end, and the questions to it.

    pool -> [0, the first message]     process -> [0, "ready", ...] | [0, "refused", reason]
    pool -> [number, ...]              process -> [number, ...]
    pool -> [number]   nobody waits    process -> [0]   every ALIVE_EVERY_S, with silence_s: its event loop turns

Owns: these messages, their deadlines, and the detection of a process that does not answer. Does not own: who asks
(pool.py), the end of what it starts (keeper.py).
Invariant: what a process writes is data of a bounded size. Whatever is no answer ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slipstream.conf.deadlines import STOPPED_S, within
from slipstream.conf.errors import ConfigError
from slipstream.rollout.channel import Disconnected, Garbled
from slipstream.rollout.user_processes.kept_process import KeptProcess
from slipstream.rollout.user_processes.outcomes import BLOCKED, DIED, GARBLED, TIMEOUT

T = TypeVar("T")

ALIVE_EVERY_S = 1.0
"""How often the event loop of a process says that it turns."""
START_TIMEOUT_S = 120.0
"""Longest import of the user's module, in seconds; some import a whole framework."""


class Lost(Exception):
    """A question's process is gone: TIMEOUT, DIED, GARBLED or BLOCKED."""

    def __init__(self, kind: str, report: str) -> None:
        super().__init__(report)
        self.kind = kind
        self.report = report


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What the processes of a pool run.

    Example: Program(what="agent", option="rollout.agent=a.py:play", module="rollout.agents.agent_process", ...)
    """

    what: str
    option: str
    """How messages name the user's function."""
    module: str
    """Main module; it serves with serve.py."""
    first_message: object
    error: type[ConfigError]
    """Raised where the function cannot be set up."""
    environment: Mapping[str, str]
    log_path: Path | None
    """File for what the user's code prints; None: it is dropped."""
    max_message_bytes: int
    """Largest message that is read from a process."""
    silence_s: float | None = None
    """A process that says nothing for so long is killed; None: it may be silent."""


class UserProcess:
    """One child process and the questions to it, from its start to its end."""

    def __init__(self, program: Program, kept: KeptProcess) -> None:
        self._program = program
        self._kept = kept
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[Any], Callable[[list[Any]], Any]]] = {}
        """Who waits for an answer, and how it is read, by number."""
        self._dropped: set[int] = set()
        """Questions that nobody waits for, but which the process may still answer."""
        self._heard_at = time.monotonic()
        self._lost: Lost | None = None
        self._has_failed = asyncio.Event()
        self._is_told = False
        """Whether it is ended by a closed connection, and not killed at once."""
        self._tasks: list[asyncio.Task[None]] = []
        self.ready: list[Any] = []
        """What it said when it was."""
        self.is_over = False
        """Whether it takes no further questions."""

    async def over(self) -> None:
        """Wait until it takes no further questions, and for the end of the process."""
        await self._has_failed.wait()
        await self._kept.end(at_once=not self._is_told)

    @classmethod
    async def start(cls, program: Program) -> UserProcess:
        """Start it and wait for it to be ready. Raises: ConfigError, of the program's class."""
        begins = f"{program.option}: its process"
        try:
            kept = await KeptProcess.start(
                program.module,
                environment=program.environment,
                log_path=program.log_path,
                max_message_bytes=program.max_message_bytes,
            )
        except OSError as e:
            raise program.error(f"{begins} cannot be started: {e}") from e
        log = "" if program.log_path is None else f"; what it printed is in {program.log_path.name}"
        async with contextlib.AsyncExitStack() as failed:
            failed.push_async_callback(kept.end, at_once=True)
            try:
                kept.channel.send([0, program.first_message])
                async with asyncio.timeout(START_TIMEOUT_S):
                    said = await kept.channel.receive()
            except TimeoutError as e:
                raise program.error(f"{begins} had not imported its module after {START_TIMEOUT_S:g} s{log}") from e
            except Disconnected as e:
                status = await kept.exit_status()
                raise program.error(f"{begins} ended while it started (exit status {status}){log}: {e}") from e
            match said:
                case [0, "ready", *ready]:
                    failed.pop_all()
                case [0, "refused", str() as reason]:
                    raise program.error(reason)
                case _:
                    raise program.error(f"{begins} wrote something else than its state")
        process = cls(program, kept)
        process.ready = ready
        process._heard_at = time.monotonic()
        process._tasks = [asyncio.create_task(work) for work in (process._listen(), process._watch())]
        return process

    async def ask(
        self, message: Sequence[object], read: Callable[[list[Any]], T | None], timeout_s: float | None, limit: str
    ) -> T:
        number = next(self._numbers)
        answered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered, read
        what, did = self._program.what, "read no question"
        try:
            if self._lost is not None:
                raise Lost(DIED, f"the {what} process was ended because of another question")
            async with within(timeout_s):
                self._kept.channel.send([number, *message])
                await self._kept.channel.sent()
                did = "gave no answer"
                return await answered
        except TimeoutError:
            self._waiting.pop(number, None)  # an answer of the same moment has been taken from there
            lost = Lost(TIMEOUT, f"the {what} process {did} within {limit}")
            self._end_with(Lost(DIED, f"the {what} process was ended because of another question"))
            raise lost from None
        finally:
            if self._waiting.pop(number, None) is not None and not self.is_over:  # cancelled
                self._dropped.add(number)
                self._kept.channel.send([number])

    async def end(self) -> None:
        """End the process and everything that it started, once its coroutines had a moment to clean up. Idempotent."""
        self._is_told = True
        self._end_with(Lost(DIED, "the run ends"))
        await self._kept.end()

    def _end_with(self, lost: Lost) -> None:
        """Fail the questions to it, but for one that has failed already."""
        if self._lost is None:
            self._lost = lost
        self.is_over = True
        self._has_failed.set()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for answered, _ in self._waiting.values():
            if not answered.done():
                answered.set_exception(Lost(self._lost.kind, self._lost.report))

    async def _listen(self) -> None:
        """Hand answers to those who wait for them, until one is no answer, or none can come."""
        what = self._program.what
        try:
            while True:
                message = await self._kept.channel.receive()
                self._heard_at = time.monotonic()
                self._take(message)
        except Garbled as e:
            lost = Lost(GARBLED, f"something else than an answer was written to the {what}'s connection: {e}")
        except Disconnected:
            self.is_over = True
            status = await self._kept.exit_status()
            report = f"the {what} process ended (exit status {status})"
            if status is None:
                report = f"the {what} closed its connection to the run: close no descriptor that you did not open"
            lost = Lost(DIED, report)
        self._end_with(lost)

    def _take(self, message: Any) -> None:
        """One message. Raises: Garbled."""
        if not isinstance(message, list) or not message or type(message[0]) is not int:
            raise Garbled("it is no answer")
        number, *answer = message
        if number == 0 and not answer and self._program.silence_s is not None:
            return
        if number in self._dropped:
            self._dropped.discard(number)
            return
        if number not in self._waiting:
            raise Garbled("an answer to another question, or to none")
        answered, read = self._waiting[number]
        if (value := read(answer)) is None:
            raise Garbled("an answer of another kind")
        del self._waiting[number]
        if not answered.done():
            answered.set_result(value)

    async def _watch(self) -> None:
        """End it when its event loop does not turn any more."""
        limit_s = self._program.silence_s
        if limit_s is None:
            return
        pause_s = min(ALIVE_EVERY_S, limit_s / 4)
        while (began := time.monotonic()) - self._heard_at <= limit_s:
            await asyncio.sleep(pause_s)
            if time.monotonic() - began > pause_s + STOPPED_S:  # nobody ran: it is listened to anew
                self._heard_at = time.monotonic()
        report = f"the event loop of the {self._program.what}'s process did not turn for {limit_s:g} s: something in "
        report += "it blocks (time.sleep, requests, a long computation); await instead, or use a thread"
        self._end_with(Lost(BLOCKED, report))
