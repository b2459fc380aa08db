"""Sizes of an engine that vLLM could not build are refused, with those that it could. Expected lists are by hand."""

from typing import Any

import pytest

from slipstream.conf.checks.tensor_parallel import check_tp_size_fits_model, num_kv_heads_of
from slipstream.conf.errors import ConfigError

GQA: dict[str, Any] = {"model_type": "llama", "num_attention_heads": 12, "hidden_size": 384}
MOE: dict[str, Any] = {**GQA, "model_type": "qwen3_moe", "num_experts": 8}
LATENT: dict[str, Any] = {"model_type": "deepseek_v3", "num_attention_heads": 12, "kv_lora_rank": 512}
FP8: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}

# fmt: off
REFUSED = [
    ({**GQA}, 5, "does not divide the model's 12 attention heads; it can be 1, 2, 3, 4, 6, 12"),
    # Key/value heads: 2 divides neither way; 6 and 12 are multiples of 3.
    ({**GQA, "num_key_value_heads": 3}, 2, "neither divides the model's 3 key/value heads nor is a multiple of them; it can be 1, 3, 6, 12"),
    ({**GQA, "model_type": "gpt_oss", "num_key_value_heads": 3}, 6, "3 key/value heads; it can be 1, 3"),
    ({**GQA, "intermediate_size": 100}, 3, "does not divide the dense feed-forward's intermediate_size=100; it can be 1, 2, 4"),
    ({**MOE, "moe_intermediate_size": 100}, 3, "the routed experts' moe_intermediate_size=100; it can be 1, 2, 4; with expert parallelism it can be 1, 2, 3,"),
    ({**MOE, "mlp_only_layers": [0], "intermediate_size": 100, "moe_intermediate_size": 96}, 3, "the dense feed-forward's intermediate_size=100; it can be 1, 2, 4"),
    ({**LATENT, "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 11}, 4, r"the shared experts' 2 \* moe_intermediate_size=11; it can be 1; with expert parallelism it can be 1, 2"),
    ({**MOE, "model_type": "qwen2_moe", "moe_intermediate_size": 96, "shared_expert_intermediate_size": 100}, 3, "the shared expert's shared_expert_intermediate_size=100; it can be 1, 2, 4"),
    ({**GQA, "model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 100}, 3, "the routed experts' intermediate_size=100; it can be 1, 2, 4; with expert parallelism it can be 1, 2, 3,"),
    *(
        (
            {**GQA, "model_type": name, "num_local_experts": 8, "intermediate_size": 100},
            3,
            "the routed experts' intermediate_size=100; it can be 1, 2, 4; with expert parallelism it can be 1, 2, 3,",
        )
        for name in ("minimax_m2", "olmoe")
    ),
    # gpt-oss cuts its experts whatever is asked for.
    ({**GQA, "model_type": "gpt_oss", "num_local_experts": 8, "intermediate_size": 100}, 3, "the experts' intermediate_size=100; it can be 1, 2, 4$"),
    ({**MOE, "decoder_sparse_step": 2, "intermediate_size": 100, "moe_intermediate_size": 96}, 3, "the dense feed-forward's intermediate_size=100; it can be 1, 2, 4"),
    ({**LATENT, "n_routed_experts": 8, "first_k_dense_replace": 1, "intermediate_size": 100}, 3, "the dense feed-forward's intermediate_size=100; it can be 1, 2, 4"),
    # Padded to 128 rows, which 3 does not divide.
    ({**GQA, "vocab_size": 100}, 3, r"the vocabulary's 128 rows \(vocab_size=100, padded\); it can be 1, 2, 4"),
    # 1536 columns are 12 blocks, which any of the sizes divides; 12 heads of 32 are 3.
    ({**GQA, **FP8, "intermediate_size": 1536}, 2, "leaves a rank 192 of the queries' 12 heads of 32, and block-FP8 comes in blocks of 128; it can be 1, 3"),
    ({**GQA, **FP8, "head_dim": 128, "intermediate_size": 768}, 4, "leaves a rank 192 of the dense feed-forward's intermediate_size=768.*; it can be 1, 2, 3, 6"),
    ({**MOE, **FP8, "head_dim": 128, "moe_intermediate_size": 192}, 1, "a rank 192 of the routed.*; no size fits; giv"),
    ({**GQA, **FP8, "num_key_value_heads": 3}, 1, "a rank 96 of the keys' 3 heads of 32.*; no size fits"),
    ({**LATENT, **FP8, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}, 12, "leaves a rank 192 of kv_b_proj's 12 heads of 192.*it can be 1, 2, 3, 6"),
    ({**LATENT, **FP8, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}, 12, "leaves a rank 96 of q_b_proj's 12 heads of 96.*it can be 1, 3"),
    ({**LATENT, **FP8, "q_lora_rank": 96}, 1, "leaves a rank 96 of q_lora_rank=96.*; no size fits"),
    ({**LATENT, **FP8, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}, 12, "leaves a rank 64 of o_proj's 12 heads of 64.*it can be 1, 2, 3, 6"),
]
# fmt: on


@pytest.mark.parametrize(("config", "tp_size", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_sizes_that_engines_cannot_build_are_refused(config: dict[str, Any], tp_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--tp={tp_size} .*{message}"):
        check_tp_size_fits_model("--tp", tp_size, config)


@pytest.mark.parametrize(
    ("config", "tp_size", "is_expert_parallel"),
    [
        ({**GQA, "num_key_value_heads": 3}, 6, False),
        ({**LATENT, "num_key_value_heads": 12}, 12, False),  # latent attention has no key/value heads to cut
        ({**MOE, "moe_intermediate_size": 100}, 3, True),
        ({**MOE, "moe_intermediate_size": 96, "intermediate_size": 100}, 3, False),  # no layer is dense
        ({**GQA, "vocab_size": 129}, 3, False),  # 192 rows
        ({**MOE, **FP8, "head_dim": 128, "moe_intermediate_size": 256}, 6, True),
        # Ranks with a copy of a key/value head hold it whole.
        ({**GQA, **FP8, "head_dim": 128, "num_key_value_heads": 1, "intermediate_size": 1536}, 12, False),
        ({**GQA, **FP8, "model_type": "qwen3"}, 12, False),  # whose heads are of 128 elements where none are given
        ({**GQA, "vocab_size": 64 * 5, "num_attention_heads": 15}, 5, False),
        ({**LATENT, **FP8, "qk_nope_head_dim": 63, "qk_rope_head_dim": 63, "v_head_dim": 63}, 1, False),  # not cut
        ({**GQA, "num_attention_heads": "12", "num_key_value_heads": None}, 7, False),  # refused elsewhere
    ],
)
def test_sizes_that_engines_can_build_are_allowed(
    config: dict[str, Any], tp_size: int, is_expert_parallel: bool
) -> None:
    check_tp_size_fits_model("--tp", tp_size, config, is_expert_parallel=is_expert_parallel)


def test_layers_that_conversion_left_out_need_no_blocks() -> None:
    quantization = {**FP8["quantization_config"], "modules_to_not_convert": ["model.layers.0.mlp.gate_proj"]}
    config = {**GQA, "head_dim": 128, "intermediate_size": 192, "quantization_config": quantization}
    check_tp_size_fits_model("--tp", 2, config)
    quantization["modules_to_not_convert"] = ["model.layers.0.mlp.gate"]  # the router is another layer
    with pytest.raises(ConfigError, match="a rank 96 of the dense"):
        check_tp_size_fits_model("--tp", 2, config)


def test_key_value_heads_default_to_all_heads() -> None:
    assert num_kv_heads_of(GQA) == 12
    assert num_kv_heads_of(LATENT) is None
