"""What an agent's process tells of an episode, and what the run makes of that: no process, no model."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.conf.functions import file_of
from slipstream.rollout.agents.agent_pool import TOLD, run_episode
from slipstream.rollout.agents.agent_process import _run, load_agent
from slipstream.rollout.errors import AgentError
from slipstream.rollout.user_processes.outcomes import (
    BLOCKED,
    DIED,
    GARBLED,
    NOT_A_NUMBER,
    NOTHING,
    RAISED,
    SCORE,
    TIMEOUT,
    Outcome,
    read_outcome,
)
from slipstream.rollout.user_processes.user_process import Lost


async def told(returns: Any) -> Outcome | None:
    """The answer of an agent that returns this, or raises it."""

    async def agent(task: dict[str, Any], session: Any) -> Any:
        assert task == {"prompt": "p"}
        assert (session.base_url, session.api_key, session.model) == ("http://here/v1", "key", "policy")
        if isinstance(returns, BaseException):
            raise returns
        return returns

    client: Any = None
    ended = await _run(agent, client, {"prompt": "p"}, "http://here/v1", "key", "policy")
    return read_outcome(ended.as_message, TOLD)


@pytest.mark.parametrize(
    ("returns", "reward"), [(1, 1.0), (0, 0.0), (-0.5, -0.5), (np.bool_(True), 1.0), (np.array(0.25), 0.25)]
)
async def test_what_an_agent_returns_is_its_episodes_reward(returns: Any, reward: float | None) -> None:
    assert await told(returns) == Outcome(SCORE, reward)
    assert await told(None) == Outcome(NOTHING)


@pytest.mark.parametrize("returns", ["1", math.nan, math.inf, [1.0], (1.0, "a")])
async def test_what_is_no_number_fails_the_episode(returns: Any) -> None:
    outcome = await told(returns)
    assert outcome is not None and (outcome.kind, outcome.value) == (NOT_A_NUMBER, None)
    kind = type(returns).__name__
    assert outcome.place == f"got {kind}"
    assert outcome.report.startswith(f"an agent must return a finite number or None, got {kind}: ")


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3)])
async def test_what_an_agent_raises_fails_the_episode(error: BaseException) -> None:
    outcome = await told(error)
    assert outcome is not None and outcome.kind == RAISED
    kind = type(error).__name__
    assert f"{kind}: {error}" in outcome.report and outcome.place.startswith(f"{kind} /")
    assert await told(asyncio.CancelledError()) == Outcome(RAISED, report="cancelled", place="cancelled")
    huge = await told(10**5000)
    assert huge is not None and huge.kind == RAISED and "for integer string conversion" in huge.report


@pytest.mark.parametrize(("kind", "failure"), [("blocked", BLOCKED), ("died", DIED), (GARBLED, DIED), (TIMEOUT, DIED)])
async def test_an_episode_whose_process_is_lost_says_how(kind: str, failure: str) -> None:
    async def ask(message: Any, read: Any) -> Outcome:
        assert message == [{"prompt": "p"}, "http://here/v1", "key", "policy"]
        assert read(["raised", "r", "p"]) and read(["timeout", "r", "p"]) is None
        raise Lost(kind, "why")

    pool: Any = SimpleNamespace(ask=ask)
    outcome = await run_episode(pool, {"prompt": "p"}, "http://here/v1", "key")
    assert outcome == Outcome(failure, report="why", place=kind)


AGENTS = """
async def plays(task, session): return 1.0
async def more(task, session, seed=3): return 1.0
async def one(task): return 1.0
async def three(task, session, needed): return 1.0
def plain(task, session): return 1.0
class Built:
    async def __call__(self, task, session): return 1.0
built = Built()
"""


def test_an_agent_is_a_coroutine_of_a_task_and_a_session(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    for name in ("plays", "more"):
        assert load_agent(f"{tmp_path}/agents.py:{name}").__name__ == name
    assert file_of(load_agent(f"{tmp_path}/agents.py:built")) == f"{tmp_path}/agents.py"
    for name, said in (
        ("agents.py:one", r"it must take \(task, session\): too many positional arguments"),
        ("agents.py:three", r"it must take \(task, session\): missing a required argument: 'needed'"),
        ("agents.py:plain", "it must be `async def`: many episodes share one process"),
        ("agents.py:absent", "has no function 'absent'"),
        ("exits.py:plays", "importing it failed: SystemExit: 3"),
    ):
        with pytest.raises(AgentError, match=f"^rollout.agent={tmp_path}/{name}: .*{said}"):
            load_agent(f"{tmp_path}/{name}")
