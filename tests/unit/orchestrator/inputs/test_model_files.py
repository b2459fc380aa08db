"""Locks: an adapter that the trainer writes fits its own model, whatever the family, and no other one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cases.tiny_models import DEEPSEEK, DENSE, GLM, GPT_OSS, LLAMA, MISTRAL, MIXED, MIXTRAL, MOE, OLMOE, make_decoder

from conf.errors import ConfigError
from orchestrator.inputs.model_files import check_adapter_fits
from trainer.adapter_io import save_adapter
from trainer.architecture.families import read_config
from weight_sync.layout import TensorMeta

FAMILIES = [DENSE, MOE, MIXED, MISTRAL, MIXTRAL, OLMOE, LLAMA, GLM, GPT_OSS, DEEPSEEK]


def tensors_of(hf_config: dict[str, Any]) -> Sequence[TensorMeta]:
    return read_config(hf_config).checkpoint_tensors("float32")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family["model_type"])
def test_what_the_trainer_writes_fits(family: dict[str, Any], tmp_path: Path) -> None:
    save_adapter(make_decoder(family, nonzero_b=False), tmp_path)
    check_adapter_fits(tmp_path, tensors_of(family), "--adapter")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (DENSE, r"layers\.0\.mlp\.experts\.base_layer\.lora_A\.weight belongs to no weight of the model"),
        ({**MOE, "num_hidden_layers": 1}, r"layers\.1\.\S+ belongs to no weight of the model"),
        (MIXED, r"layers\.1\.mlp\.experts\.base_layer\.lora_A\.weight belongs to no weight of the model"),
        ({**MOE, "hidden_size": 96}, r"lora_A\.weight has shape \(4, 64\), and the weight that it changes \(\d+, 96\)"),
        ({**MOE, "head_dim": 32}, r"lora_B\.weight has shape \(\d+, 4\), and the weight that it changes"),
    ],
)
def test_the_adapter_of_another_model_is_refused(model: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_adapter(make_decoder(MOE, nonzero_b=False), tmp_path)
    with pytest.raises(ConfigError, match=f"--adapter={tmp_path}: .*{message}"):
        check_adapter_fits(tmp_path, tensors_of(model), "--adapter")


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    save_adapter(make_decoder(MOE, nonzero_b=False), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="is cut short"):
        check_adapter_fits(tmp_path, tensors_of(MOE), "--adapter")
