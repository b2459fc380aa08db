"""Rollout workers die, are recalled, come and go while one run goes on, on real Ray, vLLM, Mooncake and FSDP2."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from system.conftest import ENDLESS, RUN_TIMEOUT_S, RunUnderWay, assert_all_end, assert_workers_came_back

from slipstream.orchestrator.control.stop_request import stop
from slipstream.orchestrator.files.row_files import read_rows


@pytest.mark.timeout(3 * RUN_TIMEOUT_S)
def test_workers_die_are_recalled_come_and_go_while_steps_go_on_and_no_sample_is_lost(
    cluster: str, tmp_path: Path
) -> None:
    """The engine of worker 1 is killed, and then worker 0, which the trainer writes to, is recalled by the command.
    Each time the one that is left carries the steps; the other is started again, takes the current version from its
    peer or from a publish, and samples. (Without a relay: test_ray_nodes.py.)

    Then a third worker is asked for, which reads its weights beside the others and takes the next publishes. It finds
    a notice, and worker 1 is one too many by command: what they were sampling goes on at others. Every prompt is used
    once, and what all workers sampled is what the trainer computes.
    """
    notice = tmp_path / "taken"
    words = [
        *ENDLESS, "trainer.num_ranks=1", "trainer.ep_size=1", cluster, "weight_sync.relay=node",
        "algorithm.max_staleness_steps=1", "run.samples_per_step=4", "rollout.max_model_len=348",
        "rollout.sampling.max_tokens=60", f"rollout.notice={notice}",  # a step takes less than a start
    ]  # fmt: skip
    with RunUnderWay(words, tmp_path) as run:
        run.wait_until(lambda rows: len(rows) >= 2)
        engine = run.engine_of("rollout-1")
        assert engine.parent() == run.worker("rollout-1"), "vLLM forks it from its worker"
        engine.send_signal(signal.SIGSEGV)
        run.wait_for_returns(1)
        assert "rollout-1 is out of service and is restarted, 1 other worker left: " in run.log
        assert re.fullmatch(r"rollout-0 was (serving|updating) and is being restarted\n", said_by(run, "recover", "0"))
        run.wait_for_returns(2)
        both = run.rows
        assert said_by(run, "scale", "rollout=3") == "rollout-2 is being started\n"
        run.wait_until(lambda rows: rows[-1]["sync/replicas_committed"] == 3)
        workers = [run.worker(name) for name in ("rollout-0.1", "rollout-1.1", "rollout-2")]
        notice.symlink_to(f"/proc/self/task/{workers[2].pid}")  # a file that is there for this process alone
        run.wait_for(lambda: "rollout-2 has gone" in run.log)
        assert said_by(run, "scale", "rollout=1") == "rollout-1.1 hands its requests over and ends\n"
        run.wait_for(lambda: "rollout-1.1 has gone" in run.log)
        num_rows = len(run.rows)
        run.wait_until(lambda rows: len(rows) >= num_rows + 3)
        assert_all_end(workers[1:])
        assert workers[0].is_running()
        stop(run.folder, timeout_s=60)
        assert run.exit_code() == 128 + signal.SIGTERM
    assert "engine's process died of SIGSEGV (" in run.log
    assert [path.name.startswith("rollout-1-") for path in run.folder.glob("crash/*")] == [True]
    assert_workers_came_back(both, times=2)
    starts = [row["start"] for row in read_rows(run.folder / "startup.jsonl")]
    assert starts == ["run", "rollout-1.1", "rollout-0.1", "rollout-2"]
    assert_the_third_came_and_two_went(run.rows, len(both), run.log)
    assert_stale_samples_are_weighed(run.rows[1:])
    assert_no_sample_is_lost(run.rows, run.folder)


def assert_the_third_came_and_two_went(rows: list[dict[str, Any]], num_before: int, log: str) -> None:
    """And steps went on meanwhile, with every publish written once and read by the others."""
    assert [row["policy_version"] for row in rows] == list(range(len(rows))), "no step was lost or repeated"
    all_three = next(place for place, row in enumerate(rows) if row["sync/replicas_committed"] == 3)
    assert rows[all_three - 1]["rollout/replicas_wanted"] == 3, "steps went on while it started"
    assert rows[all_three - 1]["rollout/replicas_serving"] < 3
    assert re.search(r"rollout-2 read \d+ bytes of version \d+ from rollout-", log) or (
        "rollout-2 joins the next publish" in log
    )
    assert "rollout-2 has gone (it was told to go by a notice that its machine is taken away)" in log
    groups = dict(re.findall(r"(\S+) handed (\d) groups over in \d+\.\d+ s", log))
    assert groups.keys() == {"rollout-1.1", "rollout-2"}
    later = rows[num_before:]
    # None where these groups had just ended; of one that has not, tests/unit/fleet/test_coming_and_going.py tells.
    assert 0 <= sum(row["rollout/handed_over"] or 0 for row in later) <= 8 * sum(map(int, groups.values()))
    assert sum((row["rollout/groups_failed"] or 0) + (row["rollout/restarts"] or 0) for row in later) == 0
    assert rows[-1]["rollout/replicas_wanted"] == rows[-1]["sync/replicas_committed"] == 1
    for row in rows:
        assert row["sync/replicas_relayed"] == max(0, row["sync/replicas_committed"] - 1)


def assert_stale_samples_are_weighed(rows: list[dict[str, Any]]) -> None:
    """They are as old as they may be, and no older."""
    assert {row["staleness/max"] for row in rows} == {0, 1}
    for row in rows:
        assert 0 <= (row["parity/k3"] or 0) < 1e-3  # null: all tokens are of the version before
        assert 0 <= (row["parity/k3_stale"] or 0) < 0.1
        assert row["staleness/dropped_groups"] == 0
        assert (row["parity/k3_stale"] is not None) == (row["staleness/max"] > 0)
        if row["staleness/max"] == 0:
            assert row["correction/weight_mean"] == pytest.approx(1, abs=1e-5)
    assert max(abs(row["correction/weight_mean"] - 1) for row in rows) > 1e-4


def assert_no_sample_is_lost(rows: list[dict[str, Any]], run: Path) -> None:
    """Nor counted twice."""
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    prompts = [sample["prompt_id"] for sample in samples]
    assert [sample["step"] for sample in samples] == [step for step in range(1, len(rows)) for _ in range(4)]
    assert len(set(prompts)) == len(prompts), "each group of an epoch has a prompt of its own"


def said_by(run: RunUnderWay, command: str, word: str) -> str:
    """What a command says that is given to the run."""
    words = [str(run.folder), *(["--worker"] if command == "recover" else []), word]
    line = [sys.executable, "-m", "slipstream.orchestrator.cli.main", command, *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=240, check=True).stdout
