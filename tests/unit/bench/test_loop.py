"""bench/loop.py: what it computes from a run's files, and the options that it gives to runs."""

import json
from argparse import Namespace
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from bench.loop import PEERS, engine_tokens_per_s, figures, job_of, keep_former_rows, model_of, run_options
from bench.loops.lengths import FIXED, LONG_TAILED, lengths, mean_length
from bench.loops.row_process import busy_and_memory
from bench.loops.trl_row import Clock, figures as trl_figures
from bench.loops.verl_row import figures as verl_figures
from slipstream.conf.load import load_run_config


def report(worker: int, time: float, tokens: int) -> dict[str, Any]:
    return {"worker": worker, "time": time, "event": "tokens", "tokens": tokens}


def test_an_engines_rate_is_of_all_workers_between_two_shares_of_their_tokens() -> None:
    slow_start = [report(0, 0.0, 0), report(0, 8.0, 100), report(1, 1.0, 0), report(1, 6.0, 50)]
    full = [report(0, 10.0, 500), report(0, 13.0, 1100), report(1, 8.0, 250), report(1, 12.0, 650)]
    slow_end = [report(0, 33.0, 1200), report(0, 99.0, 1200), report(1, 40.0, 700), report(1, 41.0, 700)]
    fleet = [*slow_start, *full, *slow_end]
    assert engine_tokens_per_s(fleet, 0.5, 0.75) == pytest.approx(200.0 + 100.0)
    assert engine_tokens_per_s(fleet, 0.0, 1.0) == pytest.approx(1200 / 33 + 700 / 39)
    assert engine_tokens_per_s(fleet, 0.5, 0.5) is None
    assert engine_tokens_per_s(fleet, 2 / 3, 1 - 1 / 3) is None
    assert engine_tokens_per_s([*fleet, report(2, 5.0, 10)], 0.5, 0.75) is None
    assert engine_tokens_per_s([{**fleet[0], "event": "up"}], 0.5, 0.75) is None


def step(number: int, wait_s: float) -> dict[str, Any]:
    return {
        "step": number, "step/total_s": 10.0, "rollout/tokens_per_s": 50.0, "rollout/wait_s": wait_s,
        "trainer/forward_backward_s": 4.0, "trainer/optimizer_s": 0.5, "sync/total_s": 0.5, "sync/pause_s": 0.1,
        "parity/k3": None, "parity/k3_stale": 1e-3, "trainer/peak_device_bytes": None,
    }  # fmt: skip


def test_shares_of_a_step_are_of_the_steps_after_the_warm_up() -> None:
    found = figures([step(1, 9.0), step(2, 9.0), step(3, 2.0), step(4, 4.0)], [], 1)
    assert found["parts"] == pytest.approx(
        {"waits for the batch": 0.3, "forward and backward": 0.4, "optimizer": 0.05, "publish": 0.05, "rest": 0.2}
    )
    assert (found["steps"], found["trained_tokens_per_s"], found["k3"]) == (2, 50.0, 1e-3)


@pytest.mark.parametrize("mode", ["merged", "merged-own-host", "adapter"])
@pytest.mark.parametrize(("shape", "tiny", "one_gpu"), [("qwen3-30b", False, True), ("dense-8b", True, False)])
def test_its_options_are_a_run(tmp_path: Path, mode: str, shape: str, tiny: bool, one_gpu: bool) -> None:
    args = Namespace(
        shape=shape, tiny=tiny, one_gpu=one_gpu, layers=2, length=64, lengths=FIXED, steps=3, responses=32, staleness=1,
        kv_gib=1.0, set=[],
    )  # fmt: skip
    config = load_run_config(run_options(args, mode, tmp_path))
    assert config.algorithm.groups_per_step * config.algorithm.group_size == args.responses
    assert config.rollout.max_model_len >= config.max_prompt_tokens + args.length
    assert model_of(args)["num_hidden_layers"] == 2


def test_a_peer_gets_the_sizes_of_the_run(tmp_path: Path) -> None:
    args = Namespace(
        shape="qwen3-30b", tiny=False, one_gpu=True, layers=4, length=507, lengths=FIXED, steps=3, responses=32,
        staleness=1, kv_gib=40.0, peer_seconds=60.0, set=[],
    )  # fmt: skip
    config = load_run_config(run_options(args, "merged", tmp_path))
    job = job_of(args, tmp_path)
    assert (job.rank, job.lr) == (config.trainer.lora.rank, config.trainer.optim.lr)
    assert (job.microbatch_tokens, job.length) == (
        config.trainer.max_microbatch_tokens,
        config.rollout.sampling.max_tokens,
    )
    assert job.max_model_len == config.rollout.max_model_len == 528
    # Keys and values of 4 layers, 4 heads of 128 bfloat16 numbers: 8,192 bytes per token. A run has two batches.
    assert job.kv_cache_bytes == 32 * 528 * 8192
    assert config.rollout.kv_cache_bytes == 2 * job.kv_cache_bytes
    assert job_of(Namespace(**{**vars(args), "kv_gib": 0.1}), tmp_path).kv_cache_bytes == (1 << 30) // 10
    for _, changes in PEERS.values():
        replace(job, **changes)


def test_most_long_tailed_responses_are_short_and_the_mean_is_known() -> None:
    drawn = list(islice(lengths(LONG_TAILED, 2000), 8000))
    assert set(drawn) == {200, 2000}
    assert sum(drawn) / len(drawn) == pytest.approx(mean_length(LONG_TAILED, 2000), rel=0.05)
    assert list(islice(lengths(FIXED, 2000), 3)) == [2000] * 3


def test_a_sync_within_a_generation_counts_once() -> None:
    times = iter([0.0, 1.0, 5.0, 7.0, 9.0])  # the generation begins, the sync begins and ends, and so on
    clock = Clock(lambda: next(times))
    clock.timed("generate", clock.timed("sync", lambda: None, lambda: None), lambda: None)()
    clock.step_ended()
    assert (clock.parts, clock.ends) == ({"sync": [4.0], "generate": [3.0]}, [9.0])


def test_a_peers_figures_are_of_the_steps_asked_for() -> None:
    clock = Clock()
    clock.ends, clock.parts = [50.0, 60.0, 68.0, 80.0], {"sync": [0, 0, 1, 1], "generate": [0, 0, 3, 5]}
    found = trl_figures(clock, [9, 9, 100, 300], [0.5, 0.5, 0.1, 0.3], 2, 4)
    assert (found["steps"], found["step_s"], found["publish_s"], found["pause_s"]) == (2, 10.0, 1, 6.0)
    assert (found["trained_tokens_per_s"], found["engine_tokens_per_s"], found["k3"]) == (20.0, 50.0, 0.2)
    assert sum(found["parts"].values()) == pytest.approx(1.0)
    assert trl_figures(clock, [9, 9, 100, 300], [], 2, 4)["k3"] is None


@pytest.mark.parametrize("is_async", [False, True])
def test_verls_metrics_are_told_in_the_same_words(tmp_path: Path, is_async: bool) -> None:
    args = Namespace(
        shape="dense-8b", tiny=True, one_gpu=True, layers=2, length=64, lengths=FIXED, steps=4, responses=32,
        staleness=1, kv_gib=1.0, peer_seconds=60.0,
    )  # fmt: skip
    publish = "timing_s/timing_s/param_sync" if is_async else "timing_s/update_weights"
    rows = [
        (100.0 + 10.0 * number, {
            "timing_s/gen": 4.0, "timing_s/update_actor": 5.0, publish: 0.5, "response_length/mean": 64.0,
            "rollout_corr/k3_kl": 0.1 * number, "actor/perf/max_memory_reserved_gb": 20.0 + number,
        })
        for number in (1, 2, 3, 4)
    ]  # fmt: skip
    found = verl_figures(rows, replace(job_of(args, tmp_path), is_async=is_async))
    assert (found["steps"], found["step_s"], found["publish_s"]) == (2, 10.0, 0.5)
    assert found["pause_s"] == (0.5 if is_async else 6.0)
    assert found["trained_tokens_per_s"] == 2 * 64 * 32 / 20
    assert found["engine_tokens_per_s"] == (None if is_async else 2 * 64 * 32 / 8)
    assert found["k3"] == pytest.approx(0.35)
    assert found["trainer_peak_gb"] == 24 * 1.073741824
    assert sum(found["parts"].values()) == pytest.approx(1.0)


def test_a_gpus_busy_share_is_of_the_later_half() -> None:
    lines = ["0, 0, 10", "1, 50, 7", "0, 0, 99", "0, 80, 20", "0, 90, 20", "1, 70, 9", "broken"]
    assert busy_and_memory(lines) == {"0": {"busy": 85.0, "mib": 99.0}, "1": {"busy": 70.0, "mib": 9.0}}


def test_only_rows_of_the_same_environment_and_options_are_kept(tmp_path: Path) -> None:
    def report(commit: str, steps: str, rows: str) -> dict[str, Any]:
        arguments = {"steps": steps, "rows": rows}
        return {"environment": {"commit": commit}, "arguments": arguments, "bare": {}, "runs": {}}

    out = tmp_path / "loop.json"
    out.write_text(json.dumps(report("a", "3", "trl") | {"runs": {"trl": {}}}))
    for other, kept in (
        (report("a", "3", "merged"), ["trl"]),
        (report("b", "3", "merged"), []),
        (report("a", "4", "trl"), []),
    ):
        keep_former_rows(other, out)
        assert list(other["runs"]) == kept
