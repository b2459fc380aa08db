"""Promises of the steps inside a mixture-of-experts block: grouped products, combine, dispatch and router."""

from __future__ import annotations

import pytest
import torch
from tiny_models import relative_error

from trainer.model.spec import MoeSpec
from trainer.moe.combine import combine
from trainer.moe.dispatch import dispatch, plan_dispatch, undispatch
from trainer.moe.grouped import GroupedBackend, choose_grouped_backend, grouped_linear
from trainer.moe.routing import Router

CPU = torch.device("cpu")


def rows_and_weights(counts, k=16, n=24, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), k, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), n, k, generator=generator).to(dtype).requires_grad_()
    return x, weight, torch.tensor(counts)


@pytest.mark.parametrize("backend", list(GroupedBackend))
@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 9, 0), (0, 0, 0, 0)], ids=str)
def test_grouped_linear_is_one_linear_an_expert(backend, counts):
    if choose_grouped_backend(CPU, torch.float32, (16, 24)) is GroupedBackend.native is not backend:
        pytest.skip("this torch has no grouped_mm on the CPU; revisit 2027-06-01")
    x, weight, counts_E = rows_and_weights(counts)
    out = grouped_linear(x, weight, counts_E, backend)
    expected = torch.cat([part @ w.t() for part, w in zip(x.split(list(counts)), weight, strict=True)])
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-6)

    # The gradient of a sum has stride 0, which grouped_mm itself refuses.
    actual = torch.autograd.grad(out.sum(), (x, weight))
    wanted = torch.autograd.grad(expected.sum(), (x, weight))
    for one, other in zip(actual, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    for expert, count in enumerate(counts):
        assert bool(actual[1][expert].any()) is (count > 0)


def test_grouped_linear_gradients_pass_gradcheck():
    x, weight, counts_E = rows_and_weights((2, 0, 3), k=4, n=3, dtype=torch.float64)
    torch.autograd.gradcheck(lambda a, b: grouped_linear(a, b, counts_E, GroupedBackend.native), (x, weight))


def test_a_frozen_weight_gets_no_gradient_product():
    x, weight, counts_E = rows_and_weights((3, 2))
    out = grouped_linear(x, weight.detach(), counts_E, GroupedBackend.native)
    out.sum().backward()
    assert x.grad is not None


def test_the_backend_depends_on_strides_and_dtype():
    assert choose_grouped_backend(CPU, torch.bfloat16, (64, 12)) is GroupedBackend.native  # 24 bytes a row
    assert choose_grouped_backend(CPU, torch.bfloat16, (64, 4)) is GroupedBackend.native  # a LoRA rank of 4
    here = tuple(int(part) for part in torch.__version__.split(".")[:2])
    expected = GroupedBackend.grouped_mm if here >= (2, 13) else GroupedBackend.native
    assert choose_grouped_backend(CPU, torch.bfloat16, (64, 8)) is expected
    assert choose_grouped_backend(CPU, torch.float32, (64, 4)) is expected


def some_routing(num_tokens=6, top_k=3, num_experts=5):
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    return scores.topk(top_k).indices


def test_rows_are_sorted_by_expert_and_come_back():
    experts_TK = some_routing()
    plan = plan_dispatch(experts_TK, 5, None)
    x = torch.arange(6.0)[:, None].expand(6, 2).contiguous()
    rows = dispatch(x, plan)
    expert_of_row = experts_TK.flatten()[plan.slot_of_row_S]
    assert torch.equal(expert_of_row, expert_of_row.sort().values)
    assert plan.counts_e.tolist() == [int((experts_TK == expert).sum()) for expert in range(5)]
    back = undispatch(rows, plan)[plan.row_of_slot_TK]
    assert torch.equal(back, x[:, None].expand(6, 3, 2))


def test_dispatch_and_combine_gradients_pass_gradcheck():
    experts_TK = some_routing()
    plan = plan_dispatch(experts_TK, 5, None)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(6, 3, generator=generator, dtype=torch.float64, requires_grad=True)

    def block(x_TH, weights_TK):
        return combine(dispatch(x_TH, plan).sin(), weights_TK, plan.row_of_slot_TK)

    # Sums run in float32 by design, so differences are taken over a wide step.
    assert torch.autograd.gradcheck(block, (x, weights), eps=1e-2, atol=1e-3, rtol=1e-3)


def test_combine_sums_in_float32_in_slot_order_and_rounds_once():
    generator = torch.Generator().manual_seed(4)
    experts_TK = some_routing(64, 4, 8)
    plan = plan_dispatch(experts_TK, 8, None)
    rows = torch.randn(256, 32, generator=generator).bfloat16()
    weights = torch.rand(64, 4, generator=generator).bfloat16()
    expected = torch.zeros(64, 32)
    for slot in range(4):
        expected += rows[plan.row_of_slot_TK[:, slot]].float() * weights[:, slot, None].float()
    assert torch.equal(combine(rows, weights, plan.row_of_slot_TK), expected.bfloat16())
    exact = (rows[plan.row_of_slot_TK].double() * weights[..., None].double()).sum(1)
    assert relative_error(combine(rows, weights, plan.row_of_slot_TK), exact) < 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_router_is_transformers_to_the_bit(dtype, norm_topk_prob):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = Qwen3MoeConfig(hidden_size=32, num_experts=16, num_experts_per_tok=4, norm_topk_prob=norm_topk_prob)
    oracle = Qwen3MoeTopKRouter(config).to(dtype)
    moe = MoeSpec(num_experts=16, top_k=4, intermediate_size=8, norm_topk_prob=norm_topk_prob, layers=(True,))
    router = Router(moe, 32, weight_dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        oracle.weight.copy_(torch.randn(16, 32, generator=generator))
        router.weight.copy_(oracle.weight)
        x = torch.randn(50, 32, generator=generator).to(dtype)
        _, scores, indices = oracle(x)
        routing = router(x)
    assert torch.equal(routing.experts_TK, indices)
    assert torch.equal(routing.weights_TK, scores)
