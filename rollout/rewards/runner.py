"""Rewards in processes of their own, so that a user's function can fail in any way and cost only one sample each time.

Owns: the reward processes, their deadlines and replacement, their environment, and what a reward is told. Does not own
what a reward is (`function.py`), the end of what it starts (`keeper.py`), nor what a missing reward means (the
advantage leaves the sample out).
Invariants: score_group() returns one entry per rollout, in order, whatever the reward does. What a reward process
writes is treated as data: JSON of a bounded size, which runs nothing.

    score_group --sample--> free process --> score
                              |  raised, not_a_number:    the process goes on
                              +- timeout, died, garbled:  the process is killed and replaced by the next call

Every wait has a deadline: reward.timeout_s for what is sent and received, END_TIMEOUT_S for the end of a process.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from conf.schema import RewardConfig
from rollout.errors import RewardError
from rollout.rewards import frames, keeper
from rollout.rewards.function import FINISH_REASON
from rollout.types import Judgement, Prompt, Rollout

logger = logging.getLogger(__name__)

SCORE = "score"
TIMEOUT = "timeout"
DIED = "died"
GARBLED = "garbled"
START_TIMEOUT_S = 120.0
"""Longest import of a reward's module, in seconds; some import a whole framework."""
END_TIMEOUT_S = 1.0
"""How long a process may take to end after its connection closed, before it is killed; and again after the kill."""
MAX_ANSWER_BYTES = 1 << 16
"""Largest answer that is read. Reports of failures are the largest (rollout.rewards.process)."""
MAX_LOG_BYTES = 64 << 20
"""Size at which rewards.log is cut."""
PASSED_ON = (
    *("PATH", "HOME", "USER", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE"),  # what any program expects
    *("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),  # what its libraries and GPUs are
)
"""Variables that a reward gets in addition to reward.env; its PYTHONPATH is made from this process's sys.path."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sample."""

    kind: str
    """SCORE, or the kind of failure."""
    value: float | None = None
    report: str = ""
    place: str = ""
    """Class of an exception and where it was raised, without its message, which may contain the response."""


def check_reward(config: RewardConfig) -> None:
    """Set the reward up once, in a process of its own, to find out before a run starts whether that works.

    Raises:
        RewardError: It cannot; the message names the option and the reason.
    """
    process = _RewardProcess(config, log_path=None, max_log_bytes=0)
    try:
        process.start()
    finally:
        process.kill()


class RewardRunner:
    """A pool of reward processes.

    Args:
        config: Which reward, how many processes, how long one sample may take.
        log_path: File for what rewards print; a copy of the file that defines the reward goes beside it. None: neither
            is kept.
        max_log_bytes: Size at which the file is cut.
    """

    def __init__(
        self, config: RewardConfig, *, log_path: Path | None = None, max_log_bytes: int = MAX_LOG_BYTES
    ) -> None:
        self._kind = config.kind
        self._log_path = log_path
        self._processes = [_RewardProcess(config, log_path, max_log_bytes) for _ in range(config.num_processes)]
        self._free: asyncio.Queue[_RewardProcess] = asyncio.Queue()
        self._threads = ThreadPoolExecutor(config.num_processes, thread_name_prefix="reward")
        self._reported: set[str] = set()

    async def start(self) -> None:
        """Start every process and wait until it has imported the reward.

        Raises:
            RewardError: The reward cannot be set up.
        """
        loop = asyncio.get_running_loop()
        sources = await asyncio.gather(
            *(loop.run_in_executor(self._threads, process.start) for process in self._processes)
        )
        logger.info("%d reward processes; a subreaper beside each ends what it starts", len(self._processes))
        if ":" in self._kind and sources[0]:
            self._keep_source(Path(sources[0]))
        for process in self._processes:
            self._free.put_nowait(process)

    async def score_group(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Judgement]:
        """What each of one prompt's rollouts is worth; the log says how a reward failed."""
        outcomes = await asyncio.gather(*(self._score(prompt, rollout) for rollout in rollouts))
        for outcome in outcomes:
            if outcome.kind != SCORE:
                self._report_once(outcome, prompt)
        return [Judgement(outcome.value, {self._kind: outcome.value}) for outcome in outcomes]

    async def close(self) -> None:
        """End the processes and everything that they started. Idempotent."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _score(self, prompt: Prompt, rollout: Rollout) -> Outcome:
        fields = {FINISH_REASON: rollout.finish_reason, **prompt.fields}  # a column of that name wins
        process = await self._free.get()
        try:
            future = self._threads.submit(process.score, prompt.text, rollout.text, fields)
        except RuntimeError as e:
            raise RewardError("the reward runner is closed") from e
        # The process is free when its thread is done, not when the waiter is: if the waiter is cancelled, the process
        # is still busy.
        call = asyncio.wrap_future(future)
        call.add_done_callback(lambda _: self._free.put_nowait(process))
        return await asyncio.shield(call)

    def _report_once(self, outcome: Outcome, prompt: Prompt) -> None:
        """Log the first failure of each kind in full (for exceptions: of each class and place). Count the others."""
        key = f"{outcome.kind}: {outcome.place or outcome.report}"
        if key not in self._reported:
            self._reported.add(key)
            logger.warning(
                "a reward failed (%s) on prompt %d; its sample is left out; more of this kind are only counted:\n%s",
                outcome.kind,
                prompt.prompt_id,
                outcome.report,
            )

    def _keep_source(self, file: Path) -> None:
        """Copy the file that defines the reward into the run folder, and log its hash."""
        try:
            source = file.read_bytes()
        except OSError as e:  # the reward's process could read it, so only the copy is missing
            logger.warning("reward.kind=%s: %s was not copied into the run folder: %s", self._kind, file, e)
            return
        logger.info("reward.kind=%s: %s, sha256 %s", self._kind, file, hashlib.sha256(source).hexdigest())
        if self._log_path is not None:
            self._log_path.with_name("reward_source.py").write_bytes(source)


class _RewardProcess:
    """One child process and the connection to it. Blocking; used by one thread at a time."""

    def __init__(self, config: RewardConfig, log_path: Path | None, max_log_bytes: int) -> None:
        self._config = config
        self._log_path = log_path
        self._max_log_bytes = max_log_bytes
        self._keeper: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._number = 0
        """Number of the last sample that was sent."""

    def start(self) -> str:
        """Start the process and wait for it to be ready. Returns the file that defines the reward, or "".

        Raises:
            RewardError: The reward cannot be set up.
        """
        environment = reward_environment(self._config, os.environ)
        self._connection, theirs = socket.socketpair()
        fd = str(theirs.fileno())
        reward = [sys.executable, "-P", "-m", "rollout.rewards.process", fd]
        with theirs, open(self._log_path or os.devnull, "ab") as output:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, fd, str(self._max_log_bytes), *reward],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,  # a signal to our group, such as Ctrl-C, does not reach it
            )
        kind, *values = self._exchange(asdict(self._config), START_TIMEOUT_S)
        if kind == "ready" and len(values) == 1:
            return str(values[0])
        self.kill()
        text = str(values[0]) if values else ""
        raise RewardError(
            text
            if kind == "refused"
            else f"reward.kind={self._config.kind}: its process {kind} while it started: {text}"
        )

    def score(self, prompt: str, response: str, fields: Mapping[str, object]) -> Outcome:
        """What became of one sample. Starts the process again if the last sample ended it."""
        if self._connection is None:
            try:
                self._number = 0
                self.start()
            except RewardError as e:  # it could be set up when the run began: this sample is lost, the next one tries
                return Outcome(DIED, report=f"the reward process could not be replaced: {e}")
        self._number += 1
        outcome = _outcome(self._exchange([self._number, prompt, response, fields], self._config.timeout_s))
        if outcome.kind in (TIMEOUT, DIED, GARBLED):
            self.kill()
        return outcome

    def kill(self) -> None:
        """End the process and everything that it started. Idempotent."""
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            if _wait(self._keeper) is None:  # a device or a file system holds it; its successor need not wait
                logger.warning("a reward was killed and has not ended yet; process %d waits for it", self._keeper.pid)
            self._keeper = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(self, message: object, timeout_s: float) -> list[object]:
        """Send one message and return its answer, without the number, or [kind of failure, report]. Every part has a
        deadline: a process that reads nothing, or sends half an answer, cannot block.
        """
        connection, process = self._connection, self._keeper  # close() may call kill() meanwhile
        assert connection is not None and process is not None
        deadline = time.monotonic() + timeout_s
        is_sent = False
        try:
            frames.send(connection, message, deadline=deadline)
            is_sent = True
            answer = frames.receive(connection, max_bytes=MAX_ANSWER_BYTES, deadline=deadline)
        except TimeoutError:
            what = "gave no score" if is_sent else "read no sample"
            return [TIMEOUT, f"the reward process {what} within reward.timeout_s={timeout_s:g} seconds"]
        except frames.BadFrame as e:
            return [GARBLED, f"something else than a score was written to the reward's connection: {e}"]
        except (EOFError, OSError):
            code = _wait(process)
            if code is None:
                return [DIED, "the reward closed its connection to the run: close no descriptor that you did not open"]
            return [DIED, f"the reward process ended (exit status {code}) while it scored a sample"]
        if not isinstance(answer, list) or answer[:1] != [self._number]:
            return [GARBLED, "an answer to another sample, or to none, was written to the reward's connection"]
        return answer[1:]


def reward_environment(config: RewardConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a reward process: the variables of PASSED_ON and reward.env, and PYTHONPATH.

    Raises:
        RewardError: reward.env names a variable that is not set.
    """
    if missing := [name for name in config.env if name not in environ]:
        raise RewardError(
            f"reward.env names {', '.join(missing)}, which is not set where the run starts; export it, or remove it "
            "from reward.env"
        )
    path = os.pathsep.join([*(entry for entry in sys.path if entry), os.getcwd()])
    return {name: environ[name] for name in (*PASSED_ON, *config.env) if name in environ} | {"PYTHONPATH": path}


def _outcome(answer: Sequence[object]) -> Outcome:
    """Check the answer: a reward process may have written anything."""
    match answer:
        case ["score", float() as value] if math.isfinite(value):
            return Outcome(SCORE, value)
        case ["raised" | "not_a_number" as kind, str() as report, str() as place]:
            return Outcome(str(kind), report=report, place=place)
        case ["timeout" | "died" | "garbled" as kind, str() as report]:
            return Outcome(str(kind), report=report)
        case _:
            return Outcome(GARBLED, report="an answer that is no score was written to the reward's connection")


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """Exit status; None if the process still runs."""
    try:
        return process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
