"""What tests/system show of one mode, server or objective, or of a run that learns: here of the other one, and of the
control.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from system.conftest import RUN_TIMEOUT_S, RunUnderWay, train
from system.test_ends import TAUGHT, kill_server
from system.test_ends import run as run  # a fixture
from system.test_learning import LETTERS, NUM_STEPS
from system.test_recalled_workers import killed_and_recalled
from system.test_sft import assert_the_same_run, in_two_parts

from slipstream.conf.schema import SyncMode


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_a_killed_worker_comes_back_with_the_current_adapter_while_steps_go_on(cluster: str, tmp_path: Path) -> None:
    killed_and_recalled(cluster, tmp_path, SyncMode.adapter)


@pytest.mark.parametrize("run", [TAUGHT], indirect=True)
def test_the_killed_other_server_of_ray_is_named(run: RunUnderWay) -> None:
    kill_server(run, "gcs_server")


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_without_publishes_nothing_is_learned(cluster: str, tmp_path: Path) -> None:
    """Shuffled advantages are another control, which takes as long: bench/runs.py."""
    run = train([*LETTERS, cluster], tmp_path, "bench.controls")
    assert run.exit_code == 0, run.stderr
    steps = run.rows
    assert steps[-1]["policy_version"] == steps[-1]["step"] == NUM_STEPS, "it trained as often"
    assert all(row["optim/grad_norm"] > 0 for row in steps[1:6]), "later all rewards of a batch may be 0"
    assert steps[-1]["eval/reward"] < 0.2
    assert [row["staleness/max"] for row in steps[1:]] == list(range(NUM_STEPS))


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_a_run_of_preferences_in_two_parts_is_the_same_run(cluster: str, tmp_path: Path) -> None:
    assert_the_same_run("dpo", in_two_parts("dpo", tmp_path, cluster))
