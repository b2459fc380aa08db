"""The agent processes: the user's coroutines, apart from the run, so that each can cost only its own episodes.

Owns: what an agent process is asked, and what is believed of its answers. Does not own: processes, their replacement
and the detection of one that blocks (user_processes), what an episode may use (episode.py), its deadline (service.py).
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from slipstream.conf.json_files import JsonMapping
from slipstream.rollout.agents.episode import MODEL
from slipstream.rollout.errors import AgentError
from slipstream.rollout.user_processes.outcomes import (
    BLOCKED,
    DIED,
    NOT_A_NUMBER,
    NOTHING,
    RAISED,
    Outcome,
    read_outcome,
)
from slipstream.rollout.user_processes.pool import UserPool
from slipstream.rollout.user_processes.user_process import Lost, Program

MAX_MESSAGE_BYTES = 1 << 20
TOLD = (NOTHING, RAISED, NOT_A_NUMBER)


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
        return await pool.ask([dict(task), base_url, key, MODEL], partial(read_outcome, told=TOLD))
    except Lost as lost:
        return Outcome(BLOCKED if lost.kind == BLOCKED else DIED, report=lost.report, place=lost.kind)
