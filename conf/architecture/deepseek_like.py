"""Families with DeepSeek-V3's parts: latent attention, an indexer of keys, experts by sigmoid. Pure data, no torch.

Owns the reading of their configs. Does not own the list of families (families.py).
"""

from dataclasses import replace

from slipstream.conf.architecture.attention_spec import IndexerSpec, MlaSpec
from slipstream.conf.architecture.config_fields import (
    by_layer,
    common_fields,
    expert_sizes,
    first_dense_layers,
    grouped_queries,
    hidden_per_head,
    in_all_layers,
    num_mtp_layers,
    number,
    refuse,
    refuse_windows,
    require,
    rope_spec,
    size,
)
from slipstream.conf.architecture.family import EngineAttention, Family
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.architecture.moe_spec import MoeSpec, RouterScore
from slipstream.conf.architecture.rope_spec import Llama3Scaling, RopeSpec, YarnScaling
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject

_OF_ROUTER = ("n_group", "topk_group", "n_shared_experts", "routed_scaling_factor", "scoring_func", "topk_method")
"""Fields without which transformers or vLLM has another router."""


def deepseek_v3(config: JsonObject) -> ModelSpec:
    """DeepSeek-V3 (transformers models/deepseek_v3; https://arxiv.org/abs/2412.19437) and Kimi-K2: latent attention,
    sigmoid router, a shared expert. vLLM's router is another where scoring_func and topk_method are missing."""
    require(config, *_OF_ROUTER)
    rope = rope_spec(config, size(config, "qk_rope_head_dim"), interleaved=True, partial=1.0)
    common = common_fields(config, "DeepseekV3ForCausalLM")
    refuse(config, index_topk=(None,))
    return ModelSpec(
        **common,
        attentions=in_all_layers(config, _latent_attention(config, rope, common["rms_norm_eps"])),
        moe=sigmoid_moe(config, engine_rounds_logits=config.get("moe_router_dtype") != "float32"),
        num_mtp_layers=num_mtp_layers(config),
    )


def deepseek_v32(config: JsonObject) -> ModelSpec:
    """DeepSeek-V3.2 (transformers models/deepseek_v32): DeepSeek-V3, where an indexer chooses each query's keys."""
    refuse(config, indexer_rope_interleave=(False, None))
    common = common_fields(config, "DeepseekV32ForCausalLM")
    rounds_logits = config.get("moe_router_dtype") != "float32"
    return _with_indexer(config, common, interleaved=False, engine_rounds_logits=rounds_logits)


def glm_moe_dsa(config: JsonObject) -> ModelSpec:
    """GLM-5 (transformers models/glm_moe_dsa): DeepSeek-V3.2 with an indexer that turns neighbours. vLLM reads from the
    config that it does; its router is one in float32, whatever the config says."""
    require(config, "indexer_rope_interleave")
    refuse(config, indexer_rope_interleave=(True,))
    common = common_fields(config, "GlmMoeDsaForCausalLM", rms_norm_eps=1e-5)
    return _with_indexer(config, common, interleaved=True, engine_rounds_logits=False)


def _with_indexer(
    config: JsonObject, common: JsonObject, *, interleaved: bool, engine_rounds_logits: bool
) -> ModelSpec:
    """Args: as in config.json, its fields that every family reads, how the indexer's heads turn, and the router's
    numerics (MoeSpec.engine_rounds_logits)."""
    require(config, *_OF_ROUTER, "index_topk", "index_n_heads", "index_head_dim")
    num_layers, num_dense = size(config, "num_hidden_layers"), first_dense_layers(config)
    _check_dense_layers(config, ["dense" if layer < num_dense else "sparse" for layer in range(num_layers)])
    refuse(config, mlp_bias=(False, None))
    # layers that see the keys that another one chose: vLLM reads the first two fields, transformers the third
    refuse(config, index_topk_freq=(1,), index_topk_pattern=(None,))
    if set(kinds := by_layer(config, "indexer_types")) - {"full"}:
        raise ConfigError(
            f"model.hf_config.indexer_types={kinds!r} is not supported for {config['model_type']}: every layer has an "
            "indexer of its own (full)"
        )
    rope = rope_spec(config, size(config, "qk_rope_head_dim"), interleaved=True)
    indexer = IndexerSpec(
        num_heads=size(config, "index_n_heads"),
        head_dim=size(config, "index_head_dim"),
        top_k=size(config, "index_topk"),
        interleaved=interleaved,
    )
    if indexer.head_dim < rope.dim:
        raise ConfigError(
            f"model.hf_config.index_head_dim must be at least qk_rope_head_dim={rope.dim}, the dims of it that turn, "
            f"got {indexer.head_dim}"
        )
    size(config, "q_lora_rank")  # the indexer's queries are made of the latent
    attention = _latent_attention(config, rope, common["rms_norm_eps"], kind="indexed_attention")
    return ModelSpec(
        **common,
        attentions=in_all_layers(config, replace(attention, indexer=indexer)),
        moe=sigmoid_moe(config, engine_rounds_logits=engine_rounds_logits),
        num_mtp_layers=num_mtp_layers(config),
    )


def _check_dense_layers(config: JsonObject, unsaid: list[str], unsaid_words: str = "none") -> None:
    """vLLM's models count dense layers by first_k_dense_replace; transformers' name them in mlp_layer_types.

    Args:
        unsaid: What transformers takes that for, where it is missing.
        unsaid_words: The same in a message.
    """
    num_layers, first_dense = size(config, "num_hidden_layers"), first_dense_layers(config)
    kinds = by_layer(config, "mlp_layer_types") or unsaid
    if kinds != ["dense" if layer < first_dense else "sparse" for layer in range(num_layers)]:
        raise ConfigError(
            f"model.hf_config.mlp_layer_types must say dense for the first_k_dense_replace={first_dense} first of "
            f"{num_layers} layers and sparse for the others: transformers reads the one and vLLM the other; got "
            f"{config.get('mlp_layer_types') or unsaid_words}"
        )


def glm4_moe_lite(config: JsonObject) -> ModelSpec:
    """GLM-4.7-Flash (transformers models/glm4_moe_lite): DeepSeek-V3's latent attention, GLM's experts and routing."""
    num_layers = size(config, "num_hidden_layers")
    _check_dense_layers(config, ["dense", *["sparse"] * (num_layers - 1)], "none, which is one dense layer")
    turning = size(config, "qk_rope_head_dim")
    refuse(config, head_dim=(turning, None))
    rope = rope_spec(config, turning, interleaved=True)
    common = common_fields(config, "Glm4MoeLiteForCausalLM", rms_norm_eps=1e-5)
    refuse(config, index_topk=(None,))
    return ModelSpec(
        **common,
        attentions=in_all_layers(config, _latent_attention(config, rope, common["rms_norm_eps"])),
        moe=sigmoid_moe(config, engine_rounds_logits=False, scaling_factor=1.8, num_shared=1),
        num_mtp_layers=num_mtp_layers(config),
    )


def _latent_attention(config: JsonObject, rope: RopeSpec, norm_eps: float, kind: str = "full_attention") -> MlaSpec:
    """Low-rank queries, keys and values. vLLM's have no biases, turn pairs (2i, 2i + 1), and take fewer of YaRN's
    fields. `kind` is what transformers calls the layers."""
    refuse(config, attention_bias=(False, None), rope_interleave=(True,), tie_word_embeddings=(False, None))
    refuse_windows(config, kind)
    require(config, "q_lora_rank", "num_key_value_heads")
    heads = size(config, "num_attention_heads")
    if config["num_key_value_heads"] not in (heads, None):
        raise ConfigError(
            f"model.hf_config.num_key_value_heads must equal num_attention_heads {heads} for latent attention, "
            f"got {config['num_key_value_heads']}"
        )
    if not isinstance(rope.scaling, YarnScaling | None):
        kind = "llama3" if isinstance(rope.scaling, Llama3Scaling) else "linear"
        raise ConfigError(f"model.hf_config: RoPE type {kind!r} is not supported for latent attention; supported: yarn")
    nope = size(config, "qk_nope_head_dim")
    scale = (nope + size(config, "qk_rope_head_dim")) ** -0.5
    if isinstance(rope.scaling, YarnScaling):
        _check_engine_scales_alike(rope.scaling)
        scale *= rope.scaling.mscale_of(rope.scaling.mscale_all_dim or 0.0) ** 2
    return MlaSpec(
        rope=rope,
        num_heads=heads,
        q_lora_rank=None if config.get("q_lora_rank") is None else size(config, "q_lora_rank"),
        kv_lora_rank=size(config, "kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=size(config, "qk_rope_head_dim"),
        v_head_dim=size(config, "v_head_dim"),
        bias=False,
        norm_eps=norm_eps,
        softmax_scale=scale,
    )


def _check_engine_scales_alike(yarn: YarnScaling) -> None:
    """vLLM's YaRN of latent attention knows mscale (1 where it is missing) and mscale_all_dim (0), no more."""
    of_engine = yarn.mscale_of(1.0 if yarn.mscale is None else yarn.mscale) / yarn.mscale_of(yarn.mscale_all_dim or 0.0)
    if yarn.attention_factor is not None or not yarn.truncate or of_engine != yarn.cos_sin_factor:
        raise ConfigError(
            "model.hf_config: YaRN of latent attention takes mscale and mscale_all_dim, both or neither, and no "
            f"attention_factor or truncate=false, which vLLM ignores; got mscale={yarn.mscale}, mscale_all_dim="
            f"{yarn.mscale_all_dim}, attention_factor={yarn.attention_factor}, truncate={yarn.truncate}"
        )


def glm4_moe(config: JsonObject) -> ModelSpec:
    """GLM-4.5 and later with experts (transformers models/glm4_moe): DeepSeek-V3's feed-forward, and grouped-query
    attention that rotates half of each head. vLLM's head is its own."""
    require(config, "n_shared_experts")
    refuse(config, tie_word_embeddings=(False, None))
    refuse_windows(config)
    head_dim = size(config, "head_dim", hidden_per_head(config))
    attention = grouped_queries(
        config,
        head_dim,
        rope_spec(config, head_dim, partial=0.5),
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=bool(config.get("use_qk_norm", False)),
    )
    return ModelSpec(
        **common_fields(config, "Glm4MoeForCausalLM", rms_norm_eps=1e-5),
        attentions=in_all_layers(config, attention),
        moe=sigmoid_moe(config, engine_rounds_logits=False),
        num_mtp_layers=num_mtp_layers(config),
    )


def sigmoid_moe(
    config: JsonObject, *, engine_rounds_logits: bool, scaling_factor: float = 1.0, num_shared: int = 0
) -> MoeSpec:
    """DeepSeek-V3's experts: the first layers dense, the others routed by sigmoid scores, in groups.

    Args:
        engine_rounds_logits: As MoeSpec.engine_rounds_logits.
        scaling_factor: routed_scaling_factor, if the config does not say.
        num_shared: n_shared_experts, if the config does not say.
    """
    refuse(config, scoring_func=("sigmoid",), topk_method=("noaux_tc",), moe_layer_freq=(1,))
    experts = expert_sizes(config)
    groups, top_groups = size(config, "n_group", 1), size(config, "topk_group", 1)
    group_size = experts["num_experts"] // groups
    if experts["num_experts"] % groups or group_size < 2 or experts["top_k"] > group_size * top_groups:
        raise ConfigError(
            f"model.hf_config.n_group={groups}, topk_group={top_groups}: n_group must cut the "
            f"{experts['num_experts']} experts into equal groups of two or more, and topk_group of them must hold "
            f"num_experts_per_tok={experts['top_k']} experts"
        )
    first_dense = first_dense_layers(config)
    return MoeSpec(
        **experts,
        norm_topk_prob=bool(config.get("norm_topk_prob", True)),
        layers=tuple(layer >= first_dense for layer in range(size(config, "num_hidden_layers"))),
        score=RouterScore.sigmoid,
        engine_rounds_logits=engine_rounds_logits,
        num_groups=groups,
        top_groups=top_groups,
        scaling_factor=number(config, "routed_scaling_factor", scaling_factor),
        shared_intermediate_size=(config.get("n_shared_experts", num_shared) or 0) * experts["intermediate_size"],
    )


_LATENT = EngineAttention("latent")
_NO_SPARSE = "it has no attention to keys that an indexer chooses (vLLM 0.32, `cpu.py`)"

FAMILIES = {
    "deepseek_v3": Family(deepseek_v3, other_attention=_LATENT),
    "deepseek_v32": Family(deepseek_v32, other_attention=_LATENT, needs_deep_gemm=True, lacks_on_cpu=_NO_SPARSE),
    "glm4_moe": Family(glm4_moe),
    "glm4_moe_lite": Family(glm4_moe_lite, other_attention=_LATENT),
    "glm_moe_dsa": Family(glm_moe_dsa, other_attention=_LATENT, needs_deep_gemm=True, lacks_on_cpu=_NO_SPARSE),
    "kimi_k2": Family(deepseek_v3, wrapper="kimi_k25", left_out={"tie_word_embeddings": True}, other_attention=_LATENT),
}
"""By model_type."""
