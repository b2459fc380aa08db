"""Reading single fields of a Hugging Face config, for the families that share them. Pure data, no torch.

Every reader names the field in its error, what it got and what it takes.
"""

from collections.abc import Callable, Collection
from typing import Any

from slipstream.conf.architecture.attention_spec import AttentionSpec, GqaSpec
from slipstream.conf.architecture.rope_spec import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec, YarnScaling
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject


def common_fields(
    config: JsonObject,
    architecture: str,
    *,
    rms_norm_eps: float = 1e-6,
    width: str = "intermediate_size",
    is_tied: bool = False,
) -> JsonObject:
    """The fields of ModelSpec that every family reads alike. `width` is the field of feed-forwards; the head is the
    embedding table where the config does not say and `is_tied`."""
    refuse(config, hidden_act=("silu",), attention_dropout=(0.0, None))
    # vLLM reads these of any config, and transformers' models have no such parts
    refuse(config, is_causal=(True, None), dual_chunk_attention_config=(None,), llama_4_scaling=(None,))
    return {
        "family": config["model_type"],
        "hf_architecture": architecture,
        "vocab_size": size(config, "vocab_size"),
        "hidden_size": size(config, "hidden_size"),
        "intermediate_size": size(config, width),
        "rms_norm_eps": number(config, "rms_norm_eps", rms_norm_eps),
        "tie_embeddings": bool(config.get("tie_word_embeddings", is_tied)),
    }


def grouped_queries(
    config: JsonObject,
    head_dim: int,
    rope: RopeSpec | None = None,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    needs_kv_heads: bool = True,
) -> GqaSpec:
    """Attention with fewer keys than queries; `needs_kv_heads` unless transformers' default is that there are as many
    (elsewhere it is a number, which fits one model). `rope`: None: all of a head turns, as the config says."""
    heads = size(config, "num_attention_heads")
    if needs_kv_heads:
        require(config, "num_key_value_heads")
    kv_heads = size(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"model.hf_config.num_key_value_heads must divide num_attention_heads, got {kv_heads} and {heads}"
        )
    return GqaSpec(
        rope=rope or rope_spec(config, head_dim),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
    )


def in_all_layers(config: JsonObject, attention: AttentionSpec) -> tuple[AttentionSpec, ...]:
    """ModelSpec.attentions of a model whose layers are alike in them."""
    return (attention,) * size(config, "num_hidden_layers")


def expert_sizes(
    config: JsonObject, *, width: str = "moe_intermediate_size", top_k: str = "num_experts_per_tok"
) -> JsonObject:
    """num_experts, top_k and intermediate_size, under any of the names in use, or of the fields named."""
    # transformers writes a family's own name, or num_local_experts (its attribute map), into config.json
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    given = [name for name in names if config.get(name) is not None]
    if not given:
        raise ConfigError(f"model.hf_config: the number of experts must be given, as one of {', '.join(names)}")
    num_experts = size(config, given[0])
    if any(config[name] != num_experts for name in given[1:]):
        raise ConfigError(f"model.hf_config: {' and '.join(given)} are one size under two names, and must be equal")
    chosen = size(config, top_k)
    if chosen > num_experts:
        raise ConfigError(f"model.hf_config.{top_k} must be <= num_experts, got {chosen} and {num_experts}")
    return {"num_experts": num_experts, "top_k": chosen, "intermediate_size": size(config, width)}


def rope_spec(
    config: JsonObject,
    head_dim: int,
    *,
    interleaved: bool = False,
    partial: float | None = None,
    theta: float = 10000.0,
    ignored: Collection[str] = (),
) -> RopeSpec:
    """Read `rope_parameters` (transformers 5), or `rope_scaling`, `rope_theta` and `partial_rotary_factor` (before).
    Of two, `rope_scaling` counts, as for transformers and vLLM.

    Args:
        head_dim: elements of a head.
        interleaved: as RopeSpec.interleaved.
        partial: the part of each head that turns, where the config does not say; None: in this family, all of it.
        theta: RoPE's base, where the config does not say.
        ignored: Fields that say nothing about text.
    """
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    given: Any = older or newer or {}
    rope: JsonObject = given
    refuse(config, original_max_position_embeddings=(None,))  # transformers prefers it to that of YaRN
    unknown = sorted(set(rope) - _ROPE_FIELDS - {*ignored}) if isinstance(given, dict) else [repr(given)]
    if unknown:
        raise ConfigError(
            f"model.hf_config: rope_scaling and rope_parameters have fields that are not read: {', '.join(unknown)}; "
            f"read are {', '.join(sorted(_ROPE_FIELDS))}"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_SCALINGS:
        raise ConfigError(
            f"model.hf_config: RoPE type {kind!r} is not supported; supported: "
            f"{', '.join(repr(one) for one in _ROPE_SCALINGS)}"
        )
    part = number(rope, "partial_rotary_factor", number(config, "partial_rotary_factor", partial or 1.0))
    if partial is None and part != 1.0:
        raise ConfigError(
            f"model.hf_config.partial_rotary_factor must be 1 for {config['model_type']}, all of whose head turns in "
            f"transformers, got {part}"
        )
    dim = int(head_dim * part)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise ConfigError(f"model.hf_config: RoPE must turn an even number of at most {head_dim} dims, got {dim}")
    return RopeSpec(
        dim=dim,
        theta=number(rope, "rope_theta", number(config, "rope_theta", theta)),
        interleaved=interleaved,
        scaling=_ROPE_SCALINGS[kind](config, rope),
    )


def _yarn(config: JsonObject, rope: JsonObject) -> YarnScaling:
    original = rope.get("original_max_position_embeddings") or size(config, "max_position_embeddings")
    factor = rope.get("factor") or size(config, "max_position_embeddings") / original
    return YarnScaling(
        factor=float(factor),
        original_max_positions=int(original),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        attention_factor=rope.get("attention_factor"),
        truncate=bool(rope.get("truncate", True)),
    )


def _llama3(config: JsonObject, rope: JsonObject) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(_number(rope, "factor")),
        low_freq_factor=float(_number(rope, "low_freq_factor")),
        high_freq_factor=float(_number(rope, "high_freq_factor")),
        original_max_positions=int(_number(rope, "original_max_position_embeddings")),
    )


def _linear(config: JsonObject, rope: JsonObject) -> LinearScaling:
    factor = _number(rope, "factor")
    if not isinstance(factor, float):
        raise ConfigError(f"model.hf_config: RoPE's factor must be written as {factor}.0: vLLM fails on a whole number")
    return LinearScaling(factor=factor)


def refuse_windows(config: JsonObject, kind: str = "full_attention") -> None:
    """For families whose layers are all alike, without a window: vLLM gives each a window that the config names."""
    refuse(config, sliding_window=(None,))
    refuse_layer_types(config, kind)


def refuse_layer_types(config: JsonObject, kind: str = "full_attention") -> None:
    kinds = by_layer(config, "layer_types")
    if set(kinds) - {kind}:
        raise ConfigError(
            f"model.hf_config.layer_types={kinds!r} is not supported for {config['model_type']}, where every layer "
            f"has {kind}; remove it"
        )


def first_dense_layers(config: JsonObject) -> int:
    """Layers before the first one with experts. vLLM asks for the field, and transformers' default fits one model."""
    require(config, "first_k_dense_replace")
    return count(config, "first_k_dense_replace")


def num_mtp_layers(config: JsonObject) -> int:
    return count(config, "num_nextn_predict_layers", count(config, "num_mtp_layers", 0))


def hidden_per_head(config: JsonObject) -> int:
    return size(config, "hidden_size") // size(config, "num_attention_heads")


def size(config: JsonObject, key: str, default: int | None = None) -> int:
    return _whole(config, key, default, 1, "a positive whole number")


def count(config: JsonObject, key: str, default: int | None = None) -> int:
    return _whole(config, key, default, 0, "a whole number from 0 on")


def _whole(config: JsonObject, key: str, default: int | None, least: int, what: str) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"model.hf_config.{key} must be {what}, got {value!r}")
    return value


def by_layer(config: JsonObject, key: str) -> list[Any]:
    value: Any = config.get(key)
    if value is not None and not isinstance(value, list | tuple):
        raise ConfigError(f"model.hf_config.{key} must be a list about layers, got {value!r}")
    return [*(config.get(key) or ())]


def refuse(config: JsonObject, **allowed: tuple[Any, ...]) -> None:
    """Refuse fields with other values than these. The first one counts where the config does not say."""
    for key, values in allowed.items():
        value = config.get(key, values[0])
        if value not in values:
            raise ConfigError(
                f"model.hf_config.{key}={value!r} is not supported for {config['model_type']}; "
                f"supported: {', '.join(repr(one) for one in values)}"
            )


def require(config: JsonObject, *keys: str) -> None:
    """Refuse a config without one of these fields: transformers' default is that of one model, or vLLM has another."""
    for key in keys:
        config.get(key)  # a reader that notes what is asked for
        if key not in config:
            raise ConfigError(
                f"model.hf_config.{key} must be given for {config['model_type']}: without it, transformers or vLLM "
                "computes another model; copy it from the checkpoint's config.json"
            )


def number(config: JsonObject, key: str, default: float) -> float:
    return float(_positive(config.get(key, default), f"model.hf_config.{key}"))


def _positive(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{name} must be a positive number, got {value!r}")
    return value


def _number(rope: JsonObject, key: str) -> float:
    return _positive(rope.get(key), f"model.hf_config: RoPE's {key}")


_ROPE_FIELDS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    *("low_freq_factor", "high_freq_factor"),
}
_ROPE_SCALINGS: dict[str, Callable[[JsonObject, JsonObject], RopeScaling | None]] = {
    "default": lambda config, rope: None,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""rope_type -> how to read it."""
