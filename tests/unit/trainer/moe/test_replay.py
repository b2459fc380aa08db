"""Promise of trainer/moe/replay.py: recorded experts are used, in every layer and every pass over it, with the weights
that the trainer's own router gives to them."""

from typing import Any

import pytest
import torch
from cases.route_cases import drawn_routes, own_routes, recorded
from cases.tiny_configs import DEEPSEEK, GEMMA4_MOE, GLM, GLM_LITE, GPT_OSS, MINIMAX, MIXED, MOE, QWEN3_NEXT
from cases.tiny_models import (
    gradients_under_checkpoint_names,
    hf_logits,
    hf_model,
    logits_of,
    make_decoder,
    packed,
    probe_loss,
    relative_error,
    trainer_config,
)
from torch import Tensor, nn

from slipstream.conf.architecture.moe_spec import MoeSpec, RouterScore
from slipstream.conf.schema import Activations, MlaNormEps, TrainMode
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.moe.replay import RecordedRoutes

FAMILIES = {
    "qwen3": MOE,
    "qwen3_not_renormalized": {**MOE, "norm_topk_prob": False},
    "qwen3_with_a_dense_layer": MIXED,
    "glm": GLM,
    "glm_lite": GLM_LITE,
    "deepseek": DEEPSEEK,
    "deepseek_not_renormalized": {**DEEPSEEK, "norm_topk_prob": False},
    "gpt_oss": GPT_OSS,
    "minimax": MINIMAX,
    "gemma4_moe": GEMMA4_MOE,
    "qwen3_next": QWEN3_NEXT,
}
MODES = {
    "lora": trainer_config(),
    "lora_keeping_activations": trainer_config(activations=Activations.keep),
    "full": trainer_config(TrainMode.full, train_router=True),
    "full_keeping_activations": trainer_config(TrainMode.full, train_router=True, activations=Activations.keep),
}
HALF = [(family, mode) for i, family in enumerate(FAMILIES) for j, mode in enumerate(MODES) if (i + j) % 2 == 0]
"""Each family trains adapters, and all weights; half of the families keep activations, as every other one does not."""


def step(decoder: Decoder, batch: Any, routes: RecordedRoutes | None = None) -> dict[str, Tensor]:
    for parameter in decoder.parameters():
        parameter.grad = None
    logits = logits_of(decoder, batch, routes)
    probe_loss(logits, batch[0]).backward()
    grads = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize(("family", "mode"), HALF)
def test_replay_of_its_own_choice_changes_no_bit(family, mode):
    """Each family in both dtypes: its first mode in bfloat16, the other one in float32."""
    dtype = torch.bfloat16 if mode.startswith("lora") else torch.float32
    decoder, batch = make_decoder(FAMILIES[family], MODES[mode], dtype=dtype), packed()
    with own_routes(decoder) as layers:
        free = step(decoder, batch)
    routes = recorded(layers)
    assert differing(step(decoder, batch, routes), free) == []
    assert [int(count) for count in routes.flipped] == [0] * len(layers)


@pytest.mark.parametrize(("family", "mode"), HALF)
def test_tokens_without_a_route_choose_for_themselves(family, mode):
    """The recorded half changes what the decoder computes; with no token recorded, nothing changes it."""
    decoder, batch = make_decoder(FAMILIES[family], MODES[mode]), packed()
    num_tokens = len(batch[0])
    layers = drawn_routes(decoder.spec, num_tokens)
    free = step(decoder, batch)
    nobody, half = torch.zeros(num_tokens, dtype=torch.bool), torch.arange(num_tokens) % 2 == 0
    assert differing(step(decoder, batch, recorded(layers, nobody)), free) == []
    with own_routes(decoder) as used:
        step(decoder, batch, recorded(layers, half))
    with own_routes(decoder) as own:
        step(decoder, batch)
    for wanted, found in zip(layers, used, strict=True):
        assert torch.equal(found[half], wanted[half])
    assert torch.equal(used[0][~half], own[0][~half])  # the first such layer sees what it sees without replay


def test_a_layer_counts_the_recorded_experts_that_it_would_not_have_chosen():
    decoder, batch = make_decoder(MIXED), packed()
    with own_routes(decoder) as own:
        step(decoder, batch)
    first = own[0].clone()
    first[2] = torch.tensor([e for e in range(8) if e not in first[2].tolist()])[:2]  # both flipped
    first[5, 1] = next(e for e in range(8) if e not in first[5].tolist())  # one flipped
    first[7] = first[7].flip(0)  # another order is the same choice
    routes = recorded([first, own[1]])
    step(decoder, batch, routes)
    assert int(routes.flipped[0]) == 3
    assert len(routes.flipped) == 2  # one per layer: recomputation does not count again


# --------------------------------------------------------------------------------------- against transformers' models


def plain_weights(moe: MoeSpec, logits_TE: Tensor, mask_TE: Tensor) -> Tensor:
    """Equations of the papers, dense: the mask is R3's I, zero outside."""
    if moe.score is RouterScore.sigmoid:
        scores_TE = logits_TE.sigmoid() * mask_TE
        return moe.scaling_factor * (scores_TE / scores_TE.sum(-1, keepdim=True) if moe.norm_topk_prob else scores_TE)
    exponentials_TE = logits_TE.exp()
    total_T = (exponentials_TE * mask_TE if moe.norm_topk_prob else exponentials_TE).sum(-1, keepdim=True)
    return exponentials_TE * mask_TE / total_T


def force(model: nn.Module, moe: MoeSpec, layers: list[Tensor]) -> None:
    """Give transformers' routers these experts; sequences come one after the other."""
    kinds = ("TopKRouter", "TopkRouter", "TextRouter")
    routers = [module for module in model.modules() if type(module).__name__.endswith(kinds)]
    assert len(routers) == len(layers)
    for router, experts_TK in zip(routers, layers, strict=True):

        def forward(hidden: Tensor, *_: Any, router: Any = router, rest: Any = [experts_TK]) -> tuple[Tensor, ...]:  # noqa: B006
            x_TH = hidden.reshape(-1, hidden.shape[-1])
            chosen_TK, rest[0] = rest[0][: len(x_TH)], rest[0][len(x_TH) :]
            factors_TK: Any = 1.0
            if moe.is_beside_dense:
                x_TH = router.norm(x_TH) * router.scale * router.scalar_root_size
                factors_TK = router.per_expert_scale[chosen_TK]
            weight = router.proj.weight if moe.is_beside_dense else router.weight
            logits_TE = x_TH @ weight.t() + getattr(router, "bias", 0.0)
            mask_TE = torch.zeros_like(logits_TE).scatter(1, chosen_TK, 1.0)
            return logits_TE, plain_weights(moe, logits_TE, mask_TE).gather(1, chosen_TK) * factors_TK, chosen_TK

        router.forward = forward


@pytest.mark.parametrize(("family", "mode"), [(family, mode) for family, mode in HALF if "full" in mode])
def test_forced_experts_give_the_logits_and_gradients_of_transformers(family, mode):
    batch = packed()
    decoder = make_decoder(FAMILIES[family], MODES[mode], mla_norm_eps=MlaNormEps.hf)
    oracle, layers = hf_model(FAMILIES[family]), drawn_routes(decoder.spec, len(batch[0]))
    free = logits_of(decoder, batch).detach()
    assert decoder.spec.moe is not None
    force(oracle, decoder.spec.moe, layers)
    wanted = hf_logits(oracle, batch)
    mine = logits_of(decoder, batch, recorded(layers))
    assert relative_error(mine, wanted) < 1e-5
    assert relative_error(mine, free) > 1e-2  # the forced experts are others

    probe_loss(mine, batch[0]).backward()
    probe_loss(wanted, batch[0]).backward()
    expected = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    found = gradients_under_checkpoint_names(decoder)
    errors = {name: relative_error(found[name], expected[name]) for name in found}
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])
    routers = [name for name in found if ".gate.weight" in name or ".router." in name]
    assert routers and all(float(found[name].norm()) > 0 for name in routers)
