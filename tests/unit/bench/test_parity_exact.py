"""bench/parity_exact.py: forwards of which one thing differs."""

from typing import Any

import pytest
import torch
from cases.tiny_models import DENSE, MOE

from bench.bitwise import Response
from bench.parity_exact import SAME_WEIGHTS, Float32Forward, Weights, with_numerics
from slipstream.conf.schema import DType, Init, LoraConfig, ModelConfig, TrainerConfig
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.scoring import Scorer

RESPONSES = [Response([5, 9, 2, 17, 3, 30, 8], 3, []), Response([1, 4, 22, 6], 2, [])]
TRAINER = TrainerConfig(lora=LoraConfig(rank=4, alpha=8.0))


def learnt(config: dict[str, Any], dtype: DType) -> Scorer:
    """Random weights, and adapters that add something."""
    model = ModelConfig(init=Init.random, hf_config=config | {"initializer_range": 0.2}, dtype=dtype)
    scorer = Scorer(model, TRAINER, config, seed=0, device="cpu", rounding_seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in scorer.decoder.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.05)
    return scorer


def of_sampled(scorer: Scorer) -> list[float]:
    """Log-probabilities as Float32Forward returns them."""
    rows, _ = scorer.logprobs([one.tokens for one in RESPONSES])
    return [value for one, row in zip(RESPONSES, rows, strict=True) for value in row[one.num_prompt_tokens - 1 :]]


@pytest.mark.parametrize("config", [MOE, DENSE, {**DENSE, "tie_word_embeddings": True}], ids=["moe", "dense", "tied"])
def test_float32_is_the_trainers_policy_in_float32(config: dict[str, Any]) -> None:
    scorer = learnt(config, DType.float32)
    with Weights(scorer.decoder, "dithered") as weights:
        found = Float32Forward(config, "cpu").logprobs(list(weights.metas), weights.exact, RESPONSES)
    assert found == pytest.approx(of_sampled(scorer), abs=2e-5)


def test_stored_weights_are_rounded_and_exact_ones_are_not() -> None:
    decoder = learnt(MOE, DType.bfloat16).decoder
    name = "model.layers.0.self_attn.q_proj.weight"
    found = {}
    for rounding in ("nearest", "dithered"):
        with Weights(decoder, rounding) as weights:
            exact, found[rounding] = weights.exact(name), weights.stored(name)
        assert (exact != exact.bfloat16().float()).float().mean() > 0.9
    assert torch.equal(found["nearest"], exact.bfloat16())
    assert not torch.equal(found["nearest"], found["dithered"])


def test_a_decoder_of_other_numerics_follows_the_first_ones_parameters() -> None:
    scorer = learnt(DENSE, DType.bfloat16)
    separate = of_sampled(scorer)
    merged: Decoder = with_numerics(scorer.decoder, TRAINER, SAME_WEIGHTS["same weights"], seed=0)
    with Weights(scorer.decoder, "dithered") as weights:
        plain = learnt(DENSE, DType.bfloat16)
        with torch.no_grad():
            for parameter_name, parameter in plain.decoder.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.zero_()
                elif (tensor := parameter_name.replace(".base.", ".")) in weights.metas:
                    parameter.copy_(weights.stored(tensor))
    first = scorer.decoder
    scorer.decoder = merged
    assert of_sampled(scorer) == of_sampled(plain) != separate
    with torch.no_grad():
        for name, parameter in first.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    scorer.decoder = first
    base = of_sampled(scorer)
    scorer.decoder = merged
    assert of_sampled(scorer) == base
