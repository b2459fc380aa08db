"""A config that decoder or engine would compute otherwise is refused by name: conf/architecture/."""

import pytest
from cases.tiny_configs import (
    DEEPSEEK,
    DEEPSEEK_V32,
    GEMMA3,
    GEMMA4,
    GEMMA4_MOE,
    GLM,
    GLM_DSA,
    GLM_LITE,
    GPT_OSS,
    KIMI_INT4,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MIXTRAL,
    MOE,
    OLMOE,
    PACKED,
    QWEN2,
    QWEN2_MOE,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
)

from slipstream.conf.architecture.families import FAMILIES, check_engine_constants, read_config
from slipstream.conf.errors import ConfigError

FP8 = {"quant_method": "fp8"}
IGNORE, WEIGHTS = PACKED["ignore"], PACKED["config_groups"]["group_0"]["weights"]


def packed(**changes):
    return {"quantization_config": {**PACKED, **changes}}


def changed(config, changes):
    """The config with these fields; without those that are `...`."""
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, r"must be one of deepseek_v3, .*, qwen3_next, got 'bert'"),
        *(
            ({"model_type": family.wrapper}, rf"{family.wrapper} has a vision tower.* model.path.*model_type={name}$")
            for name, family in FAMILIES.items()
            if family.wrapper is not None
        ),
        ({"hidden_size": None}, "hidden_size must be a positive whole number, got None"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "RoPE type 'longrope' is not supported"),
        ({"vision_config": {"depth": 2}}, "vision_config: models with towers"),
        (
            {"model_type": "qwen3_vl", "vision_config": {"a": 2}},
            "vision_config: models with towers .* qwen3_vl has one",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "is not supported: quant_method='gptq'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is not supported: quant_method='fp8'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "is not supported: quant_method='bitsandbytes'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 for qwen3_moe, .* got 0.5"),
        ({"rope_scaling": {"mrope_section": [2, 3, 3]}}, "have fields that are not read: mrope_section; read are "),
        ({"rope_parameters": {"full_attention": {}}}, "have fields that are not read: full_attention"),
        ({"original_max_position_embeddings": 64}, "original_max_position_embeddings=64 is not supported"),
        ({"num_local_experts": 4}, "num_experts and num_local_experts are one size under two names"),
        ({"num_key_value_heads": ...}, "num_key_value_heads must be given for qwen3_moe"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types=.* is not supported for qwen3_moe, where every"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config=.* is not supported"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number, got 'small'"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be <= num_experts"),
        ({"model_type": ["qwen3_moe"]}, r"must be one of deepseek_v3, .*, got \['qwen3_moe'\]"),
        *(({"rms_norm_eps": one}, "rms_norm_eps must be a positive") for one in (float("nan"), float("inf"), 10**400)),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1024, got 1000000000"),
        ({"num_experts": 10**9}, "num_experts must be at most 4096, got 1000000000"),
        ({"hidden_size": 10**400}, "hidden_size must be at most 2147483647, got 10000"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"RoPE type \"\['yarn'\]\" is not supported"),
        *(
            ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, field: value}}, f"RoPE's {field} must be a positive")
            for field in ("factor", "beta_fast", "mscale", "original_max_position_embeddings")
            for value in ("abc", [1], float("nan"))
        ),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        read_config(changed(MOE, changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads must equal num_attention_heads 4"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({"topk_method": "group_limited_greedy"}, "topk_method='group_limited_greedy' is not supported"),
        ({"n_group": 3}, "n_group must cut the 8 experts"),
        ({"topk_group": 1}, "must hold num_experts_per_tok=3"),
        ({"kv_lora_rank": None}, "kv_lora_rank must be a positive whole number"),
        ({"attention_bias": True}, "attention_bias=True is not supported for deepseek_v3"),
        ({"rope_interleave": False}, "rope_interleave=False is not supported for deepseek_v3"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported for deepseek_v3"),
        ({"sliding_window": 4}, "sliding_window=4 is not supported for deepseek_v3"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number from 0 on, got -1"),
        *(
            ({"rope_scaling": {**DEEPSEEK["rope_scaling"], **changes}}, "YaRN of latent attention takes mscale and")
            for changes in (
                *({"attention_factor": 1.0}, {"truncate": False}, {"mscale": 0.7, "mscale_all_dim": None}),
                *({"mscale": 0, "mscale_all_dim": zero} for zero in (0, None)),
            )
        ),
        *(
            ({field: ...}, f"{field} must be given for deepseek_v3")
            for field in (
                *("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "routed_scaling_factor"),
                *("scoring_func", "topk_method", "q_lora_rank", "num_key_value_heads"),
            )
        ),
    ],
)
def test_a_latent_attention_model_out_of_range_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        read_config(changed(DEEPSEEK, changes))
    with pytest.raises(ConfigError, match=message.replace("deepseek_v3", "kimi_k2")):
        read_config({**changed(DEEPSEEK, changes), "model_type": "kimi_k2"})


@pytest.mark.parametrize(
    ("hf_config", "changes", "message"),
    [
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window=True is not supported for qwen2"),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.* is not supported for qwen2"),
        (QWEN2, {"head_dim": 32}, "head_dim=32 is not supported for qwen2; supported: 16, None"),
        (MISTRAL, {"layer_types": ["full_attention"] * 2}, "layer_types is not supported for mistral"),
        (MISTRAL, {"attention_bias": True}, "attention_bias=True is not supported for mistral"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window must be a positive whole number, got 0"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported for mixtral"),
        (MIXTRAL, {"quantization_config": PACKED}, "packed experts of mixtral are not supported"),
        (QWEN2_MOE, {"qkv_bias": False}, "qkv_bias=False is not supported for qwen2_moe"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be a positive"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported for olmoe; supported: None"),
        (OLMOE, {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 is not supported for olmoe; supported: 1e-05"),
        (OLMOE, {"norm_topk_prob": True}, "norm_topk_prob=True is not supported for olmoe"),
        (OLMOE, {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported for olmoe"),
        (DEEPSEEK, {"rope_scaling": LLAMA["rope_scaling"]}, "RoPE type 'llama3' is not supported for latent attention"),
        (DEEPSEEK, {"index_topk": 2048}, "index_topk=2048 is not supported for deepseek_v3; supported: None"),
        (GLM_LITE, {"index_topk": 2048}, "index_topk=2048 is not supported for glm4_moe_lite"),
        (DEEPSEEK_V32, {"index_topk": ...}, "index_topk must be given for deepseek_v32"),
        (DEEPSEEK_V32, {"index_topk": 0}, "index_topk must be a positive whole number, got 0"),
        (DEEPSEEK_V32, {"index_head_dim": 6}, "index_head_dim must be at least qk_rope_head_dim=8.*, got 6"),
        (DEEPSEEK_V32, {"q_lora_rank": None}, "q_lora_rank must be a positive whole number, got None"),
        (DEEPSEEK_V32, {"indexer_rope_interleave": True}, "indexer_rope_interleave=True is not supported for deepse"),
        (DEEPSEEK_V32, {"layer_types": ["full_attention"] * 3}, "layer_types=.* every layer has indexed_attention"),
        (DEEPSEEK_V32, {"mlp_layer_types": ["sparse"] * 3}, "must say dense for the first_k_dense_replace=1 first of"),
        (DEEPSEEK_V32, {"mlp_bias": True}, "mlp_bias=True is not supported for deepseek_v32"),
        (GLM_DSA, {"indexer_rope_interleave": ...}, "indexer_rope_interleave must be given for glm_moe_dsa"),
        (GLM_DSA, {"indexer_rope_interleave": False}, "indexer_rope_interleave=False is not supported for glm_moe_dsa"),
        (GLM_DSA, {"index_topk_freq": 4}, "index_topk_freq=4 is not supported for glm_moe_dsa; supported: 1"),
        (GLM_DSA, {"index_topk_pattern": "FSS"}, "index_topk_pattern='FSS' is not supported for glm_moe_dsa"),
        (GLM_DSA, {"indexer_types": ["full", "shared", "full"]}, "indexer_types=.* every layer has an indexer of its"),
        (GLM_LITE, {"attention_bias": True}, "attention_bias=True is not supported for glm4_moe_lite"),
        (GLM_LITE, {"rope_interleave": False}, "rope_interleave=False is not supported for glm4_moe_lite"),
        (GLM_LITE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 for glm4_moe_lite"),
        (GLM_LITE, {"head_dim": 16}, "head_dim=16 is not supported for glm4_moe_lite; supported: 8, None"),
        (GLM_LITE, {"q_lora_rank": ...}, "q_lora_rank must be given for glm4_moe_lite"),
        (GLM_LITE, {"first_k_dense_replace": ...}, "first_k_dense_replace must be given for glm4_moe_lite"),
        (GLM, {"partial_rotary_factor": 0.2}, "must turn an even number of at most 16 dims, got 3"),
        (GLM, {"n_shared_experts": ...}, "n_shared_experts must be given for glm4_moe"),
        (GLM, {"n_shared_experts": [1]}, "n_shared_experts must be a whole number from 0 on"),
        (GLM, {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported for glm4_moe"),
        (GLM, {"sliding_window": 4}, "sliding_window=4 is not supported for glm4_moe"),
        (GPT_OSS, {"layer_types": ["full_attention"] * 2}, "sliding_attention and full_attention in turn for all 2"),
        (GPT_OSS, {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 is not supported for gpt_oss"),
        (GPT_OSS, {"attention_bias": False}, "attention_bias=False is not supported for gpt_oss"),
        (GPT_OSS, {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported for gpt_oss"),
        (GPT_OSS, {"rope_scaling": {"rope_type": "default"}}, "must be of type yarn for gpt_oss"),
        (GPT_OSS, {"rope_scaling": {**GPT_OSS["rope_scaling"], "attention_factor": 2.0}}, "must be of type yarn"),
        (LLAMA, {"sliding_window": 4}, "sliding_window=4 is not supported for llama"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 2}, "layer_types=.* is not supported for llama"),
        (LLAMA, {"qkv_bias": True}, "qkv_bias=True is not supported for llama"),
        (LLAMA, {"logit_scale": 0.5}, "logit_scale=0.5 is not supported for llama"),
        (LLAMA, {"is_causal": False}, "is_causal=False is not supported for llama"),
        (OLMOE, {"sliding_window": 4}, "sliding_window=4 is not supported for olmoe"),
        (QWEN3_NEXT, {"sliding_window": 4}, "sliding_window=4 is not supported for qwen3_next"),
        (MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive whole number, got 0"),
        (MOE, {"mlp_only_layers": 1}, "mlp_only_layers must be a list about layers, got 1"),
        (GLM_LITE, {"first_k_dense_replace": 2}, "first_k_dense_replace=2 first of 3 .* got none, which is one dense"),
        (QWEN3_NEXT, {"quantization_config": FP8}, "engines of qwen3_next are not supported, because engines keep"),
        (QWEN3_NEXT, {"attention_bias": True}, "attention_bias=True is not supported for qwen3_next"),
        (QWEN3_NEXT, {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported for qwen3_next"),
        (QWEN3_NEXT, {"attn_output_gate": False}, "attn_output_gate=False is not supported for qwen3_next"),
        (QWEN3_NEXT, {"layer_types": ["full_attention"] * 3}, "layer_types must say .* for each of 4 layers"),
        (QWEN3_NEXT, {"linear_num_key_heads": 3}, "linear_num_key_heads must divide linear_num_value_heads, got 3"),
        (QWEN3_NEXT, {"rope_parameters": {"mrope_section": [1, 1, 1]}}, "fields that are not read: mrope_section"),
        (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported for gemma3_text"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported for gemma3"),
        (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported for gemma3_text"),
        (GEMMA3, {"layer_types": ["full_attention"]}, "layer_types must say .* for each of 3 layers"),
        (GEMMA3, {"sliding_window": ...}, "sliding_window must be given for gemma3_text"),
        (GEMMA4, {"hidden_size_per_layer_input": ...}, "hidden_size_per_layer_input must be given for gemma4_text"),
        (
            GEMMA4,
            {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 2},
            r"lacks: embeddings that each layer adds \(hidden_.*=256\); layers that attend to keys and values of ano",
        ),
        (GEMMA4, {"enable_moe_block": True}, r"needs both enable_moe_block=true and num_experts, .* got True and None"),
        (GEMMA4_MOE, {"enable_moe_block": False}, "needs both enable_moe_block=true and num_experts, .* False and 8"),
        (GEMMA4_MOE, {"top_k_experts": 9}, "top_k_experts must be <= num_experts, got 9 and 8"),
        (GEMMA4_MOE, {"quantization_config": FP8}, "engines of gemma4_text are not supported, because its checkpoints"),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
        (GEMMA4, {"layer_types": ["sliding_attention"] * 4}, "layer_types must end with full_attention"),
        (GEMMA4, {"per_layer_config": {"1": {"head_dim": 24}}}, "per_layer_config must give every layer with full_at"),
        (GEMMA4, {"num_global_key_value_heads": 3}, "num_key_value_heads that divide num_attention_heads 4"),
        (GEMMA4, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters must be a mapping of"),
        (GEMMA3, {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters must be a mapping of full_attention and"),
        (GEMMA3, {"rope_scaling": {"rope_type": "linear", "factor": 8}}, "factor must be written as 8.0"),
        (DEEPSEEK, {"rope_scaling": GEMMA3["rope_scaling"]}, "RoPE type 'linear' is not supported for latent"),
        (QWEN3_5_MOE, {"norm_topk_prob": False}, "norm_topk_prob=False is not supported for qwen3_5_moe_text"),
        (QWEN3_5_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers=.0. is not supported for qwen3_5_moe_text"),
        (QWEN3_5, {"quantization_config": {"quant_method": "fp8"}}, "engines of qwen3_5_text are not supported"),
        (MINIMAX, {"use_routing_bias": None}, "use_routing_bias must be True for minimax_m2, got None: vLLM reads it"),
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid' for minimax_m2, got 'softmax'"),
        (MINIMAX, {"rotary_dim": None}, "rotary_dim must be a positive whole number, got None"),
        (MINIMAX, {"rotary_dim": 22}, "must turn an even number of at most 20 dims, got 22"),
        (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type='per_head' is not supported for minimax_m2"),
        (MINIMAX, {"use_qk_norm": False}, "use_qk_norm=False is not supported for minimax_m2"),
        (MINIMAX, {"attn_type_list": [1, 0]}, "attn_type_list must be 1 .full attention. for every layer"),
        (MINIMAX, {"shared_intermediate_size": 64}, "shared_intermediate_size=64 is not supported for minimax_m2"),
        (MINIMAX, {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported for minimax_m2"),
        (GLM_LITE, {"mlp_layer_types": ["dense"] * 3}, "must say dense for the first_k_dense_replace=1 first of 3"),
        (KIMI_INT4, {"moe_intermediate_size": 24}, "multiples of 32 for packed experts, got 64 and 24"),
        (KIMI_INT4, packed(format="int-quantized"), "format='int-quantized'"),
        (KIMI_INT4, packed(ignore=IGNORE[1:]), "does not name lm_head: only routed experts"),
        (KIMI_INT4, packed(ignore=[IGNORE[0], *IGNORE[2:]]), "does not name model.layers.0.self_attn.q_a_proj"),
        (KIMI_INT4, packed(config_groups={"a": {"weights": {**WEIGHTS, "num_bits": 8}}}), "'num_bits': 8"),
        *((KIMI_INT4, packed(config_groups=one), "'num_bits': None") for one in (3, {"a": 3}, {"a": {"weights": 3}})),
        *((KIMI_INT4, packed(ignore=one), "does not name model.layers.0") for one in (3, [3])),
        (KIMI_INT4, packed(ignore=["re:("]), r"ignore has 're:\(': error: missing \)"),
    ],
)
def test_what_an_engine_would_compute_otherwise_is_refused_by_name(hf_config, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_config(changed(hf_config, changes))


@pytest.mark.parametrize("field", ["swiglu_alpha", "swiglu_limit"])
def test_a_clamp_that_engines_do_not_have_is_refused_where_there_are_engines(field):
    hf_config = {**GPT_OSS, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    check_engine_constants(hf_config)
    read_config({**hf_config, field: 0.5})
    with pytest.raises(ConfigError, match=rf"{field}=0.5 is not supported for gpt_oss in engines: vLLM has .*=sft"):
        check_engine_constants({**hf_config, field: 0.5})
