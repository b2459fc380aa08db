"""A config is understood as transformers understands it: conf/architecture/model_spec.py."""

import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from cases.tiny_configs import (
    BY_FAMILY,
    DEEPSEEK,
    DEEPSEEK_V32,
    DENSE,
    GEMMA4,
    GLM_LITE,
    GPT_OSS,
    KIMI_INT4,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    MOE,
    without,
)
from cases.tiny_models import make_decoder
from transformers import AutoConfig

from slipstream.conf.architecture import families
from slipstream.conf.architecture.attention_spec import GqaSpec, MlaSpec
from slipstream.conf.architecture.families import FAMILIES, read_config
from slipstream.conf.architecture.moe_spec import ExpertFormat
from slipstream.conf.architecture.spelling import check_spelling
from slipstream.conf.errors import ConfigError
from slipstream.trainer.weights.shards import local_shards


@pytest.mark.parametrize(
    "hf_config", [*BY_FAMILY.values(), MOE, {**DENSE, "tie_word_embeddings": True, "attention_bias": True}]
)
def test_the_model_holds_exactly_the_checkpoints_tensors(hf_config):
    spec = read_config(hf_config)
    expected = {meta.name: (meta.shape, f"torch.{meta.dtype}") for meta in spec.checkpoint_tensors("bfloat16")}
    shards = local_shards(make_decoder(hf_config, dtype=torch.bfloat16))
    assert {one.tensor: (one.region.shape, str(one.parameter.dtype)) for one in shards} == expected


def test_a_config_written_by_transformers_reads_the_same():
    from transformers import Qwen3MoeConfig

    fields = {key: value for key, value in MOE.items() if key not in ("model_type", "rope_theta")}
    written = Qwen3MoeConfig(**fields, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).to_dict()
    assert read_config(written) == read_config({**MOE, "rope_theta": 5e5})
    assert read_config({**LLAMA, "rope_parameters": {"rope_type": "default"}}) == read_config(LLAMA), "the older counts"


def test_a_window_that_the_config_does_not_say_is_the_familys():
    mistral, mixtral = (
        read_config({key: value for key, value in config.items() if key != "sliding_window"}).attentions
        for config in (MISTRAL, MIXTRAL)
    )
    assert [one.window for one in mistral if isinstance(one, GqaSpec)] == [4096, 4096]  # transformers' MistralConfig
    assert [one.window for one in mixtral if isinstance(one, GqaSpec)] == [None, None]


PUBLISHED = {
    "Qwen2.5-7B": (
        {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
         "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "use_sliding_window": False},
        7_615_616_512,
    ),
    "Mistral-7B-v0.3": (
        {"model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None},
        7_248_023_552,
    ),
    "Mixtral-8x7B": (
        {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
         "num_experts_per_tok": 2},
        46_702_792_704,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {"model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
         "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24,
         "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4},
        14_315_784_192,
    ),
    "OLMoE-1B-7B": (
        {"model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024,
         "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64,
         "num_experts_per_tok": 8, "clip_qkv": None, "rms_norm_eps": 1e-5},
        6_919_161_856,
    ),
    "Gemma-3-27B": ("gemma3_27b", 27_009_346_304),  # 27,432,406,640 with its tower of 423,060,336
    "GLM-4.7-Flash": ("glm_4_7_flash", 29_943_393_920),
    "DeepSeek-V3.2": ("deepseek_v3_2", 671_877_944_064),  # without scales and multi-token prediction
    "MiniMax-M2": (
        {"model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
         "mlp_intermediate_size": 8192, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
         "head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000, "num_local_experts": 256, "num_experts_per_tok": 8,
         "scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0, "use_qk_norm": True,
         "qk_norm_type": "per_layer", "attn_type_list": [1] * 62, "attention_dropout": 0.0,
         "router_jitter_noise": 0.0, "use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1,
         "rms_norm_eps": 1e-6, "max_position_embeddings": 196608, "tie_word_embeddings": False,
         "quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic",
                                 "weight_block_size": [128, 128],
                                 "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}},
        228_689_764_864,
    ),
    "Qwen3-Next-80B-A3B": ("qwen3_next_80b_a3b", 79_674_391_296),
}  # fmt: skip
"""The sizes in a published config.json, or the preset that has them, and the elements of that checkpoint's files."""


def preset(name):
    """The shape that a choice of `model` has."""
    return yaml.safe_load((Path(families.__file__).parents[1] / "model" / f"{name}.yaml").read_text())["hf_config"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_has_this_many_elements(name):
    config, num_elements = PUBLISHED[name]
    tensors = read_config(preset(config) if isinstance(config, str) else config).checkpoint_tensors("bfloat16")
    assert sum(math.prod(meta.shape) for meta in tensors) == num_elements


def test_a_preset_says_how_many_parameters_it_has():
    sizes, wrong = {"million": 10**6, "billion": 10**9, "trillion": 10**12}, []
    for path in sorted((Path(families.__file__).parents[1] / "model").glob("*.yaml")):
        if said := re.search(r"([\d.]+) (\w+illion) parameters", path.read_text().partition("\n")[0]):
            tensors = read_config(preset(path.stem)).checkpoint_tensors("bfloat16")
            number, digits = float(said[1]), len(said[1].partition(".")[2])
            has = sum(math.prod(meta.shape) for meta in tensors) / sizes[said[2]]
            wrong += [(path.stem, said[0], has)] if round(has, digits) != number else []
    assert wrong == []


def test_kimi_k2_is_deepseek_v3_with_its_own_numbers():
    """The published shape: 61 layers, the first dense, 384 experts of 2048, 1.03 trillion parameters."""
    yarn = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 1, "mscale_all_dim": 1}
    config = {**preset("kimi_k2"), "model_type": "kimi_k2", "rms_norm_eps": 1e-5, "rope_scaling": yarn}
    spec = read_config(config)
    tensors = {meta.name: meta for meta in spec.checkpoint_tensors("bfloat16")}
    assert sum(math.prod(meta.shape) for meta in tensors.values()) == pytest.approx(1.026e12, rel=1e-3)
    assert tensors["model.layers.60.self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 7168)
    assert tensors["model.layers.60.self_attn.kv_b_proj.weight"].shape == (16384, 512)
    assert tensors["model.layers.60.mlp.gate.e_score_correction_bias"].dtype == "float32"
    assert tensors["model.layers.60.mlp.gate.weight"].dtype == "bfloat16"
    assert "model.layers.0.mlp.gate_proj.weight" in tensors
    (attention,) = spec.kinds_of_attention
    assert isinstance(attention, MlaSpec)
    assert attention.norm_eps == 1e-5
    # (128 + 64)^-0.5 * (0.1 ln 64 + 1)^2
    assert attention.softmax_scale == pytest.approx(0.144680, abs=1e-5)


def test_blocks_of_fp8_do_not_change_what_the_trainer_holds():
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    assert read_config({**DEEPSEEK, "quantization_config": quantization}) == read_config(DEEPSEEK)


def test_packed_experts_are_recognized_by_their_three_tensors():
    spec = read_config(KIMI_INT4)
    assert spec.moe is not None
    assert spec.moe.expert_format is ExpertFormat.int4
    tensors = {meta.name: (meta.shape, meta.dtype) for meta in spec.checkpoint_tensors("bfloat16")}
    down = "model.layers.2.mlp.experts.7.down_proj.weight"
    assert tensors[f"{down}_packed"] == ((64, 4), "int32")
    assert tensors[f"{down}_scale"] == ((64, 1), "bfloat16")
    assert tensors[f"{down}_shape"] == ((2,), "int64")
    assert down not in tensors
    assert tensors["model.layers.2.mlp.shared_experts.down_proj.weight"] == ((64, 32), "bfloat16")


FOR_VLLM = {
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "deepseek_v32": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "glm_moe_dsa": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "indexer_rope_interleave": True},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "minimax_m2": {"rotary_dim": 64, "use_routing_bias": True, "scoring_func": "sigmoid"},
}
"""Fields of published configs that transformers does not write and vLLM asks for."""


# transformers does not know kimi_k2, and the defaults of its glm4_moe turn an odd number of dims
@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"glm4_moe", "kimi_k2"}))
def test_no_field_that_transformers_writes_is_taken_for_a_misspelt_one(model_type):
    hf_config = {**AutoConfig.for_model(model_type).to_dict(), **FOR_VLLM.get(model_type, {}), "model_type": model_type}
    check_spelling(hf_config, hf_config)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("num_experts_per_token", "num_experts_per_tok"),
        ("norm_topk_probs", "norm_topk_prob"),
        ("hiddensize", "hidden_size"),
        ("rope_thata", "rope_theta"),
        ("rms_norm_epsilon", "rms_norm_eps"),
    ],
)
def test_a_misspelt_field_is_refused_and_the_right_one_named(wrong, right):
    hf_config = {**AutoConfig.for_model("qwen3_moe").to_dict(), "model_type": "qwen3_moe", wrong: 1}
    with pytest.raises(ConfigError, match=f"hf_config.{wrong} is .* Did you mean {right}"):
        check_spelling(hf_config, [wrong])


def test_a_misspelt_field_is_refused_also_where_the_right_one_may_be_missing():
    hf_config = {**without(GLM_LITE, "n_shared_experts"), "n_shared_expert": 1}
    with pytest.raises(ConfigError, match="Did you mean n_shared_experts"):
        check_spelling(hf_config, ["n_shared_expert"])


@pytest.mark.parametrize(
    ("tp_size", "num_bytes"),
    [
        # keys and values of 2 heads of 16 in 2 layers, float32, 100 tokens
        (1, 100 * 2 * (2 * 2 * 16) * 4),
        (2, 100 * 2 * (2 * 1 * 16) * 4),
        (4, 100 * 2 * (2 * 1 * 16) * 4),  # two ranks share a head, each with all of it
    ],
)
def test_a_sequence_takes_keys_and_values_of_every_layer(tp_size, num_bytes):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    assert read_config({**DENSE, **sizes}).sequence_cache_bytes(100, "float32", tp_size) == num_bytes


def test_latents_are_cached_once_and_windows_bound_what_a_layer_keeps():
    latent = read_config(DEEPSEEK)
    (attention,) = latent.kinds_of_attention
    assert isinstance(attention, MlaSpec)
    width = attention.kv_lora_rank + attention.qk_rope_head_dim
    assert latent.sequence_cache_bytes(100, "bfloat16", 2) == 100 * latent.num_layers * width * 2
    # and an indexer's key of 14 elements in FP8 with its scale
    assert read_config(DEEPSEEK_V32).sequence_cache_bytes(100, "bfloat16", 2) == 100 * 3 * (width * 2 + 14 + 4)

    spec = read_config(GPT_OSS)
    layers = [one for one in spec.attentions if isinstance(one, GqaSpec)]
    kept = sum(one.window or 1000 for one in layers)
    assert 0 < kept < 1000 * spec.num_layers
    heads = 2 * layers[0].num_kv_heads * layers[0].head_dim
    assert spec.sequence_cache_bytes(1000, "bfloat16", 1) == kept * heads * 2

    # two layers of 2 heads of 20 that keep 4 tokens, two of one head of 24
    assert read_config(GEMMA4).sequence_cache_bytes(1000, "bfloat16", 1) == 2 * 2 * (2 * 4 * 2 * 20 + 2 * 1000 * 24)


def test_a_family_is_named_where_its_config_is_read_alone() -> None:
    """So that another family touches few files. What differs is a field of a spec or of `Family`; run.py has the model
    of a run that names none."""
    names = [*FAMILIES, *(family.wrapper for family in FAMILIES.values() if family.wrapper is not None)]
    named = re.compile("|".join(f"[\"']{name}[\"']" for name in names))
    root = Path(families.__file__).parents[2]
    packages = ("conf", "weight_sync", "trainer", "rollout", "fleet", "orchestrator")
    files = [file for package in packages for file in (root / package).rglob("*.py")]
    found = {str(file.relative_to(root)) for file in files if named.search(file.read_text())}
    readers = (f"conf/architecture/{name}.py" for name in ("families", "llama_like", "deepseek_like", "gemma"))
    assert found == {*readers, "conf/schema/run.py"}
