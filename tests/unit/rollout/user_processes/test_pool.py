"""A question that nobody waits for any more, or that is answered at its deadline, costs no other question."""

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from slipstream.rollout.agents.agent_pool import agent_pool, run_episode
from slipstream.rollout.errors import AgentError
from slipstream.rollout.user_processes.keeper import copy
from slipstream.rollout.user_processes.outcomes import DIED, SCORE, TIMEOUT, Outcome
from slipstream.rollout.user_processes.pool import UserPool, _Place, user_environment
from slipstream.rollout.user_processes.user_process import Lost

AGENT = """
import asyncio
from pathlib import Path

async def play(task, session):
    diary = Path(task.get("diary", "/dev/null"))
    try:
        diary.write_text("begun")
        await asyncio.sleep(task["seconds"])
    except asyncio.CancelledError:
        diary.write_text("cancelled")
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


async def until(diary: Path, said: str) -> None:
    while not is_in(diary, said):
        await asyncio.sleep(0.02)


def is_in(diary: Path, said: str) -> bool:
    return diary.exists() and diary.read_text() == said


async def test_a_cancelled_question_is_cancelled_in_the_process_which_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        other = asyncio.create_task(run_episode(pool, {"seconds": 2}, "", ""))
        late = asyncio.create_task(run_episode(pool, {"seconds": 600, "diary": str(tmp_path / "diary")}, "", ""))
        await until(tmp_path / "diary", "begun")
        late.cancel()
        await until(tmp_path / "diary", "cancelled")
        assert await other == Outcome(SCORE, 0.5)
        assert late.cancelled()


async def test_a_process_for_which_the_machine_has_no_room_costs_what_is_asked_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as pool:
        (process,) = pool._alive
        with monkeypatch.context() as full:
            full.setattr(subprocess, "Popen", Mock(side_effect=BlockingIOError(11, "no room for a process")))
            await process.end()
            outcome = await run_episode(pool, {"seconds": 0}, "", "")
        assert outcome.kind == DIED and "no room for a process" in outcome.report
        assert await run_episode(pool, {"seconds": 0}, "", "") == Outcome(SCORE, 0.5)


async def test_what_is_asked_when_the_pool_is_closed_cleans_up(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        task = {"seconds": 600, "diary": str(tmp_path / "diary")}
        asked = asyncio.create_task(run_episode(pool, task, "", ""))
        await until(tmp_path / "diary", "begun")
    assert (await asked).kind == DIED
    assert is_in(tmp_path / "diary", "cancelled")


async def test_an_answer_that_comes_with_the_deadline_is_late(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        question = [{"seconds": 0.5}, "", "", ""]
        asked = asyncio.create_task(pool.ask(question, lambda answer: answer, timeout_s=1.0, limit="1 s"))
        await asyncio.sleep(0.05)
        time.sleep(1.5)  # noqa: ASYNC251 - the loop finds the answer and the end of the time together
        with pytest.raises(Lost) as lost:
            await asked
        assert lost.value.kind == TIMEOUT
        assert await run_episode(pool, {"seconds": 0}, "", "") == Outcome(SCORE, 0.5)


async def test_a_process_that_is_up_when_the_pool_is_closed_ends(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        (process,) = pool._alive
    assert await process._kept.exit_status() is not None


async def test_the_process_with_room_that_is_up_and_has_the_fewest_questions_is_asked(tmp_path: Path) -> None:
    async with running(tmp_path) as pool:
        (place,) = pool._places
        pool.limit(2)
        idle = _Place()
        assert place.is_up and not idle.is_up
        for num_questions, wanted in ((0, place), (1, place), (2, idle)):
            place.num_questions = num_questions
            assert min([idle, place], key=pool._preference) is wanted, num_questions
        busier = _Place(place.process, num_questions=1)
        place.num_questions = 0
        assert min([busier, place], key=pool._preference) is place


def test_a_log_takes_what_there_is_room_for(tmp_path: Path) -> None:
    """Two keepers append to one file of ten bytes."""
    logs = [os.open(tmp_path / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT) for _ in range(2)]
    source, theirs = os.pipe()
    os.set_blocking(source, False)
    assert not copy(source, logs[0], 10), "there is nothing to read"
    for log, written, wanted in (
        (logs[0], b"abcd", b"abcd"),
        (logs[1], b"efghij", b"abcdefghij"),
        (logs[0], b"k", b"abcdefghij"),
    ):
        os.write(theirs, written)
        assert copy(source, log, 10)
        assert (tmp_path / "log").read_bytes() == wanted
    small = os.open(tmp_path / "small", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(theirs, b"abcd")
    assert copy(source, small, 3)
    assert (tmp_path / "small").read_bytes() == b"abc\n[cut here: this file has reached its 3 bytes]\n"
    os.close(theirs)
    assert not copy(source, small, 3), "the end"
