"""Rules between options and a model at their edges: the last value that is right, and the first that is not."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from cases.tiny_configs import BY_FAMILY

from slipstream.conf.checks.model import (
    of_base,
    of_cpu_engines,
    of_exactness,
    of_formats,
    of_slots,
    of_trainer,
    packing_of,
)
from slipstream.conf.load import load_run_config
from slipstream.conf.schema import RunConfig

Rules = Callable[[RunConfig, Mapping[str, Any]], Iterable[str]]
EIGHT_RANKS = ["trainer.num_ranks=8", "trainer.ep_size=8"]
TWO_PARTS = ["rollout.tp_size=2", "model=checkpoint", "model.path=/x", "weight_sync.mode=adapter"]
WHOLE_EXPERTS = [*TWO_PARTS, "rollout.enable_expert_parallel=true", "cluster.device=cuda"]
BITWISE = ["parity=bitwise", "cluster.device=cuda", "trainer.num_ranks=1", "trainer.ep_size=1", "model.dtype=bfloat16"]
BITWISE += ["model.hf_config.head_dim=128"]
MLP_ALONE = ["model=tiny_deepseek_v3", "trainer.ep_size=1", "trainer.lora.targets=[mlp]"]
LONG = ["rollout.max_model_len=64", "trainer.ep_size=1"]
MERGE = ["model.dtype=bfloat16", "weight_sync.remote_merge=host"]
INT4 = {"quantization_config": {"config_groups": {"all": {"weights": {"num_bits": 4, "type": "int"}}}}}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
NO_MLP = {"num_experts": 8, "decoder_sparse_step": 1, "first_k_dense_replace": 0}
ON_HOST = ["trainer.num_ranks=1", "trainer.ep_size=1", "trainer.embedding_on_host=true"]
SFT = ["experiment=sft_quickstart", "data.max_sequence_tokens=64", "trainer.ep_size=1"]


@pytest.mark.parametrize(
    ("rules", "words", "right", "wrong", "message"),
    [
        (of_trainer, EIGHT_RANKS, {"num_experts": 8}, {"num_experts": 7}, "trainer.ep_size=8 is more than the model's 7 experts; with trainer.num_ranks=8 it can be 1, 2, 4$"),
        (of_trainer, LONG, {"max_position_embeddings": 64}, {"max_position_embeddings": 63}, "rollout.max_model_len=64 is more than .*to at most 63"),
        (of_trainer, SFT, {"max_position_embeddings": 64}, {"max_position_embeddings": 63}, "data.max_sequence_tokens=64 is more than .*to at most 63"),
        (of_trainer, ON_HOST, BY_FAMILY["qwen3"], {**BY_FAMILY["qwen3"], "tie_word_embeddings": True}, "needs a head of its own.*set trainer.embedding_on_host=false"),
        (of_cpu_engines, [], {"head_dim": 512}, {"head_dim": 576}, "head_dim=576 has no attention kernel"),
        (of_cpu_engines, [], {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 48}, {"kv_lora_rank": 512, "qk_rope_head_dim": 32}, "this model has 512 and 32"),
        (of_cpu_engines, [], {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, {"kv_lora_rank": 256, "qk_rope_head_dim": 64}, "this model has 256 and 64"),
        (of_base, TWO_PARTS, {**INT4, "hidden_size": 256, "moe_intermediate_size": 128}, {**INT4, "hidden_size": 256, "moe_intermediate_size": 64}, "got 256 and 64 / 2"),
        (of_base, WHOLE_EXPERTS, {**INT4, "hidden_size": 128, "moe_intermediate_size": 64}, {**INT4, "hidden_size": 192, "moe_intermediate_size": 64}, "got 192 and 64 / 1"),
        (of_exactness, BITWISE, {"model_type": "qwen3", "head_dim": 256}, {"model_type": "qwen3", "head_dim": 80}, "head_dim=80: only at 128, 192, 256"),
        (of_exactness, BITWISE, {"model_type": "qwen3", "rope_parameters": {"rope_type": "default"}}, {"model_type": "qwen3", "rope_parameters": {"type": "linear"}}, "positions scaled by linear"),
        (of_exactness, BITWISE, {"model_type": "qwen3_moe"}, {"model_type": "qwen3_moe", "quantization_config": {"quant_method": "fp8"}}, "quantized engines"),
        (of_formats, MERGE, BY_FAMILY["qwen3_moe"], BY_FAMILY["gpt_oss"], "for gpt_oss, whose experts lie in turns"),
        (of_formats, [*MERGE, "trainer.lora.targets=[attention]"], BY_FAMILY["gpt_oss"], {**BY_FAMILY["gpt_oss"], **FP8}, "contradicts block-FP8 engines"),
        *(
            (of_trainer, MLP_ALONE, right, NO_MLP, r"has experts only; set \S*targets=\[experts\]")
            for right in (
                {}, {**NO_MLP, "n_shared_experts": 1}, {**NO_MLP, "shared_expert_intermediate_size": 32},
                {**NO_MLP, "first_k_dense_replace": 1}, {**NO_MLP, "decoder_sparse_step": 2},
                {**NO_MLP, "mlp_only_layers": [0]},
            )
        ),
    ],
)  # fmt: skip
def test_the_last_value_is_right_and_the_next_is_refused(
    rules: Rules, words: list[str], right: dict[str, Any], wrong: dict[str, Any], message: str
) -> None:
    config = load_run_config(["experiment=quickstart", *words])
    assert list(rules(config, right)) == []
    (problem,) = rules(config, wrong)
    assert re.search(message, problem), problem


def test_values_that_are_keys_have_no_slot() -> None:
    """An engine loads k_proj's weights for values, too, but puts k_proj's adapter on keys alone."""
    words = ["experiment=quickstart_gpu", "weight_sync.mode=adapter", "trainer.lora.targets=[attention,mlp]"]
    gemma = {"model_type": "gemma4_text"}
    (problem,) = of_slots(load_run_config(words), gemma)
    assert "engines give values of gemma4_text the weights of keys, and no adapter" in problem
    alone = ["trainer.lora.targets=[mlp]", "model=tiny_qwen3", "trainer.ep_size=1"]
    assert list(of_slots(load_run_config([*words, *alone]), gemma)) == []


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
