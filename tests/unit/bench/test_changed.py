"""bench/changed.py: what it counts as changed, and that its rows are trained and compared."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_configs import DENSE
from fakes.checkpoints import write_checkpoint
from fakes.template_tokenizer import NUM_WORDS, QWEN, QWEN_PLAIN, save_template_tokenizer

from bench import changed
from slipstream.trainer.weights.quantization import SCALE_SUFFIX


def test_two_neighbours_in_fp8_are_an_element_and_scales_go_whole() -> None:
    before = {"w": torch.ones(64, 128).to(torch.float8_e4m3fn), "w" + SCALE_SUFFIX: torch.ones(1, 1)}
    now = {name: tensor.clone() for name, tensor in before.items()}
    now["w"].view(torch.uint8)[:2, :3] += 1  # in each row two in one element, and one in the next
    found = changed.compared(before, now)
    num_bytes = 64 * 128
    assert found == {
        "values": 6 / num_bytes, "elements": 4 / (num_bytes / 2), "scales": 0.0, "whole": num_bytes + 4,
        "sent": (8 + 4 * 4 + 4) / (num_bytes + 4),
    }  # fmt: skip
    now["w"].view(torch.uint8)[:, :64] += 1  # half of all: the stream has no room
    assert changed.compared(before, now)["sent"] == 1.0


def test_a_zero_of_another_sign_is_sent() -> None:
    before = {"w": torch.zeros(4, 4096, dtype=torch.bfloat16)}
    found = changed.compared(before, {"w": -before["w"]})
    assert found["values"] == found["elements"] == 1.0


def test_rows_are_trained_and_compared_in_both_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**DENSE, "vocab_size": 640, "architectures": ["Qwen3ForCausalLM"]}
    assert NUM_WORDS + len(QWEN) + len(QWEN_PLAIN) < 640
    folder, out = write_checkpoint(config, tmp_path / "model", seed=0), tmp_path / "changed.json"
    save_template_tokenizer(folder, "qwen3", QWEN, QWEN_PLAIN)
    rows = ["lora:1e-3", "lora:1e-5", "lora-random:1e-5", "full:1e-3"]
    monkeypatch.setattr(sys, "argv", ["changed.py", str(folder), "--rows", *rows, "--out", str(out)])
    changed.main()
    found: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    assert [f"{row['kind']}:{row['lr']:g}" for row in found] == [
        "lora:0.001",
        "lora:1e-05",
        "lora-random:1e-05",
        "full:0.001",
    ]
    for row in found:
        of_bfloat16, of_fp8 = row["formats"]["torch.bfloat16"], row["formats"]["torch.float8_e4m3fn"]
        for apart in of_fp8.values():
            assert 0 < apart["values"] <= apart["elements"] <= 2 * apart["values"]
        assert 0 < of_bfloat16["1"]["values"] < of_bfloat16["4"]["values"]
        # FP8's neighbouring values are 16 times as far apart
        assert of_fp8["1"]["values"] < of_bfloat16["1"]["values"]
        assert of_fp8["1"]["whole"] < 0.6 * of_bfloat16["1"]["whole"]
    fast, slow = (row["formats"]["torch.bfloat16"]["1"]["values"] for row in found[:2])
    assert slow < fast
