"""Gemma: how its config is read. Pure data, no torch."""

from __future__ import annotations

from dataclasses import replace

from slipstream.conf.architecture.attention_spec import RopeSpec
from slipstream.conf.architecture.config_fields import (
    by_layer,
    common_fields,
    grouped_queries,
    number,
    refuse,
    require,
    rope_spec,
    size,
)
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject, is_object
from slipstream.conf.schema import MlaNormEps

KINDS = ("full_attention", "sliding_attention")
GEMMA3_DEFAULTS: JsonObject = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
}
"""Defaults of transformers' class: published checkpoints with a vision tower leave out what is equal to them."""


def gemma3(config: JsonObject, mla_norm_eps: MlaNormEps) -> ModelSpec:
    """Gemma 3 (transformers models/gemma3): a sliding window in five of six layers, with a RoPE of its own; norms of
    1 + weight before and after attention and feed-forward; GELU; scaled embeddings, which are the head, too."""
    refuse(config, "hidden_activation", ("gelu_pytorch_tanh",))
    for key in ("attention_bias", "use_bidirectional_attention"):
        refuse(config, key, (False, None))
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        refuse(config, key, (None,))
    require(config, "sliding_window")
    head_dim, window = size(config, "head_dim", 256), size(config, "sliding_window")
    full, local = _ropes(config, head_dim)
    attention = grouped_queries(config, head_dim, qkv_bias=False, output_bias=False, qk_norm=True)
    common = common_fields(config, "Gemma3ForCausalLM", is_tied=True)
    return ModelSpec(
        **common,
        attention=replace(
            attention,
            score_dim=size(config, "query_pre_attn_scalar", 256),
            windows=tuple(window if kind == "sliding_attention" else None for kind in _kinds(config)),
        ),
        rope=full,
        local_rope=local,
        norms_add_one=True,
        norms_halves=True,
        embedding_scale=common["hidden_size"] ** 0.5,
        has_gelu=True,
    )


def _kinds(config: JsonObject) -> list[str]:
    num_layers = size(config, "num_hidden_layers")
    # transformers reads the one and writes the other
    pattern = size(config, "sliding_window_pattern", size(config, "_sliding_window_pattern", 6))
    kinds = by_layer(config, "layer_types") or [KINDS[(layer + 1) % pattern > 0] for layer in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - set(KINDS):
        raise ConfigError(
            f"model.hf_config.layer_types must say full_attention or sliding_attention for each of {num_layers} "
            f"layers, got {kinds}"
        )
    return kinds


def _ropes(config: JsonObject, head_dim: int) -> list[RopeSpec]:
    """The rotations of full attention and of sliding windows, from `rope_parameters` by kind of layer
    (transformers 5), or from fields of their own (before); `rope_scaling` is that of full attention."""
    given: object = config.get("rope_parameters") or {}
    if not is_object(given) or set(given) - set(KINDS):
        raise ConfigError(f"model.hf_config.rope_parameters must be a mapping of {' and '.join(KINDS)}, got {given!r}")
    thetas = number(config, "rope_theta", 1e6), number(config, "rope_local_base_freq", 1e4)
    scalings: tuple[object, object] = (config.get("rope_scaling") or {}, {})
    ropes: list[RopeSpec] = []
    for kind, theta, scaling in zip(KINDS, thetas, scalings, strict=True):
        own: object = given.get(kind) or {}
        if not is_object(own) or not is_object(scaling):
            raise ConfigError(f"model.hf_config: RoPE of {kind} must be a mapping, got {own!r} and {scaling!r}")
        fields: JsonObject = {"model_type": config["model_type"], "rope_parameters": {**own, **scaling}}
        for key in ("max_position_embeddings", "original_max_position_embeddings"):
            fields[key] = config.get(key)
        ropes.append(rope_spec(fields, head_dim, theta=theta))
    return ropes
