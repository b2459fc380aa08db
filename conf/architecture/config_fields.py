"""Reading single fields of a Hugging Face config, for the families that share them. Pure data, no torch.

Every reader names the field in its error, what it got and what it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conf.architecture.attention_spec import GqaSpec, Llama3Scaling, RopeSpec, YarnScaling
from conf.errors import ConfigError


def common_fields(config: dict[str, Any], architecture: str, *, rms_norm_eps: float = 1e-6) -> dict[str, Any]:
    """The fields of ModelSpec that every family reads alike."""
    refuse(config, "hidden_act", ("silu",))
    refuse(config, "attention_dropout", (0.0, None))
    return {
        "family": config["model_type"],
        "hf_architecture": architecture,
        "vocab_size": size(config, "vocab_size"),
        "hidden_size": size(config, "hidden_size"),
        "num_layers": size(config, "num_hidden_layers"),
        "intermediate_size": size(config, "intermediate_size"),
        "rms_norm_eps": float(config.get("rms_norm_eps", rms_norm_eps)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def grouped_queries(
    config: dict[str, Any], head_dim: int, *, qkv_bias: bool, output_bias: bool, qk_norm: bool
) -> GqaSpec:
    heads = size(config, "num_attention_heads")
    kv_heads = size(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"model.hf_config.num_key_value_heads must divide num_attention_heads, got {kv_heads} and {heads}"
        )
    return GqaSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
    )


def expert_sizes(config: dict[str, Any], *, width: str = "moe_intermediate_size") -> dict[str, Any]:
    """num_experts, top_k and intermediate_size, under any of the names in use; `width` is the field of the last."""
    # transformers writes a family's own name, or num_local_experts (its attribute map), into config.json
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    num_experts = size(config, next((name for name in names if name in config), names[0]))
    top_k = size(config, "num_experts_per_tok")
    if top_k > num_experts:
        raise ConfigError(f"model.hf_config.num_experts_per_tok must be <= num_experts, got {top_k} and {num_experts}")
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "intermediate_size": size(config, width),
    }


def rope_spec(
    config: dict[str, Any],
    head_dim: int,
    *,
    interleaved: bool = False,
    partial: float = 1.0,
    theta: float = 10000.0,
) -> RopeSpec:
    """Read `rope_parameters` (transformers 5), or `rope_scaling`, `rope_theta` and `partial_rotary_factor` (before).

    Args:
        config: as in config.json.
        head_dim: elements of a head.
        interleaved: as RopeSpec.interleaved.
        partial: the part of each head that turns, where the config does not say.
        theta: RoPE's base, where the config does not say.
    """
    rope: dict[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_SCALINGS:
        raise ConfigError(
            f"model.hf_config: RoPE type {kind!r} is not supported; supported: "
            f"{', '.join(repr(one) for one in _ROPE_SCALINGS)}"
        )
    dim = int(head_dim * rope.get("partial_rotary_factor", config.get("partial_rotary_factor", partial)))
    if dim < 2 or dim % 2 or dim > head_dim:
        raise ConfigError(f"model.hf_config: RoPE must turn an even number of at most {head_dim} dims, got {dim}")
    return RopeSpec(
        dim=dim,
        theta=float(rope.get("rope_theta", config.get("rope_theta", theta))),
        interleaved=interleaved,
        scaling=_ROPE_SCALINGS[kind](config, rope),
    )


def _yarn(config: dict[str, Any], rope: dict[str, Any]) -> YarnScaling:
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


def _llama3(config: dict[str, Any], rope: dict[str, Any]) -> Llama3Scaling:
    return Llama3Scaling(
        factor=float(_number(rope, "factor")),
        low_freq_factor=float(_number(rope, "low_freq_factor")),
        high_freq_factor=float(_number(rope, "high_freq_factor")),
        original_max_positions=int(_number(rope, "original_max_position_embeddings")),
    )


def num_mtp_layers(config: dict[str, Any]) -> int:
    return int(config.get("num_nextn_predict_layers", config.get("num_mtp_layers")) or 0)


def hidden_per_head(config: dict[str, Any]) -> int:
    return size(config, "hidden_size") // size(config, "num_attention_heads")


def size(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"model.hf_config.{key} must be a positive whole number, got {value!r}")
    return value


def refuse(config: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    value = config.get(key, allowed[0])
    if value not in allowed:
        raise ConfigError(
            f"model.hf_config.{key}={value!r} is not supported for {config['model_type']}; "
            f"supported: {', '.join(repr(one) for one in allowed)}"
        )


def _number(rope: dict[str, Any], key: str) -> float:
    value = rope.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"model.hf_config: RoPE's {key} must be a positive number, got {value!r}")
    return value


_ROPE_SCALINGS: dict[str, Callable[[dict[str, Any], dict[str, Any]], YarnScaling | Llama3Scaling | None]] = {
    "default": lambda config, rope: None,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""rope_type -> how to read it."""
