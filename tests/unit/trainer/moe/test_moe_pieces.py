"""Promises of the steps inside a mixture-of-experts block: grouped products, dispatch and router."""

from dataclasses import replace

import pytest
import torch
from cases.tiny_models import AS_TRANSFORMERS

from slipstream.conf.architecture.moe_spec import MoeSpec, RouterScore
from slipstream.conf.schema import RoutedScale, RouterFormat, RouterLogits
from slipstream.trainer.kernels.experts.groups import RowGroups
from slipstream.trainer.moe.dispatch import plan_dispatch
from slipstream.trainer.moe.grouped import (
    LIGHT_FLOP,
    GroupedBackend,
    backend_of_product,
    choose_grouped_backend,
    grouped_gradient,
    grouped_product,
)
from slipstream.trainer.moe.replay import LayerRoutes
from slipstream.trainer.moe.router import Router

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("backend", "num_operations", "is_plain", "is_grouped_mm_fast", "chosen"),
    [
        ("triton", LIGHT_FLOP - 1, True, True, "grouped_mm"),
        ("triton", LIGHT_FLOP, True, True, "triton"),
        ("triton", LIGHT_FLOP - 1, False, True, "triton"),
        ("triton", LIGHT_FLOP - 1, True, False, "triton"),
        ("native", LIGHT_FLOP - 1, True, True, "native"),
    ],
)
def test_on_hopper_light_products_of_nothing_else_are_grouped_mm(
    backend, num_operations, is_plain, is_grouped_mm_fast, chosen
):
    found = backend_of_product(
        GroupedBackend(backend), num_operations, is_plain=is_plain, is_grouped_mm_fast=is_grouped_mm_fast
    )
    assert found == chosen


@pytest.mark.parametrize("backend", [GroupedBackend.grouped_mm, GroupedBackend.native])
@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 9, 0), (0, 0, 0, 0)], ids=str)
def test_grouped_products_are_one_product_an_expert(backend, counts):
    if choose_grouped_backend(CPU, torch.float32, (16, 24)) is GroupedBackend.native is not backend:
        pytest.skip("this torch has no grouped_mm on the CPU; revisit 2027-06-01")
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(sum(counts), 16, generator=generator), torch.randn(sum(counts), 24, generator=generator)
    weight = torch.randn(4, 24, 16, generator=generator)
    groups = RowGroups(torch.tensor(counts), sum(counts))
    parts = list(zip(x.split(list(counts)), grad.split(list(counts)), weight, strict=True))
    out = grouped_product(x, weight.transpose(1, 2), groups, backend)
    assert torch.allclose(out, torch.cat([one @ w.t() for one, _, w in parts]), rtol=1e-5, atol=1e-5)
    back = grouped_product(grad, weight, groups, backend)
    assert torch.allclose(back, torch.cat([g @ w for _, g, w in parts]), rtol=1e-5, atol=1e-5)
    outer = grouped_gradient(grad, x, groups, backend)
    assert torch.allclose(outer, torch.stack([g.t() @ one for one, g, _ in parts]), rtol=1e-5, atol=1e-5)
    for expert, count in enumerate(counts):
        assert bool(outer[expert].any()) is (count > 0)


def test_the_backend_depends_on_strides_and_dtype(monkeypatch):
    assert choose_grouped_backend(CPU, torch.bfloat16, (64, 12)) is GroupedBackend.native  # 24 bytes a row
    assert choose_grouped_backend(CPU, torch.bfloat16, (64, 4)) is GroupedBackend.native  # a LoRA rank of 4
    here = tuple(int(part) for part in torch.__version__.split(".")[:2])
    expected = GroupedBackend.grouped_mm if here >= (2, 13) else GroupedBackend.native
    assert choose_grouped_backend(CPU, torch.bfloat16, (64, 8)) is expected
    assert choose_grouped_backend(CPU, torch.float32, (64, 4)) is expected
    monkeypatch.setattr(torch, "__version__", "2.9.1")  # as a text it is behind 2.13
    assert choose_grouped_backend(CPU, torch.float32, (64, 4)) is GroupedBackend.native


def some_routing(num_tokens=6, top_k=3, num_experts=5):
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    return scores.topk(top_k).indices


def test_rows_are_sorted_by_expert_and_come_back():
    experts_TK = some_routing()
    plan = plan_dispatch(experts_TK, 5, None)
    x = torch.arange(6.0)[:, None].expand(6, 2).contiguous()
    values, source = plan.sending(x)()
    rows = values[source]
    expert_of_row = experts_TK.flatten()[plan.choice_of_row_S]
    assert torch.equal(expert_of_row, expert_of_row.sort().values)
    assert torch.equal(plan.groups.expert_of_row_S, expert_of_row)
    assert plan.groups.counts == [int((experts_TK == expert).sum()) for expert in range(5)]
    for expert, places in plan.groups.slices():
        assert bool((expert_of_row[places] == expert).all())
        tokens = plan.token_of_row_S[places]
        assert torch.equal(tokens, tokens.sort().values)  # stable
    assert torch.equal(rows[plan.row_of_choice_TK], x[:, None].expand(6, 3, 2))
    assert torch.equal(plan.combining(rows, None)(), 3 * x)
    assert torch.equal(plan.weights_gradient(rows[:, 0])(), x[:, :1].expand(6, 3))


ROUTERS = {
    "softmax": {},
    "not normalized": {"norm_topk_prob": False},
    "gpt_oss": {"has_router_bias": True},
    "gemma": {"is_beside_dense": True},
    "sigmoid": {"score": RouterScore.sigmoid, "scaling_factor": 2.5, "num_groups": 4, "top_groups": 2},
    "sigmoid, not normalized": {"score": RouterScore.sigmoid, "norm_topk_prob": False},
}


def router_of(kind, dtype=torch.float32, numerics=AS_TRANSFORMERS.places, **more):
    """A router of 12 experts with random parameters, and 20 tokens that have 3 of them each."""
    options = {"num_experts": 12, "top_k": 3, "intermediate_size": 8, "norm_topk_prob": True, "layers": (True,)}
    moe = MoeSpec(**options | ROUTERS[kind] | more)
    router = Router(moe, 48, weight_dtype=dtype, numerics=numerics, norm_eps=0.5)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / (8 if parameter.dim() == 2 else 2))
    return router, torch.randn(20, 48, generator=generator).to(dtype)


def formula_of(router, x, experts_TK):
    """The weights of these experts in float64, and what experts are chosen by."""
    moe, parameters = router.moe, dict(router.named_parameters())
    values = {name: parameter.detach().double().requires_grad_() for name, parameter in parameters.items()}
    if moe.is_beside_dense:  # in unit length, with the eps of the model's norms
        x = x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt() * values["scale"] / 48**0.5
    logits = x @ values["weight"].t() + values.get("bias", 0)
    if moe.score is RouterScore.sigmoid:
        scores, judged = logits.sigmoid(), logits.sigmoid() + values["e_score_correction_bias"]
        by_group = judged.unflatten(1, (moe.num_groups, -1))
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(moe.top_groups, dim=-1).indices
        is_best = torch.zeros(20, moe.num_groups).scatter(1, best, 1.0).bool()
        judged = by_group.masked_fill(~is_best[:, :, None], -9.0).flatten(1)
    else:
        scores = judged = logits.softmax(-1)
    weights = scores.gather(1, experts_TK)
    if moe.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    if moe.is_beside_dense:
        weights = weights * values["per_expert_scale"][experts_TK]
    return weights * moe.scaling_factor, judged, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_router_is_transformers_to_the_bit(dtype, norm_topk_prob):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = Qwen3MoeConfig(hidden_size=48, num_experts=12, num_experts_per_tok=3, norm_topk_prob=norm_topk_prob)
    oracle = Qwen3MoeTopKRouter(config).to(dtype)
    router, x = router_of("softmax", dtype, norm_topk_prob=norm_topk_prob)
    with torch.no_grad():
        oracle.weight.copy_(router.weight)
        _, scores, indices = oracle(x)
        routing = router(x)
    assert torch.equal(routing.experts_TK, indices)
    assert torch.equal(routing.weights_TK, scores)


def test_a_frozen_sigmoid_router_multiplies_in_bfloat16_and_loses_nothing():
    """Forward: the products of float32 factors. Backward: of float64's gradient, rounded once. A trained one's
    weight gets float64's gradient, too."""
    router, x = router_of("sigmoid", torch.bfloat16, top_groups=4)
    assert router.e_score_correction_bias.dtype is torch.float32
    dweights, results = torch.randn(20, 3, generator=torch.Generator().manual_seed(6)), []
    for is_trained in (False, True):
        router.weight.requires_grad_(is_trained)
        start = x.clone().requires_grad_()
        routing = router(start)
        (routing.weights_TK * dweights).sum().backward()
        results.append((routing, start.grad))
    (mine, dx), (wide, _) = results
    assert torch.equal(mine.experts_TK, wide.experts_TK)
    assert torch.allclose(mine.weights_TK, wide.weights_TK, rtol=1e-6)

    exact = x.double().requires_grad_()
    wanted, _, values = formula_of(router, exact, mine.experts_TK)
    (wanted * dweights).sum().backward()
    for found, expected in ((dx, exact.grad), (router.weight.grad, values["weight"].grad)):
        assert found is not None and expected is not None
        error = (found.double() - expected).abs()
        assert bool((error <= 2**-8 * expected.abs() + 1e-5 * expected.abs().mean()).all())


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("kind", ROUTERS)
def test_a_routers_choice_weights_and_gradients_are_those_of_its_formula(kind, is_recorded):
    """A recorded choice gets the weights that the router would have given to it."""
    router, x = router_of(kind)
    generator = torch.Generator().manual_seed(6)
    recorded_TK = torch.rand(20, 12, generator=generator).topk(3).indices
    routes = LayerRoutes(recorded_TK.to(torch.uint8), torch.arange(20) % 4 > 0) if is_recorded else None
    start, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    routing, own_TK = router(start, routes), router(x).experts_TK
    is_own = torch.tensor(routes is None) if routes is None else ~routes.is_recorded_T[:, None]
    assert torch.equal(routing.experts_TK, torch.where(is_own, own_TK, recorded_TK))
    wanted, judged, values = formula_of(router, exact, routing.experts_TK)
    assert torch.equal(own_TK, judged.topk(3).indices)
    torch.testing.assert_close(routing.weights_TK.double(), wanted, rtol=1e-5, atol=1e-7)

    dweights = torch.randn(20, 3, generator=generator)
    (routing.weights_TK * dweights).sum().backward()
    (wanted * dweights).sum().backward()
    found = {"x": start, **{name: one for name, one in router.named_parameters() if one.requires_grad}}
    assert found.keys() == {"x", *values} - {"e_score_correction_bias"}
    for name, one in found.items():
        expected = {"x": exact, **values}[name].grad
        torch.testing.assert_close(one.grad.double(), expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("option", "engine_rounds", "is_rounded"),
    [
        (RouterLogits.engine, True, True),
        (RouterLogits.engine, False, False),
        (RouterLogits.model, False, True),
        (RouterLogits.float32, True, False),
    ],
)
def test_sigmoid_logits_are_rounded_where_the_option_or_the_engine_has_it_so(option, engine_rounds, is_rounded):
    numerics = replace(AS_TRANSFORMERS.places, router_logits=option)
    router, x = router_of(
        "sigmoid, not normalized", torch.bfloat16, numerics, top_k=12, engine_rounds_logits=engine_rounds
    )
    with torch.no_grad():
        routing = router(x)
        logits = x.float() @ router.weight.float().t()
    scores, rounded = (some.sigmoid().gather(1, routing.experts_TK) for some in (logits, logits.bfloat16().float()))
    off = [(routing.weights_TK - some).abs().mean().item() for some in (scores, rounded)]
    assert off[is_rounded] < off[not is_rounded] / 10
    assert routing.weights_TK.dtype is torch.float32


@pytest.mark.parametrize(
    ("kind", "option", "dtype"),
    [
        ("softmax", RouterFormat.model, torch.bfloat16),
        ("softmax", RouterFormat.float32, torch.float32),
        ("gemma", RouterFormat.model, torch.float32),
    ],
)
def test_weights_have_the_format_that_was_asked_for_also_of_recorded_experts(kind, option, dtype):
    router, x = router_of(kind, torch.bfloat16, replace(AS_TRANSFORMERS.places, router_weights=option))
    own = router(x)
    recorded = router(x, LayerRoutes(own.experts_TK.to(torch.uint8), torch.ones(20, dtype=torch.bool)))
    assert own.weights_TK.dtype is dtype and recorded.num_flipped == 0
    assert torch.equal(own.weights_TK, recorded.weights_TK)


def test_the_gradient_of_gemmas_factors_of_experts_is_added_up_in_float32():
    """The sum of a thousand tokens: in bfloat16 a sum would stand still long before."""
    router, x = router_of("gemma", torch.bfloat16)
    wide, _ = router_of("gemma")
    wide.load_state_dict(router.state_dict())
    tokens = x.repeat(50, 1)
    for one, given in ((router, tokens), (wide, tokens.float())):
        one(given).weights_TK.sum().backward()
    found, wanted = (one.get_parameter("per_expert_scale").grad for one in (router, wide))
    assert found is not None and wanted is not None
    assert bool(((found.float() - wanted).abs() <= 0.02 * wanted.max()).all()) and wanted.max() > 50


def test_gemmas_tokens_are_rounded_after_each_factor_as_vllm_has_them():
    """1 / sqrt(48) is one of the factors. Logits are float32."""
    router, x = router_of("gemma", torch.bfloat16)
    assert router.scale is not None and router.per_expert_scale is not None
    with torch.no_grad():
        weights_TK = router(x).weights_TK
        unit = (x.float() / (x.float().square().mean(-1, keepdim=True) + 0.5).sqrt()).bfloat16()
        logits = (unit * torch.tensor(48**-0.5).bfloat16() * router.scale).float() @ router.weight.float().t()
        wanted, experts_TK = logits.softmax(-1).topk(3)
        wanted = wanted / wanted.sum(-1, keepdim=True) * router.per_expert_scale.float()[experts_TK]
    torch.testing.assert_close(weights_TK, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize(("place", "factors"), [(RoutedScale.weights, (2.5, 1.0)), (RoutedScale.output, (1.0, 2.5))])
def test_weights_or_their_sum_are_multiplied_by_the_models_factor(place, factors, top_k):
    router, x = router_of("sigmoid", numerics=replace(AS_TRANSFORMERS.places, routed_scale=place), top_k=top_k)
    sums_T = router(x).weights_TK.sum(-1)
    assert (router.factor_of_weights, router.factor_of_output) == factors
    assert sums_T.tolist() == pytest.approx([factors[0]] * 20)


@pytest.mark.parametrize("top_groups", [1, 2, 4])
def test_experts_are_of_the_best_groups_also_where_all_of_their_scores_are_negative(top_groups):
    """A bias that is the same for all experts changes no choice, however far it is below the scores."""
    router, x = router_of("sigmoid", top_groups=top_groups)
    chosen = []
    for bias in (0.0, -2.0):
        router.e_score_correction_bias.data.fill_(bias)
        chosen.append(router(x).experts_TK)
    assert torch.equal(*chosen)
    groups = torch.div(chosen[0], 3, rounding_mode="floor").sort().values
    assert 1 + (groups.diff() != 0).sum(-1).max() == min(top_groups, 3)
    by_group_TGM = (x @ router.weight.T).sigmoid().unflatten(1, (4, 3))
    best_TG = by_group_TGM.topk(2, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices  # as DeepSeek-V3 has it
    assert (groups[:, :, None] == best_TG[:, None]).any(-1).all()
