"""Faults planted in the trainer's side are found and named, against what a real vLLM engine computed.

One engine (bfloat16, on a GPU where there is one, else on the CPU) serves all tests; each compares its recorded
activations with a trainer that is wrong in one place. The comparison with a trainer that is right is the reference
noise.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases.tiny_models import by_place, draw_b

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import CombineMode, Device, DType, RolloutConfig, RouterFormat
from slipstream.orchestrator.inputs.model_folder import resolve_hf_config
from slipstream.orchestrator.parity.compare import partings
from slipstream.orchestrator.parity.engine_side import Sampled, sample_and_record
from slipstream.orchestrator.parity.measure import Layers, compare_layers, read_tensors
from slipstream.rollout.types import EngineOptions
from slipstream.trainer.moe.router import Router, Routing
from slipstream.trainer.scoring import Scorer

pytestmark = pytest.mark.timeout(900)

MODEL = ["model=tiny_qwen3_moe", "model.dtype=bfloat16", "model.hf_config.num_experts_per_tok=4", "data=letters"]
DEVICE = Device.cuda if torch.cuda.is_available() else Device.cpu
PROMPT, RESPONSE, SEQUENCES = 16, 48, 4


def scorer_of(combine: CombineMode = CombineMode.fp32_once) -> Scorer:
    lengths = ["rollout.max_model_len=128", f"rollout.sampling.max_tokens={RESPONSE}"]
    # vLLM on a CPU rounds the router's weights, and not the experts' products; on a GPU it is the other way round.
    numerics = by_place(router_weights=RouterFormat.model, combine=combine)
    config = load_run_config([*MODEL, *lengths])
    trainer = replace(config.trainer, numerics=numerics)
    return Scorer(config.model, trainer, resolve_hf_config(config.model), seed=0, device=str(DEVICE))


@dataclass
class Recorded:
    """The engine's side, and what a trainer without a fault differs from it."""

    sampled: list[Sampled]
    activations: dict[str, torch.Tensor]
    clean: Layers

    @property
    def usual(self) -> dict[str, float]:
        return {one.tensor: one.relative for one in self.clean.differences}

    def against(self, scorer: Scorer) -> Layers:
        return compare_layers(scorer, self.sampled, self.activations, self.usual)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("parity")
    right = scorer_of()
    right.save(folder / "checkpoint")
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 64) for _ in range(PROMPT)] for _ in range(SEQUENCES)]
    small = RolloutConfig(kv_cache_bytes=64 << 20, gpu_memory_utilization=0.05)
    options = EngineOptions(folder=folder / "checkpoint", config=small, dtype=DType.bfloat16, device=DEVICE)
    sampled = sample_and_record(
        options,
        prompts,
        seed=0,
        max_tokens=RESPONSE,
        num_recorded=SEQUENCES,
        activations=folder / "activations",
        say=lambda _: None,
    )
    activations = read_tensors(folder / "activations")
    return Recorded(sampled, activations, compare_layers(right, sampled, activations))


def test_without_a_fault_nothing_differs_by_more_than_rounding(recorded: Recorded):
    assert recorded.clean.agrees, recorded.clean.sentence
    compared = {one.kind for one in recorded.clean.differences}
    assert {
        "embed_tokens", "input_layernorm", "self_attn.qkv_proj", "self_attn.qk_norm", "self_attn.rotary_emb",
        "self_attn.attn", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate", "mlp.experts", "mlp", "norm",
    } <= compared  # fmt: skip
    assert recorded.against(scorer_of()).agrees


def layer_of(scorer: Scorer, number: int) -> Any:
    """A layer, whose parts torch types as tensors or modules."""
    return scorer.decoder.model.layers[number]


def wrong_eps(scorer: Scorer) -> None:
    layer_of(scorer, 0).input_layernorm.eps = 1e-5


def narrow_router(scorer: Scorer) -> None:
    """The softmax over the experts in bfloat16 instead of float32."""

    def rounded(gate: Router, args: tuple[torch.Tensor], routing: Routing) -> Routing:
        logits_TE = torch.nn.functional.linear(args[0], gate.weight)
        weights_TK = logits_TE.softmax(-1).gather(1, routing.experts_TK)
        return Routing(weights_TK / weights_TK.sum(-1, keepdim=True), routing.experts_TK)

    for number in range(2):
        layer_of(scorer, number).mlp.gate.register_forward_hook(rounded)


def stale_weights(scorer: Scorer) -> None:
    """One layer's projection missed the last update: it is off by one unit in the last place."""
    with torch.no_grad():
        layer_of(scorer, 1).self_attn.o_proj.weight.mul_(1 + 2.0**-7)


def late_positions(scorer: Scorer) -> None:
    """Attention sees differences of positions alone: no log-probability shows this."""
    decoder: Any = scorer.decoder
    (right,) = decoder.rotaries
    decoder.rotaries = [lambda positions, dtype: right(positions + 1, dtype)]


@pytest.mark.parametrize(
    ("plant", "place"),
    [
        (wrong_eps, "layer 0, input_layernorm"),
        (narrow_router, "every layer, mlp.gate"),
        (stale_weights, "layer 1, self_attn.o_proj"),
        (late_positions, "every layer, self_attn.rotary_emb"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_fault_is_named(recorded: Recorded, plant: Callable[[Scorer], None], place: str):
    scorer = scorer_of()
    plant(scorer)
    found = recorded.against(scorer)
    assert [one.place for one in partings(found.differences)] == [place]
    assert found.sentence.startswith(f"They part at {place}")


def test_another_order_of_the_experts_sum_is_named(recorded: Recorded):
    found = recorded.against(scorer_of(CombineMode.hf_eager))
    assert [one.place for one in partings(found.differences)] == ["every layer, mlp.experts"]
    assert "order of their weighted sum" in found.sentence


def test_an_adapter_that_the_engine_did_not_load_is_named(recorded: Recorded):
    scorer = scorer_of()
    draw_b(scorer.decoder)
    found = recorded.against(scorer)
    assert found.sentence.startswith("The engine computes without the adapter: ")
    assert {one.kind for one in partings(found.differences)} == {
        "self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts",
    }  # fmt: skip


def test_taking_a_faulty_block_from_the_engine_brings_them_together(recorded: Recorded):
    """The swap of one block: nothing but the swap of the block with the fault brings k3 back to what it was."""
    scorer = scorer_of()
    with torch.no_grad():
        layer_of(scorer, 0).self_attn.o_proj.weight.mul_(1.5)
    swaps = {swap.block: swap.k3_mean for swap in recorded.against(scorer).swaps}
    clean = {swap.block: swap.k3_mean for swap in recorded.clean.swaps}
    assert swaps[""] > 10 * clean[""]
    assert min(swaps, key=lambda block: swaps[block] if block.startswith("layers.") else 1.0) == "layers.0.self_attn"
    assert swaps["layers.0.self_attn"] < swaps[""] / 10
