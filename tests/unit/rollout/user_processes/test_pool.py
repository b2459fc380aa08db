"""A question that nobody waits for any more, or that is answered at its deadline, costs no other question."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollout.agents.agent_pool import Outcome, agent_pool, run_episode
from rollout.agents.failures import DIED
from rollout.errors import AgentError
from rollout.rewards.outcomes import read_answer
from rollout.user_processes.pool import UserPool, user_environment
from rollout.user_processes.user_process import TIMEOUT, Lost

AGENT = """
import asyncio
from pathlib import Path

async def play(task, session):
    try:
        await asyncio.sleep(task["seconds"])
    except asyncio.CancelledError:
        Path(task["told"]).touch()
        raise
    return 0.5
"""


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[UserPool]:
    (folder / "agent.py").write_text(AGENT)
    environment = user_environment("rollout.episodes.env", (), os.environ, AgentError)
    pool = agent_pool(f"{folder}/agent.py:play", 1, 60.0, environment, None)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def until(file: Path) -> None:
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(file.exists):
            await asyncio.sleep(0.02)


async def test_a_cancelled_question_is_cancelled_in_the_process_which_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        other = asyncio.create_task(run_episode(pool, {"seconds": 2}, "", ""))
        late = asyncio.create_task(run_episode(pool, {"seconds": 600, "told": str(tmp_path / "told")}, "", ""))
        await asyncio.sleep(0.5)
        late.cancel()
        await until(tmp_path / "told")
        assert await other == Outcome(reward=0.5)
        assert late.cancelled()


async def test_what_is_asked_when_the_pool_is_closed_cleans_up(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        task = {"seconds": 600, "told": str(tmp_path / "told")}
        asked = asyncio.create_task(run_episode(pool, task, "", ""))
        await asyncio.sleep(0.5)
    assert (await asked).failure == DIED
    assert (tmp_path / "told").exists()


async def test_an_answer_that_comes_with_the_deadline_is_late(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        question = [{"seconds": 0.2}, "", "", ""]
        asked = asyncio.create_task(pool.ask(question, lambda answer: answer, timeout_s=0.6, limit="0.6 s"))
        await asyncio.sleep(0.05)
        time.sleep(1.5)  # noqa: ASYNC251 - the loop finds the answer and the end of the time together
        with pytest.raises(Lost) as lost:
            await asked
        assert lost.value.kind == TIMEOUT
        assert await run_episode(pool, {"seconds": 0}, "", "") == Outcome(reward=0.5)


async def test_a_process_that_is_up_when_the_pool_is_closed_ends(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        (process,) = pool._alive
    assert await process._kept.exit_status() is not None


@pytest.mark.parametrize("count", [10**400, -(10**400), float("inf"), "1", None])
def test_counts_that_are_no_numbers_are_no_answer(count: object) -> None:
    assert read_answer([[["score", 1.0]], {"judge/calls": count}], 1) is None
