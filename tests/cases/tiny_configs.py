"""config.json of tiny models, one of each family that the trainer knows."""

from typing import Any


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """A config that does not give these fields."""
    return {name: value for name, value in config.items() if name not in names}


COMMON = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
DENSE = {**COMMON, "model_type": "qwen3"}
MOE = {
    **COMMON, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}  # fmt: skip
MIXED = {**MOE, "num_hidden_layers": 3, "mlp_only_layers": [1]}
"""A Qwen3-MoE whose middle layer is dense."""

QWEN2 = {**COMMON, "model_type": "qwen2", "rms_norm_eps": 1e-5}
MISTRAL = {**COMMON, "model_type": "mistral", "head_dim": 20, "sliding_window": 4, "rms_norm_eps": 1e-5}
"""A window shorter than most sequences, and heads that are not hidden_size / num_attention_heads."""
MIXTRAL = {
    **without(COMMON, "rope_theta"),
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 3e-5,
}
"""A checkpoint with names of its own. The base of RoPE is the family's."""
QWEN2_MOE = {
    **COMMON, "model_type": "qwen2_moe", "num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    "norm_topk_prob": False,
}  # fmt: skip
"""A dense layer, and a shared expert with a gate."""
OLMOE = {
    **COMMON, "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32,
    "norm_topk_prob": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Norms over all heads of q and of k."""

LLAMA = {
    **without(COMMON, "rope_theta"),
    "model_type": "llama",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
GLM = {
    **COMMON, "model_type": "glm4_moe", "num_hidden_layers": 3, "moe_intermediate_size": 24, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Grouped-query attention of which half of each head turns, with DeepSeek's feed-forward."""

GPT_OSS = {
    **COMMON,
    "model_type": "gpt_oss",
    "intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 4,
    "swiglu_limit": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
"""Windows shorter than most sequences, and a bound of the activation that many elements reach."""

DEEPSEEK = {
    **without(COMMON, "head_dim"),
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
}
"""Latent attention with YaRN, a dense first layer, groups of experts, a shared expert."""

GLM_LITE = {
    **without(DEEPSEEK, "scoring_func", "rope_scaling"),
    "model_type": "glm4_moe_lite", "q_lora_rank": 20, "v_head_dim": 22, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.8, "rope_theta": 1000000.0, "partial_rotary_factor": 1.0,
}  # fmt: skip
"""DeepSeek's latent attention without scaled positions, values wider than keys, and GLM's routing."""

DEEPSEEK_V32 = {**DEEPSEEK, "model_type": "deepseek_v32", "index_topk": 5, "index_n_heads": 12, "index_head_dim": 14}
"""Some sequences are longer than the keys that an indexer chooses, some are not."""

GLM_DSA = {
    **without(DEEPSEEK_V32, "rope_scaling"), "model_type": "glm_moe_dsa",
    "q_lora_rank": 20, "v_head_dim": 22, "n_group": 1, "topk_group": 1, "rope_theta": 1000000.0,
    "indexer_rope_interleave": True,
}  # fmt: skip

QWEN3_NEXT = {
    **COMMON, "model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 24, "partial_rotary_factor": 0.25,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [2], "rms_norm_eps": 3e-5,
}  # fmt: skip
"""Linear attention in three of four layers, a gate on the heads of the other, norms of 1 + weight, a dense layer."""

QWEN3_5_MOE = {
    **without(QWEN3_NEXT, "mlp_only_layers", "intermediate_size"),
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 6,
    "rope_parameters": {"rope_theta": 3e4, "mrope_section": [1, 1, 1], "mrope_interleaved": True},
}
"""Qwen3-Next's layers with more projections, experts in every layer, and positions of images."""
_OF_EXPERTS = {"moe_intermediate_size", "norm_topk_prob", "mlp_only_layers"}
QWEN3_5 = {
    **{key: value for key, value in QWEN3_NEXT.items() if "expert" not in key and key not in _OF_EXPERTS},
    "model_type": "qwen3_5_text",
    "tie_word_embeddings": True,
    "linear_num_key_heads": 4,
}

GEMMA3 = {
    **without(COMMON, "rope_theta"),
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "head_dim": 20,
    "query_pre_attn_scalar": 12,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "rope_local_base_freq": 3000.0,
    "pad_token_id": None,  # transformers gives the embedding of token 0 no gradient else
    "tie_word_embeddings": True,
    "rms_norm_eps": 3e-5,
}
"""Windows with a RoPE of their own, norms before and after, GELU, scaled embeddings."""

GEMMA4 = {
    **without(COMMON, "rope_theta"),
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "head_dim": 20,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
    },
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 2.0,
    "pad_token_id": None,
    "tie_word_embeddings": True,
    "rms_norm_eps": 3e-5,
}
GEMMA4_MOE = {
    **GEMMA4, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "enable_moe_block": True,
    "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24,
}  # fmt: skip
"""Heads, RoPE and values of layers without a window are their own; layers' factors; a soft cap that bends logits."""

MINIMAX = {
    **without(COMMON, "rope_theta"), "model_type": "minimax_m2", "head_dim": 20,
    "rotary_dim": 12, "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 3,
    "scoring_func": "sigmoid", "use_routing_bias": True, "rms_norm_eps": 3e-5,
}  # fmt: skip
"""Norms over all heads of q and of k, three of five dims turn, experts by sigmoid. The base of RoPE is the family's."""

PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}
KIMI_INT4 = {**DEEPSEEK, "model_type": "kimi_k2", "moe_intermediate_size": 32, "quantization_config": PACKED}
"""Kimi-K2-Thinking: DeepSeek-V3 with routed experts of four bits."""

GPT_OSS_MXFP4 = {**GPT_OSS, "intermediate_size": 32, "quantization_config": {"quant_method": "mxfp4"}}

BY_FAMILY = {
    "qwen3": DENSE, "qwen3_moe": MIXED, "qwen2": QWEN2, "qwen2_moe": QWEN2_MOE, "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5, "qwen3_5_moe": QWEN3_5_MOE, "llama": LLAMA, "mistral": MISTRAL, "mixtral": MIXTRAL,
    "olmoe": OLMOE, "glm": GLM, "glm_lite": GLM_LITE, "glm_dsa": GLM_DSA, "deepseek": DEEPSEEK,
    "deepseek_v32": DEEPSEEK_V32, "gpt_oss": GPT_OSS, "minimax": MINIMAX, "gemma3": GEMMA3, "gemma4": GEMMA4,
    "gemma4_moe": GEMMA4_MOE,
}  # fmt: skip
"""One of each family; of Gemma 4 with and without experts."""
