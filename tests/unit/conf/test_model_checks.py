"""Rules between options and a model at their edges: the last value that is right, and the first that is not."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from cases.tiny_configs import BY_FAMILY

from slipstream.conf.checks.model import (
    check_engine_forward_knows_the_model,
    check_ep_size_fits_experts,
    check_head_dim_on_cpu,
    check_int4_kernels_add_adapters,
    check_lora_adapts_something,
    check_sequence_fits_model,
    check_slots_have_names,
    packing_of,
)
from slipstream.conf.checks.publish import check_engines_can_merge
from slipstream.conf.errors import ConfigError
from slipstream.conf.load import load_run_config
from slipstream.conf.schema import RunConfig

Check = Callable[[RunConfig, Mapping[str, Any]], None]
EIGHT_RANKS = ["trainer.num_ranks=8", "trainer.ep_size=8"]
TWO_PARTS = ["rollout.tp_size=2"]
WHOLE_EXPERTS = [*TWO_PARTS, "rollout.enable_expert_parallel=true", "cluster.device=cuda"]
BITWISE = ["parity=bitwise", "cluster.device=cuda", "trainer.num_ranks=1", "trainer.ep_size=1", "model.dtype=bfloat16"]
BITWISE += ["model.hf_config.head_dim=128"]
MLP_ALONE = ["model=tiny_deepseek_v3", "trainer.lora.targets=[mlp]"]
MERGE = ["model.dtype=bfloat16", "weight_sync.remote_merge=host"]
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
NO_MLP = {"num_experts": 8, "decoder_sparse_step": 1, "first_k_dense_replace": 0}
SFT = ["experiment=sft_quickstart", "data.max_sequence_tokens=64"]


@pytest.mark.parametrize(
    ("check", "words", "right", "wrong", "message"),
    [
        (check_ep_size_fits_experts, EIGHT_RANKS, {"num_experts": 8}, {"num_experts": 7}, "trainer.ep_size=8 is more than the model's 7 experts; with trainer.num_ranks=8 it can be 1, 2, 4$"),
        (check_sequence_fits_model, ["rollout.max_model_len=64"], {"max_position_embeddings": 64}, {"max_position_embeddings": 63}, "rollout.max_model_len=64 is more than .*to at most 63"),
        (check_sequence_fits_model, SFT, {"max_position_embeddings": 64}, {"max_position_embeddings": 63}, "data.max_sequence_tokens=64 is more than .*to at most 63"),
        (check_head_dim_on_cpu, [], {"head_dim": 512}, {"head_dim": 576}, "head_dim=576 has no attention kernel"),
        (check_head_dim_on_cpu, [], {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 48}, {"kv_lora_rank": 512, "qk_rope_head_dim": 32}, "this model has 512 and 32"),
        (check_head_dim_on_cpu, [], {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, {"kv_lora_rank": 256, "qk_rope_head_dim": 64}, "this model has 256 and 64"),
        (check_int4_kernels_add_adapters, TWO_PARTS, {"hidden_size": 256, "moe_intermediate_size": 128}, {"hidden_size": 256, "moe_intermediate_size": 64}, "got 256 and 64 / 2"),
        (check_int4_kernels_add_adapters, WHOLE_EXPERTS, {"hidden_size": 128, "moe_intermediate_size": 64}, {"hidden_size": 192, "moe_intermediate_size": 64}, "got 192 and 64 / 1"),
        (check_engine_forward_knows_the_model, BITWISE, {"model_type": "qwen3", "head_dim": 256}, {"model_type": "qwen3", "head_dim": 80}, "head_dim=80: only at 128, 192, 256"),
        (check_engine_forward_knows_the_model, BITWISE, {"model_type": "qwen3", "rope_parameters": {"rope_type": "default"}}, {"model_type": "qwen3", "rope_parameters": {"type": "linear"}}, "positions scaled by linear"),
        (check_engine_forward_knows_the_model, BITWISE, {"model_type": "qwen3_moe"}, {"model_type": "qwen3_moe", "quantization_config": {"quant_method": "fp8"}}, "quantized engines"),
        (check_engines_can_merge, MERGE, BY_FAMILY["qwen3_moe"], BY_FAMILY["gpt_oss"], "for gpt_oss, whose experts lie in turns"),
        (check_engines_can_merge, [*MERGE, "trainer.lora.targets=[attention]"], BY_FAMILY["gpt_oss"], {**BY_FAMILY["gpt_oss"], **FP8}, "contradicts block-FP8 engines"),
        *(
            (check_lora_adapts_something, MLP_ALONE, right, NO_MLP, r"has experts only; set \S*targets=\[experts\]")
            for right in (
                {}, {**NO_MLP, "n_shared_experts": 1}, {**NO_MLP, "shared_expert_intermediate_size": 32},
                {**NO_MLP, "first_k_dense_replace": 1}, {**NO_MLP, "decoder_sparse_step": 2},
                {**NO_MLP, "mlp_only_layers": [0]},
            )
        ),
    ],
)  # fmt: skip
def test_the_last_value_is_right_and_the_next_is_refused(
    check: Check, words: list[str], right: dict[str, Any], wrong: dict[str, Any], message: str
) -> None:
    config = load_run_config(["experiment=quickstart", *words])
    check(config, right)
    with pytest.raises(ConfigError, match=message):
        check(config, wrong)


@pytest.mark.parametrize(("rank", "is_right"), [(128, True), (129, False)])
def test_slots_of_experts_have_kernels_up_to_a_rank(rank: int, is_right: bool) -> None:
    words = ["experiment=quickstart_gpu", "weight_sync.mode=adapter", "trainer.lora.expert_rank=16"]
    words += [f"trainer.lora.rank={rank}"]
    if is_right:
        load_run_config(words)
        return
    with pytest.raises(ConfigError, match=r"adapters of experts up to rank 128, and .* which is 256 here"):
        load_run_config(words)
    load_run_config([*words, "weight_sync.mode=merged"])


def test_values_that_are_keys_have_no_slot() -> None:
    """An engine loads k_proj's weights for values, too, but puts k_proj's adapter on keys alone."""
    words = ["experiment=quickstart_gpu", "weight_sync.mode=adapter", "trainer.lora.targets=[attention,mlp]"]
    gemma = {"model_type": "gemma4_text"}
    with pytest.raises(ConfigError, match="engines give values of gemma4_text the weights of keys, and no adapter"):
        check_slots_have_names(load_run_config([*words]), gemma)
    alone = ["trainer.lora.targets=[mlp]", "model=tiny_qwen3", "trainer.ep_size=1"]
    check_slots_have_names(load_run_config([*words, *alone]), gemma)


@pytest.mark.parametrize(
    ("quantization", "packing"),
    [
        (None, None),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {"weights": {"num_bits": 4}}}}, "INT4"),
        ({"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}}, None),
        ({"config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}}, None),
        ({"config_groups": {"a": {"weights": None}}}, None),
        ({"quant_method": "fp8"}, None),
    ],
)
def test_four_bit_weights_are_known_by_their_config(quantization: dict[str, Any] | None, packing: str | None) -> None:
    assert packing_of({"quantization_config": quantization}) == packing
