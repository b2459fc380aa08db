"""The processes of one reward, so that a user's function can fail in any way and cost only what it was judging.

Owns: what a reward process is asked, what is believed of its answers, its deadline, its environment, and what is
counted. Does not own: processes (user_processes/pool.py), what happens inside one (reward_process.py), nor what several
rewards add up to (runner.py).
Invariant: judge() returns one outcome per response, in order, whatever the reward does.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.conf.json_files import JsonMapping
from slipstream.conf.schema import RewardPart
from slipstream.rollout.errors import RewardError
from slipstream.rollout.rewards.counting import COUNTED
from slipstream.rollout.rewards.function import Form
from slipstream.rollout.user_processes.outcomes import (
    NOT_A_NUMBER,
    RAISED,
    TIMEOUT,
    Outcome,
    plain_number,
    read_outcome,
)
from slipstream.rollout.user_processes.pool import UserPool, user_environment
from slipstream.rollout.user_processes.user_process import Lost, Program

LATE_S = 30.0
"""How much later than its own deadline a coroutine's answer may come, before its process is taken to be blocked, which
costs all that it judges. Another coroutine may block it for a while: that time counts for none (conf/deadlines.py).
"""
MAX_ANSWER_BYTES = 1 << 20
"""Largest answer that is read. Those about a large group are the largest: each response may have a text (outcomes.py).
"""
TOLD = (RAISED, NOT_A_NUMBER, TIMEOUT)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reward process says about one sample, or about the samples of one group."""

    outcomes: list[Outcome]
    counts: dict[str, float]
    """What the reward counted, such as the tokens that a judge read."""


def read_answer(message: Sequence[object], num_responses: int) -> Answer | None:
    """[outcomes, counts] as a reward process wrote them; None if that is no answer about so many responses."""
    match message:
        case [list(outcomes), dict(counts)] if len(outcomes) in (1, num_responses):
            read = [read_outcome(one, TOLD) for one in outcomes] * (num_responses // len(outcomes))
            if all(plain_number(value) is not None for value in counts.values()):
                known = [one for one in read if one is not None]
                return Answer(known, dict(counts)) if len(known) == len(read) else None
    return None


class RewardPool:
    """The processes of one reward, which messages call `section`: reward, or reward.parts.NAME. What it prints goes to
    `log_path`; `num_processes` is in place of what the options say."""

    def __init__(
        self, section: str, config: RewardPart, log_path: Path | None, num_processes: int | None = None
    ) -> None:
        self._config = config
        self._section = section
        self._log_path = log_path
        self._num_processes = num_processes or config.num_processes
        self._pool: UserPool | None = None
        self._limit_s = config.timeout_s
        """When a process is taken to be stuck."""
        self._calls: set[asyncio.Task[Answer]] = set()
        self.counts: Counter[str] = Counter()
        """What the reward counted since the start, by the names of COUNTED."""

    async def start(self) -> Form:
        """Start every process and wait until it has imported the reward. Raises RewardError: the reward cannot be set
        up."""
        folder = None if self._log_path is None else str(self._log_path.parent.absolute())
        program = Program(
            what="reward",
            option=f"{self._section}.kind={self._config.kind}",
            module="slipstream.rollout.rewards.reward_process",
            first_message=[asdict(self._config), self._section, folder],
            error=RewardError,
            environment=reward_environment(self._config, os.environ, self._section),
            log_path=self._log_path,
            max_message_bytes=MAX_ANSWER_BYTES,
        )
        self._pool = UserPool(program, self._num_processes)
        form = Form(*await self._pool.start())
        self._pool.limit(self._config.max_concurrent if form.is_async else 1)
        self._limit_s += LATE_S if form.is_async else 0.0
        return form

    async def judge(
        self, prompt: str, responses: Sequence[str], fields: JsonMapping, messages: Sequence[JsonMapping] | None = None
    ) -> Answer:
        """What became of one sample, or of all samples of a group. Raises RewardError: the pool is closed."""
        # A process is free when its sample is judged, not when the waiter is gone: if the waiter is cancelled, the
        # process is still busy.
        call = asyncio.create_task(self._judge([prompt, list(responses), dict(fields), messages]))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _judge(self, question: list[Any]) -> Answer:
        if self._pool is None or self._pool.is_closed:
            raise RewardError("the reward runner is closed")
        num_responses = len(question[1])
        limit = f"reward.timeout_s={self._config.timeout_s:g} seconds"
        try:
            answer = await self._pool.ask(
                question, lambda message: read_answer(message, num_responses), self._limit_s, limit
            )
        except Lost as lost:
            return Answer([Outcome(lost.kind, report=lost.report)] * num_responses, {})
        self.counts.update({name: number for name, number in answer.counts.items() if name in COUNTED})
        return answer


def reward_environment(config: RewardPart, environ: Mapping[str, str], section: str = "reward") -> dict[str, str]:
    """The environment of a reward process: what user_environment() gives, and the key of a judge. Raises RewardError:
    reward.env or reward.judge.api_key_env names a variable that is not set."""
    key = config.judge.api_key_env if config.kind == "judge" else None
    if key is not None and key not in environ:
        raise RewardError(
            f"{section}.judge.api_key_env names {key}, which is not set where the run starts; export it, or set it to "
            "null for a judge that takes no key"
        )
    also = ("CUDA_VISIBLE_DEVICES", *([key] if key is not None else []))
    return user_environment(f"{section}.env", config.env, environ, RewardError, also=also)
