"""Families of Llama's shape: grouped queries, RMSNorm, SwiGLU, and experts that a softmax chooses, if any. Pure data.

Owns how each of their configs is read, and refuses what the decoder cannot do, or what vLLM's model of the family would
ignore: an engine that computes another model than the trainer is worse than no run. families.py lists them by
model_type.
"""

from dataclasses import replace

from slipstream.conf.architecture.config_fields import (
    by_layer,
    common_fields,
    expert_sizes,
    grouped_queries,
    hidden_per_head,
    in_all_layers,
    refuse,
    refuse_layer_types,
    refuse_windows,
    rope_spec,
    size,
)
from slipstream.conf.architecture.delta_net_spec import IN_ENGINES, DeltaNetSpec
from slipstream.conf.architecture.family import Family
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.architecture.moe_spec import CheckpointNames, MoeSpec
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject


def llama(config: JsonObject) -> ModelSpec:
    """Llama 2 and 3 (transformers models/llama): no norms on q and k."""
    refuse(config, mlp_bias=(False,))
    refuse_windows(config)
    _refuse_others_of_engine(config)
    head_dim = size(config, "head_dim", hidden_per_head(config))
    bias = bool(config.get("attention_bias", False))
    attention = grouped_queries(config, head_dim, qkv_bias=bias, output_bias=bias, needs_kv_heads=False)
    return ModelSpec(**common_fields(config, "LlamaForCausalLM"), attentions=in_all_layers(config, attention))


def mistral(config: JsonObject) -> ModelSpec:
    """Mistral (transformers models/mistral): Llama whose layers may all have a sliding window."""
    refuse(config, attention_bias=(False, None), mlp_bias=(False, None), ada_rms_norm_t_cond=(False, None))
    _refuse_others_of_engine(config)
    return _mistral_like(config, "MistralForCausalLM", default_window=4096)


def mixtral(config: JsonObject) -> ModelSpec:
    """Mixtral (transformers models/mixtral): Mistral's attention, every feed-forward a mixture of experts."""
    refuse(config, router_jitter_noise=(0.0, None))
    moe = MoeSpec(
        **expert_sizes(config, width="intermediate_size"),
        norm_topk_prob=True,
        layers=(True,) * size(config, "num_hidden_layers"),
        names=CheckpointNames(block="block_sparse_moe", projections=("w1", "w3", "w2")),
    )
    return _mistral_like(
        config, "MixtralForCausalLM", default_window=None, rms_norm_eps=1e-5, default_theta=1e6, moe=moe
    )


def qwen2(config: JsonObject) -> ModelSpec:
    """Qwen2 and Qwen2.5 (transformers models/qwen2): biases on q, k and v."""
    return _qwen2_like(config, "Qwen2ForCausalLM")


def qwen2_moe(config: JsonObject) -> ModelSpec:
    """Qwen1.5-MoE and Qwen2-MoE (transformers models/qwen2_moe): Qwen2 with routed experts and one that every token
    passes, weighed by a gate of its own."""
    refuse(config, qkv_bias=(True,))
    return _qwen2_like(config, "Qwen2MoeForCausalLM", _with_shared_gate(config, _sparse_layers(config)))


def qwen3(config: JsonObject, *, moe: MoeSpec | None = None) -> ModelSpec:
    """Qwen3 (transformers models/qwen3): norms on the heads of q and k."""
    refuse(config, use_sliding_window=(False, None))
    refuse_layer_types(config)
    # Only the dense family has a default head_dim of its own.
    head_dim = size(config, "head_dim", 128 if moe is None else hidden_per_head(config))
    bias = bool(config.get("attention_bias", False))
    attention = grouped_queries(config, head_dim, qkv_bias=bias, output_bias=bias, qk_norm=True)
    return ModelSpec(
        **common_fields(config, "Qwen3ForCausalLM" if moe is None else "Qwen3MoeForCausalLM"),
        attentions=in_all_layers(config, attention),
        moe=moe,
    )


def qwen3_moe(config: JsonObject) -> ModelSpec:
    """Qwen3-MoE (transformers models/qwen3_moe): Qwen3 whose feed-forwards are experts without a shared one."""
    return qwen3(config, moe=_sparse_layers(config))


def qwen3_next(config: JsonObject) -> ModelSpec:
    """Qwen3-Next (transformers models/qwen3_next): experts of which one is for every token, and perhaps dense layers.
    vLLM's head is its own."""
    refuse(config, tie_word_embeddings=(False, None))
    moe = _with_shared_gate(config, _sparse_layers(config, norm_topk_prob=True), default=512)
    return _with_delta_net(config, "Qwen3NextForCausalLM", moe, has_fused_inputs=True)


def qwen3_5(config: JsonObject) -> ModelSpec:
    """The language model of dense Qwen3.5 to 3.8 (transformers models/qwen3_5)."""
    return _with_delta_net(config, "Qwen3_5ForCausalLM", None, has_fused_inputs=False)


def qwen3_5_moe(config: JsonObject) -> ModelSpec:
    """The language model of Qwen3.5-MoE and 3.6-MoE (transformers models/qwen3_5_moe): every layer has experts. Neither
    transformers nor vLLM reads the three fields that other families have for it."""
    refuse(config, mlp_only_layers=([], None), decoder_sparse_step=(1, None), norm_topk_prob=(True, None))
    every = (True,) * size(config, "num_hidden_layers")
    moe = MoeSpec(**expert_sizes(config), norm_topk_prob=True, layers=every)
    moe = _with_shared_gate(config, moe, default=512)
    return _with_delta_net(config, "Qwen3_5MoeForCausalLM", moe, has_fused_inputs=False, width="moe_intermediate_size")


def _with_shared_gate(config: JsonObject, moe: MoeSpec, default: int | None = None) -> MoeSpec:
    """The same, and an expert for every token, weighed by a gate of its own; of `default` width, if nothing is said."""
    return replace(
        moe,
        shared_intermediate_size=size(config, "shared_expert_intermediate_size", default),
        has_shared_gate=True,
        names=CheckpointNames(shared="shared_expert"),
    )


def _with_delta_net(
    config: JsonObject,
    architecture: str,
    moe: MoeSpec | None,
    *,
    has_fused_inputs: bool,
    width: str = "intermediate_size",
) -> ModelSpec:
    """Gated DeltaNet in three of four layers, a gate on the heads of the others; norms multiply by 1 + weight.

    Args:
        architecture: Class of transformers and vLLM.
        moe: The layers with experts; None: there are none.
        has_fused_inputs: As DeltaNetSpec.has_fused_inputs.
        width: Field of the width of dense feed-forwards, which no layer needs to have.
    """
    refuse(config, attention_bias=(False, None), qkv_bias=(False, None), layer_scale=(False, None))
    refuse(config, use_sliding_window=(False, None), sliding_window=(None,))
    refuse(config, attn_output_gate=(True, None), output_gate_type=("silu", "swish", None))
    num_layers, head_dim = size(config, "num_hidden_layers"), size(config, "head_dim", 256)
    interval = size(config, "full_attention_interval", 4)
    kinds = by_layer(config, "layer_types") or [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(num_layers)
    ]
    if len(kinds) != num_layers or set(kinds) - {"full_attention", "linear_attention"}:
        raise ConfigError(
            "model.hf_config.layer_types must say full_attention or linear_attention for each of "
            f"{num_layers} layers, got {kinds}"
        )
    # A token of text has the same position on every axis of an image.
    axes = () if has_fused_inputs else ("mrope_section", "mrope_interleaved")
    rope = rope_spec(config, head_dim, partial=0.25, ignored=axes)
    delta_net = DeltaNetSpec(
        rope=rope,
        num_key_heads=size(config, "linear_num_key_heads", 16),
        num_value_heads=size(config, "linear_num_value_heads", 32),
        key_head_dim=size(config, "linear_key_head_dim", 128),
        value_head_dim=size(config, "linear_value_head_dim", 128),
        conv_width=size(config, "linear_conv_kernel_dim", 4),
        has_fused_inputs=has_fused_inputs,
    )
    if delta_net.num_value_heads % delta_net.num_key_heads:
        raise ConfigError(
            f"model.hf_config.linear_num_key_heads must divide linear_num_value_heads, got {delta_net.num_key_heads} "
            f"and {delta_net.num_value_heads}"
        )
    full = replace(grouped_queries(config, head_dim, rope, qk_norm=True), gated=True, norms_add_one=True)
    return ModelSpec(
        **common_fields(config, architecture, width=width),
        attentions=tuple(delta_net if kind == "linear_attention" else full for kind in kinds),
        moe=moe,
        norms_add_one=True,
    )


def olmoe(config: JsonObject) -> ModelSpec:
    """OLMoE (transformers models/olmoe): norms over all of q and of k, weights of experts that are not normalized.

    vLLM's model has its eps, its norms' size, its untied head and its unnormalized weights written down, and clips
    nothing (0.32, `olmoe.py`).
    """
    refuse(config, clip_qkv=(None,), rms_norm_eps=(1e-5,), norm_topk_prob=(False, None))
    refuse(config, attention_bias=(False, None), tie_word_embeddings=(False, None))
    refuse_windows(config)
    head_dim = _engine_head_dim(config)
    attention = grouped_queries(config, head_dim, qk_norm=True, needs_kv_heads=False)
    return ModelSpec(
        **common_fields(config, "OlmoeForCausalLM", rms_norm_eps=1e-5),
        attentions=in_all_layers(config, replace(attention, norms_all_heads=True)),
        moe=MoeSpec(
            **expert_sizes(config, width="intermediate_size"),
            norm_topk_prob=False,
            layers=(True,) * size(config, "num_hidden_layers"),
        ),
    )


def _mistral_like(
    config: JsonObject,
    architecture: str,
    *,
    default_window: int | None,
    rms_norm_eps: float = 1e-6,
    default_theta: float = 10000.0,
    moe: MoeSpec | None = None,
) -> ModelSpec:
    """Attention without biases and norms.

    Args:
        architecture: Class of transformers and vLLM.
        default_window: Keys that a query sees, if the config does not say.
        rms_norm_eps: eps, if the config does not say.
        default_theta: RoPE's base, if the config does not say.
        moe: The layers with experts; None: there are none.
    """
    if config.get("layer_types"):
        raise ConfigError(
            f"model.hf_config.layer_types is not supported for {config['model_type']}: neither transformers nor vLLM "
            "reads it there; sliding_window is the window of every layer"
        )
    window = config.get("sliding_window", default_window)
    head_dim = size(config, "head_dim", hidden_per_head(config))
    attention = grouped_queries(config, head_dim, rope_spec(config, head_dim, theta=default_theta))
    if window is not None:
        attention = replace(attention, window=size(config, "sliding_window", default_window))
    return ModelSpec(
        **common_fields(config, architecture, rms_norm_eps=rms_norm_eps),
        attentions=in_all_layers(config, attention),
        moe=moe,
    )


def _qwen2_like(config: JsonObject, architecture: str, moe: MoeSpec | None = None) -> ModelSpec:
    refuse(config, use_sliding_window=(False, None), qk_norm=(False, None))
    refuse_layer_types(config)
    head_dim = _engine_head_dim(config)
    attention = grouped_queries(config, head_dim, qkv_bias=True)
    return ModelSpec(**common_fields(config, architecture), attentions=in_all_layers(config, attention), moe=moe)


def _sparse_layers(config: JsonObject, *, norm_topk_prob: bool = False) -> MoeSpec:
    """Qwen's experts: some layers, by number, stay dense. `norm_topk_prob` counts where the config does not say."""
    sparse_step, dense_layers = size(config, "decoder_sparse_step", 1), by_layer(config, "mlp_only_layers")
    return MoeSpec(
        **expert_sizes(config),
        norm_topk_prob=bool(config.get("norm_topk_prob", norm_topk_prob)),
        layers=tuple(
            i not in dense_layers and (i + 1) % sparse_step == 0 for i in range(size(config, "num_hidden_layers"))
        ),
    )


def _refuse_others_of_engine(config: JsonObject) -> None:
    """Fields that vLLM's Llama reads for other families' sake."""
    refuse(config, bias=(False, None), qkv_bias=(False, None), logit_scale=(1.0, None))


def _engine_head_dim(config: JsonObject) -> int:
    """hidden_size / num_attention_heads; vLLM's model of the family knows no other."""
    head_dim = hidden_per_head(config)
    refuse(config, head_dim=(head_dim, None))
    return head_dim


_QWEN3_5 = Family(qwen3_5, wrapper="qwen3_5", head_dim=256, other_attention=IN_ENGINES, engine_imports=("torchvision",))

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
    "qwen3_next": Family(qwen3_next, head_dim=256, other_attention=IN_ENGINES),
}
"""By model_type."""
