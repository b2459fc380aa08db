"""Rewards in processes of their own, so that a user's function can fail in every way and cost one sample each time.

Owns: the reward processes, their deadlines and replacement, and what a reward is told. Does not own what a reward is
(`function.py`) nor what a missing reward means (the advantage leaves the sample out).
Invariant: score_group() returns one entry per rollout, in order, whatever the reward does.

    score_group --sample--> free process --> score
                              |  raised, not_a_number: the process goes on
                              +- timeout, died:        the process is killed and replaced by the next call

No wait is without a deadline: reward.timeout_s for what is sent and received, END_TIMEOUT_S for the end of a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from conf.schema import RewardConfig
from rollout.errors import RewardError
from rollout.rewards.function import FINISH_REASON
from rollout.types import Prompt, Rollout

logger = logging.getLogger(__name__)

TIMEOUT = "timeout"
DIED = "died"
START_TIMEOUT_S = 120.0
"""Longest import of a reward's module, in seconds; some import a whole framework."""
END_TIMEOUT_S = 1.0
"""How long a process may take to end: after its connection closed, before it is killed; and once it is killed."""


def check_reward(config: RewardConfig) -> None:
    """Set the reward up once, in a process of its own, to tell before a run starts whether it can.

    Raises:
        RewardError: It cannot; the message names the option and the reason.
    """
    process = _RewardProcess(config, log_path=None)
    try:
        process.start()
    finally:
        process.kill()


class RewardRunner:
    """A pool of reward processes.

    Args:
        config: Which reward, how many processes, how long one sample may take.
        log_path: File that receives whatever rewards print. None: it is dropped.
    """

    def __init__(self, config: RewardConfig, *, log_path: Path | None = None) -> None:
        self._processes = [_RewardProcess(config, log_path) for _ in range(config.num_processes)]
        self._free: asyncio.Queue[_RewardProcess] = asyncio.Queue()
        self._threads = ThreadPoolExecutor(config.num_processes, thread_name_prefix="reward")
        self._reported: set[str] = set()

    async def start(self) -> None:
        """Start every process and wait until it has imported the reward.

        Raises:
            RewardError: The reward cannot be set up.
        """
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, process.start) for process in self._processes))
        for process in self._processes:
            self._free.put_nowait(process)

    async def score_group(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float | None]:
        """Rewards of the siblings of one prompt; None where the reward failed, of which the log tells the kind."""
        outcomes = await asyncio.gather(*(self._score(prompt, rollout) for rollout in rollouts))
        for kind, value in outcomes:
            if kind != "score":
                self._report_once(kind, value, prompt)
        return [value if kind == "score" else None for kind, value in outcomes]

    async def close(self) -> None:
        """Kill the processes. Idempotent."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _score(self, prompt: Prompt, rollout: Rollout) -> tuple[str, Any]:
        fields = {FINISH_REASON: rollout.finish_reason, **prompt.fields}  # a column of that name stays what it is
        process = await self._free.get()
        try:
            future = self._threads.submit(process.score, prompt.text, rollout.text, fields)
        except RuntimeError as e:
            raise RewardError("the reward runner is closed") from e
        # The process is free when its thread is done, not when the waiter is: a cancelled waiter must not hand out a
        # busy one.
        call = asyncio.wrap_future(future)
        call.add_done_callback(lambda _: self._free.put_nowait(process))
        return await asyncio.shield(call)

    def _report_once(self, kind: str, text: str, prompt: Prompt) -> None:
        """Log the first failure of each kind in full (of exceptions: of each class and place); the rest are counted."""
        key = f"{kind}: {_class_and_place(text)}"
        if key not in self._reported:
            self._reported.add(key)
            logger.warning(
                "a reward failed (%s) on prompt %d; its sample is left out; more of this kind are only counted:\n%s",
                kind,
                prompt.prompt_id,
                text,
            )


def _class_and_place(text: str) -> str:
    """Of a traceback, without the exception's own words, which may hold the response. Any other text as it is."""
    lines = text.strip().splitlines()
    frames = [at for at, line in enumerate(lines) if line.lstrip().startswith("File ")]
    if not frames:
        return text.strip()
    raised = next((line for line in lines[frames[-1] + 1 :] if not line.startswith(" ")), "")
    return f"{raised.partition(':')[0]} {lines[frames[-1]].strip()}"


class _RewardProcess:
    """One child process and the connection to it. Blocking; used by one thread at a time."""

    def __init__(self, config: RewardConfig, log_path: Path | None) -> None:
        self._config = config
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Start the process and wait for it to be ready. Raises RewardError if the reward cannot be set up."""
        mine, theirs = socket.socketpair()
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(self._config.timeout_s))
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(self._config.timeout_s))
        self._connection = Connection(mine.detach())
        path = os.pathsep.join([os.getcwd(), *(entry for entry in sys.path if entry)])
        with theirs, open(self._log_path or os.devnull, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rollout.rewards.process", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # so that kill() reaches whatever the reward starts
            )
        kind, text = self._exchange(self._config, START_TIMEOUT_S)
        if kind != "ready":
            self.kill()
            raise RewardError(
                text
                if kind == "refused"
                else f"reward.kind={self._config.kind}: its process {kind} while it started: {text}"
            )

    def score(self, prompt: str, response: str, fields: dict[str, Any]) -> tuple[str, Any]:
        """("score", value), or (failure kind, report). Restarts the process if the last sample took it down."""
        if self._connection is None:
            try:
                self.start()
            except RewardError as e:  # when the run began it could be set up: costs this sample, the next one tries
                return DIED, f"the reward process could not be replaced: {e}"
        kind, value = self._exchange((prompt, response, fields), self._config.timeout_s)
        if kind in (TIMEOUT, DIED):
            self.kill()
        return kind, value

    def kill(self) -> None:
        """End the process and everything that it started. Idempotent."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            if _wait(self._process) is None:  # a device or a file system holds it; its successor need not wait
                logger.warning("reward process %d was killed and has not ended yet", self._process.pid)
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(self, message: Any, timeout_s: float) -> tuple[str, Any]:
        """One message and its answer. No part of it can last: not a process that reads nothing, nor half an answer."""
        assert self._connection is not None and self._process is not None
        process = self._process  # kill() may come from close() meanwhile
        deadline = time.monotonic() + timeout_s
        try:
            self._connection.send(message)
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                return TIMEOUT, f"no score within reward.timeout_s={timeout_s:g} seconds"
            return self._connection.recv()
        except BlockingIOError:  # the socket's own timeout
            return TIMEOUT, f"the reward process read no sample within reward.timeout_s={timeout_s:g} seconds"
        except (EOFError, OSError):
            code = _wait(process)
            if code is None:
                return DIED, "the reward closed its connection to the run: close no descriptor that you did not open"
            return DIED, f"the reward process ended (exit status {code}) while it scored a sample"


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """Exit status; None if the process goes on."""
    try:
        return process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None


def _timeval(seconds: float) -> bytes:
    """C's struct timeval."""
    whole = int(seconds)
    return struct.pack("ll", whole, max(1, int(1e6 * (seconds - whole))))
