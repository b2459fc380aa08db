"""The agent processes: the user's code, apart from the run, so that it can fail in any way and cost only its episodes.

    run(task) --> the process with the fewest episodes --> Outcome
                     |  raised, not a number:   the process goes on
                     +- died, blocked:          its episodes fail, and a process takes its place

Owns: start, replacement and end of the processes, which episode is where, and the detection of an event loop that does
not turn any more. Does not own: what an episode may use (episode.py), its deadline (service.py), what a process starts
(rewards/processes/keeper.py, which runs beside each).
Invariant: every run() gets an Outcome, or is cancelled. What a process writes is data of a bounded size.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.agents.channel import Disconnected
from rollout.agents.episode import MODEL
from rollout.agents.failures import BLOCKED, DIED, NOT_A_NUMBER, RAISED
from rollout.agents.kept_process import KeptProcess
from rollout.errors import AgentError

logger = logging.getLogger(__name__)

ALIVE_EVERY_S = 1.0
"""How often the event loop of an agent process says that it turns."""
START_TIMEOUT_S = 120.0
"""Longest import of an agent's module; some import a whole framework."""
MAX_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one episode."""

    failure: str = ""
    """One of failures.py; "": the agent returned."""
    reward: float | None = None
    """What the agent returned; None leaves the judgement to the run's reward."""
    report: str = ""
    place: str = ""
    """Class of an exception and where it was raised, without its message."""


@dataclass(slots=True)
class _Process:
    """One agent process that is up."""

    kept: KeptProcess
    source: str
    heard_at: float
    episodes: dict[int, asyncio.Future[Outcome]] = field(default_factory=dict[int, asyncio.Future[Outcome]])
    is_blocked: bool = False


class AgentPool:
    """See the module's docstring. All methods belong to one event loop.

    Args:
        agent: `package.module:function` or `FILE.py:function`.
        blocked_s: A process that says nothing for so long is killed.
        environment: Of the processes.
        log_path: File for what agents print; None: it is dropped.
        max_log_bytes: Size at which the file is cut.
    """

    def __init__(
        self,
        agent: str,
        *,
        num_processes: int,
        blocked_s: float,
        environment: Mapping[str, str],
        log_path: Path | None,
        max_log_bytes: int,
    ) -> None:
        self._agent = agent
        self._num_processes = num_processes
        self._blocked_s = blocked_s
        self._environment = dict(environment)
        self._log_path = log_path
        self._max_log_bytes = max_log_bytes
        self._processes: list[_Process] = []
        self._starting: set[asyncio.Task[_Process]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> str:
        """Start every process. Returns the file that defines the agent, or "".

        Raises:
            AgentError: The agent cannot be set up.
        """
        started = await asyncio.gather(*(self._start_one() for _ in range(self._num_processes)))
        return started[0].source

    async def run(self, number: int, task: Mapping[str, Any], base_url: str, key: str) -> Outcome:
        """Run one episode to its end. Cancelled, it cancels the agent's coroutine, and waits for nothing."""
        try:
            process = await self._free_process()
        except AgentError as e:  # it could be set up when the run began: this episode is lost, the next one tries
            return Outcome(DIED, report=f"the agent process could not be replaced: {e}", place="start")
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        process.episodes[number] = ended
        process.kept.channel.send(["run", number, dict(task), base_url, key, MODEL])
        try:
            return await ended
        finally:
            if process.episodes.pop(number, None) is not None and not ended.done():
                process.kept.channel.send(["cancel", number])

    async def close(self) -> None:
        """End the processes and everything that they started. Idempotent."""
        self._is_closed = True
        for start in self._starting:
            start.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        processes, self._processes = self._processes, []
        await asyncio.gather(*(process.kept.end() for process in processes))
        for task in self._tasks:
            task.cancel()

    async def _free_process(self) -> _Process:
        """The process with the fewest episodes, once one is up."""
        if not self._processes:
            if not self._starting:
                self._begin_start()
            await asyncio.wait({*self._starting}, return_when=asyncio.FIRST_COMPLETED)
            if not self._processes:
                raise AgentError("it did not come up again; run.log has the reason")
        return min(self._processes, key=lambda process: len(process.episodes))

    def _begin_start(self) -> None:
        start = asyncio.create_task(self._start_one())
        self._starting.add(start)
        start.add_done_callback(self._started)

    def _started(self, start: asyncio.Task[_Process]) -> None:
        self._starting.discard(start)
        if not start.cancelled() and (error := start.exception()) is not None:
            logger.warning("an agent process could not be replaced: %s", error)

    async def _start_one(self) -> _Process:
        """Start one process and wait for it to be ready. Raises: AgentError."""
        kept = await KeptProcess.start(
            "rollout.agents.agent_process",
            self._agent,
            environment=self._environment,
            log_path=self._log_path,
            max_log_bytes=self._max_log_bytes,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await kept.channel.receive()
            match answer:
                case ["ready", str() as source]:
                    process = _Process(kept, source, time.monotonic())
                case ["refused", str() as reason]:
                    raise AgentError(reason)
                case _:
                    raise AgentError(f"rollout.agent={self._agent}: its process wrote something else than its state")
        except BaseException as e:
            await kept.end()
            if isinstance(e, TimeoutError):
                raise AgentError(
                    f"rollout.agent={self._agent}: its module was not imported within {START_TIMEOUT_S:g} s"
                ) from e
            if isinstance(e, Disconnected):
                raise AgentError(
                    f"rollout.agent={self._agent}: its process ended while it started; what it printed is in agents.log"
                ) from e
            raise
        self._processes.append(process)
        for work in (self._listen(process), self._watch(process)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return process

    async def _listen(self, process: _Process) -> None:
        """Take what a process says until it ends; then fail its episodes and start another one."""
        with contextlib.suppress(Disconnected):
            while True:
                message = await process.kept.channel.receive()
                process.heard_at = time.monotonic()
                if message != ["alive"]:
                    number, outcome = _outcome(message)
                    ended = process.episodes.pop(number, None)
                    if ended is not None and not ended.done():
                        ended.set_result(outcome)
        if self._is_closed:
            return
        self._processes.remove(process)
        code = await process.kept.end()
        if process.is_blocked:
            report = f"the event loop of the agent's process did not turn for {self._blocked_s:g} s: something in it "
            report += "blocks (time.sleep, requests, a long computation); await instead, or use a thread"
            outcome = Outcome(BLOCKED, report=report, place="blocked")
        else:
            outcome = Outcome(DIED, report=f"the agent process ended (exit status {code})", place="died")
        for ended in process.episodes.values():
            if not ended.done():
                ended.set_result(outcome)
        process.episodes.clear()
        self._begin_start()

    async def _watch(self, process: _Process) -> None:
        """End a process whose event loop does not turn any more."""
        while process in self._processes:
            await asyncio.sleep(min(ALIVE_EVERY_S, self._blocked_s / 4))
            if time.monotonic() - process.heard_at > self._blocked_s:
                process.is_blocked = True
                process.kept.channel.close()  # _listen does the rest
                return


def _outcome(message: Any) -> tuple[int, Outcome]:
    """Check what an agent process said: the user's code may have written anything.

    Raises:
        Disconnected: This process says nothing that can be believed.
    """
    match message:
        case ["ended", int() as number, None]:
            return number, Outcome()
        case ["ended", int() as number, float() as reward] if math.isfinite(reward):
            return number, Outcome(reward=reward)
        case ["failed", int() as number, "raised" | "not_a_number" as kind, str() as report, str() as place]:
            return number, Outcome(RAISED if kind == RAISED else NOT_A_NUMBER, report=report, place=place)
        case _:
            raise Disconnected("an agent process wrote something else than its episodes' ends")
