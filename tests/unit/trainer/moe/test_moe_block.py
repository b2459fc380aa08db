"""Promise of trainer/moe/experts.py and bank.py: output and every gradient are those of transformers' experts under
PEFT's adapters, whatever is recomputed, packed, or spread over ranks.
"""

import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.moe_cases import HIDDEN, NUM_EXPERTS, NUM_TOKENS, RANK, TOP_K, WIDTH, make_batch, make_experts, run
from cases.tiny_configs import MIXED
from cases.tiny_models import logits_of, make_decoder, packed, probe_loss, relative_error, trainer_config
from torch import Tensor, nn

from slipstream.conf.architecture.activation import CLAMPED_SWIGLU, SWIGLU
from slipstream.conf.architecture.moe_spec import ExpertFormat
from slipstream.conf.schema import Activations
from slipstream.trainer.adapter_io import pack_expert_a, pack_expert_b
from slipstream.trainer.moe import dispatch, experts as arithmetic
from slipstream.trainer.moe.bank import PackedBank, UnpackBuffers
from slipstream.trainer.moe.dispatch import plan_dispatch
from slipstream.trainer.moe.experts import Experts


def oracle_experts(experts: Experts) -> Any:
    """transformers' Qwen3-MoE experts with PEFT's ParamWrapper, holding the same values."""
    from peft import LoraConfig as PeftConfig, get_peft_model
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = "eager"
    inner: Any = Qwen3MoeExperts(config)
    assert experts.gate_up_proj is not None and experts.down_proj is not None
    with torch.no_grad():
        inner.gate_up_proj.copy_(experts.gate_up_proj)
        inner.down_proj.copy_(experts.down_proj)
    holder = nn.Module()
    holder.experts = inner
    peft = PeftConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    wrapped: Any = get_peft_model(holder, peft)
    return wrapped.base_model.model.experts


def oracle_factors(oracle: Any) -> dict[str, Any]:
    """PEFT nests the wrappers: down_proj outside, gate_up_proj inside."""
    outer, inner = oracle, oracle.base_layer
    return {
        "gate_up_lora_A": inner.lora_A["default"].weight,
        "gate_up_lora_B": inner.lora_B["default"].weight,
        "down_lora_A": outer.lora_A["default"].weight,
        "down_lora_B": outer.lora_B["default"].weight,
    }


def oracle_results(experts: Experts, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of the oracle in float32, gradients of factors in PEFT's packing; inputs as in dtype."""
    oracle = oracle_experts(experts).to(torch.float32)
    factors = oracle_factors(oracle)
    with torch.no_grad():
        for name, factor in factors.items():
            factor.copy_((pack_expert_a if name.endswith("A") else pack_expert_b)(getattr(experts, name)))
    x, weights, ids, grad_out = make_batch(dtype)
    x, weights = x.detach().float().requires_grad_(), weights.detach().float().requires_grad_()
    out = oracle(x, ids, weights)
    out.backward(grad_out.float())
    assert x.grad is not None and weights.grad is not None
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, **{n: p.grad for n, p in factors.items()}}


def packed_like_peft(results: dict[str, Tensor]) -> dict[str, Tensor]:
    packings = {"A": pack_expert_a, "B": pack_expert_b}
    return {name: packings[name[-1]](value) if "lora_" in name else value for name, value in results.items()}


def errors(mine: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    assert mine.keys() == wanted.keys()
    return {name: relative_error(mine[name].float(), wanted[name].float()) for name in wanted}


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_output_and_every_gradient_are_pefts_on_transformers_experts(dtype, allowed):
    """In bfloat16 each product rounds its rows and its float32 adapter to 2^-9; up to four follow each other."""
    mine, wide = make_experts(dtype=dtype), make_experts()
    wide.load_state_dict(mine.state_dict())
    found = errors(packed_like_peft(run(mine)), oracle_results(wide, dtype))
    assert max(found.values()) < allowed, found


@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED_SWIGLU], ids=["swiglu", "clamped"])
@pytest.mark.parametrize("is_full", [False, True], ids=["adapters", "full"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_gradients_pass_gradcheck(activation, is_full, has_bias):
    experts = make_experts(dtype=torch.float64, is_full=is_full, activation=activation, has_bias=has_bias, rank=4)
    x, weights, ids, _ = make_batch(torch.float64)
    x, weights, plan = x.detach()[:5].requires_grad_(), weights.detach()[:5].requires_grad_(), None
    plan = plan_dispatch(ids[:5], NUM_EXPERTS, None)
    names = [name for name, parameter in experts.named_parameters() if parameter.requires_grad]
    assert any("bias" in name for name in names) is (is_full and has_bias)

    def call(is_computed_again, x, weights, *values):
        again = (lambda: x) if is_computed_again else None
        return torch.func.functional_call(experts, dict(zip(names, values, strict=True)), (x, weights, plan, again))

    values = [dict(experts.named_parameters())[name] for name in names]
    for is_computed_again in (False, True):
        assert torch.autograd.gradcheck(partial(call, is_computed_again), (x, weights, *values), fast_mode=True)


def test_weights_that_multiply_rows_in_the_product_are_those_of_the_rows(monkeypatch):
    """What Triton's product is given, which has rows in the order of experts, and not in that of tokens."""
    plain, product, weighed_by = run(make_experts()), arithmetic.grouped_product, []

    def weighed(*arguments, weights_S=None, **more):
        weighed_by.append(weights_S)
        rows = product(*arguments, **more)
        return rows if weights_S is None else rows * weights_S[:, None]

    monkeypatch.setattr(arithmetic, "grouped_product", weighed)
    monkeypatch.setattr(Experts, "weighs_in_product", True)
    found = errors(run(make_experts()), plain)
    assert max(found.values()) < 1e-6, found
    assert sum(weights is not None for weights in weighed_by) == 1


def test_clamped_experts_with_biases_are_gpt_oss():
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts = make_experts(is_full=True, activation=CLAMPED_SWIGLU, has_bias=True)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.mul_(4)  # reach the clamps
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = "eager"
    oracle = GptOssExperts(config)
    with torch.no_grad():  # gpt-oss: columns are outputs, gate and up take turns
        for name in ("gate_up_proj", "gate_up_bias"):
            ours = getattr(experts, name).unflatten(1, (2, WIDTH)).transpose(1, 2).flatten(1, 2)
            theirs = oracle.gate_up_proj if name == "gate_up_proj" else oracle.gate_up_proj_bias
            theirs.copy_(ours.transpose(1, 2) if ours.dim() == 3 else ours)
        oracle.down_proj.copy_(experts.down_proj.transpose(1, 2))
        oracle.down_proj_bias.copy_(experts.down_bias)
    x, weights, ids, grad_out = make_batch()
    out = oracle(x, ids, weights)
    out.backward(grad_out)
    mine = run(experts)
    assert relative_error(mine["out"], out) < 1e-5
    assert relative_error(mine["x"], x.grad) < 1e-5
    assert relative_error(mine["weights"], weights.grad) < 1e-5
    assert relative_error(mine["down_bias"], oracle.down_proj_bias.grad) < 1e-5
    turned = oracle.gate_up_proj.grad.transpose(1, 2).unflatten(1, (WIDTH, 2)).transpose(1, 2).flatten(1, 2)
    assert relative_error(mine["gate_up_proj"], turned) < 1e-5


def test_frozen_weights_get_no_gradient_product(monkeypatch):
    monkeypatch.setattr(arithmetic, "grouped_gradient", None)
    run(make_experts())


@pytest.mark.parametrize("frozen", ["gate_up_lora_A", "down_lora_B"])
def test_adapters_beside_a_frozen_factor_get_their_gradients(frozen):
    whole, part = run(make_experts()), make_experts()
    part.get_parameter(frozen).requires_grad_(False)
    x, weights, ids, grad_out = make_batch()
    part(x, weights, plan_dispatch(ids, NUM_EXPERTS, None)).backward(grad_out)
    grads = {name: parameter.grad for name, parameter in part.named_parameters() if parameter.grad is not None}
    assert len(grads) == 3 and all(torch.equal(grad, whole[name]) for name, grad in grads.items())


def saved_beside_arguments(experts: Experts, *, is_recomputed: bool, keep: Any = None) -> tuple[int, int]:
    """How many floats and how many integers one call keeps for its backward."""
    x, weights, ids, _ = make_batch(torch.bfloat16)
    held = {p.data_ptr() for p in experts.parameters()} | {x.data_ptr(), weights.data_ptr()}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        experts(x, weights, plan_dispatch(ids, NUM_EXPERTS, None), (lambda: x) if is_recomputed else None, keep)
    extra = [t for t in kept if t.data_ptr() not in held]
    floats = sum(t.numel() for t in extra if t.is_floating_point())
    return floats, sum(t.numel() for t in extra) - floats


def test_what_is_saved():
    """Routing and low-rank rows; and if tokens are kept, the rows of gate and up, which are then not computed again."""
    experts, rows = make_experts(dtype=torch.bfloat16), NUM_TOKENS * TOP_K
    plan = 3 * rows + 2 * NUM_EXPERTS  # three tables of slots, two of experts
    assert saved_beside_arguments(experts, is_recomputed=True) == (2 * rows * RANK, plan)
    assert saved_beside_arguments(experts, is_recomputed=False) == (2 * rows * RANK + rows * 2 * WIDTH, plan)
    kept: list[Tensor] = []
    found = saved_beside_arguments(experts, is_recomputed=True, keep=kept.append)
    assert found == (2 * rows * RANK + rows * 2 * WIDTH, plan), "somebody keeps them: they are not computed again"
    assert [one.shape for one in kept] == [(rows, 2 * WIDTH)]


def test_adapters_that_are_read_often_are_copied_for_the_kernels_and_get_the_same_gradients(monkeypatch):
    """From a mean of rows per expert on, 111 / 8 here. Into the format of the tokens, and not into that of the router's
    weights, which may be wider; gradients are in their own format."""
    results, read, project = [], [], arithmetic.gather_project

    def noting(rows, source, adapter, *rest, **more):
        read.append(adapter.dtype)
        return project(rows, source, adapter, *rest, **more)

    monkeypatch.setattr(arithmetic, "gather_project", noting)
    x, weights, ids, grad_out = make_batch(torch.bfloat16)
    for copied_rows in (NUM_TOKENS * TOP_K // NUM_EXPERTS, NUM_TOKENS * TOP_K // NUM_EXPERTS + 1):
        monkeypatch.setattr(arithmetic, "COPIED_ROWS", copied_rows)
        experts = make_experts(dtype=torch.bfloat16)
        experts(x, weights.detach().float(), plan_dispatch(ids, NUM_EXPERTS, None)).backward(grad_out)
        results.append({name: p.grad for name, p in experts.named_parameters() if p.grad is not None})
    assert read == [torch.bfloat16] * 2 + [torch.float32] * 2, "forward and backward"
    copied, others = results
    assert len(copied) == 4 and all(torch.equal(copied[name], others[name]) for name in others)
    grads = copied.values()
    assert all(grad.dtype is torch.float32 and not torch.equal(grad, grad.bfloat16().float()) for grad in grads)


def test_gate_and_up_that_are_saved_outlive_a_backward(monkeypatch):
    """The kernel writes gradients where they lie, if it may."""
    backward = arithmetic.activate_backward

    def overwriting(gu, *rest, may_overwrite_gu, **more):
        found = backward(gu, *rest, may_overwrite_gu=may_overwrite_gu, **more)
        if may_overwrite_gu:
            gu.fill_(torch.nan)
        return found

    monkeypatch.setattr(arithmetic, "activate_backward", overwriting)
    x, weights, ids, grad_out = make_batch()
    out = make_experts()(x, weights, plan_dispatch(ids, NUM_EXPERTS, None))
    first, second = (torch.autograd.grad(out, (x, weights), grad_out, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_kernels_read_weights_and_gradients_that_lie_in_order_however_they_come(monkeypatch):
    """A gradient of a sum is one number that is read again and again; of a transposed product it lies across."""
    wanted = run(make_experts())

    def checked(call):
        def run(*arguments, **more):
            assert all(one.is_contiguous() for one in arguments[:2] if isinstance(one, Tensor))
            return call(*arguments, **more)

        return run

    for place, name in ((arithmetic, "gather_rows"), (arithmetic, "gather_project"), (dispatch, "weighted_sum")):
        monkeypatch.setattr(place, name, checked(getattr(place, name)))
    x, weights, ids, grad_out = make_batch()
    across = [one.detach().t().contiguous().t() for one in (weights, grad_out)]
    experts = make_experts()
    out = experts(x, across[0], plan_dispatch(ids, NUM_EXPERTS, None))
    out.backward(across[1])
    assert torch.equal(out, wanted["out"]) and torch.equal(x.grad, wanted["x"])


def test_a_checkpointed_layer_computes_its_routed_experts_forward_once():
    calls: list[torch.nn.Module] = []
    batch, decoder = packed(), make_decoder(MIXED, trainer_config(activations=Activations.recompute))
    for module in decoder.modules():
        if isinstance(module, Experts):
            module.register_forward_pre_hook(lambda experts, _: calls.append(experts))
    probe_loss(logits_of(decoder, batch), batch[0]).backward()
    assert len(calls) == len(set(calls)) == 2  # of three layers, one is dense


def test_sent_rows_end_when_they_were_sent(tmp_path, monkeypatch):
    """At 8,192 tokens of Kimi-K2 each of these tensors is 0.94 GB of a rank's peak."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        gathered: list[weakref.ref[Tensor]] = []
        sent: list[weakref.ref[Tensor]] = []
        is_product_held: list[bool] = []
        exchange, gather_rows = dispatch._all_to_all, dispatch.gather_rows
        activate_backward = arithmetic.activate_backward

        def gather(values, source):
            gathered.append(weakref.ref(values))
            return gather_rows(values, source)

        def watch(rows, *rest):
            if rows.dim() == 2:
                sent.append(weakref.ref(rows))
                is_product_held.append(gathered[-1]() is not None)
            return exchange(rows, *rest)

        def look(*arguments, **more):
            deadline = time.monotonic() + 60  # gloo's thread lets go of what it sent a moment after it was received
            while any(rows() is not None for rows in sent) and time.monotonic() < deadline:
                time.sleep(0.001)
            assert [rows() is None for rows in sent] == [True] * 4, "x and y forward, g and x backward"
            return activate_backward(*arguments, **more)

        monkeypatch.setattr(dispatch, "gather_rows", gather)
        monkeypatch.setattr(dispatch, "_all_to_all", watch)
        monkeypatch.setattr(arithmetic, "activate_backward", look)
        run(make_experts(), dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    # x and the experts' output forward, then g, x and the gradient of the rows: tokens stay, products do not
    assert is_product_held == [True, False, True, True, False]


def fill_packed(experts: Experts) -> None:
    assert experts.packed is not None
    generator = torch.Generator().manual_seed(9)
    for name, buffer in experts.packed.named_buffers():
        if buffer.dtype is torch.bfloat16:
            buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.05)
        elif name.endswith("scale"):
            buffer.copy_(torch.randint(118, 124, buffer.shape, generator=generator))
        else:
            limits = (-(2**31), 2**31) if buffer.dtype is torch.int32 else (0, 256)
            buffer.copy_(torch.randint(*limits, buffer.shape, generator=generator))


@pytest.mark.parametrize("expert_format", [ExpertFormat.int4, ExpertFormat.mxfp4])
def test_packed_experts_are_plain_experts_of_the_unpacked_values(expert_format):
    unpacked = UnpackBuffers(torch.bfloat16)
    layers = [make_experts(dtype=torch.bfloat16, expert_format=expert_format, unpacked=unpacked) for _ in range(3)]
    for one in layers:
        fill_packed(one)
    middle = layers[1]
    bits = {name: buffer.clone() for name, buffer in middle.named_buffers()}
    plain = make_experts(dtype=torch.bfloat16)
    assert middle.packed is not None
    with torch.no_grad():
        gate_up, down = middle.packed.weights(1)
        plain.gate_up_proj.copy_(gate_up)
        plain.down_proj.copy_(down)
        for name, parameter in middle.named_parameters():
            getattr(plain, name).copy_(parameter)
    layers[0].packed.weights(1)  # another layer's values are in the buffers
    layers[2].packed.weights(1)
    mine, wanted = run(middle), run(plain)
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    assert bool(wanted["out"].any())
    again = make_experts(dtype=torch.bfloat16, expert_format=expert_format, unpacked=UnpackBuffers(torch.bfloat16))
    again.load_state_dict(middle.state_dict())
    for name, buffer in again.named_buffers():
        assert torch.equal(buffer, bits[name]), name


def test_the_forward_asks_for_weights_on_the_way_to_the_output_and_the_backward_to_the_input(monkeypatch):
    """The neighbour that is used next is unpacked meanwhile, where that can be done at the same time."""
    asked = []
    weights = PackedBank.weights
    monkeypatch.setattr(PackedBank, "weights", lambda bank, towards: asked.append(towards) or weights(bank, towards))
    unpacked = UnpackBuffers(torch.bfloat16)
    experts = make_experts(dtype=torch.bfloat16, expert_format=ExpertFormat.int4, unpacked=unpacked)
    fill_packed(experts)
    run(experts)
    assert asked == [1, -1]
