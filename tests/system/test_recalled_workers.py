"""Workers that are killed or recalled come back with the current weights, on real Ray, vLLM, Mooncake and FSDP2."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from system.conftest import ENDLESS, RUN_TIMEOUT_S, RunUnderWay

from conf.schema import Relay, SyncMode


@pytest.mark.timeout(3 * RUN_TIMEOUT_S)
@pytest.mark.parametrize(
    ("mode", "relay"),
    [(SyncMode.merged, Relay.none), (SyncMode.merged, Relay.node), (SyncMode.adapter, Relay.none)],
)
def test_killed_and_recalled_workers_come_back_with_the_current_weights_while_steps_go_on(
    tmp_path: Path, mode: SyncMode, relay: Relay
) -> None:
    """A strictly on-policy run; one engine is killed (or its worker), then the other worker recalled by the command.
    Each time the one that is left carries the steps; the other is started again, takes the current version from its
    peer or from a publish, and samples: in every batch the log-probabilities of all workers are the trainer's. With a
    relay the one that is recalled is worker 0, which the trainer writes to: it goes on with the other one.
    """
    recalled = 0 if relay is Relay.node else 1
    words = [*ENDLESS, "cluster.dashboard=false", f"weight_sync.mode={mode}", f"weight_sync.relay={relay}"]
    if mode is SyncMode.adapter:
        words += ["model=tiny_qwen3"]  # CPU engines serve no adapters of experts
    if mode is SyncMode.adapter or relay is Relay.node:
        words += ["trainer.num_ranks=1", "trainer.ep_size=1"]
    with RunUnderWay(words, tmp_path) as run:
        run.wait_until(lambda rows: len(rows) >= 3)
        engine = run.engine_of(f"rollout-{1 - recalled}")
        victim = engine if mode is SyncMode.merged else engine.parent()
        assert victim is not None
        victim.send_signal(signal.SIGKILL)
        run.wait_until(lambda rows: any(row["rollout/recoveries"] for row in rows))
        recover = [sys.executable, "-m", "orchestrator.cli.main", "recover", str(run.folder), "--worker", str(recalled)]
        said = subprocess.run(recover, capture_output=True, text=True, timeout=60, check=True).stdout
        assert said.startswith(f"rollout-{recalled}")
        assert said.endswith((" was serving and is being restarted\n", " was updating and is being restarted\n"))
        run.wait_until(lambda rows: sum(row["rollout/recoveries"] or 0 for row in rows) == 2)
        num_rows = len(run.rows)
        run.wait_until(lambda rows: len(rows) >= num_rows + 4)
        run.stop()
    rows = run.rows
    first, second = [number for number, row in enumerate(rows) if row["rollout/recoveries"]]
    assert [row["policy_version"] for row in rows] == list(range(len(rows))), "no step was lost or repeated"
    assert sum(row["rollout/restarts"] or 0 for row in rows) == 2
    for part in (rows[:first], rows[first:second]):
        alone = [row for row in part if row["rollout/replicas_serving"] == 1]
        assert len(alone) >= 2, "steps went on while a worker was away"
    assert all(rows[back]["rollout/down_s"] > 0 for back in (first, second))
    assert {row["rollout/replicas_serving"] for row in rows[second:]} == {2}
    assert {row["sync/replicas_committed"] for row in rows[second + 1 :]} == {2}
    assert all(0 <= row["parity/k3"] < 1e-3 for row in rows[1:])
    if relay is Relay.node:
        assert all(row["sync/replicas_relayed"] == max(0, row["sync/replicas_committed"] - 1) for row in rows)
    else:
        assert {row["sync/replicas_relayed"] for row in rows} == {0}
