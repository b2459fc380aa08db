"""The models of bench/parity.py: layers of published models at full width, and the same cut small for a CPU."""

from dataclasses import dataclass, replace
from typing import Any

SEED = 0
"""The seed of weights, training and prompts."""
LOAD_FORMAT = "drawn"
"""vLLM's load_format of bench/random_loader.py."""
FACTS = "drawn.json"
"""Where that finds the seed and the standard deviation, beside config.json."""
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False,
}  # fmt: skip
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "attention_bias": False,
}  # fmt: skip
GLM_45_AIR: dict[str, Any] = {
    "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "attention_bias": True,
    "use_qk_norm": False, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
    "rope_scaling": YARN | {"factor": 32.0, "truncate": False}, "attention_bias": True,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False,
    "rope_scaling": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
COMMON: dict[str, Any] = {
    "hidden_act": "silu", "max_position_embeddings": 40960, "tie_word_embeddings": False, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "n_routed_experts": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64, "v_head_dim": 32, "n_group": 2, "topk_group": 1, "sliding_window": 16,
}  # fmt: skip
"""Sizes of --tiny, of those that a config has."""


@dataclass(frozen=True)
class Row:
    """One row of the table: a model, how much is sampled, and who scores it."""

    base: dict[str, Any]
    layers: int
    std: float
    gib: int
    """GPU memory that the row may take."""
    prompts: int = 64
    prompt_tokens: int = 16
    tokens: int = 128
    others: tuple[str, ...] = ("replay",)
    """Scorers beside the trainer as it is: numerics.match=VALUE, ROUNDING=VALUE, or replay."""
    with_hf: bool = True
    with_fp32: bool = True
    batch_invariant: bool = False
    is_compiled: bool = False
    """Engine with torch.compile and CUDA graphs, as runs have it; its operations cannot be recorded."""

    def config(self, tiny: bool) -> dict[str, Any]:
        small = {name: value for name, value in SMALL.items() if name in self.base} if tiny else {}
        if tiny and self.base["model_type"] == "deepseek_v3":
            small["num_key_value_heads"] = small["num_attention_heads"]
        layers = min(self.layers, 2) if tiny else self.layers
        return COMMON | self.base | small | {"num_hidden_layers": layers}


OWN_ATTENTION = "numerics.attention=own"
DENSE_EACH = "numerics.dense_activation=each"
TRANSFORMERS_WAY = (
    OWN_ATTENTION, "numerics.norm=each", "numerics.rotation=each", "numerics.expert_activation=once",
    "numerics.router_weights=model", "combine=hf_eager",
)  # fmt: skip
"""Every switch of a softmax router's family turned away from the engine's way."""
OFF = ",".join(TRANSFORMERS_WAY)
ONE_OFF = (*TRANSFORMERS_WAY, "combine=fp32_once", OFF)
ONE_ON = tuple(",".join(part for part in TRANSFORMERS_WAY if part != item) for item in TRANSFORMERS_WAY)
SIGMOID_OFF = (
    OWN_ATTENTION, DENSE_EACH, "numerics.norm=each", "numerics.expert_activation=once",
    "numerics.router_logits=float32", "numerics.routed_scale=weights", "combine=hf_eager",
)  # fmt: skip
DENSE_OFF = (OWN_ATTENTION, DENSE_EACH, f"{OWN_ATTENTION},{DENSE_EACH}", "numerics.norm=each", "numerics.rotation=each")
GPT_OSS_OFF = (OWN_ATTENTION, "numerics.norm=each", "numerics.rotation=each", "combine=hf_eager")
BITWISE = "numerics.match=bitwise"
SEED_004: dict[str, Any] = {"prompts": 25, "tokens": 200, "with_fp32": False}
ONLY_BITWISE: dict[str, Any] = {"others": (BITWISE,), "with_hf": False, "batch_invariant": True, "is_compiled": True}
ROWS = {
    "qwen3-30b-a3b-48": Row(QWEN3_30B, 48, 0.06, 72, with_fp32=False, with_hf=False),
    "qwen3-30b-a3b-12": Row(QWEN3_30B, 12, 0.06, 40, others=("replay", *ONE_OFF, BITWISE)),
    "qwen3-30b-a3b-12-compiled": Row(
        QWEN3_30B, 12, 0.06, 24, others=("replay", *ONE_OFF), with_hf=False, is_compiled=True
    ),
    "qwen3-8b-8": Row(QWEN3_8B, 8, 0.06, 30, others=(*DENSE_OFF, BITWISE)),
    "glm-4.5-air-4": Row(GLM_45_AIR, 4, 0.03, 40, others=("replay", *SIGMOID_OFF)),
    "gpt-oss-20b-6": Row(GPT_OSS_20B, 6, 0.03, 32, others=("replay", *GPT_OSS_OFF)),
    "gpt-oss-20b-6-0.02": Row(GPT_OSS_20B, 6, 0.02, 32, others=("replay", *GPT_OSS_OFF)),
    "deepseek-v3-3": Row(DEEPSEEK_V3, 3, 0.02, 60, others=("replay", *SIGMOID_OFF), with_fp32=False),
    "seed-004": Row(QWEN3_30B, 12, 0.06, 24, others=("replay", OFF, *ONE_ON, BITWISE), **SEED_004),
    "seed-004-bitwise": Row(QWEN3_30B, 12, 0.06, 24, **(SEED_004 | ONLY_BITWISE)),
}
for _name, _gib, _others in (
    ("qwen3-30b-a3b-48", 72, ("replay", OWN_ATTENTION)),
    ("qwen3-8b-8", 24, DENSE_OFF),
    ("glm-4.5-air-4", 34, ("replay", *SIGMOID_OFF)),
    ("gpt-oss-20b-6", 30, ("replay", *GPT_OSS_OFF)),
    ("gpt-oss-20b-6-0.02", 30, ("replay", OWN_ATTENTION)),
    ("deepseek-v3-3", 60, ("replay", *SIGMOID_OFF)),
):
    ROWS[f"{_name}-compiled"] = replace(ROWS[_name], gib=_gib, others=_others, with_hf=False, is_compiled=True)
