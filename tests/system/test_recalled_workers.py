"""Workers that are killed or recalled come back with the current weights, on real Ray, vLLM, Mooncake and FSDP2."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from system.conftest import ENDLESS, RUN_TIMEOUT_S, RunUnderWay, assert_workers_came_back

from conf.schema import SyncMode
from orchestrator.files.startup import read_starts
from orchestrator.fleet.stop_request import stop


@pytest.mark.timeout(3 * RUN_TIMEOUT_S)
@pytest.mark.parametrize("mode", [SyncMode.merged, SyncMode.adapter])
def test_killed_and_recalled_workers_come_back_with_the_current_weights_while_steps_go_on(
    tmp_path: Path, mode: SyncMode
) -> None:
    """A strictly on-policy run; one worker is killed, then the other one recalled by the command. Each time the one
    that is left carries the steps; the other is started again, takes the current version from its peer or from a
    publish, and samples. With merged weights they are relayed, and the one that is recalled is worker 0, which the
    trainer writes to: it goes on with the other one. (Without a relay: test_ray_nodes.py.)
    """
    words = [
        *ENDLESS, "cluster.dashboard=false", f"weight_sync.mode={mode}", "trainer.num_ranks=1", "trainer.ep_size=1",
    ]  # fmt: skip
    if mode is SyncMode.merged:
        recalled, words = 0, [*words, "weight_sync.relay=node"]
    else:
        recalled, words = 1, [*words, "model=tiny_qwen3"]  # CPU engines serve no adapters of experts
    with RunUnderWay(words, tmp_path) as run:
        run.wait_until(lambda rows: len(rows) >= 2)
        engine = run.engine_of(f"rollout-{1 - recalled}")
        victim = engine if mode is SyncMode.merged else engine.parent()
        assert victim is not None
        victim.kill()
        run.wait_for_returns(1)
        recover = [sys.executable, "-m", "orchestrator.cli.main", "recover", str(run.folder), "--worker", str(recalled)]
        said = subprocess.run(recover, capture_output=True, text=True, timeout=60, check=True).stdout
        assert said.startswith(f"rollout-{recalled}")
        assert said.endswith((" was serving and is being restarted\n", " was updating and is being restarted\n"))
        run.wait_for_returns(2)
        stop(run.folder, timeout_s=60)
        assert run.exit_code() == 128 + signal.SIGTERM
    assert_workers_came_back(run.rows, times=2)
    starts = [row["start"] for row in read_starts(run.folder / "startup.jsonl")]
    assert starts == ["run", f"rollout-{1 - recalled}.1", f"rollout-{recalled}.1"]
    for row in run.rows:
        is_relayed = mode is SyncMode.merged
        assert row["sync/replicas_relayed"] == (max(0, row["sync/replicas_committed"] - 1) if is_relayed else 0)
