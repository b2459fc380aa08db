"""The model that benches run: a Qwen3-MoE of any size, and the options for its size."""

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


def add_shape_options(parser: argparse.ArgumentParser, *, rank: int | None) -> None:
    """Add options for the sizes of the model, by default Qwen3-30B-A3B's, and --rank if it has adapters."""
    for name, value in (("layers", 48), ("experts", 128), ("hidden", 2048), ("width", 768), ("heads", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=151936)
    if rank is not None:
        parser.add_argument("--rank", type=int, default=rank, help="of the adapters")


def shrink(args: argparse.Namespace) -> None:
    """Apply --tiny of the trainer's benches: two small layers."""
    args.layers, args.experts, args.hidden, args.width, args.vocab, args.rank = 2, 8, 64, 32, 512, 8
    args.heads, args.head_dim = 8, 16
