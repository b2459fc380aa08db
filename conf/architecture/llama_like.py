"""Families of Llama's shape: grouped queries, RMSNorm, SwiGLU, and experts that a softmax chooses, if any. Pure data.

Owns how each of their configs is read, and refuses what the decoder cannot do, or what vLLM's model of the family would
ignore: an engine that computes another model than the trainer is worse than no run.
"""

from dataclasses import replace
from typing import Any

from slipstream.conf.architecture.attention_spec import DeltaNetSpec
from slipstream.conf.architecture.config_fields import Fields
from slipstream.conf.architecture.family import EngineAttention, Family
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.architecture.moe_spec import CheckpointNames, MoeSpec
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import DType


def llama(config: Fields) -> ModelSpec:
    """Llama 2 and 3 (transformers models/llama): no norms on q and k."""
    config.refuse(mlp_bias=(False,))
    config.refuse_windows()
    _refuse_others_of_engine(config)
    head_dim, bias = config.size("head_dim", config.hidden_per_head), bool(config.get("attention_bias", False))
    attention = config.grouped_queries(head_dim, qkv_bias=bias, output_bias=bias, needs_kv_heads=False)
    return config.model("LlamaForCausalLM", attention)


def mistral(config: Fields) -> ModelSpec:
    """Mistral (transformers models/mistral): Llama whose layers may all have a sliding window."""
    config.refuse(attention_bias=(False, None), mlp_bias=(False, None), ada_rms_norm_t_cond=(False, None))
    _refuse_others_of_engine(config)
    return _mistral_like(config, "MistralForCausalLM", default_window=4096)


def mixtral(config: Fields) -> ModelSpec:
    """Mixtral (transformers models/mixtral): Mistral's attention, every feed-forward a mixture of experts."""
    config.refuse(router_jitter_noise=(0.0, None))
    names = CheckpointNames(block="block_sparse_moe", projections=("w1", "w3", "w2"))
    moe = config.experts(norm_topk_prob=True, width="intermediate_size", names=names)
    return _mistral_like(config, "MixtralForCausalLM", rms_norm_eps=1e-5, default_theta=1e6, moe=moe)


def qwen2(config: Fields) -> ModelSpec:
    """Qwen2 and Qwen2.5 (transformers models/qwen2): biases on q, k and v."""
    return _qwen2_like(config, "Qwen2ForCausalLM")


def qwen2_moe(config: Fields) -> ModelSpec:
    """Qwen1.5-MoE and Qwen2-MoE (transformers models/qwen2_moe): Qwen2 with routed experts and one that every token
    passes, weighed by a gate of its own."""
    config.refuse(qkv_bias=(True,))
    return _qwen2_like(config, "Qwen2MoeForCausalLM", _sparse_layers(config, **_shared_expert(config)))


def qwen3(config: Fields, *, moe: MoeSpec | None = None) -> ModelSpec:
    """Qwen3 (transformers models/qwen3): norms on the heads of q and k."""
    config.refuse(use_sliding_window=(False, None))
    config.refuse_layer_types()
    # Only the dense family has a default head_dim of its own.
    head_dim = config.size("head_dim", 128 if moe is None else config.hidden_per_head)
    bias = bool(config.get("attention_bias", False))
    attention = config.grouped_queries(head_dim, qkv_bias=bias, output_bias=bias, qk_norm=True)
    return config.model("Qwen3ForCausalLM" if moe is None else "Qwen3MoeForCausalLM", attention, moe=moe)


def qwen3_moe(config: Fields) -> ModelSpec:
    """Qwen3-MoE (transformers models/qwen3_moe): Qwen3 whose feed-forwards are experts without a shared one."""
    return qwen3(config, moe=_sparse_layers(config))


def qwen3_next(config: Fields) -> ModelSpec:
    """Qwen3-Next (transformers models/qwen3_next): experts of which one is for every token, and perhaps dense layers.
    vLLM's head is its own."""
    config.refuse(tie_word_embeddings=(False, None))
    moe = _sparse_layers(config, norm_topk_prob=True, **_shared_expert(config, default=512))
    return _with_delta_net(config, "Qwen3NextForCausalLM", moe, has_fused_inputs=True)


def qwen3_5(config: Fields) -> ModelSpec:
    """The language model of dense Qwen3.5 to 3.8 (transformers models/qwen3_5)."""
    return _with_delta_net(config, "Qwen3_5ForCausalLM", None)


def qwen3_5_moe(config: Fields) -> ModelSpec:
    """The language model of Qwen3.5-MoE and 3.6-MoE (transformers models/qwen3_5_moe): every layer has experts. Neither
    transformers nor vLLM reads the three fields that other families have for it."""
    config.refuse(mlp_only_layers=([], None), decoder_sparse_step=(1, None), norm_topk_prob=(True, None))
    moe = config.experts(norm_topk_prob=True, **_shared_expert(config, default=512))
    return _with_delta_net(config, "Qwen3_5MoeForCausalLM", moe, width="moe_intermediate_size")


def _shared_expert(config: Fields, default: int | None = None) -> JsonObject:
    """MoeSpec's fields about an expert for every token, weighed by a gate of its own; of `default` width, if nothing is
    said."""
    width = config.size("shared_expert_intermediate_size", default)
    names = CheckpointNames(shared="shared_expert")
    return {"shared_intermediate_size": width, "has_shared_gate": True, "names": names}


def _with_delta_net(
    config: Fields,
    architecture: str,
    moe: MoeSpec | None,
    *,
    has_fused_inputs: bool = False,
    width: str = "intermediate_size",
) -> ModelSpec:
    """Gated DeltaNet in three of four layers, a gate on the heads of the others; norms multiply by 1 + weight. `width`
    is the field of dense feed-forwards' width, which no layer needs to have."""
    config.refuse(attention_bias=(False, None), qkv_bias=(False, None), layer_scale=(False, None))
    config.refuse(use_sliding_window=(False, None), sliding_window=(None,))
    config.refuse(attn_output_gate=(True, None), output_gate_type=("silu", "swish", None))
    num_layers, head_dim = config.num_layers, config.size("head_dim", 256)
    interval = config.size("full_attention_interval", 4)
    kinds = config.by_layer("layer_types") or [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(num_layers)
    ]
    if len(kinds) != num_layers or set(kinds) - {"full_attention", "linear_attention"}:
        raise ConfigError(
            "model.hf_config.layer_types must say full_attention or linear_attention for each of "
            f"{num_layers} layers, got {kinds}"
        )
    # A token of text has the same position on every axis of an image.
    axes = () if has_fused_inputs else ("mrope_section", "mrope_interleaved")
    rope = config.rope(head_dim, partial=0.25, ignored=axes)
    delta_net = DeltaNetSpec(
        rope=rope,
        num_key_heads=config.size("linear_num_key_heads", 16),
        num_value_heads=config.size("linear_num_value_heads", 32),
        key_head_dim=config.size("linear_key_head_dim", 128),
        value_head_dim=config.size("linear_value_head_dim", 128),
        conv_width=config.size("linear_conv_kernel_dim", 4),
        has_fused_inputs=has_fused_inputs,
    )
    if delta_net.num_value_heads % delta_net.num_key_heads:
        raise ConfigError(
            f"model.hf_config.linear_num_key_heads must divide linear_num_value_heads, got {delta_net.num_key_heads} "
            f"and {delta_net.num_value_heads}"
        )
    full = config.grouped_queries(head_dim, rope, qk_norm=True, gated=True, norms_add_one=True)
    attentions = tuple(delta_net if kind == "linear_attention" else full for kind in kinds)
    return config.model(architecture, attentions, width=width, moe=moe, norms_add_one=True)


def olmoe(config: Fields) -> ModelSpec:
    """OLMoE (transformers models/olmoe): norms over all of q and of k, weights of experts that are not normalized.

    vLLM's model has its eps, its norms' size, its untied head and its unnormalized weights written down, and clips
    nothing (0.32, `olmoe.py`).
    """
    config.refuse(clip_qkv=(None,), rms_norm_eps=(1e-5,), norm_topk_prob=(False, None))
    config.refuse(attention_bias=(False, None), tie_word_embeddings=(False, None))
    config.refuse_windows()
    head_dim = _engine_head_dim(config)
    attention = config.grouped_queries(head_dim, qk_norm=True, needs_kv_heads=False, norms_all_heads=True)
    moe = config.experts(norm_topk_prob=False, width="intermediate_size")
    return config.model("OlmoeForCausalLM", attention, rms_norm_eps=1e-5, moe=moe)


def _mistral_like(
    config: Fields,
    architecture: str,
    *,
    default_window: int | None = None,
    default_theta: float = 10000.0,
    **own: Any,
) -> ModelSpec:
    """Attention without biases and norms. `own`: as of Fields.model.

    Args:
        default_window: Keys that a query sees, if the config does not say.
        default_theta: RoPE's base, if the config does not say.
    """
    if config.get("layer_types"):
        raise ConfigError(
            f"model.hf_config.layer_types is not supported for {config['model_type']}: neither transformers nor vLLM "
            "reads it there; sliding_window is the window of every layer"
        )
    window = config.get("sliding_window", default_window)
    head_dim = config.size("head_dim", config.hidden_per_head)
    attention = config.grouped_queries(head_dim, config.rope(head_dim, theta=default_theta))
    if window is not None:
        attention = replace(attention, window=config.size("sliding_window", default_window))
    return config.model(architecture, attention, **own)


def _qwen2_like(config: Fields, architecture: str, moe: MoeSpec | None = None) -> ModelSpec:
    config.refuse(use_sliding_window=(False, None), qk_norm=(False, None))
    config.refuse_layer_types()
    return config.model(architecture, config.grouped_queries(_engine_head_dim(config), qkv_bias=True), moe=moe)


def _sparse_layers(config: Fields, *, norm_topk_prob: bool = False, **own: Any) -> MoeSpec:
    """Qwen's experts: some layers, by number, stay dense. `norm_topk_prob` counts where the config does not say."""
    sparse_step, dense_layers = config.size("decoder_sparse_step", 1), config.by_layer("mlp_only_layers")
    layers = (i not in dense_layers and (i + 1) % sparse_step == 0 for i in range(config.num_layers))
    is_normed = bool(config.get("norm_topk_prob", norm_topk_prob))
    return config.experts(norm_topk_prob=is_normed, layers=tuple(layers), **own)


def _refuse_others_of_engine(config: Fields) -> None:
    """Fields that vLLM's Llama reads for other families' sake."""
    config.refuse(bias=(False, None), qkv_bias=(False, None), logit_scale=(1.0, None))


def _engine_head_dim(config: Fields) -> int:
    """hidden_size / num_attention_heads; vLLM's model of the family knows no other."""
    config.refuse(head_dim=(config.hidden_per_head, None))
    return config.hidden_per_head


_DELTA_NET = EngineAttention(
    kind="linear",
    divided=("linear_num_key_heads", "linear_num_value_heads"),
    # The state as the trainer's, else it is rounded after every token. On Hopper vLLM's own choice of a kernel is
    # flashinfer's, without a look at whether flashinfer is installed.
    arguments={"mamba_ssm_cache_dtype": "float32", "gdn_prefill_backend": "triton"},
    cpu_dtype=DType.bfloat16,  # vLLM 0.32, `gdn_attention.py`, assertions
    cpu_widths=(("linear_key_head_dim", 128), ("linear_value_head_dim", 128)),
)
"""A run on a CPU was tried with heads of 128; vLLM's kernel refuses 32."""
_QWEN3_5 = Family(qwen3_5, wrapper="qwen3_5", head_dim=256, other_attention=_DELTA_NET, engine_imports=("torchvision",))

FAMILIES = {
    "llama": Family(llama),
    "mistral": Family(mistral),
    "mixtral": Family(mixtral, expert_width="intermediate_size", names_slots=False),
    "olmoe": Family(olmoe, expert_width="intermediate_size"),
    "qwen2": Family(qwen2),
    "qwen2_moe": Family(qwen2_moe),
    "qwen3": Family(qwen3, head_dim=128, has_engine_forward=True),
    "qwen3_moe": Family(qwen3_moe, has_engine_forward=True),
    "qwen3_5_moe_text": replace(_QWEN3_5, read=qwen3_5_moe, wrapper="qwen3_5_moe"),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": Family(qwen3_next, head_dim=256, other_attention=_DELTA_NET),
}
