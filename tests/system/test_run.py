"""The quick start's loop for a few steps, on real Ray, vLLM, Mooncake and FSDP2, through the command line."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file
from system.conftest import RUN_TIMEOUT_S, FinishedRun, HeldReward, RunUnderWay, assert_all_end, train, trainer_ranks

from slipstream.conf.load import load_resolved_yaml
from slipstream.orchestrator.files.row_files import read_rows

DATA = [
    "data=files", "data.sources=[pkg://letters_train.jsonl,pkg://letters_heldout.jsonl]", "data.weights=[3,1]",
    "data.order=middling", "data.eval_path=pkg://letters_heldout.jsonl", "data.max_prompt_tokens=16",
    "rollout.sampling.seed=1", "rollout.sampling.stop=[xy]", "rollout.eval.top_k=8", "rollout.eval.seed=2",
]  # fmt: skip
"""Orders of prompts and ways of sampling that a first run need not name."""


ON_POLICY = ["run.num_steps=3", "run.eval_every_steps=0", *DATA]


@pytest.fixture(scope="module")
def on_policy(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Three strictly on-policy steps."""
    folder = tmp_path_factory.mktemp("on_policy")
    return train([*ON_POLICY, *HeldReward(folder).words, f"run.checkpoint_dir=file://{folder}/store"], folder)


@pytest.fixture(scope="module")
def resumed(on_policy: FinishedRun, cluster: str) -> FinishedRun:
    """Two more steps of the same run, with one engine and on another Ray cluster. Its checkpoints on its own disk are
    lost.
    """
    shutil.rmtree(on_policy.folder / "checkpoints")
    folder = on_policy.folder.parent
    words = ["run.num_steps=5", "run.eval_every_steps=0", "rollout.num_workers=1", cluster, *DATA]
    words += [*HeldReward(folder).words, f"run.resume={on_policy.folder}", f"run.checkpoint_dir=file://{folder}/store"]
    return train(words, folder)


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
    (start,) = read_rows(on_policy.folder / "startup.jsonl")
    assert {span["who"] for span in start["spans"]} == {"run", "trainer-0", "trainer-1", "rollout-0", "rollout-1"}
    sample = json.loads((on_policy.folder / "samples.jsonl").read_text().splitlines()[0])
    assert {"prompt", "response", "reward", "policy_version"} <= set(sample)


def test_no_process_of_a_run_is_left(on_policy: FinishedRun) -> None:
    """Not by the run's name alone: a run that begins beside it, in the same second, has it too."""
    under = str(on_policy.folder.parent)
    lines = (" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    assert [line for line in lines if under in line] == []


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_a_controller_and_trainer_ranks_that_are_killed_change_nothing_that_is_learned(
    on_policy: FinishedRun, tmp_path: Path
) -> None:
    """The same run, before it is resumed. Its command is killed in the second step, and again in the publish after it;
    `slipstream resume` goes on with the same processes. Then a rank is killed in a step, and rank 0 in a publish, for
    which an engine is held up. It samples from the same prompts, once each, and learns what the undisturbed run did, up
    to the last bits that engines' log-probabilities have in any two runs. No step ends before its reward is let go.
    """
    reward = HeldReward(tmp_path)
    reward.hold(2)
    with RunUnderWay([*ON_POLICY, *reward.words, "run.checkpoint_every_steps=0"], tmp_path) as run:
        reward.wait_until_held(run)
        ranks, engines = trainer_ranks(run.folder), [run.engine_of(f"rollout-{number}") for number in (0, 1)]
        wait_until_idle(engines[0])  # what it samples for this step is there
        ranks[1].suspend()
        reward.hold(3)
        wait_until_idle(engines[0])  # a rank is waited for
        kill_command(run)
        ranks[1].resume()
        run.resume()
        run.wait_for(lambda: "publish of version 2 begins" in run.log)
        kill_command(run)  # in it, or soon after
        run.resume()
        run.wait_for(lambda: len(went_on_after(run)) == 2)
        reward.wait_until_held(run)
        ranks[1].kill()
        run.wait_for(lambda: run.log.count("trainer ranks are up again") == 1)
        ranks = trainer_ranks(run.folder)
        wait_until_idle(engines[0])
        engines[0].suspend()
        reward.let_go()
        run.wait_for(lambda: last_publish(run) == "begins")
        time.sleep(0.5)
        ranks[0].kill()
        engines[0].resume()
        run.wait_for(lambda: run.log.count("trainer ranks are up again") == 2)
        ranks = trainer_ranks(run.folder)
        assert run.exit_code() == 0
    assert went_on_after(run) in (["1", "1"], ["1", "2"])
    num_left = re.search(r"rollout workers have (\d+) groups? for the controller before", run.log)
    assert num_left is not None and int(num_left[1]) >= 4, "the batch was there when it died"
    assert run.log.count("its engine is process") == 2 and run.log.count("trainer ranks are processes") == 3
    assert_all_end([*ranks, *engines])
    for name in ("trainer-1", "trainer-0.1"):
        assert f"{name} died without a word: by SIGKILL" in run.log
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3]
    assert sum(row["trainer/restarts"] or 0 for row in run.rows) == 2
    assert all(row["trainer/down_s"] > 0 for row in run.rows if row["trainer/restarts"])
    assert_as_undisturbed(run, on_policy)


def test_a_resumed_run_goes_on_where_it_stopped(on_policy: FinishedRun, resumed: FinishedRun) -> None:
    assert resumed.exit_code == 0, resumed.stderr
    assert resumed.folder == on_policy.folder
    assert [row["step"] for row in resumed.rows] == [0, 1, 2, 3, 4, 5]
    assert [row["policy_version"] for row in resumed.rows] == [0, 1, 2, 3, 4, 5]
    assert all(row["parity/k3"] < 1e-3 for row in resumed.rows[1:])


def test_a_resumed_run_draws_prompts_on_from_where_it_stopped(resumed: FinishedRun) -> None:
    """Each step draws its groups once: none is drawn again, and none is lost, where the run was stopped."""
    shares = [row["data/share_error"] for row in resumed.rows[1:]]
    assert all(0 <= error <= 0.25 for error in shares)
    seen = [row["data/seen_fraction"] for row in resumed.rows[1:]]
    assert seen == sorted(seen) and seen[2] < seen[3], "what was seen before the stop is known after it"
    newest = max((resumed.folder / "checkpoints").glob("step-*"))
    cursor = json.loads((newest / "state.json").read_text())["prompts"]
    groups_per_step = load_resolved_yaml((resumed.folder / "config.yaml").read_text()).algorithm.groups_per_step
    assert sum(cursor["counts"]) == 5 * groups_per_step
    assert [part["num_drawn"] for part in cursor["cursors"]] == cursor["counts"]


def went_on_after(run: RunUnderWay) -> list[str]:
    """The step after which each `slipstream resume` went on."""
    return re.findall(r"processes of the run are alive: it goes on after step (\d)", run.said)


def last_publish(run: RunUnderWay) -> str:
    """What became of it: "begins" while it is under way."""
    return re.findall(r"publish of version \d+ (\w+)", run.log)[-1]


def kill_command(run: RunUnderWay) -> None:
    """With SIGKILL."""
    os.kill(run.pid, signal.SIGKILL)
    assert run.exit_code() == -signal.SIGKILL


def assert_as_undisturbed(run: RunUnderWay, on_policy: FinishedRun) -> None:
    """The same rows, samples and adapter as those of the run that nothing happened to."""
    for row, undisturbed in zip(run.rows[1:], on_policy.rows[1:], strict=True):
        assert row["staleness/max"] == 0 and 0 <= row["parity/k3"] < 1e-3, "no sample is of a half published version"
        assert row["sync/replicas_committed"] == 2
        for figure in ("policy_version", "reward/mean", "data/seen_fraction", "data/share_error"):
            assert row[figure] == undisturbed[figure]
        assert row["optim/grad_norm"] == pytest.approx(undisturbed["optim/grad_norm"], rel=1e-3)
    assert samples_of(run.folder) == samples_of(on_policy.folder)
    assert_learned_the_same(run.folder, on_policy.folder)


def assert_learned_the_same(one: Path, undisturbed: Path) -> None:
    """Up to what the last bits of engines' log-probabilities change."""
    learned, expected = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (one, undisturbed))
    assert learned.keys() == expected.keys()
    assert max(float(abs(values - learned[name]).max()) for name, values in expected.items()) < 1e-4
    assert max(float(abs(values).max()) for values in expected.values()) > 1e-3


def wait_until_idle(process: psutil.Process) -> None:
    """For a second it has little to do, and waits for no core either, as on a busy machine: what is held up waits for
    somebody else.
    """
    used, is_idle = -1.0, False
    while (now := sum(process.cpu_times()[:2])) - used > 0.2 or not is_idle:
        used, is_idle = now, True
        for _ in range(20):
            time.sleep(0.05)
            is_idle &= process.status() != psutil.STATUS_RUNNING


def samples_of(run: Path) -> list[tuple[object, ...]]:
    """What was sampled, as far as a run writes it down."""
    rows = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    return sorted((row["step"], row["prompt"], row["response"], row["reward"]) for row in rows)
