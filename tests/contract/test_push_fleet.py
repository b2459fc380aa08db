"""`slipstream push` starts a `vllm serve` from disk, which holds what its own loader would have made, ends with the
command, and as a teacher gives the log-probabilities that transformers computes for the same ids.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.held_port import held_port
from cases.pushing import SMALL, command, environment, held
from cases.tiny_configs import DENSE
from cases.tiny_models import hf_model
from fakes.readable_engine import READER
from fakes.vllm_oracle import vllm_loads

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import TeacherConfig
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.orchestrator.inputs.teacher_check import check_teacher
from slipstream.rollout.served.client import ServedEngine
from slipstream.rollout.teacher import Teacher
from slipstream.rollout.types import Prompt, Rollout, Turn

pytest.importorskip("vllm")
MODEL = {**DENSE, "head_dim": 32}  # vLLM's CPU attention takes no 16
VLLM_CACHE = Path(os.environ.get("VLLM_CACHE_ROOT", Path.home() / ".cache" / "vllm"))
"""What vLLM knows of classes of models; without it, it imports all of itself once more to look."""


@dataclass(frozen=True)
class Fleet:
    """One server, and the command that has started it and serves."""

    folder: Path
    engine: ServedEngine
    process: subprocess.Popen[str]
    report: dict[str, Any]
    loaded: dict[str, str]
    """Hashes of every parameter after vLLM's own load."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    model: Any = hf_model(MODEL)
    model.save_pretrained(folder / "big")
    save_character_tokenizer(folder / "big", vocab_size=MODEL["vocab_size"])
    loaded = vllm_loads(folder / "big", "float32")  # before the server starts: VLLM_CACHE
    with held_port() as port:
        words = ["big", "--start", "1", "--port", str(port), "--dtype", "float32", "--json"]
        process = subprocess.Popen(
            command("push", *words, "--", *SMALL, "--served-model-name", "big", "--worker-extension-cls", READER),
            cwd=folder,
            env=environment() | {"HOME": str(folder), "VLLM_CACHE_ROOT": str(VLLM_CACHE)},  # no layout is cached yet
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate()[1] + "".join(f.read_text()[-3000:] for f in folder.glob("push-logs/*"))
            yield Fleet(folder, ServedEngine(f"http://127.0.0.1:{port}"), process, json.loads(line), loaded)
        finally:
            process.kill()
            process.wait(120)


async def test_its_log_probabilities_are_those_of_transformers(fleet: Fleet) -> None:
    """float32 on both sides; a rollout whose text would be tokenized otherwise, one with special tokens, an episode."""
    url = f"{fleet.engine.url}/v1"
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


def test_it_holds_what_its_own_loader_makes_of_the_disk_and_ends_with_the_command(fleet: Fleet) -> None:
    """The last test of this file: the server is gone after it."""
    engine, report = fleet.engine, fleet.report
    assert report["engines"] == {engine.url: ""}
    assert report["serving_s"] >= max(report["disk_done_s"], report["engines_up_s"])
    assert not report["expected_error"]
    if report["expected_s"]:  # in time; a busy host may be late with it
        assert report["expected_s"] < report["engines_up_s"]
        assert report["num_expected"] == 1  # the layout recorded on meta is the engine's, and was planned for
        assert report["plan_s"] > 0
    assert set(report["attach_s"]) == {"whole", "record", "link", "register", "describe", "endpoint"}
    assert held(engine) == fleet.loaded
    fleet.process.send_signal(signal.SIGTERM)
    assert fleet.process.wait(240) == 143
    assert not engine.is_healthy()
