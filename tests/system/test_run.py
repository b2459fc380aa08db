"""The quick start's loop for a few steps, on real Ray, vLLM, Mooncake and FSDP2, through the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from system.conftest import RUN_TIMEOUT_S, FinishedRun, RunUnderWay, train

from conf.schema import Relay, SyncMode


@pytest.fixture(scope="module")
def on_policy(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Three strictly on-policy steps."""
    return train(["run.num_steps=3", "run.eval_every_steps=0"], tmp_path_factory.mktemp("on_policy"))


@pytest.fixture(scope="module")
def resumed(on_policy: FinishedRun) -> FinishedRun:
    """Two more steps of the same run."""
    return train(
        ["run.num_steps=5", "run.eval_every_steps=0", f"run.resume={on_policy.folder}"], on_policy.folder.parent
    )


def test_every_step_is_on_policy_committed_everywhere_and_in_parity(on_policy: FinishedRun) -> None:
    assert on_policy.exit_code == 0, on_policy.stderr
    start, *steps = on_policy.rows
    assert start["step"] == 0
    assert start["eval/reward"] is not None
    assert [row["policy_version"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["staleness/max"] == 0
        assert 0 <= row["parity/k3"] < 1e-3
        assert row["policy/entropy"] > 1.0, "at a low entropy any two models agree"
        assert row["sync/replicas_committed"] == 2
        assert 0 < row["sync/peak_bytes"] <= row["sync/watermark_bytes"]
        assert row["optim/grad_norm"] > 0


def test_a_run_leaves_what_it_promises(on_policy: FinishedRun) -> None:
    for name in ("config.yaml", "environment.json", "run.log", "samples.jsonl", "curves.png", "tensorboard"):
        assert (on_policy.folder / name).exists(), name
    config = json.loads((on_policy.folder / "adapter" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    sample = json.loads((on_policy.folder / "samples.jsonl").read_text().splitlines()[0])
    assert {"prompt", "response", "reward", "policy_version"} <= set(sample)


def test_no_process_of_a_run_is_left(on_policy: FinishedRun) -> None:
    marks = (str(on_policy.folder.parent), on_policy.folder.name)
    left = [p for p in psutil.process_iter(["cmdline"]) if any(m in " ".join(p.info["cmdline"] or []) for m in marks)]
    assert left == []


def test_a_resumed_run_goes_on_where_it_stopped(on_policy: FinishedRun, resumed: FinishedRun) -> None:
    assert resumed.exit_code == 0, resumed.stderr
    assert resumed.folder == on_policy.folder
    assert [row["step"] for row in resumed.rows] == [0, 1, 2, 3, 4, 5]
    assert [row["policy_version"] for row in resumed.rows] == [0, 1, 2, 3, 4, 5]
    assert all(row["parity/k3"] < 1e-3 for row in resumed.rows[1:])


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
    words = ["run.num_steps=1000", "run.eval_every_steps=0", "run.checkpoint_every_steps=0", f"weight_sync.mode={mode}"]
    words += [f"weight_sync.relay={relay}"]
    if mode is SyncMode.adapter:
        words += ["model=tiny_qwen3", "trainer.ep_size=1"]  # CPU engines serve no adapters of experts
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
