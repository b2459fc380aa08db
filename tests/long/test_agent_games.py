"""Locks: an agent's game and its use of a tool are learned as a whole, and their control is not.

What one episode after the other must be is in tests/system/test_agents.py, which learns less in a third of the steps.
"""

from __future__ import annotations

from pathlib import Path

from system.conftest import RunUnderWay, train
from system.test_agents import GAMES, HELD_OUT, assert_episodes_of_both_games, rows_of_both_games

from bench.controls import SHUFFLED

BOTH = [*GAMES, "rollout.agent=tests.fakes.two_games:play"]


def test_a_game_and_a_tool_are_learned(tmp_path: Path) -> None:
    """A policy that always answers the same letter scores 1/8, in either. Seen: both learned after 50 to 80 steps."""
    words = [*rows_of_both_games(tmp_path), "run.num_steps=100", "run.eval_every_steps=10"]
    with RunUnderWay([*BOTH, *words], tmp_path) as run:
        run.wait_until(lambda rows: any(min(row[name] or 0 for name in HELD_OUT) > 0.8 for row in rows))
        run.stop()
    assert all(run.rows[0][name] < 0.15 for name in HELD_OUT)
    assert_episodes_of_both_games(run)


def test_with_shuffled_advantages_neither_is_learned(tmp_path: Path) -> None:
    words = ["run.num_steps=40", "run.eval_every_steps=0", SHUFFLED]
    run = train([*BOTH, *rows_of_both_games(tmp_path), *words], tmp_path)
    assert run.exit_code == 0, run.stderr
    assert all(row["optim/grad_norm"] > 0 for row in run.rows[1:6])
    assert all(run.rows[-1][name] < 0.3 for name in HELD_OUT)
