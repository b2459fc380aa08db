"""Gemma: how its config is read. Pure data, no torch."""

from dataclasses import replace

from slipstream.conf.architecture.activation import GELU_TANH
from slipstream.conf.architecture.attention_spec import GqaSpec
from slipstream.conf.architecture.config_fields import Fields
from slipstream.conf.architecture.family import Family
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.architecture.moe_spec import CheckpointNames, MoeSpec
from slipstream.conf.architecture.rope_spec import ProportionalScaling, RopeSpec
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject, is_object

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


def gemma3(config: Fields) -> ModelSpec:
    """Gemma 3 (transformers models/gemma3): a sliding window in five of six layers, with a RoPE of its own; norms of
    1 + weight before and after attention and feed-forward; GELU; scaled embeddings, which are the head, too."""
    config.refuse(hidden_activation=("gelu_pytorch_tanh",), attention_bias=(False, None))
    config.refuse(use_bidirectional_attention=(False, None))
    config.refuse(final_logit_softcapping=(None,), attn_logit_softcapping=(None,))
    config.require("sliding_window")
    head_dim, window = config.size("head_dim", 256), config.size("sliding_window")
    rope, rope_of_windows = _ropes(config, head_dim)
    score_dim = config.size("query_pre_attn_scalar", 256)
    full = config.grouped_queries(head_dim, rope, qk_norm=True, score_dim=score_dim, norms_add_one=True)
    local = replace(full, rope=rope_of_windows, window=window)
    return config.model(
        "Gemma3ForCausalLM",
        tuple(local if kind == "sliding_attention" else full for kind in _kinds(config)),
        is_tied=True,
        norms_add_one=True,
        norms_halves=True,
        embedding_scale=config.size("hidden_size") ** 0.5,
        has_gelu=True,
    )


def gemma4(config: Fields) -> ModelSpec:
    """Gemma 4 of 31B and 26B-A4B (transformers models/gemma4): layers without a window have heads of their own, whose
    values may be their keys before the norm; values are normed; scores have no scale, layers' results have; logits pass
    a soft cap. The second has experts beside its dense feed-forward."""
    _refuse_other_gemma4(config)
    config.refuse(hidden_activation=("gelu_pytorch_tanh",), attention_bias=(False, None))
    config.refuse(attn_logit_softcapping=(None,), use_bidirectional_attention=(None, "vision"))  # of pictures' tokens
    # rope_parameters has them, by kind of layer
    by_kind = (None,)
    config.refuse(rope_theta=by_kind, rope_scaling=by_kind, partial_rotary_factor=by_kind, rope_local_base_freq=by_kind)
    softcap = config.get("final_logit_softcapping")
    return config.model(
        "Gemma4ForCausalLM",
        _gemma4_attentions(config),
        is_tied=True,
        norms_halves=True,
        scales_layers=True,
        embedding_scale=config.size("hidden_size") ** 0.5,
        logit_softcap=None if softcap is None else config.number("final_logit_softcapping", 30.0),
        has_gelu=True,
        moe=_experts_beside_dense(config),
    )


def gemma4_engine_fields(config: JsonObject) -> JsonObject:
    """What vLLM 0.25.1 builds layers without a window from. transformers moves these fields to `per_layer_config`, and
    from 5.15 on refuses to say the other layers' head_dim; vLLM from 0.28 on reads it by layer."""
    full = _gemma4_attentions(Fields(config))[-1]
    return {
        "allow_global_per_layer_attribute_access": True,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_kv_heads,
    }


def _experts_beside_dense(config: Fields) -> MoeSpec | None:
    """transformers reads enable_moe_block, and vLLM whether there are num_experts."""
    has_block, has_experts = bool(config.get("enable_moe_block")), config.get("num_experts") is not None
    if has_block is not has_experts:
        raise ConfigError(
            f"model.hf_config of {config['model_type']} needs both enable_moe_block=true and num_experts, or neither, "
            f"got {config.get('enable_moe_block')!r} and {config.get('num_experts')!r}"
        )
    if not has_block:
        return None
    names = CheckpointNames(block="")
    return config.experts(
        norm_topk_prob=True, top_k="top_k_experts", activation=GELU_TANH, names=names, is_beside_dense=True
    )


def _refuse_other_gemma4(config: Fields) -> None:
    config.require("hidden_size_per_layer_input")  # transformers' default is that of E2B
    lacking = [
        f"{feature} ({key}={config[key]!r})"
        for key, feature in (
            ("hidden_size_per_layer_input", "embeddings that each layer adds"),
            ("num_kv_shared_layers", "layers that attend to keys and values of another layer"),
        )
        if config.get(key) not in (0, None)
    ]
    if lacking:
        raise ConfigError(
            f"model.hf_config: {config['model_type']} is supported as 31B and 26B-A4B are; this one has what the "
            f"decoder lacks: {'; '.join(lacking)}"
        )


def _gemma4_attentions(config: Fields) -> tuple[GqaSpec, ...]:
    """Layers with a window, and those without, of which the last one is."""
    config.require("sliding_window")
    window, kinds = config.size("sliding_window"), _kinds(config, ends_full=True)
    head_dim = config.size("head_dim", 256)
    rope = _gemma4_rope(config, "sliding_attention", head_dim)
    heads = config.grouped_queries(head_dim, rope, qk_norm=True, norms_values=True, score_dim=1)
    local, full = replace(heads, window=window), _full_attention(config, heads, kinds)
    return tuple(local if kind == "sliding_attention" else full for kind in kinds)


def _full_attention(config: Fields, others: GqaSpec, kinds: list[str]) -> GqaSpec:
    """The heads of layers without a window: `per_layer_config` (transformers), or global fields (as published)."""
    are_values = config.get("attention_k_eq_v") or False
    if not isinstance(are_values, bool):
        raise ConfigError(f"model.hf_config.attention_k_eq_v must be true or false, got {are_values!r}")
    heads = Fields({"head_dim": config.size("global_head_dim", 512)})
    if are_values and config.get("num_global_key_value_heads") is not None:
        heads["num_key_value_heads"] = config.size("num_global_key_value_heads")
    given: object = config.get("per_layer_config")
    if given is not None:
        layers = {layer for layer, kind in enumerate(kinds) if kind == "full_attention"}
        of_layers: dict[int, object] = {}
        if is_object(given) and all(str(layer).isdecimal() for layer in given):
            of_layers = {int(layer): one for layer, one in given.items()}
        first: object = next(iter(of_layers.values()), None)
        if set(of_layers) != layers or any(one != first for one in of_layers.values()) or not is_object(first):
            raise ConfigError(
                "model.hf_config.per_layer_config must give every layer with full_attention the same head_dim and "
                f"num_key_value_heads, and no other layer any; got {given!r}"
            )
        heads = Fields(first)
    unknown = set(heads) - {"head_dim", "num_key_value_heads"}
    kv_heads, head_dim = heads.size("num_key_value_heads", others.num_kv_heads), heads.size("head_dim", others.head_dim)
    if unknown or others.num_heads % kv_heads:
        raise ConfigError(
            f"model.hf_config: layers with full_attention can have a head_dim, and num_key_value_heads that divide "
            f"num_attention_heads {others.num_heads}; got {heads}"
        )
    rope = _gemma4_rope(config, "full_attention", head_dim)
    return replace(others, rope=rope, num_kv_heads=kv_heads, head_dim=head_dim, keys_are_values=are_values)


def _gemma4_rope(config: Fields, kind: str, head_dim: int) -> RopeSpec:
    """The rotation of layers of this kind. Fields of proportional RoPE are read here."""
    defaults: JsonObject = {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    given: object = config.get("rope_parameters")
    given = defaults if given is None else given
    if not is_object(given) or set(given) != set(KINDS) or not all(is_object(one) for one in given.values()):
        raise ConfigError(f"model.hf_config.rope_parameters must be a mapping of {' and '.join(KINDS)}, got {given!r}")
    own = Fields(given[kind])
    if own.get("rope_theta") is None:
        raise ConfigError(f"model.hf_config.rope_parameters.{kind} needs rope_theta, got {own!r}")
    if own.get("rope_type") != "proportional":
        return Fields({"model_type": config["model_type"], "rope_parameters": own}).rope(head_dim)
    unknown = set(own) - {"rope_type", "rope_theta", "partial_rotary_factor"}
    share = own.number("partial_rotary_factor", 1.0)
    if unknown or share > 1 or head_dim % 2:
        raise ConfigError(
            f"model.hf_config.rope_parameters.{kind}: proportional RoPE takes rope_theta and a "
            f"partial_rotary_factor of at most 1, for heads of an even size; got {own!r} for heads of {head_dim}"
        )
    theta = own.number("rope_theta", 1e4)
    return RopeSpec(dim=head_dim, theta=theta, scaling=ProportionalScaling(share=share))


def _kinds(config: Fields, *, ends_full: bool = False) -> list[str]:
    """Which attention each layer has. `ends_full`: transformers makes the last one full, whatever the config says."""
    num_layers = config.num_layers
    # transformers reads the one and writes the other
    pattern = config.size("sliding_window_pattern", config.size("_sliding_window_pattern", 6))
    kinds = config.by_layer("layer_types") or [KINDS[(layer + 1) % pattern > 0] for layer in range(num_layers)]
    if ends_full and not config.get("layer_types"):
        kinds[-1] = "full_attention"
    if ends_full and kinds[-1] != "full_attention":
        raise ConfigError(f"model.hf_config.layer_types must end with full_attention, got {kinds[-1]!r}")
    if len(kinds) != num_layers or set(kinds) - set(KINDS):
        raise ConfigError(
            f"model.hf_config.layer_types must say full_attention or sliding_attention for each of {num_layers} "
            f"layers, got {kinds}"
        )
    return kinds


def _ropes(config: Fields, head_dim: int) -> list[RopeSpec]:
    """The rotations of full attention and of sliding windows, from `rope_parameters` by kind of layer
    (transformers 5), or from fields of their own (before); `rope_scaling` is that of full attention."""
    given: object = config.get("rope_parameters") or {}
    if not is_object(given) or set(given) - set(KINDS):
        raise ConfigError(f"model.hf_config.rope_parameters must be a mapping of {' and '.join(KINDS)}, got {given!r}")
    thetas = config.number("rope_theta", 1e6), config.number("rope_local_base_freq", 1e4)
    scalings: tuple[object, object] = (config.get("rope_scaling") or {}, {})
    ropes: list[RopeSpec] = []
    for kind, theta, scaling in zip(KINDS, thetas, scalings, strict=True):
        own: object = given.get(kind) or {}
        if not is_object(own) or not is_object(scaling):
            raise ConfigError(f"model.hf_config: RoPE of {kind} must be a mapping, got {own!r} and {scaling!r}")
        passed = ("model_type", "max_position_embeddings", "original_max_position_embeddings")
        fields = Fields({"rope_parameters": {**own, **scaling}, **{key: config.get(key) for key in passed}})
        ropes.append(fields.rope(head_dim, theta=theta))
    return ropes


FAMILIES = {
    "gemma3_text": Family(gemma3, wrapper="gemma3", left_out=GEMMA3_DEFAULTS, head_dim=256),
    "gemma4_text": Family(
        gemma4, wrapper="gemma4", head_dim=256, engine_fields=gemma4_engine_fields, fills_slots=False, names_slots=False
    ),
}
