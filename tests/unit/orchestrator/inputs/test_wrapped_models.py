"""Locks: the language model of a published checkpoint with a vision tower is read, whatever names it has there."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_configs import DEEPSEEK, GEMMA3, GEMMA4_MOE, QWEN3_5, QWEN3_5_MOE
from cases.tiny_models import hf_logits, logits_of, make_decoder, packed, relative_error
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from slipstream.conf.architecture.families import of_language_model, read_config
from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import DType, ModelConfig
from slipstream.orchestrator.inputs.model_files import check_checkpoint_files
from slipstream.orchestrator.inputs.model_folder import resolve_hf_config
from slipstream.trainer.weights.loading import CheckpointReader, load_weights

TOWER = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip
GEMMA_TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
GEMMA4_TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64,
}  # fmt: skip
KIMI_TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
    "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", QWEN3_5, TOWER),
    "qwen3_5_moe": ("qwen3_5_moe", QWEN3_5_MOE, TOWER),
    "gemma3": ("gemma3", GEMMA3, GEMMA_TOWER),
    "kimi": ("kimi_k25", {**DEEPSEEK, "rms_norm_eps": 1e-6}, KIMI_TOWER),
    "gemma4": ("gemma4", {**GEMMA4_MOE, "pad_token_id": 0}, GEMMA4_TOWER),
}


def write_wrapped(model: str, folder: Path) -> Path:
    """A checkpoint of transformers' class with a tower, every tensor of it random."""
    kind, text, tower = MODELS[model]
    fields = {key: value for key, value in text.items() if key != "model_type"}
    tied = text["tie_word_embeddings"]
    config = AutoConfig.for_model(kind, text_config=fields, vision_config=tower, tie_word_embeddings=tied)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    whole.save_pretrained(folder)
    if model == "kimi":  # transformers 5.19 calls all layers blocks when it writes; published are those of the tower
        stored = load_file(folder / "model.safetensors")
        named = {
            name.replace("language_model.model.blocks.", "language_model.model.layers."): stored[name]
            for name in stored
        }
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stack_experts(folder: Path) -> None:
    """Experts as published: one tensor of gate and up of all of a layer, one of down."""
    tensors, stacks = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if ".experts." in name]:
        layer, _, rest = name.partition(".experts.")
        expert, projection, _ = rest.split(".")
        stacks.setdefault(f"{layer}.experts", {}).setdefault(int(expert), {})[projection] = tensors.pop(name)
    for name, experts in stacks.items():
        ordered: list[dict[str, Tensor]] = [experts[index] for index in range(len(experts))]
        tensors[f"{name}.gate_up_proj"] = torch.stack([torch.cat((e["gate_proj"], e["up_proj"])) for e in ordered])
        tensors[f"{name}.down_proj"] = torch.stack([e["down_proj"] for e in ordered])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("model", "is_stacked"),
    [
        ("qwen3_5", False),
        ("qwen3_5_moe", False),
        ("qwen3_5_moe", True),
        ("gemma3", False),
        ("gemma4", False),
        ("kimi", False),
    ],
)
def test_the_language_model_of_a_wrapper_is_what_transformers_loads_of_it(model, is_stacked, tmp_path):
    folder = write_wrapped(model, tmp_path)
    oracle = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    if is_stacked:
        stack_experts(folder)
    hf_config = resolve_hf_config(ModelConfig(path=str(folder), dtype=DType.float32))
    spec = read_config(hf_config)
    check_checkpoint_files(folder, spec.checkpoint_tensors("float32"))
    decoder = make_decoder(hf_config, nonzero_b=False)
    report = load_weights(decoder, CheckpointReader(folder, spec), seed=0)
    assert all(
        re.search("visual|vision_tower|m(ulti_)?m(odal)?_projector|embed_vision", name) for name in report.ignored
    )
    batch = packed()
    assert relative_error(logits_of(decoder, batch), hf_logits(oracle, batch)) < 1e-5


def test_a_stack_without_an_expert_or_of_another_width_is_refused(tmp_path):
    folder = write_wrapped("qwen3_5_moe", tmp_path)
    stack_experts(folder)
    expected = read_config(QWEN3_5_MOE).checkpoint_tensors("float32")
    tensors = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    for stack, message in (
        (tensors[name][:5], r"lacks model\.layers\.1\.mlp\.experts\.5\.gate_proj\.weight"),
        (tensors[name][:, :40].contiguous(), r"experts\.0\.gate_proj\.weight has shape \(20, 64\), and .* \(24, 64\)"),
    ):
        save_file(tensors | {name: stack}, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            check_checkpoint_files(folder, expected)
    save_file(tensors | {"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"norm\.weight is model\.norm\.weight of the language model, which"):
        check_checkpoint_files(folder, expected)


def test_a_wrapper_that_says_two_things_or_no_language_model_is_refused():
    config = {"model_type": "qwen3_5", "text_config": {**QWEN3_5, "architectures": None}, "eos_token_id": 5}
    assert of_language_model(json.loads(json.dumps(config))) == {**QWEN3_5, "eos_token_id": 5}
    with pytest.raises(ConfigError, match=r"says tie_word_embeddings=False, and .*=True in text_config"):
        of_language_model({**config, "tie_word_embeddings": False})
    with pytest.raises(ConfigError, match=r"config.json of qwen3_5 needs text_config, .* got None"):
        of_language_model({"model_type": "qwen3_5"})
    assert of_language_model(QWEN3_5) is QWEN3_5
