"""Locks: an agent's episodes are trained token for token, the shipped game is learned and its control is not.

Real Ray, vLLM, Mooncake, FSDP2, endpoint and agents' processes; all is asserted on metrics.jsonl and samples.jsonl. The
trainer computes the log-probability of every sampled token from the sequence that it is given, and the engine from what
it was given: if one token of an episode were another one, parity/k3 would be near 1. It is 1e-13, and up to 1e-5 in
steps in which a single token's experts differ. In the third run the steps are so small that this holds for tokens of
the version before, too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from system.conftest import ONE_OF_EACH, RUN_TIMEOUT_S, train

pytestmark = pytest.mark.timeout(RUN_TIMEOUT_S)

GAME = [
    "experiment=agent_game", *ONE_OF_EACH, "cluster.dashboard=false", "run.loggers=[]", "algorithm.group_size=16",
]  # fmt: skip
TALK = [
    *GAME, "rollout.agent=tests.fakes.openai_agent:talk", "rollout.sampling.max_tokens=3", "rollout.max_model_len=256",
    "rollout.sampling.stop_at_eos=true", "rollout.episodes.max_turns=8", "data.eval_path=null",
    "algorithm.groups_per_step=4", "algorithm.group_size=4", "algorithm.max_staleness_steps=1",
    "run.checkpoint_every_steps=2", "trainer.optim.lr=1.0e-6",
]  # fmt: skip


def test_the_game_is_learned(tmp_path: Path) -> None:
    """A policy that always answers the same letter scores 1/8. Seen at 60 steps: 0.86 and 0.95."""
    run = train([*GAME, "run.num_steps=60", "run.eval_every_steps=0", "run.checkpoint_every_steps=0"], tmp_path)
    assert run.exit_code == 0, run.stderr
    assert run.rows[0]["eval/reward"] < 0.15
    assert run.rows[-1]["eval/reward"] > 0.6
    for row in run.rows[1:]:
        assert row["rollout/turns_mean"] == 3
        assert row["rollout/branches_mean"] == 1
        assert row["parity/k3"] < 1e-3
    (sample, *_) = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert [bool(turn["given"] and turn["said"]) for turn in sample["turns"]] == [True] * 3


def test_with_shuffled_advantages_the_game_is_not_learned(tmp_path: Path) -> None:
    words = ["run.num_steps=40", "run.eval_every_steps=0", "run.checkpoint_every_steps=0"]
    run = train([*GAME, *words, "algorithm.shuffle_advantages=true"], tmp_path)
    assert run.exit_code == 0, run.stderr
    assert all(row["optim/grad_norm"] > 0 for row in run.rows[1:6])
    assert run.rows[-1]["eval/reward"] < 0.3


def test_openais_client_edited_histories_failures_stale_episodes_and_a_resumed_run(tmp_path: Path) -> None:
    run = train([*TALK, "run.num_steps=2"], tmp_path)
    assert run.exit_code == 0, run.stderr
    resumed = train([*TALK, "run.num_steps=4", f"run.resume={run.folder}"], tmp_path)
    assert resumed.exit_code == 0, resumed.stderr
    rows = resumed.rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for row in rows[1:]:
        assert row["rollout/turns_mean"] == 5
        # A conversation, the same with an edited history, and the plain prompt.
        assert row["rollout/branches_mean"] == 3
        assert row["rollout/branches_edited"] == row["rollout/branches_new"] == 16
        assert row["reward/failures"] == row["rollout/failed_raised"]
        for mismatch in (row["parity/k3"], row["parity/k3_stale"]):
            assert mismatch is None or mismatch < 1e-3
    assert sum(row["rollout/failed_raised"] for row in rows[1:]) > 0
    assert max(row["staleness/max"] for row in rows[1:]) == 1
