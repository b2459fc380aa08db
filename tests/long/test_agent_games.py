"""Locks: an agent's game and its use of a tool are learned as a whole, and their control is not.

What one episode after the other must be is in tests/system/test_agents.py, too.
"""

import json
from pathlib import Path

from fakes.two_games import letter_rows, lookup_rows, write_rows
from system.conftest import ONE_OF_EACH, RunUnderWay, train

from bench.controls import SHUFFLED

BOTH = [
    "experiment=agent_game", *ONE_OF_EACH, "run.loggers=[]", "run.checkpoint_every_steps=0",
    "rollout.agent=tests.fakes.two_games:play",
]  # fmt: skip
HELD_OUT = ("eval/letters/reward", "eval/tool/reward")


def rows_of_both_games(folder: Path) -> list[str]:
    """Options: as many rows of one game as of the other, each with held-out rows of its own."""
    both = [row for pair in zip(letter_rows("train"), lookup_rows("train"), strict=False) for row in pair]
    paths = {
        name: write_rows(folder / f"{name}.jsonl", content)
        for name, content in {
            "both": both, "letters": letter_rows("heldout"), "tool": lookup_rows("heldout"),
        }.items()
    }  # fmt: skip
    return [
        f"data.path={paths['both']}",
        "data.eval_path=null",
        f"data.eval_sets.letters={paths['letters']}",
        f"data.eval_sets.tool={paths['tool']}",
    ]


def assert_episodes_of_both_games(run: RunUnderWay) -> None:
    """Three turns each, of both kinds, whose tokens are those that the engine was given and sampled."""
    for row in run.rows[1:]:
        assert row["rollout/turns_mean"] == 3
        assert row["rollout/branches_mean"] == 1
        assert row["parity/k3"] < 1e-3
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    given = ["".join(turn["given"] for turn in sample["turns"]) for sample in samples]
    spoke = {(text.count("user: "), text.count("tool: ")) for text in given}
    assert spoke == {(3, 0), (1, 2)}  # every turn of the letters is the user's, and of the tool's game only the first
    assert all(bool(turn["given"] and turn["said"]) for turn in samples[0]["turns"])


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
