"""Families with DeepSeek-V3's parts: latent attention, an indexer of keys, experts by sigmoid. Pure data, no torch.

Owns the reading of their configs. Does not own the list of families (families.py).
"""

from dataclasses import replace

from slipstream.conf.architecture.attention_spec import IndexerSpec, MlaSpec
from slipstream.conf.architecture.config_fields import Fields
from slipstream.conf.architecture.family import EngineAttention, Family
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.architecture.moe_spec import MoeSpec, RouterScore
from slipstream.conf.architecture.rope_spec import Llama3Scaling, RopeSpec, YarnScaling
from slipstream.conf.errors import ConfigError

_OF_ROUTER = ("n_group", "topk_group", "n_shared_experts", "routed_scaling_factor", "scoring_func", "topk_method")
"""Fields without which transformers or vLLM has another router."""


def deepseek_v3(config: Fields) -> ModelSpec:
    """DeepSeek-V3 (transformers models/deepseek_v3; https://arxiv.org/abs/2412.19437) and Kimi-K2: latent attention,
    sigmoid router, a shared expert. vLLM's router is another where scoring_func and topk_method are missing."""
    config.require(*_OF_ROUTER)
    rope = config.rope(config.size("qk_rope_head_dim"), interleaved=True, partial=1.0)
    config.refuse(index_topk=(None,))
    attention = _latent_attention(config, rope)
    moe = sigmoid_moe(config, engine_rounds_logits=_rounds_logits(config))
    return config.model("DeepseekV3ForCausalLM", attention, moe=moe, num_mtp_layers=_num_mtp_layers(config))


def deepseek_v32(config: Fields) -> ModelSpec:
    """DeepSeek-V3.2 (transformers models/deepseek_v32): DeepSeek-V3, where an indexer chooses each query's keys."""
    config.refuse(indexer_rope_interleave=(False, None))
    rounds_logits = _rounds_logits(config)
    return _with_indexer(config, "DeepseekV32ForCausalLM", interleaved=False, engine_rounds_logits=rounds_logits)


def glm_moe_dsa(config: Fields) -> ModelSpec:
    """GLM-5 (transformers models/glm_moe_dsa): DeepSeek-V3.2 with an indexer that turns neighbours. vLLM reads from the
    config that it does; its router is one in float32, whatever the config says."""
    config.require("indexer_rope_interleave")
    config.refuse(indexer_rope_interleave=(True,))
    return _with_indexer(config, "GlmMoeDsaForCausalLM", interleaved=True, rms_norm_eps=1e-5)


def _rounds_logits(config: Fields) -> bool:
    return config.get("moe_router_dtype") != "float32"


def _num_mtp_layers(config: Fields) -> int:
    return config.count("num_nextn_predict_layers", config.count("num_mtp_layers", 0))


def _with_indexer(
    config: Fields,
    architecture: str,
    *,
    interleaved: bool,
    rms_norm_eps: float = 1e-6,
    engine_rounds_logits: bool = False,
) -> ModelSpec:
    """`interleaved`: how the indexer's heads turn."""
    config.require(*_OF_ROUTER, "index_topk", "index_n_heads", "index_head_dim")
    _check_dense_layers(config)
    config.refuse(mlp_bias=(False, None))
    # layers that see the keys that another one chose: vLLM reads the first two fields, transformers the third
    config.refuse(index_topk_freq=(1,), index_topk_pattern=(None,))
    if set(kinds := config.by_layer("indexer_types")) - {"full"}:
        raise ConfigError(
            f"model.hf_config.indexer_types={kinds!r} is not supported for {config['model_type']}: every layer has an "
            "indexer of its own (full)"
        )
    rope = config.rope(config.size("qk_rope_head_dim"), interleaved=True)
    indexer = IndexerSpec(
        num_heads=config.size("index_n_heads"),
        head_dim=config.size("index_head_dim"),
        top_k=config.size("index_topk"),
        interleaved=interleaved,
    )
    if indexer.head_dim < rope.dim:
        raise ConfigError(
            f"model.hf_config.index_head_dim must be at least qk_rope_head_dim={rope.dim}, the dims of it that turn, "
            f"got {indexer.head_dim}"
        )
    config.size("q_lora_rank")  # the indexer's queries are made of the latent
    attention = replace(_latent_attention(config, rope, rms_norm_eps, "indexed_attention"), indexer=indexer)
    moe, mtp = sigmoid_moe(config, engine_rounds_logits=engine_rounds_logits), _num_mtp_layers(config)
    return config.model(architecture, attention, rms_norm_eps=rms_norm_eps, moe=moe, num_mtp_layers=mtp)


def _check_dense_layers(config: Fields, unsaid: list[str] | None = None, unsaid_words: str = "none") -> None:
    """vLLM's models count dense layers by first_k_dense_replace; transformers' name them in mlp_layer_types.

    Args:
        unsaid: What transformers takes that for, where it is missing; None: the same as vLLM.
        unsaid_words: The same in a message.
    """
    num_layers, first_dense = config.num_layers, config.first_dense_layers
    wanted = ["dense" if layer < first_dense else "sparse" for layer in range(num_layers)]
    if (config.by_layer("mlp_layer_types") or unsaid or wanted) != wanted:
        raise ConfigError(
            f"model.hf_config.mlp_layer_types must say dense for the first_k_dense_replace={first_dense} first of "
            f"{num_layers} layers and sparse for the others: transformers reads the one and vLLM the other; got "
            f"{config.get('mlp_layer_types') or unsaid_words}"
        )


def glm4_moe_lite(config: Fields) -> ModelSpec:
    """GLM-4.7-Flash (transformers models/glm4_moe_lite): DeepSeek-V3's latent attention, GLM's experts and routing."""
    _check_dense_layers(config, ["dense", *["sparse"] * (config.num_layers - 1)], "none, which is one dense layer")
    turning = config.size("qk_rope_head_dim")
    config.refuse(head_dim=(turning, None), index_topk=(None,))
    attention = _latent_attention(config, config.rope(turning, interleaved=True), 1e-5)
    moe = sigmoid_moe(config, engine_rounds_logits=False, scaling_factor=1.8, num_shared=1)
    mtp = _num_mtp_layers(config)
    return config.model("Glm4MoeLiteForCausalLM", attention, rms_norm_eps=1e-5, moe=moe, num_mtp_layers=mtp)


def _latent_attention(
    config: Fields, rope: RopeSpec, rms_norm_eps: float = 1e-6, kind: str = "full_attention"
) -> MlaSpec:
    """Low-rank queries, keys and values. vLLM's have no biases, turn pairs (2i, 2i + 1), and take fewer of YaRN's
    fields. `kind` is what transformers calls the layers; `rms_norm_eps` counts where the config does not say."""
    config.refuse(attention_bias=(False, None), rope_interleave=(True,), tie_word_embeddings=(False, None))
    config.refuse_windows(kind)
    config.require("q_lora_rank", "num_key_value_heads")
    heads = config.size("num_attention_heads")
    if config["num_key_value_heads"] not in (heads, None):
        raise ConfigError(
            f"model.hf_config.num_key_value_heads must equal num_attention_heads {heads} for latent attention, "
            f"got {config['num_key_value_heads']}"
        )
    if not isinstance(rope.scaling, YarnScaling | None):
        kind = "llama3" if isinstance(rope.scaling, Llama3Scaling) else "linear"
        raise ConfigError(f"model.hf_config: RoPE type {kind!r} is not supported for latent attention; supported: yarn")
    nope = config.size("qk_nope_head_dim")
    scale = (nope + config.size("qk_rope_head_dim")) ** -0.5
    if isinstance(rope.scaling, YarnScaling):
        _check_engine_scales_alike(rope.scaling)
        scale *= rope.scaling.mscale_of(rope.scaling.mscale_all_dim or 0.0) ** 2
    return MlaSpec(
        rope=rope,
        num_heads=heads,
        q_lora_rank=None if config.get("q_lora_rank") is None else config.size("q_lora_rank"),
        kv_lora_rank=config.size("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=config.size("qk_rope_head_dim"),
        v_head_dim=config.size("v_head_dim"),
        bias=False,
        norm_eps=config.number("rms_norm_eps", rms_norm_eps),
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


def glm4_moe(config: Fields) -> ModelSpec:
    """GLM-4.5 and later with experts (transformers models/glm4_moe): DeepSeek-V3's feed-forward, and grouped-query
    attention that rotates half of each head. vLLM's head is its own."""
    config.require("n_shared_experts")
    config.refuse(tie_word_embeddings=(False, None))
    config.refuse_windows()
    head_dim = config.size("head_dim", config.hidden_per_head)
    attention = config.grouped_queries(
        head_dim,
        config.rope(head_dim, partial=0.5),
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=bool(config.get("use_qk_norm", False)),
    )
    moe, mtp = sigmoid_moe(config, engine_rounds_logits=False), _num_mtp_layers(config)
    return config.model("Glm4MoeForCausalLM", attention, rms_norm_eps=1e-5, moe=moe, num_mtp_layers=mtp)


def sigmoid_moe(
    config: Fields, *, engine_rounds_logits: bool, scaling_factor: float = 1.0, num_shared: int = 0
) -> MoeSpec:
    """DeepSeek-V3's experts: the first layers dense, the others routed by sigmoid scores, in groups.

    Args:
        scaling_factor: routed_scaling_factor, if the config does not say.
        num_shared: n_shared_experts, if the config does not say.
    """
    config.refuse(scoring_func=("sigmoid",), topk_method=("noaux_tc",), moe_layer_freq=(1,))
    first_dense = config.first_dense_layers
    moe = config.experts(
        norm_topk_prob=bool(config.get("norm_topk_prob", True)),
        layers=tuple(layer >= first_dense for layer in range(config.num_layers)),
        score=RouterScore.sigmoid,
        engine_rounds_logits=engine_rounds_logits,
        num_groups=config.size("n_group", 1),
        top_groups=config.size("topk_group", 1),
        scaling_factor=config.number("routed_scaling_factor", scaling_factor),
    )
    group_size = moe.num_experts // moe.num_groups
    if moe.num_experts % moe.num_groups or group_size < 2 or moe.top_k > group_size * moe.top_groups:
        raise ConfigError(
            f"model.hf_config.n_group={moe.num_groups}, topk_group={moe.top_groups}: n_group must cut the "
            f"{moe.num_experts} experts into equal groups of two or more, and topk_group of them must hold "
            f"num_experts_per_tok={moe.top_k} experts"
        )
    num_shared = config.count("n_shared_experts", 0 if "n_shared_experts" in config else num_shared)
    return replace(moe, shared_intermediate_size=num_shared * moe.intermediate_size)


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
