"""A field that a config.json leaves out is what transformers takes it for, and no field that counts is passed over."""

from dataclasses import replace
from typing import Any

import pytest
from cases.tiny_configs import BY_FAMILY, MOE
from transformers import AutoConfig

from slipstream.conf.architecture.config_fields import Fields
from slipstream.conf.architecture.families import FAMILIES, read_config
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.errors import ConfigError

CONFIGS: dict[str, dict[str, Any]] = {config["model_type"]: config for config in (*BY_FAMILY.values(), MOE)}
NEUTRAL = {
    *("_name_or_path", "architectures", "dtype", "problem_type", "transformers_version", "id2label", "label2id"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "is_encoder_decoder", "chunk_size_feed_forward"),
    *("max_position_embeddings", "pretraining_tp", "initializer_range", "router_aux_loss_coef", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
}
"""Fields of transformers' classes that change no logit: names, tokens, sizes of a cache, losses of their training."""
NEUTRAL_HERE = {
    "qwen2": {"max_window_layers", "sliding_window"},  # use_sliding_window is refused, without which they do nothing
    "qwen2_moe": {"max_window_layers", "sliding_window"},
    "qwen3": {"max_window_layers", "sliding_window"},
    "qwen3_moe": {"sliding_window"},
    "deepseek_v3": {"head_dim", "qk_head_dim"},  # computed from other fields
    "deepseek_v32": {"head_dim", "qk_head_dim"},
    "glm_moe_dsa": {"head_dim", "qk_head_dim"},
    "glm4_moe_lite": {"qk_head_dim"},
    # of embeddings that each layer adds, and of layers with keys of another, which are refused
    "gemma4_text": {"vocab_size_per_layer_input", "use_double_wide_mlp"},
}


def written(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers writes for a config of which it is given these fields."""
    fields = {key: value for key, value in config.items() if key != "model_type"}
    return {**AutoConfig.for_model(config["model_type"], **fields).to_dict(), "model_type": config["model_type"]}


def computed(config: dict[str, Any]) -> ModelSpec:
    """The spec without what is only counted in the log."""
    return replace(read_config(config), num_mtp_layers=0)


def asked(config: dict[str, Any]) -> set[str]:
    fields = Fields(config)
    read_config(fields)
    return fields.asked - {"model_type"}


def test_every_family_has_a_config_here():
    assert set(CONFIGS) == set(FAMILIES) - {"kimi_k2"}  # deepseek_v3 by another name: vLLM takes that class for it


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_field_that_is_left_out_is_what_transformers_takes_or_refused_by_name(model_type):
    config = CONFIGS[model_type]
    assert computed(config) == computed(written(config))
    for field in asked(config):
        without = {key: value for key, value in config.items() if key != field}
        try:
            mine = computed(without)
        except ConfigError as refused:
            assert field in str(refused)
        else:
            assert mine == computed(written(without)), field


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_field_of_transformers_class_is_read_refused_or_known_to_be_neutral(model_type):
    config = written(CONFIGS[model_type])
    assert set(config) - asked(CONFIGS[model_type]) - {"model_type"} - NEUTRAL == NEUTRAL_HERE.get(model_type, set())


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize("value", [None, "x", -1, 0, []], ids=repr)
def test_a_field_of_another_kind_is_refused_not_a_traceback(model_type, value):
    for field in asked(CONFIGS[model_type]):
        try:
            read_config({**CONFIGS[model_type], field: value})
        except ConfigError as refused:
            assert "hf_config" in str(refused), field
