"""Locks: reinforcement learns, and what it learned is evaluated. (The control, which learns nothing, and an algorithm's
loss in a run: tests/long. Stale samples: test_workers.py.)

A run and an evaluation through the command line on real Ray, vLLM, Mooncake and FSDP2, with one engine and one trainer
rank. Everything is asserted on metrics.jsonl, and on what the evaluation says.
"""

import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from system.conftest import ONE_OF_EACH, RUN_TIMEOUT_S, FinishedRun, train

pytestmark = pytest.mark.timeout(2 * RUN_TIMEOUT_S)

SMALL = [*ONE_OF_EACH, "run.checkpoint_every_steps=0", "run.loggers=[]"]
NUM_STEPS = 25
LETTERS = [
    *SMALL, f"run.num_steps={NUM_STEPS}", "run.eval_every_steps=0", "run.eval_samples_per_prompt=4",
    "rollout.sampling.max_tokens=2", "trainer.optim.lr=7e-3", "algorithm.group_size=8", "algorithm.entropy_coef=0.1",
]  # fmt: skip


@pytest.fixture(scope="module")
def learned(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return train([*LETTERS, cluster], tmp_path_factory.mktemp("learned"))


def evaluated(run: FinishedRun, *options: str) -> dict[str, Any]:
    """What `slipstream eval` says of the adapter that a run has exported."""
    words = ["eval", str(run.folder), "--adapter", str(run.folder / "adapter"), "--json"]
    command = [sys.executable, "-m", "slipstream.orchestrator.cli.main", *words, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_letters_are_learned(learned: FinishedRun) -> None:
    """A policy that always answers the same scores 1/8. Seen without engines over the seeds 0 to 3: 0.60 to 0.77."""
    assert learned.exit_code == 0, learned.stderr
    steps = learned.rows
    assert [row["step"] for row in steps] == list(range(NUM_STEPS + 1))
    assert steps[0]["eval/reward"] < 0.1
    assert steps[-1]["eval/reward"] > 0.3
    assert {row["sync/replicas_committed"] for row in steps} == {1}
    assert {row["staleness/max"] for row in steps[1:]} == {0}


def test_an_adapter_alone_is_evaluated_as_its_samples_count(learned: FinishedRun, cluster: str) -> None:
    """pass@k is the share of subsets of k responses, of the four to a prompt, with one that earned everything."""
    told = evaluated(learned, cluster)
    samples = [json.loads(line) for line in Path(told["samples"]).read_text().splitlines()]
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample["prompt_id"], []).append(sample["reward"])
    assert {len(of_prompt) for of_prompt in rewards.values()} == {4}
    found = told["sets"]["all"]
    trained = learned.rows[-1]["eval/reward"]
    assert found["reward"]["mean"] == pytest.approx(statistics.mean(map(statistics.mean, rewards.values())))
    assert found["reward"]["mean"] == pytest.approx(trained, abs=0.15), "the same weights, sampled again"
    for k in (1, 2, 4):
        shares = [
            statistics.mean(max(subset) >= 1 for subset in itertools.combinations(of_prompt, k))
            for of_prompt in rewards.values()
        ]
        assert found[f"pass_at_{k}"]["mean"] == pytest.approx(statistics.mean(shares))
    assert not (Path(told["json"]).parent / "adapter").exists(), "it would be a copy of what was read"
