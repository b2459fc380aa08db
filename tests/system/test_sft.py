"""Learning from given answers, and from pairs of them, on real Ray and FSDP2, through the command line.

The runs of both go on at the same time, because their start is most of their time. They train all weights.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from system.conftest import ONE_OF_EACH, RUN_TIMEOUT_S, rows_of, trainer_ranks

from slipstream import conf

TRAIN = ("train", "experiment=sft_quickstart", "trainer=full")
OBJECTIVES = {
    "sft": ("eval/nll", ()),
    "dpo": (
        "eval/dpo_loss",
        ("algorithm=dpo", "algorithm.sequences_per_step=32", "trainer.num_ranks=1", "trainer.ep_size=1"),
    ),
}
"""Objective -> its figure of held-out rows, and the words of its run. Of all weights, DPO's reference is kept apart."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class InTwoParts:
    """A whole run's rows, and again after its second half was lost and the run resumed."""

    folder: Path
    whole: Rows
    resumed: Rows


def _run(folder: Path, *words: str) -> Rows:
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.orchestrator.cli.main", *words],
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S, env={**os.environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "latest" / "metrics.jsonl").read_text().splitlines()]


def _pairs(folder: Path) -> list[str]:
    """The quick start's prompts with the letter as the chosen answer, and a digit of the prompt as the rejected one.
    Returns the options that name the files.
    """
    for part in ("train", "heldout"):
        rows = map(json.loads, (Path(conf.__file__).parent / "data" / f"letters_{part}.jsonl").read_text().splitlines())
        pairs = [
            {"prompt": row["prompt"], "chosen": row["answer"], "rejected": min(row["prompt"].strip("="))}
            for row in rows
        ]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return ["data=files", f"data.path={folder}/train.jsonl", f"data.eval_path={folder}/heldout.jsonl"]


def whole_run(objective: str, folder: Path, cluster: str) -> Rows:
    """24 steps, with a checkpoint in the middle."""
    data = _pairs(folder) if objective == "dpo" else []
    return _run(
        folder, *TRAIN, *OBJECTIVES[objective][1], *data, f"run.dir={folder}", "run.num_steps=24",
        "run.checkpoint_every_steps=12", cluster,
    )  # fmt: skip


def in_two_parts(objective: str, folder: Path, cluster: str) -> InTwoParts:
    """In the half that is trained again one of two trainer ranks (sft) is killed."""
    whole = whole_run(objective, folder, cluster)
    shutil.rmtree(folder / "latest" / "checkpoints" / "step-000024")
    with ThreadPoolExecutor() as pool:
        killing = pool.submit(_kill_a_rank, folder / "latest") if objective == "sft" else None
        resumed = _run(folder, "resume", str(folder / "latest"))
        if killing is not None:
            killing.result()
    return InTwoParts(folder / "latest", whole, resumed)


def _kill_a_rank(run: Path) -> None:
    """SIGKILL rank 1 in a step of the second half."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not 14 <= len(rows_of(run)) <= 22:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    trainer_ranks(run)[1].kill()


@dataclass(frozen=True)
class Started:
    """A run of each objective."""

    sft: Future[InTwoParts]
    dpo: Future[Rows]


@pytest.fixture(scope="module")
def started(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    with ThreadPoolExecutor() as pool:
        yield Started(
            pool.submit(in_two_parts, "sft", tmp_path_factory.mktemp("sft"), cluster),
            pool.submit(whole_run, "dpo", tmp_path_factory.mktemp("dpo"), cluster),
        )


def test_a_run_in_two_parts_is_the_same_run(started: Started) -> None:
    """One of preferences: tests/long."""
    assert_the_same_run("sft", started.sft.result())


def assert_the_same_run(objective: str, run: InTwoParts) -> None:
    """What came of the second half does not depend on the interruption."""
    whole, resumed = run.whole, run.resumed
    held_out, _ = OBJECTIVES[objective]
    assert all(row["sync/total_s"] is None and row["reward/mean"] is None for row in whole)
    assert [row["step"] for row in resumed] == list(range(25))
    assert resumed[:13] == whole[:13]
    for again, row in zip(resumed[13:], whole[13:], strict=True):
        assert again["step/total_s"] != row["step/total_s"], "it was not trained again"
        for name in ("sft/nll", "dpo/loss", "dpo/margin_mean", "optim/grad_norm"):
            assert again[name] == row[name]
    assert resumed[-1][held_out] == whole[-1][held_out]
    restarts = [row["trainer/down_s"] for row in resumed[13:] if row["trainer/restarts"]]
    assert len(restarts) == (objective == "sft"), "a rank was killed"


def test_given_answers_are_learned(started: Started) -> None:
    rows = started.sft.result().whole
    assert rows[0]["eval/nll"] > 4 and rows[-1]["eval/nll"] < 2


def test_preferences_are_learned(started: Started) -> None:
    """Before the first update the policy is its own reference: every reward is 0, and no answer has the larger one."""
    rows = started.dpo.result()
    assert rows[0]["eval/dpo_loss"] == pytest.approx(math.log(2)) and rows[0]["eval/dpo_accuracy"] == 0
    assert rows[1]["dpo/loss"] == pytest.approx(math.log(2)) and rows[1]["dpo/margin_mean"] == 0
    assert rows[-1]["eval/dpo_loss"] < 0.3 and rows[-1]["eval/dpo_accuracy"] > 0.95


def test_reinforcement_goes_on_from_what_full_fine_tuning_left_in_latest(
    started: Started, cluster: str, tmp_path: Path
) -> None:
    letters, taught = "abcdefgh", started.sft.result().folder
    answers = _run(
        tmp_path, "train", "experiment=quickstart", "model=checkpoint", f"model.path={taught}/merged",
        "model.dtype=float32", *ONE_OF_EACH, f"run.dir={tmp_path}", cluster, "run.num_steps=1",
        "rollout.sampling.max_tokens=1",
    )  # fmt: skip
    assert len(answers) == 2
    samples = [json.loads(line) for line in (tmp_path / "latest" / "samples.jsonl").read_text().splitlines()]
    first = [sample["response"] for sample in samples if sample["step"] == 0]
    assert first and all(response in letters for response in first), "a random model says any of 60 characters"
