"""From a Hugging Face config to a ModelSpec: one function a family. Pure data, no torch.

Owns the reading and the refusals: what a config asks for and the decoder cannot do (sliding windows, vision towers,
quantized weights, other activations) is named here, before anything starts. A new architecture is one entry of
`_FAMILIES`; see docs/new_architecture.md.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from conf.errors import ConfigError
from conf.schema import MlaNormEps
from trainer.architecture.activation import ExpertActivation
from trainer.architecture.model_spec import (
    INT4_GROUP,
    ExpertFormat,
    GqaSpec,
    Llama3Scaling,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    RouterScore,
    YarnScaling,
)

_GPT_OSS_YARN = {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Where its config does not say."""

FP8_BLOCK = [128, 128]
"""Rows and columns under one scale, as DeepSeek-V3 is published."""

HF_MLA_NORM_EPS = 1e-6
"""transformers builds q_a_layernorm and kv_a_layernorm of DeepSeek-V3 without an eps, so with this default."""


def read_config(config: dict[str, Any], mla_norm_eps: MlaNormEps) -> ModelSpec:
    """The spec of a config.json's dict.

    Raises:
        ConfigError: unknown model_type, a missing size, or a feature that the decoder lacks.
    """
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        raise ConfigError(
            f"model.hf_config.model_type must be one of {', '.join(sorted(_FAMILIES))}, got {model_type!r}; "
            "a new architecture is one entry of trainer/architecture/families.py"
        )
    for key in ("vision_config", "audio_config", "text_config"):
        if config.get(key):
            raise ConfigError(
                f"model.hf_config.{key}: models with towers beside the decoder are not supported; give a checkpoint "
                "of the language model alone"
            )
    spec = _FAMILIES[model_type](config, mla_norm_eps)
    quantization = config.get("quantization_config")
    return _quantized(spec, quantization) if quantization else spec


def check_spelling(config: dict[str, Any], given: Collection[str]) -> None:
    """Refuse a given field that is not read and is spelt almost as one that is.

    Fields that only the engine reads may have any name: a config.json has many.

    Args:
        config: One that read_config() can read.
        given: Names of the fields that a person wrote.

    Raises:
        ConfigError: Names the first such field and what it is near to.
    """
    asked = _Asked(config)
    read_config(asked, MlaNormEps.rollout)
    for name in sorted(set(given) - asked.names):
        for known in sorted(asked.names):
            if _is_misspelling(name, known):
                raise ConfigError(
                    f"model.hf_config.{name} is a field that this model does not have. Did you mean {known}?"
                )


def _is_misspelling(name: str, known: str) -> bool:
    """Word for word nearly the same. A word more or another word is another field: (moe_)intermediate_size."""
    words, known_words = name.split("_"), known.split("_")
    if len(words) != len(known_words):
        return "".join(words) == "".join(known_words)
    likeness = [difflib.SequenceMatcher(None, *pair).ratio() for pair in zip(words, known_words, strict=True)]
    return min(likeness) >= 0.6 and sum(likeness) >= len(words) - 0.5


class _Asked(dict[str, Any]):
    """A config that notes which fields are looked for."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.names: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)


def _llama(config: dict[str, Any], mla_norm_eps: MlaNormEps) -> ModelSpec:
    """Llama 2 and 3 (transformers models/llama): GQA, SwiGLU, RMSNorm, no norms on q and k."""
    _refuse(config, "mlp_bias", (False,))
    head_dim = _size(config, "head_dim", _hidden_a_head(config))
    bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        **_common(config, "LlamaForCausalLM"),
        attention=_gqa(config, head_dim, qkv_bias=bias, output_bias=bias, qk_norm=False),
        rope=_rope(config, head_dim),
    )


def _qwen3(config: dict[str, Any], mla_norm_eps: MlaNormEps, *, moe: MoeSpec | None = None) -> ModelSpec:
    """Qwen3 (transformers models/qwen3): GQA with q/k norms, SwiGLU, RMSNorm."""
    _refuse(config, "use_sliding_window", (False, None))
    # Only the dense family has a default head_dim of its own.
    head_dim = _size(config, "head_dim", 128 if moe is None else _hidden_a_head(config))
    bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        **_common(config, "Qwen3ForCausalLM" if moe is None else "Qwen3MoeForCausalLM"),
        attention=_gqa(config, head_dim, qkv_bias=bias, output_bias=bias, qk_norm=True),
        rope=_rope(config, head_dim),
        moe=moe,
    )


def _qwen3_moe(config: dict[str, Any], mla_norm_eps: MlaNormEps) -> ModelSpec:
    """Qwen3-MoE (transformers models/qwen3_moe): Qwen3 whose feed-forwards are experts without a shared one."""
    sparse_step, dense_layers = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    moe = MoeSpec(
        **_experts(config),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        layers=tuple(
            i not in dense_layers and (i + 1) % sparse_step == 0 for i in range(_size(config, "num_hidden_layers"))
        ),
    )
    return _qwen3(config, mla_norm_eps, moe=moe)


def _deepseek_v3(config: dict[str, Any], mla_norm_eps: MlaNormEps) -> ModelSpec:
    """DeepSeek-V3 (transformers models/deepseek_v3; https://arxiv.org/abs/2412.19437) and Kimi-K2: latent attention,
    sigmoid router, a shared expert."""
    heads = _size(config, "num_attention_heads")
    if config.get("num_key_value_heads", heads) not in (heads, None):
        raise ConfigError(
            f"model.hf_config.num_key_value_heads must equal num_attention_heads {heads} for latent attention, "
            f"got {config['num_key_value_heads']}"
        )
    nope, turning = _size(config, "qk_nope_head_dim"), _size(config, "qk_rope_head_dim")
    rope = _rope(config, turning, interleaved=bool(config.get("rope_interleave", True)))
    scale = (nope + turning) ** -0.5
    if isinstance(rope.scaling, YarnScaling) and rope.scaling.mscale_all_dim:
        scale *= rope.scaling.mscale_of(rope.scaling.mscale_all_dim) ** 2
    rms_norm_eps = float(config.get("rms_norm_eps", 1e-6))
    attention = MlaSpec(
        num_heads=heads,
        q_lora_rank=None if config.get("q_lora_rank") is None else _size(config, "q_lora_rank"),
        kv_lora_rank=_size(config, "kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=turning,
        v_head_dim=_size(config, "v_head_dim"),
        bias=bool(config.get("attention_bias", False)),
        norm_eps=rms_norm_eps if mla_norm_eps is MlaNormEps.rollout else HF_MLA_NORM_EPS,
        softmax_scale=scale,
    )
    return ModelSpec(
        **_common(config, "DeepseekV3ForCausalLM"),
        attention=attention,
        rope=rope,
        moe=_sigmoid_moe(config),
        num_mtp_layers=_num_mtp_layers(config),
    )


def _glm4_moe(config: dict[str, Any], mla_norm_eps: MlaNormEps) -> ModelSpec:
    """GLM-4.5 and later with experts (transformers models/glm4_moe): DeepSeek-V3's feed-forward under grouped-query
    attention of which half of each head turns."""
    head_dim = _size(config, "head_dim", _hidden_a_head(config))
    attention = _gqa(
        config,
        head_dim,
        qkv_bias=bool(config.get("attention_bias", False)),
        output_bias=False,
        qk_norm=bool(config.get("use_qk_norm", False)),
    )
    return ModelSpec(
        **_common(config, "Glm4MoeForCausalLM", rms_norm_eps=1e-5),
        attention=attention,
        rope=_rope(config, head_dim, partial=0.5),
        moe=_sigmoid_moe(config),
        num_mtp_layers=_num_mtp_layers(config),
    )


def _gpt_oss(config: dict[str, Any], mla_norm_eps: MlaNormEps) -> ModelSpec:
    """gpt-oss (transformers models/gpt_oss): sinks, sliding windows in turns, clamped SwiGLU, biases everywhere."""
    num_layers, head_dim = _size(config, "num_hidden_layers"), _size(config, "head_dim", 64)
    kinds = config.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != num_layers:
        raise ConfigError(
            f"model.hf_config.layer_types must say full_attention or sliding_attention for each of {num_layers} "
            f"layers, got {len(kinds)} entries{f' with {sorted(unknown)}' if unknown else ''}"
        )
    window = _size(config, "sliding_window", 128)
    bias = bool(config.get("attention_bias", True))
    attention = _gqa(config, head_dim, qkv_bias=bias, output_bias=bias, qk_norm=False)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {"rope_type": "yarn", **_GPT_OSS_YARN}
    moe = MoeSpec(
        **_experts({"moe_intermediate_size": config.get("intermediate_size"), **config}),
        norm_topk_prob=False,
        layers=(True,) * num_layers,
        score=RouterScore.softmax_of_top,
        activation=ExpertActivation(
            alpha=float(config.get("swiglu_alpha", 1.702)), limit=float(config.get("swiglu_limit", 7.0)), up_offset=1.0
        ),
        is_fused=True,
    )
    return ModelSpec(
        **_common(config, "GptOssForCausalLM", rms_norm_eps=1e-5),
        attention=replace(
            attention,
            sinks=True,
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        ),
        rope=_rope({"rope_theta": 150000.0, **config, "rope_parameters": rope}, head_dim),
        moe=moe,
    )


def _sigmoid_moe(config: dict[str, Any]) -> MoeSpec:
    """DeepSeek-V3's experts: the first layers dense, the others routed by sigmoid scores, in groups."""
    _refuse(config, "scoring_func", ("sigmoid",))
    _refuse(config, "topk_method", ("noaux_tc",))
    _refuse(config, "moe_layer_freq", (1,))
    experts = _experts(config)
    groups, top_groups = _size(config, "n_group", 1), _size(config, "topk_group", 1)
    group_size = experts["num_experts"] // groups
    if experts["num_experts"] % groups or group_size < 2 or experts["top_k"] > group_size * top_groups:
        raise ConfigError(
            f"model.hf_config.n_group={groups}, topk_group={top_groups}: n_group must cut the "
            f"{experts['num_experts']} experts into equal groups of two or more, and topk_group of them must hold "
            f"num_experts_per_tok={experts['top_k']} experts"
        )
    first_dense = config.get("first_k_dense_replace", 0)
    return MoeSpec(
        **experts,
        norm_topk_prob=bool(config.get("norm_topk_prob", True)),
        layers=tuple(layer >= first_dense for layer in range(_size(config, "num_hidden_layers"))),
        score=RouterScore.sigmoid,
        num_groups=groups,
        top_groups=top_groups,
        scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
        shared_intermediate_size=(config.get("n_shared_experts") or 0) * experts["intermediate_size"],
    )


def _common(config: dict[str, Any], architecture: str, *, rms_norm_eps: float = 1e-6) -> dict[str, Any]:
    """The fields of ModelSpec that every family reads alike."""
    _refuse(config, "hidden_act", ("silu",))
    _refuse(config, "attention_dropout", (0.0, None))
    return {
        "family": config["model_type"],
        "hf_architecture": architecture,
        "vocab_size": _size(config, "vocab_size"),
        "hidden_size": _size(config, "hidden_size"),
        "num_layers": _size(config, "num_hidden_layers"),
        "intermediate_size": _size(config, "intermediate_size"),
        "rms_norm_eps": float(config.get("rms_norm_eps", rms_norm_eps)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def _gqa(config: dict[str, Any], head_dim: int, *, qkv_bias: bool, output_bias: bool, qk_norm: bool) -> GqaSpec:
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
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


def _experts(config: dict[str, Any]) -> dict[str, Any]:
    """num_experts, top_k and intermediate_size, under any of the names in use."""
    # transformers writes a family's own name, or num_local_experts (its attribute map), into config.json
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    num_experts = _size(config, next((name for name in names if name in config), names[0]))
    top_k = _size(config, "num_experts_per_tok")
    if top_k > num_experts:
        raise ConfigError(f"model.hf_config.num_experts_per_tok must be <= num_experts, got {top_k} and {num_experts}")
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "intermediate_size": _size(config, "moe_intermediate_size"),
    }


def _rope(config: dict[str, Any], head_dim: int, *, interleaved: bool = False, partial: float = 1.0) -> RopeSpec:
    """From `rope_parameters` (transformers 5), or `rope_scaling`, `rope_theta` and `partial_rotary_factor` (before).

    Args:
        partial: the part of each head that turns, where the config does not say.
    """
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
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
        theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        interleaved=interleaved,
        scaling=_ROPE_SCALINGS[kind](config, rope),
    )


def _yarn(config: dict[str, Any], rope: dict[str, Any]) -> YarnScaling:
    original = rope.get("original_max_position_embeddings") or _size(config, "max_position_embeddings")
    factor = rope.get("factor") or _size(config, "max_position_embeddings") / original
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


def _num_mtp_layers(config: dict[str, Any]) -> int:
    return int(config.get("num_nextn_predict_layers", config.get("num_mtp_layers")) or 0)


def _hidden_a_head(config: dict[str, Any]) -> int:
    return _size(config, "hidden_size") // _size(config, "num_attention_heads")


def _size(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"model.hf_config.{key} must be a positive whole number, got {value!r}")
    return value


def _refuse(config: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
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


def _quantized(spec: ModelSpec, quantization: dict[str, Any]) -> ModelSpec:
    """The spec of a checkpoint with packed experts, or with blocks of FP8, which loading and publishing turn into and
    out of the model's own format; every other quantization is refused by name."""
    method, layout = quantization.get("quant_method"), quantization.get("format")
    if method == "fp8" and list(quantization.get("weight_block_size") or ()) == FP8_BLOCK:
        return spec
    if method == "mxfp4" and spec.moe is not None and spec.moe.is_fused:
        return _packed(spec, ExpertFormat.mxfp4)
    groups = list((quantization.get("config_groups") or {}).values())
    weights = groups[0].get("weights") or {} if len(groups) == 1 else {}
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": INT4_GROUP}
    got = {key: weights.get(key) for key in wanted}
    is_int4 = method == "compressed-tensors" and layout == "pack-quantized" and got == wanted
    if not is_int4 or groups[0].get("input_activations") is not None or spec.moe is None:
        raise ConfigError(
            f"model.hf_config.quantization_config is not supported: quant_method={method!r}, format={layout!r}, "
            f"weights={got}; the trainer reads float weights, and routed experts as compressed-tensors "
            f"pack-quantized {wanted} or gpt-oss's mxfp4, or fp8 with weight_block_size={FP8_BLOCK}: give one of "
            "these (GPTQ, AWQ and bitsandbytes are not among them)"
        )
    for linear in _other_linears(spec):
        if not any(_matches(pattern, linear) for pattern in quantization.get("ignore") or ()):
            raise ConfigError(
                f"model.hf_config.quantization_config.ignore does not name {linear}: only routed experts may be packed"
            )
    return _packed(spec, ExpertFormat.int4)


def _packed(spec: ModelSpec, expert_format: ExpertFormat) -> ModelSpec:
    assert spec.moe is not None
    if spec.hidden_size % INT4_GROUP or spec.moe.intermediate_size % INT4_GROUP:
        raise ConfigError(
            f"model.hf_config: hidden_size and moe_intermediate_size must be multiples of {INT4_GROUP} for packed "
            f"experts, got {spec.hidden_size} and {spec.moe.intermediate_size}"
        )
    return replace(spec, moe=replace(spec.moe, expert_format=expert_format))


def _other_linears(spec: ModelSpec) -> Iterator[str]:
    """Module names of every linear layer that is no routed expert (routers are none, to compressed-tensors)."""
    for meta in spec.checkpoint_tensors("bfloat16"):
        module, _, leaf = meta.name.rpartition(".")
        is_other = ".experts." in module or module.endswith((".gate", "embed_tokens"))
        if leaf == "weight" and len(meta.shape) == 2 and not is_other:
            yield module


def _matches(pattern: str, module: str) -> bool:
    """As compressed-tensors matches: a whole name, or a regular expression from the name's start after "re:"."""
    return re.match(pattern[3:], module) is not None if pattern.startswith("re:") else pattern == module


_ROPE_SCALINGS: dict[str, Callable[[dict[str, Any], dict[str, Any]], YarnScaling | Llama3Scaling | None]] = {
    "default": lambda config, rope: None,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""rope_type -> how to read it."""

_FAMILIES: dict[str, Callable[[dict[str, Any], MlaNormEps], ModelSpec]] = {
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _deepseek_v3,
    "llama": _llama,
}
"""model_type -> how to read its config."""
