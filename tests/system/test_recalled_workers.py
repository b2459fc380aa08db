"""Workers that are killed or recalled come back with the current weights, on real Ray, vLLM, Mooncake and FSDP2."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from system.conftest import ENDLESS, RUN_TIMEOUT_S, RunUnderWay, assert_workers_came_back

from slipstream.conf.schema import SyncMode
from slipstream.orchestrator.chaos.command import ChaosOptions, chaos
from slipstream.orchestrator.control.stop_request import stop
from slipstream.orchestrator.files.row_files import read_rows


@pytest.mark.timeout(3 * RUN_TIMEOUT_S)
def test_killed_and_recalled_workers_come_back_with_the_current_weights_while_steps_go_on(
    cluster: str, tmp_path: Path
) -> None:
    killed_and_recalled(cluster, tmp_path, SyncMode.merged)


def killed_and_recalled(cluster: str, tmp_path: Path, mode: SyncMode) -> None:
    """A strictly on-policy run; one worker is killed, and with merged weights the other one then recalled by the
    command. Each time the one that is left carries the steps; the other is started again, takes the current version
    from its peer or from a publish, and samples. Merged weights are relayed, and the one that is recalled is worker 0,
    which the trainer writes to: it goes on with the other one. (Without a relay: test_ray_nodes.py.) What is killed is
    an engine with merged weights, and a whole worker in adapter mode (tests/long).
    """
    is_merged = mode is SyncMode.merged
    words = [
        *ENDLESS, f"weight_sync.mode={mode}", "trainer.num_ranks=1", "trainer.ep_size=1",
        "weight_sync.relay=node" if is_merged else "model=tiny_qwen3",  # CPU engines serve no adapters of experts
        cluster,
    ]  # fmt: skip
    killed = "rollout-1" if is_merged else "rollout-0"
    with RunUnderWay(words, tmp_path) as run:
        run.wait_until(lambda rows: len(rows) >= 2)
        assert run.engine_of(killed).parent() == run.worker(killed), "vLLM forks it from its worker"
        if is_merged:
            run.engine_of(killed).send_signal(signal.SIGSEGV)
        else:
            (event,) = chaos(ChaosOptions(run=run.folder, victims=["worker-0"], patience_s=RUN_TIMEOUT_S), print)
            assert (event.outcome, event.victim, event.steps_again) == ("as before", "worker-0", 0)
        run.wait_for_returns(1)
        assert f"{killed} is out of service and is restarted, 1 left: " in run.log
        if is_merged:
            recall(run.folder, 0)
            run.wait_for_returns(2)
        stop(run.folder, timeout_s=60)
        assert run.exit_code() == 128 + signal.SIGTERM
    how = "engine's process died of SIGSEGV (" if is_merged else "of the rollout worker was ended by SIGKILL"
    assert how in run.log
    reports = [path.name for path in run.folder.glob("crash/*")]
    assert [name.startswith(f"{killed}-") for name in reports] == [True] * is_merged
    assert_workers_came_back(run.rows, times=2 if is_merged else 1)
    starts = [row["start"] for row in read_rows(run.folder / "startup.jsonl")]
    assert starts == ["run", f"{killed}.1", *(["rollout-0.1"] if is_merged else [])]
    for row in run.rows:
        assert row["sync/replicas_relayed"] == (max(0, row["sync/replicas_committed"] - 1) if is_merged else 0)


def recall(run: Path, worker: int) -> None:
    """Recall a worker that serves, by the command."""
    words = ["recover", str(run), "--worker", str(worker)]
    command = [sys.executable, "-m", "slipstream.orchestrator.cli.main", *words]
    said = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    assert said.startswith(f"rollout-{worker}")
    assert said.endswith((" was serving and is being restarted\n", " was updating and is being restarted\n"))
