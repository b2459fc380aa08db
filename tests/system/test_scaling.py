"""Rollout workers come and go by command while a run goes on, on real Ray, vLLM, Mooncake and FSDP2."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from system.conftest import ENDLESS, ONE_OF_EACH, RUN_TIMEOUT_S, RunUnderWay, assert_all_end

from slipstream.orchestrator.control.stop_request import stop


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_a_run_has_one_worker_then_three_then_one_and_no_sample_is_lost(cluster: str, tmp_path: Path) -> None:
    """Two further workers start beside the first one, which carries the steps meanwhile. They read its weights, and the
    trainer writes to them from the next publish on. One of them then finds a notice, the other one is one too many by
    command: what they were sampling goes on at others. Every prompt is used once, in its order, and what all workers
    sampled is what the trainer computes.
    """
    notice = tmp_path / "taken"
    words = [
        *ENDLESS, *ONE_OF_EACH, cluster, "algorithm.max_staleness_steps=1", "run.samples_per_step=4",
        "rollout.max_model_len=448", "rollout.sampling.max_tokens=400", f"rollout.notice={notice}",
    ]  # fmt: skip
    with RunUnderWay(words, tmp_path) as run:
        run.wait_until(lambda rows: len(rows) >= 3)
        assert scaled(run.folder, 3) == "rollout-1 is being started\nrollout-2 is being started\n"
        run.wait_until(lambda rows: rows[-1]["sync/replicas_committed"] == 3)
        workers = [run.worker(f"rollout-{place}") for place in range(3)]
        notice.symlink_to(f"/proc/self/task/{workers[2].pid}")  # a file that is there for this process alone
        run.wait_for(lambda: "rollout-2 has gone" in run.log)
        assert scaled(run.folder, 1) == "rollout-1 hands its requests over and ends\n"
        run.wait_for(lambda: "rollout-1 has gone" in run.log)
        num_rows = len(run.rows)
        run.wait_until(lambda rows: len(rows) >= num_rows + 3)
        assert_all_end(workers[1:])
        assert workers[0].is_running()
        stop(run.folder, timeout_s=60)
        assert run.exit_code() == 128 + signal.SIGTERM
    rows, log = run.rows, run.log
    assert [row["policy_version"] for row in rows] == list(range(len(rows))), "no step was lost or repeated"
    all_three = next(place for place, row in enumerate(rows) if row["sync/replicas_committed"] == 3)
    assert rows[all_three - 1]["rollout/replicas_wanted"] == 3, "steps went on while workers started"
    assert rows[all_three - 1]["rollout/replicas_serving"] < 3
    for place in (1, 2):
        assert re.search(rf"rollout-{place} read \d+ bytes of version \d+ from rollout-", log) or (
            f"rollout-{place} joins the next publish" in log
        )
        assert re.search(rf"rollout-{place} handed \d groups over in \d+\.\d+ s", log)
    assert "rollout-2 has gone (it was told to go by a notice that its machine is taken away)" in log
    assert sum(row["rollout/handed_over"] or 0 for row in rows) > 0
    assert sum((row["rollout/groups_failed"] or 0) + (row["rollout/restarts"] or 0) for row in rows) == 0
    assert rows[-1]["rollout/replicas_wanted"] == rows[-1]["sync/replicas_committed"] == 1
    assert all(0 <= (row["parity/k3"] or 0) < 1e-3 for row in rows[1:])  # null: all tokens are of the version before
    assert all(0 <= (row["parity/k3_stale"] or 0) < 0.1 for row in rows[1:])
    assert_stale_samples_are_weighed(rows[1:])
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    prompts = [sample["prompt_id"] for sample in samples]
    assert [sample["step"] for sample in samples] == [step for step in range(1, len(rows)) for _ in range(4)]
    assert len(set(prompts)) == len(prompts), "each group of an epoch has a prompt of its own"


def assert_stale_samples_are_weighed(rows: list[dict[str, Any]]) -> None:
    """They are as old as they may be, and no older."""
    assert {row["staleness/max"] for row in rows} == {0, 1}
    for row in rows:
        assert row["staleness/dropped_groups"] == 0
        assert (row["parity/k3_stale"] is not None) == (row["staleness/max"] > 0)
        if row["staleness/max"] == 0:
            assert row["correction/weight_mean"] == pytest.approx(1, abs=1e-5)
    assert max(abs(row["correction/weight_mean"] - 1) for row in rows) > 1e-4


def scaled(run: Path, num_workers: int) -> str:
    """What the command says."""
    command = [sys.executable, "-m", "slipstream.orchestrator.cli.main", "scale", str(run), f"rollout={num_workers}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
