"""A teacher behind a real `vllm serve` gives the log-probabilities that transformers computes for the same ids."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_models import DENSE, hf_model
from cases.vllm_process import import_path

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import Device, TeacherConfig
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.orchestrator.inputs.teacher_check import check_teacher
from slipstream.orchestrator.machine import HERE
from slipstream.rollout.engine.engine_options import engine_environment
from slipstream.rollout.served.client import ServedEngine
from slipstream.rollout.served.servers import SERVER_MODULE
from slipstream.rollout.teacher import Teacher
from slipstream.rollout.types import Prompt, Rollout, Turn

pytest.importorskip("vllm")
START_TIMEOUT_S = 240.0
MODEL = {**DENSE, "head_dim": 32}  # vLLM's CPU attention takes no 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    model: Any = hf_model(MODEL)
    model.save_pretrained(folder)
    save_character_tokenizer(folder, vocab_size=MODEL["vocab_size"])
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    port = HERE.next_free_port(8600)
    log = folder / "server.log"
    words = ["--model", str(folder), "--served-model-name", "big", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--dtype", "float32", "--max-model-len", "64", "--kv-cache-memory-bytes", str(16 << 20)]
    environment = {**os.environ, **engine_environment(Device.cpu), "PYTHONPATH": import_path()}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", SERVER_MODULE, *words, "--enforce-eager"],
            env=environment | {"GLOO_SOCKET_IFNAME": "lo"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        engine, deadline = ServedEngine(f"http://127.0.0.1:{port}"), time.monotonic() + START_TIMEOUT_S
        while not engine.is_healthy():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield f"{engine.url}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(120)


async def test_its_log_probabilities_are_those_of_transformers(folder: Path, url: str) -> None:
    """float32 on both sides; a rollout whose text would be tokenized otherwise, one with special tokens, an episode."""
    words = ["experiment=quickstart", "model=tiny_qwen3", f"model.hf_config.vocab_size={MODEL['vocab_size']}"]
    words += ["trainer.ep_size=1", "algorithm=distill", f"algorithm.teacher.base_url={url}"]
    assert check_teacher(load_run_config([*words, "algorithm.teacher.model=big"])) == f"big at {url}"

    turns = (Turn(None, [1, 7], 2, "start"), Turn(0, [8], 1, ""), Turn(None, [1, 9], 1, "edited"))
    responses = [[5, 2], list(range(95, 40, -1)), [0, 1, 3, 2], [5, 6, 90, 3]]
    rollouts = [
        Rollout(ids, [-1.0] * len(ids), [0] * len(ids), "", "stop", turns=turns if ids == responses[3] else ())
        for ids in responses
    ]
    teacher = Teacher(TeacherConfig(base_url=url, model="big"))
    found = await teacher.group_logprobs(Prompt(0, (1, 30, 31), ""), rollouts)
    await teacher.close()

    model = hf_model(MODEL)

    def own(*ids: int) -> list[float]:
        """The log-probability of each token but the first."""
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    talk, edited = own(1, 7, 5, 6, 8, 90), own(1, 9, 3)
    expected = [own(1, 30, 31, *ids)[2:] for ids in responses[:3]] + [[talk[1], talk[2], talk[4], edited[1]]]
    for logprobs, values in zip(found, expected, strict=True):
        assert logprobs == pytest.approx(values, abs=1e-4)
