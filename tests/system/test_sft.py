"""Supervised fine-tuning on real Ray and FSDP2, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from system.conftest import ONE_OF_EACH, RUN_TIMEOUT_S

TRAIN = ("train", "experiment=sft_quickstart")


def _run(folder: Path, *words: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli.main", *words, "cluster.dashboard=false"],
        capture_output=True, text=True, timeout=RUN_TIMEOUT_S, env={**os.environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "latest" / "metrics.jsonl").read_text().splitlines()]


def test_fine_tuning_learns_and_a_run_in_two_parts_is_the_same_run(tmp_path: Path) -> None:
    whole = _run(tmp_path, *TRAIN, f"run.dir={tmp_path}", "run.num_steps=24", "run.checkpoint_every_steps=12")
    assert whole[0]["eval/nll"] > 4 and whole[-1]["eval/nll"] < 2
    assert all(row["sync/total_s"] is None and row["reward/mean"] is None for row in whole)
    shutil.rmtree(tmp_path / "latest" / "checkpoints" / "step-000024")
    resumed = _run(tmp_path, "resume", str(tmp_path / "latest"))
    assert [row["step"] for row in resumed] == list(range(25))
    assert resumed[:13] == whole[:13]
    for again, row in zip(resumed[13:], whole[13:], strict=True):
        assert again["step/total_s"] != row["step/total_s"], "it was not trained again"
        assert again["sft/nll"] == row["sft/nll"]
    assert resumed[-1]["eval/nll"] == whole[-1]["eval/nll"]


def test_reinforcement_goes_on_from_what_full_fine_tuning_left_in_latest(tmp_path: Path) -> None:
    taught = _run(
        tmp_path, *TRAIN, f"run.dir={tmp_path}", "trainer=full", "trainer.num_ranks=1", "trainer.ep_size=1",
        "run.num_steps=30",
    )  # fmt: skip
    assert taught[-1]["eval/nll"] < 2
    letters = "abcdefgh"
    answers = _run(
        tmp_path, "train", "experiment=quickstart", "model=checkpoint", f"model.path={tmp_path}/latest/merged",
        "model.dtype=float32", *ONE_OF_EACH, f"run.dir={tmp_path}", "run.num_steps=1", "rollout.sampling.max_tokens=1",
    )  # fmt: skip
    assert len(answers) == 2
    samples = [json.loads(line) for line in (tmp_path / "latest" / "samples.jsonl").read_text().splitlines()]
    first = [sample["response"] for sample in samples if sample["step"] == 0]
    assert first and all(response in letters for response in first), "a random model says any of 60 characters"
