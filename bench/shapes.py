"""The model that benches run: a Qwen3-MoE of any size."""

from __future__ import annotations

import argparse
from typing import Any


def model_config(args: argparse.Namespace) -> dict[str, Any]:
    """config.json of a Qwen3-MoE; the defaults are Qwen3-30B-A3B's."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": max(1, args.heads // 8),
        "head_dim": args.head_dim,
        "intermediate_size": 3 * args.hidden,
        "moe_intermediate_size": args.width,
        "num_experts": args.experts,
        "num_experts_per_tok": min(8, args.experts),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
