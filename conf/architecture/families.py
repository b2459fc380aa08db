"""From a Hugging Face config to a ModelSpec: one function per family. Pure data, no torch.

Owns the list of families, the reading of MiniMax's and gpt-oss, and the refusals. A new architecture is one entry of
`FAMILIES`; see docs/new_architecture.md.
"""

from dataclasses import replace

from slipstream.conf.architecture import deepseek_like, gemma, llama_like
from slipstream.conf.architecture.activation import ExpertActivation
from slipstream.conf.architecture.attention_spec import MlaSpec
from slipstream.conf.architecture.config_fields import Fields
from slipstream.conf.architecture.family import Family
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.architecture.moe_spec import CORRECTION_BIAS, CheckpointNames, RouterScore
from slipstream.conf.architecture.quantized_checkpoints import with_quantization
from slipstream.conf.architecture.rope_spec import YarnScaling
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import HfConfig, JsonObject, is_object
from slipstream.conf.schema import MlaNormEps

HF_MLA_NORM_EPS = 1e-6
"""transformers builds the norms inside latent attention without an eps, so with this default."""
_GPT_OSS_YARN = {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""YaRN's fields, where gpt-oss's config does not say."""


def read_config(config: HfConfig, mla_norm_eps: MlaNormEps = MlaNormEps.rollout) -> ModelSpec:
    """The spec of a config.json's dict. Missing optional fields take transformers' defaults.

    Raises:
        ConfigError: unknown model_type, a missing size, or a feature that the decoder lacks.
    """
    model_type = config.get("model_type")
    if (why := _LEFT_OUT.get(str(model_type))) is not None:
        raise ConfigError(
            f"model.hf_config.model_type={model_type} is not supported: {why}; supported: "
            f"{', '.join(sorted(FAMILIES))} (docs/families.md)"
        )
    if (text := _WRAPPED.get(str(model_type))) is not None:
        raise ConfigError(
            f"model.hf_config.model_type={model_type} has a vision tower, which is not trained: give such a checkpoint "
            f"as model.path, of which text_config is read, or the fields of its language model with model_type={text}"
        )
    for key in ("vision_config", "audio_config", "text_config"):
        if config.get(key):
            raise ConfigError(
                f"model.hf_config.{key}: models with towers beside the decoder are not supported, and {model_type} has "
                "one; give a checkpoint of the language model alone"
            )
    read, given = family_of(config).read, config if isinstance(config, Fields) else Fields(config)
    if read is None:
        raise ConfigError(
            f"model.hf_config.model_type must be one of {', '.join(sorted(FAMILIES))}, got {model_type!r}; "
            "a new architecture is one entry of conf/architecture/families.py"
        )
    spec = read(given)
    if mla_norm_eps is MlaNormEps.hf:
        own = (replace(one, norm_eps=HF_MLA_NORM_EPS) if isinstance(one, MlaSpec) else one for one in spec.attentions)
        spec = replace(spec, attentions=tuple(own))
    quantization: object = config.get("quantization_config")
    if quantization and not is_object(quantization):
        raise ConfigError(f"model.hf_config.quantization_config must be a mapping, got {quantization!r}")
    return with_quantization(spec, quantization) if is_object(quantization) and quantization else spec


def of_language_model(config: JsonObject) -> JsonObject:
    """The config of the language model in a checkpoint that has a vision tower, too; any other config as it is.

    Raises:
        ConfigError: text_config, which has the language model's fields, is missing or contradicts the rest.
    """
    kind = kind_of(config)
    if kind not in _WRAPPED:
        return config
    text: object = config.get("text_config")
    if not is_object(text):
        raise ConfigError(f"config.json of {kind} needs text_config, the fields of its language model, got {text!r}")
    whole = {key: config[key] for key in _OF_WHOLE if config.get(key) is not None}
    for key in sorted(whole.keys() & text.keys()):
        if key not in _TOKENS and text[key] != whole[key]:
            raise ConfigError(
                f"config.json says {key}={whole[key]!r}, and {key}={text[key]!r} in text_config; remove the wrong one"
            )
    own = {key: value for key, value in text.items() if key != "architectures"}
    name = _WRAPPED[kind]
    return {**FAMILIES[name].left_out, **whole, **own, "model_type": name}


def family_of(config: HfConfig) -> Family:
    """The family of a config.json's dict; one with the usual fields for a model_type that is not here."""
    return FAMILIES.get(kind_of(config), Family())


def kind_of(config: HfConfig) -> str:
    """model_type, as messages name a model."""
    return str(config.get("model_type"))


def check_engine_constants(config: HfConfig) -> None:
    """Refuse a value that vLLM's model of the family has written down otherwise. Only runs with engines need this."""
    for key, value in family_of(config).engine_constants:
        if config.get(key, value) != value:
            raise ConfigError(
                f"model.hf_config.{key}={config[key]!r} is not supported for {kind_of(config)} in engines: vLLM has "
                f"{value}, whatever it says; a run without engines (algorithm=sft) may have it"
            )


def _minimax_m2(config: Fields) -> ModelSpec:
    """MiniMax-M2 (transformers models/minimax_m2): one norm over all heads of q, one over all of k, RoPE on a part of
    each head, experts by sigmoid under Mixtral's names. vLLM reads rotary_dim, use_routing_bias and scoring_func, which
    transformers' own config does not have."""
    for key, wanted in (("use_routing_bias", True), ("scoring_func", "sigmoid")):
        if config.get(key) != wanted:
            raise ConfigError(
                f"model.hf_config.{key} must be {wanted!r} for minimax_m2, got {config.get(key)!r}: vLLM reads it, and "
                "transformers has no other router"
            )
    config.refuse(use_qk_norm=(True,), qk_norm_type=("per_layer",), shared_intermediate_size=(0, None))
    config.refuse(attention_bias=(False, None), tie_word_embeddings=(False, None), router_jitter_noise=(0.0, None))
    config.refuse_windows()
    if set(config.by_layer("attn_type_list")) - {1}:
        raise ConfigError("model.hf_config.attn_type_list must be 1 (full attention) for every layer of minimax_m2")
    head_dim = config.size("head_dim", 128)
    rope = config.rope(head_dim, partial=config.size("rotary_dim") / head_dim, theta=5e6)
    attention = config.grouped_queries(head_dim, rope, qk_norm=True, norms_all_heads=True)
    names = CheckpointNames(block="block_sparse_moe", projections=("w1", "w3", "w2"), correction=CORRECTION_BIAS)
    moe = config.experts(norm_topk_prob=True, width="intermediate_size", score=RouterScore.sigmoid, names=names)
    return config.model("MiniMaxM2ForCausalLM", attention, moe=moe, num_mtp_layers=config.count("num_mtp_modules", 0))


def _gpt_oss(config: Fields) -> ModelSpec:
    """gpt-oss (transformers models/gpt_oss): sinks, a sliding window in every other layer, clamped SwiGLU, biases
    everywhere. vLLM's model has its biases, its eps, its windows' layers and YaRN written down."""
    config.refuse(attention_bias=(True,), rms_norm_eps=(1e-5,), tie_word_embeddings=(False, None))
    num_layers, head_dim = config.num_layers, config.size("head_dim", 64)
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    if (config.by_layer("layer_types") or kinds) != kinds:
        raise ConfigError(
            f"model.hf_config.layer_types must be sliding_attention and full_attention in turn for all {num_layers} "
            f"layers of gpt_oss, which is what vLLM has, whatever they say; got {config['layer_types']}"
        )
    window = config.size("sliding_window", 128)
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    given = older or newer or {"rope_type": "yarn", **_GPT_OSS_YARN}
    rope = Fields({**config, "rope_scaling": given}).rope(head_dim, theta=150000.0)
    missing = [key for key in ("factor", "beta_fast", "beta_slow") if given.get(key) is None]
    scaled = rope.scaling
    if not isinstance(scaled, YarnScaling) or missing or scaled.cos_sin_factor != scaled.mscale_of():
        raise ConfigError(
            "model.hf_config.rope_scaling must be of type yarn for gpt_oss, with factor, beta_fast and beta_slow, and "
            f"without mscale and attention_factor, which vLLM ignores; got {given}"
        )
    rope = replace(rope, is_wide=True)
    full = config.grouped_queries(head_dim, rope, qkv_bias=True, output_bias=True, sinks=True)
    local = replace(full, window=window)
    activation = ExpertActivation(
        alpha=config.number("swiglu_alpha", 1.702), limit=config.number("swiglu_limit", 7.0), up_offset=1.0
    )
    moe = config.experts(
        norm_topk_prob=True, width="intermediate_size", has_router_bias=True, activation=activation, is_fused=True
    )
    attentions = tuple(local if kind == "sliding_attention" else full for kind in kinds)
    return config.model("GptOssForCausalLM", attentions, rms_norm_eps=1e-5, moe=moe)


_NO_UNGROUPED = "its router takes sigmoid scores only where experts come in groups (vLLM 0.32, `cpu_router.py`)"

FAMILIES: dict[str, Family] = {
    **llama_like.FAMILIES,
    **deepseek_like.FAMILIES,
    **gemma.FAMILIES,
    "gpt_oss": Family(
        _gpt_oss,
        head_dim=64,
        expert_width="intermediate_size",
        cuts_all=True,
        engine_constants=(("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)),
    ),
    "minimax_m2": Family(
        _minimax_m2, head_dim=128, expert_width="intermediate_size", names_slots=False, lacks_on_cpu=_NO_UNGROUPED
    ),
}

_WRAPPED = {family.wrapper: name for name, family in FAMILIES.items() if family.wrapper is not None}
"""model_type of a checkpoint with a vision tower -> that of its language model."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OF_WHOLE = (*_TOKENS, "tie_word_embeddings", "quantization_config")
"""Fields of a whole checkpoint that count for its language model; tokens, where that has none of its own."""
_NORMS_AFTER = "the decoder's norms are before attention and feed-forward, this family's after them"
_LEFT_OUT = {"olmo2": _NORMS_AFTER, "olmo3": _NORMS_AFTER}
"""model_type -> why there is no entry for a family that people ask for."""
