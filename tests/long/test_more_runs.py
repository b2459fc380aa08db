"""What tests/system show of one mode, server or objective, or of a run that learns: here of the other one, and of the
control.
"""

import signal
from pathlib import Path

import pytest
from system.conftest import ENDLESS, RUN_TIMEOUT_S, RunUnderWay, assert_workers_came_back, train
from system.test_ends import (
    TAUGHT,
    kill_server,
    run as run,  # a fixture
)
from system.test_learning import LETTERS, NUM_STEPS
from system.test_sft import assert_the_same_run, in_two_parts

from slipstream.orchestrator.chaos.command import ChaosOptions, chaos
from slipstream.orchestrator.control.stop_request import stop


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_a_killed_worker_comes_back_with_the_current_adapter_while_steps_go_on(cluster: str, tmp_path: Path) -> None:
    """The whole worker 0, by the command. (Merged weights: tests/system/test_workers.py.)"""
    words = [
        *ENDLESS, "weight_sync.mode=adapter", "trainer.num_ranks=1", "trainer.ep_size=1",
        "model=tiny_qwen3", cluster,  # CPU engines serve no adapters of experts
    ]  # fmt: skip
    with RunUnderWay(words, tmp_path) as run:
        run.wait_until(lambda rows: len(rows) >= 2)
        (event,) = chaos(ChaosOptions(run=run.folder, victims=["worker-0"], patience_s=RUN_TIMEOUT_S), print)
        assert (event.outcome, event.victim, event.steps_again) == ("as before", "worker-0", 0)
        run.wait_for_returns(1)
        stop(run.folder, timeout_s=60)
        assert run.exit_code() == 128 + signal.SIGTERM
    assert "rollout-0 is out of service and is restarted, 1 other worker left: " in run.log
    assert "of the rollout worker was ended by SIGKILL" in run.log
    assert_workers_came_back(run.rows, times=1)


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
