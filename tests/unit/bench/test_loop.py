"""bench/loop.py: what it computes from a run's files, and the options that it gives to runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench.loop import engine_tokens_per_s, figures, model_of, run_options
from conf.load import load_run_config


def report(worker: int, time: float, tokens: int) -> dict[str, Any]:
    return {"worker": worker, "time": time, "event": "tokens", "tokens": tokens}


def test_an_engines_rate_is_of_the_last_seconds_and_all_workers() -> None:
    early = [report(0, 0.0, 0), report(0, 2.0, 5), report(1, 1.0, 0)]
    late = [
        report(0, 10.0, 1000),
        report(0, 12.0, 1200),
        report(0, 14.0, 1400),
        report(1, 11.0, 300),
        report(1, 13.0, 400),
    ]
    assert engine_tokens_per_s([*early, *late], 4.0) == pytest.approx(100.0 + 50.0)
    assert engine_tokens_per_s([*early, *late], 2.5) is None  # worker 1 has one report in that time
    assert engine_tokens_per_s([{**late[0], "event": "up"}], 4.0) is None


def step(number: int, wait_s: float) -> dict[str, Any]:
    return {
        "step": number, "step/total_s": 10.0, "rollout/tokens_per_s": 50.0, "rollout/wait_s": wait_s,
        "trainer/forward_backward_s": 4.0, "trainer/optimizer_s": 0.5, "sync/total_s": 0.5, "sync/pause_s": 0.1,
        "parity/k3": None, "parity/k3_stale": 1e-3, "trainer/peak_device_bytes": None,
    }  # fmt: skip


def test_shares_of_a_step_are_of_the_steps_after_the_warm_up() -> None:
    found = figures([step(1, 9.0), step(2, 9.0), step(3, 2.0), step(4, 4.0)], [])
    assert found["parts"] == pytest.approx(
        {"waits for the batch": 0.3, "forward and backward": 0.4, "optimizer": 0.05, "publish": 0.05, "rest": 0.2}
    )
    assert (found["steps"], found["trained_tokens_per_s"], found["k3"]) == (2, 50.0, 1e-3)


@pytest.mark.parametrize("mode", ["merged", "adapter"])
@pytest.mark.parametrize(("shape", "tiny", "one_gpu"), [("qwen3-30b", False, True), ("dense-8b", True, False)])
def test_its_options_are_a_run(tmp_path: Path, mode: str, shape: str, tiny: bool, one_gpu: bool) -> None:
    args = Namespace(
        shape=shape, tiny=tiny, one_gpu=one_gpu, layers=2, length=64, steps=3, responses=32, staleness=1, set=[]
    )
    config = load_run_config(run_options(args, mode, tmp_path))
    assert config.algorithm.groups_per_step * config.algorithm.group_size == args.responses
    assert config.rollout.max_model_len >= config.max_prompt_tokens + args.length
    assert model_of(args)["num_hidden_layers"] == 2
