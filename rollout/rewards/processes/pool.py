"""The processes of one reward, so that a user's function can fail in any way and cost only what it was judging.

Owns: reward processes, their deadlines and replacement, and their environment. Does not own what a reward is
(`function.py`), the end of what it starts (`keeper.py`), nor what several rewards add up to (`runner.py`).
Invariants: judge() returns one outcome per response, in order, whatever the reward does. What a reward process writes
is treated as data: JSON of a bounded size, which runs nothing.

    judge --[number, sample]--> a process with a free place --[number, outcomes]--> Answer
                                  |  raised, not_a_number:    the process goes on; a coroutine's timeout, too
                                  +- timeout, died, garbled:  the process is killed and replaced by the next call;
                                                              what else it was judging has died

Every wait has a deadline: reward.timeout_s for what is sent and received, LATE_S more if coroutines judge,
END_TIMEOUT_S for the end of a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from conf.schema import RewardPart
from rollout.errors import RewardError
from rollout.rewards.counting import COUNTED
from rollout.rewards.processes import frames, keeper
from rollout.rewards.processes.outcomes import DIED, GARBLED, TIMEOUT, Answer, failed, read_answer

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Longest import of a reward's module, in seconds; some import a whole framework."""
END_TIMEOUT_S = 1.0
"""How long a process may take to end after its connection closed, before it is killed; and again after the kill."""
LATE_S = 3.0
"""How much later than its own deadline a coroutine's answer may come, before its process is taken to be blocked."""
MAX_ANSWER_BYTES = 1 << 16
"""Largest answer that is read. Reports of failures are the largest (rollout.rewards.processes.process)."""
MAX_REASON = 4000
"""Longest reason why a reward could not be started, in characters."""
PASSED_ON = (
    *("PATH", "HOME", "USER", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE"),  # what any program expects
    *("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),  # what its libraries and GPUs are
)
"""Variables that a reward gets in addition to reward.env; its PYTHONPATH is made from this process's sys.path."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What a reward process says of its reward once it is set up."""

    is_async: bool
    is_of_group: bool
    source: str
    """Path of the file that defines it; "" if no file does."""


class RewardPool:
    """The processes of one reward.

    Args:
        section: How messages name the configuration: reward, or reward.parts.NAME.
        config: Which reward, how many processes, how long one sample may take.
        log_path: File for what the reward prints. None: it is dropped.
        max_log_bytes: Size at which the file is cut.
        num_processes: In place of what the options say.
    """

    def __init__(
        self,
        section: str,
        config: RewardPart,
        log_path: Path | None,
        max_log_bytes: int,
        num_processes: int | None = None,
    ) -> None:
        self._config = config
        self._new = partial(_RewardProcess, section, config, log_path, max_log_bytes)
        self._processes = [self._new() for _ in range(num_processes or config.num_processes)]
        self._replacing = [asyncio.Lock() for _ in self._processes]
        self._free: asyncio.Queue[int] = asyncio.Queue()
        """Every process's index, once per sample that it may judge in addition to those that it judges."""
        self._calls: set[asyncio.Task[Answer]] = set()
        self._is_closed = False
        self.counts: Counter[str] = Counter()
        """What the reward counted since the start, by the names of COUNTED."""

    async def start(self) -> Ready:
        """Start every process and wait until it has imported the reward.

        Raises:
            RewardError: The reward cannot be set up.
        """
        ready, *_ = await asyncio.gather(*(process.start() for process in self._processes))
        for _ in range(self._config.max_concurrent if ready.is_async else 1):
            for index in range(len(self._processes)):
                self._free.put_nowait(index)
        return ready

    async def judge(self, prompt: str, responses: Sequence[str], fields: Mapping[str, Any]) -> Answer:
        """What became of one sample, or of all samples of a group.

        Raises:
            RewardError: The pool is closed.
        """
        index = await self._free.get()
        if self._is_closed:
            raise RewardError("the reward runner is closed")
        # A place is free when its sample is judged, not when the waiter is gone: if the waiter is cancelled, the
        # process is still busy.
        call = asyncio.create_task(self._judge_in(index, prompt, responses, fields))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)

    async def close(self) -> None:
        """End the processes and everything that they started. Idempotent."""
        self._is_closed = True
        await asyncio.gather(*(process.end() for process in self._processes))
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _judge_in(self, index: int, prompt: str, responses: Sequence[str], fields: Mapping[str, Any]) -> Answer:
        try:
            async with self._replacing[index]:
                if self._processes[index].is_over:
                    if self._is_closed:
                        return failed(DIED, "the run ends", len(responses))
                    self._processes[index] = self._new()
                    try:
                        await self._processes[index].start()
                    except RewardError as e:  # it could be set up when the run began: this sample is lost, others try
                        return failed(DIED, f"the reward process could not be replaced: {e}", len(responses))
            answer = await self._processes[index].judge(prompt, responses, fields)
            self.counts.update({name: number for name, number in answer.counts.items() if name in COUNTED})
            return answer
        finally:
            self._free.put_nowait(index)


class _RewardProcess:
    """One child process and the connection to it, from its start to its end."""

    def __init__(self, section: str, config: RewardPart, log_path: Path | None, max_log_bytes: int) -> None:
        self._section = section
        self._config = config
        self._log_path = log_path
        self._max_log_bytes = max_log_bytes
        self._keeper: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[list[Any]]] = {}
        """Who waits for an answer, by the number of what was sent."""
        self._number = 0
        """Number of the last sample that was sent."""
        self._writing = asyncio.Lock()
        self._grace_s = 0.0
        """How much later than reward.timeout_s an answer may come."""
        self.is_over = False
        """Whether it takes no further samples."""

    async def start(self) -> Ready:
        """Start the process and wait for it to be ready.

        Raises:
            RewardError: The reward cannot be set up.
        """
        self._connection, self._keeper = self._spawn()
        self._reader = asyncio.create_task(self._read(self._connection, self._keeper))
        folder = None if self._log_path is None else str(self._log_path.parent.absolute())
        message = [asdict(self._config), self._section, folder]
        answer = await self._exchange(message, 0, START_TIMEOUT_S)
        match answer:
            case ["ready", bool() as is_async, bool() as is_of_group, str() as source]:
                self._grace_s = LATE_S if is_async else 0.0
                return Ready(is_async, is_of_group, source)
            case ["refused", str() as reason]:
                await self.end()
                raise RewardError(reason)
            case _:
                await self.end()
                raise RewardError(
                    f"{self._section}.kind={self._config.kind}: its process could not be started: "
                    f"{' '.join(map(str, answer))[:MAX_REASON]}"
                )

    async def judge(self, prompt: str, responses: Sequence[str], fields: Mapping[str, Any]) -> Answer:
        """What became of one sample or group. A failure that the process did not report itself ends it."""
        self._number += 1
        message = [self._number, prompt, list(responses), dict(fields)]
        answer = await self._exchange(message, self._number, self._config.timeout_s + self._grace_s)
        read = read_answer(answer, len(responses))
        if read is not None:
            return read
        await self.end()
        match answer:
            case [("timeout" | "died" | "garbled") as kind, str() as report]:
                return failed(kind, report, len(responses))
        return failed(GARBLED, "an answer that is no score was written to the reward's connection", len(responses))

    async def end(self) -> None:
        """End the process and everything that it started. Idempotent."""
        self.is_over = True
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            if await asyncio.to_thread(_wait, self._keeper) is None:
                # A device or a file system holds it; its successor need not wait.
                logger.warning("a reward was killed and has not ended yet; process %d waits for it", self._keeper.pid)
        if self._connection is not None and self._reader is not None:
            self._connection.shutdown(socket.SHUT_RDWR)  # who reads or writes stops, and only then is it closed
            await self._reader
            async with self._writing:
                self._connection.close()

    def _spawn(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        environment = reward_environment(self._config, os.environ, self._section)
        connection, theirs = socket.socketpair()
        connection.setblocking(False)
        fd = str(theirs.fileno())
        reward = [sys.executable, "-X", "faulthandler", "-P", "-m", "rollout.rewards.processes.process", fd]
        with theirs, open(self._log_path or os.devnull, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, fd, str(self._max_log_bytes), *reward],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,  # a signal to our group, such as Ctrl-C, does not reach it
            )
        return connection, process

    async def _exchange(self, message: object, number: int, timeout_s: float) -> list[Any]:
        """Send one message and return its answer, without the number, or [kind of failure, report]. Every part has a
        deadline: a process that reads nothing, or sends half an answer, cannot block.
        """
        assert self._connection is not None
        if self.is_over:
            return [DIED, "the reward process was ended because of another sample"]
        loop = asyncio.get_running_loop()
        answered = self._waiting[number] = loop.create_future()
        is_sent = False
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(OSError):  # the other end is gone: _read says why
                    async with self._writing:
                        await loop.sock_sendall(self._connection, frames.framed(message))
                is_sent = True
                return await answered
        except TimeoutError:
            what = "gave no score" if is_sent else "read no sample"
            return [TIMEOUT, f"the reward process {what} within reward.timeout_s={self._config.timeout_s:g} seconds"]
        finally:
            self._waiting.pop(number, None)

    async def _read(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """Hand answers to those who wait for them, until one is no answer, or none can come."""
        try:
            while True:
                answer = await frames.next_message(connection, max_bytes=MAX_ANSWER_BYTES)
                if not isinstance(answer, list) or not answer or not isinstance(answer[0], int):
                    raise frames.BadFrame("it is no answer")
                waiter = self._waiting.get(answer[0])
                if waiter is None:
                    raise frames.BadFrame("an answer to another sample, or to none")
                if not waiter.done():
                    waiter.set_result(answer[1:])
                self._waiting.pop(answer[0])
        except frames.BadFrame as e:
            failure = [GARBLED, f"something else than a score was written to the reward's connection: {e}"]
        except (EOFError, OSError):
            self.is_over = True
            code = await asyncio.to_thread(_wait, process)
            if code is None:
                report = "the reward closed its connection to the run: close no descriptor that you did not open"
            else:
                report = f"the reward process ended (exit status {code}) while it judged a sample"
            failure = [DIED, report]
        self.is_over = True
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(failure)


def reward_environment(config: RewardPart, environ: Mapping[str, str], section: str = "reward") -> dict[str, str]:
    """The environment of a reward process: the variables of PASSED_ON and reward.env, and PYTHONPATH.

    Raises:
        RewardError: reward.env or reward.judge.api_key_env names a variable that is not set.
    """
    if missing := [name for name in config.env if name not in environ]:
        raise RewardError(
            f"{section}.env names {', '.join(missing)}, which is not set where the run starts; export it, or remove it "
            f"from {section}.env"
        )
    key = config.judge.api_key_env if config.kind == "judge" else None
    if key is not None and key not in environ:
        raise RewardError(
            f"{section}.judge.api_key_env names {key}, which is not set where the run starts; export it, or set it to "
            "null for a judge that takes no key"
        )
    names = (*PASSED_ON, *config.env, *([key] if key is not None else []))
    path = os.pathsep.join([*(entry for entry in sys.path if entry), os.getcwd()])
    return {name: environ[name] for name in names if name in environ} | {"PYTHONPATH": path}


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """Exit status; None if the process still runs."""
    try:
        return process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
