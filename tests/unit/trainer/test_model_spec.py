"""Promise of trainer/model/spec.py: a config is understood as transformers understands it, or refused by name."""

from __future__ import annotations

import pytest
import torch
from tiny_models import DENSE, MIXED, MOE, make_decoder, trainer_config

from conf.errors import ConfigError
from trainer.model.spec import ModelSpec
from trainer.parallel import ParallelLayout
from trainer.shards import local_shards


@pytest.mark.parametrize(
    "hf_config", [DENSE, MOE, MIXED, {**DENSE, "tie_word_embeddings": True, "attention_bias": True}]
)
def test_the_model_holds_exactly_the_checkpoints_tensors(hf_config):
    spec = ModelSpec.from_hf_config(hf_config)
    expected = {meta.name: meta.shape for meta in spec.checkpoint_tensors("bfloat16")}
    held = {one.tensor: one.region.shape for one in local_shards(make_decoder(hf_config))}
    assert held == expected


def test_a_config_written_by_transformers_reads_the_same():
    from transformers import Qwen3MoeConfig

    fields = {key: value for key, value in MOE.items() if key not in ("model_type", "rope_theta")}
    written = Qwen3MoeConfig(**fields, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).to_dict()
    assert ModelSpec.from_hf_config(written) == ModelSpec.from_hf_config({**MOE, "rope_theta": 5e5})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "must be one of qwen3, qwen3_moe, got 'llama'"),
        ({"hidden_size": None}, "hidden_size must be a positive whole number, got None"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE type 'yarn' is not supported"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be <= num_experts"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelSpec.from_hf_config({**MOE, **changes})


def test_an_expert_parallel_size_that_does_not_fit_is_refused():
    layout = ParallelLayout(3, 3, 0, torch.device("cpu"), None, None, None)
    with pytest.raises(ConfigError, match="ep_size must divide the number of experts 8, got 3"):
        make_decoder(MOE, trainer_config(), layout=layout)
    with pytest.raises(ConfigError, match="ep_size must be 1 for a model without experts"):
        make_decoder(DENSE, trainer_config(), layout=layout)
