"""The agent processes: the user's coroutines, apart from the run, so that each can cost only its own episodes.

Owns: what an agent process is asked, and what is believed of its answers. Does not own: processes, their replacement
and the detection of one that blocks (user_processes), what an episode may use (episode.py), its deadline (service.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.conf.json_files import JsonMapping
from slipstream.rollout.agents.episode import MODEL
from slipstream.rollout.agents.failures import BLOCKED, DIED, NOT_A_NUMBER, RAISED
from slipstream.rollout.errors import AgentError
from slipstream.rollout.user_processes.pool import UserPool
from slipstream.rollout.user_processes.user_process import Lost, Program

MAX_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    failure: str = ""
    """One of failures.py; "": the agent returned."""
    reward: float | None = None
    """What the agent returned; None leaves the judgement to the run's reward."""
    report: str = ""
    place: str = ""
    """Class of an exception and where it was raised, without its message."""


def agent_pool(
    agent: str, num_processes: int, blocked_s: float, environment: Mapping[str, str], log_path: Path | None
) -> UserPool:
    """Processes of `package.module:function` or `FILE.py:function`. Its start() gives [the file that defines it]."""
    program = Program(
        what="agent",
        option=f"rollout.agent={agent}",
        module="slipstream.rollout.agents.agent_process",
        first_message=agent,
        error=AgentError,
        environment=environment,
        log_path=log_path,
        max_message_bytes=MAX_MESSAGE_BYTES,
        silence_s=blocked_s,
    )
    return UserPool(program, num_processes)


async def run_episode(pool: UserPool, task: JsonMapping, base_url: str, key: str) -> Outcome:
    """Run one episode to its end. Cancelled, it cancels the agent's coroutine, and waits for nothing."""
    try:
        return await pool.ask([dict(task), base_url, key, MODEL], _outcome)
    except Lost as lost:
        return Outcome(BLOCKED if lost.kind == BLOCKED else DIED, report=lost.report, place=lost.kind)


def _outcome(message: list[Any]) -> Outcome | None:
    """What an agent process said; None if that is no outcome: the user's code may have written anything."""
    match message:
        case ["ended", None]:
            return Outcome()
        case ["ended", float() as reward] if math.isfinite(reward):
            return Outcome(reward=reward)
        case ["failed", "raised" | "not_a_number" as kind, str() as report, str() as place]:
            return Outcome(RAISED if kind == RAISED else NOT_A_NUMBER, report=report, place=place)
        case _:
            return None
