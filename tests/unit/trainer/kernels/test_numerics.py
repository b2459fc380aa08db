"""trainer.numerics: each choice rounds where it says, against formulas written out here, and changes nothing else."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases.tiny_configs import DEEPSEEK, DENSE, GPT_OSS, MOE
from cases.tiny_models import by_place, logits_of, make_decoder, packed, trainer_config
from torch import Tensor

from slipstream.conf.architecture.activation import CLAMPED_SWIGLU, GELU_TANH, SWIGLU
from slipstream.conf.schema import Activations, CombineMode, Rounding, RoutedScale, RouterFormat, RouterLogits
from slipstream.trainer.kernels.elementwise import residual_sum, silu_product
from slipstream.trainer.kernels.experts.groups import RowGroups
from slipstream.trainer.kernels.experts.route import route
from slipstream.trainer.kernels.experts.swiglu import activate
from slipstream.trainer.kernels.rms_norm import add_rms_norm, norm_rotate, rms_norm
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.feed_forward import DenseMlp
from slipstream.trainer.model.forward import Forward

EPS = 1e-6


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def normed(wide: Tensor) -> Tensor:
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)


def test_the_norm_rounds_once_as_vllms_native_form_or_each_as_transformers() -> None:
    """vLLM compiles `vllm/ir/ops/layernorm.py` into one kernel, whose steps are float32."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    x, delta, weight = draw(50, 64, seed=0), draw(50, 64, seed=1), draw(64, seed=2)
    wide = x.float() + delta.float()
    total, once = add_rms_norm(x, delta, weight, EPS, True)
    assert torch.equal(total, wide.bfloat16())
    assert torch.equal(once, (normed(wide) * weight.float()).bfloat16())
    assert torch.equal(rms_norm(x, weight, EPS, True), (normed(x.float()) * weight.float()).bfloat16())
    theirs = Qwen3RMSNorm(64, EPS).bfloat16()
    theirs.weight.data.copy_(weight)
    total, each = add_rms_norm(x, delta, weight, EPS, False)
    assert torch.equal(each, theirs(total))
    assert not torch.equal(each, once)


def test_a_norm_after_its_sum_sees_what_was_added_and_its_gradient_goes_to_the_sum() -> None:
    x, delta, weight = draw(50, 64, seed=0), draw(50, 64, seed=1), draw(64, seed=2)
    total, wanted = add_rms_norm(x, delta, weight, EPS, True)
    total, dout = total.requires_grad_(), draw(50, 64, seed=3)
    later = rms_norm(total, weight, EPS, True, x.float() + delta.float())
    rounded = rms_norm(total, weight, EPS, True)
    assert torch.equal(later, wanted)
    assert not torch.equal(later, rounded)
    (mine,) = torch.autograd.grad(later, total, dout)
    (other,) = torch.autograd.grad(rounded, total, dout)
    assert (mine - other).abs().max() < 0.02 * other.abs().max()


def test_a_layers_sum_is_rounded_once_and_each_addend_gets_its_gradient() -> None:
    """Inductor's kernel of the sum after attention, the experts' factor, the shared experts and the next sum."""
    x, attended, fed, shared, dy = (draw(50, 64, seed=seed) for seed in range(5))
    middle = (x + attended).requires_grad_()
    leaves = middle, fed.requires_grad_(), shared.requires_grad_()
    y, wide = residual_sum(x, attended, *leaves, 2.5)
    exact = x.double() + attended.double() + 2.5 * fed.double() + shared.double()
    assert (wide.double() - exact).abs().max() < 1e-5
    assert torch.equal(y, wide.bfloat16())
    assert not torch.equal(y, middle + (fed * 2.5 + shared))
    dmiddle, dfed, dshared = torch.autograd.grad(y, leaves, dy)
    assert torch.equal(dmiddle, dy)
    assert torch.equal(dfed, dy * 2.5)
    assert torch.equal(dshared, dy)


@pytest.mark.parametrize("once", [True, False])
def test_a_decoder_layer_rounds_its_sum_where_numerics_say(once: bool) -> None:
    numerics = by_place(norm=Rounding.once if once else Rounding.each)
    decoder = make_decoder(DENSE, trainer_config(numerics=numerics), dtype=torch.bfloat16)
    attended: list[Tensor] = []
    fed: list[Tensor] = []
    layers: list[tuple[Tensor, Tensor]] = []

    class Watched(Forward):
        def output(self, linear: Linear, x_TO: Tensor) -> Tensor:
            attended.append(super().output(linear, x_TO))
            return attended[-1]

        def feed_forward(self, mlp: DenseMlp, x_TH: Tensor) -> Tensor:
            fed.append(super().feed_forward(mlp, x_TH))
            return fed[-1]

    decoder.model.layers[0].register_forward_hook(lambda _, args, out: layers.append((args[0], out)))
    with torch.no_grad():
        decoder(*packed(), by=Watched())
    x, out = layers[0]
    at_the_end = (x.float() + attended[0].float() + fed[0].float()).bfloat16()
    each = x + attended[0] + fed[0]
    assert not torch.equal(at_the_end, each)
    assert torch.equal(out, at_the_end if once else each)


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "experts"])
def test_a_layer_norms_the_sum_of_the_layer_before_it_unrounded(config: dict[str, object], checkpointing: bool) -> None:
    """norm=once, in bfloat16: where a layer is given the rounded sum alone, its output differs."""
    decoder = make_decoder(
        config, trainer_config(activations=Activations("recompute" if checkpointing else "keep")), dtype=torch.bfloat16
    )
    token_ids, positions, cu_seqlens = packed()
    norm = decoder.model.layers[1].get_submodule("input_layernorm")
    seen: list[tuple[Tensor, Tensor]] = []
    norm.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    decoder(token_ids, positions, cu_seqlens).float().sum().backward()
    (stream, normed_sum), *again = seen
    alone = norm(stream)
    assert not torch.equal(normed_sum, alone)
    assert (normed_sum - alone).abs().max() < 0.02 * alone.abs().max()
    assert len(again) == checkpointing  # recomputed in the backward pass
    assert all(torch.equal(out, alone) for _, out in again)


def test_the_rotation_rounds_once_or_each_as_transformers() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    q, k, weight, angles = draw(9, 4, 16, seed=0), draw(9, 2, 16, seed=1), draw(16, seed=2), draw(9, 1, 8, seed=3)
    cos, sin = angles.float().cos().bfloat16(), angles.float().sin().bfloat16()

    def turned(x: Tensor) -> Tensor:
        first, second = (normed(x.float()) * weight.float()).chunk(2, -1)
        c, s = cos.float(), sin.float()
        return torch.cat((first * c - second * s, second * c + first * s), -1).bfloat16()

    once = norm_rotate(q, k, weight, weight, EPS, cos, sin, True)
    assert all(torch.equal(mine, turned(x)) for mine, x in zip(once, (q, k), strict=True))
    norm = Qwen3RMSNorm(16, EPS).bfloat16()
    norm.weight.data.copy_(weight)
    both = [torch.cat((x, x), -1).squeeze(1)[None] for x in (cos, sin)]
    wanted = apply_rotary_pos_emb(norm(q).transpose(0, 1)[None], norm(k).transpose(0, 1)[None], *both)
    each = norm_rotate(q, k, weight, weight, EPS, cos, sin, False)
    for mine, other, one in zip(each, wanted, once, strict=True):
        assert torch.equal(mine, other[0].transpose(0, 1))
        assert not torch.equal(mine, one)


def test_the_experts_activation_rounds_what_vllms_kernels_write_out() -> None:
    """silu(gate) or gelu(gate), rounded, times up (`csrc/activation_kernels.cu`); clamped, gate and up alone."""
    gu, groups = draw(40, 32, seed=0), RowGroups(torch.tensor([30, 10]), 40)
    for shape in (SWIGLU, GELU_TANH, CLAMPED_SWIGLU):
        each, _ = activate(gu, None, None, groups, replace(shape, rounds_each=True))
        gate, up = gu.chunk(2, -1)
        if shape is not CLAMPED_SWIGLU:
            wanted = (F.silu(gate) if shape is SWIGLU else F.gelu(gate, approximate="tanh")) * up
        else:
            gate, up = gate.float().clamp(max=7), up.float().clamp(-7, 7)
            wanted = ((up + 1) * gate * torch.sigmoid(1.702 * gate)).bfloat16()
        assert torch.equal(each, wanted)
        once, _ = activate(gu, None, None, groups, shape)
        assert torch.equal(each, once) == (shape is CLAMPED_SWIGLU)  # without an adapter gate and up are rounded


def test_the_routers_weights_are_float32_as_vllms_topk_softmax() -> None:
    logits = draw(30, 16, seed=0)
    weights, experts = route(logits, 4, True, True)
    chosen = logits.float().softmax(-1).gather(1, experts)
    assert weights.dtype is torch.float32
    assert torch.equal(weights, chosen / chosen.sum(-1, keepdim=True))
    assert torch.equal(route(logits, 4, True, False)[0], weights.bfloat16())


def test_the_dense_activation_rounds_once_as_vllms_native_form_or_each_as_its_kernel() -> None:
    """vLLM compiles `SiluAndMul.forward_native` (`model_executor/layers/activation.py`) into one kernel, whose steps
    are float32; `csrc/activation_kernels.cu`, which an eager engine calls, rounds silu."""
    gate, up, dh = (draw(40, 32, seed=seed) for seed in range(3))
    once, each = silu_product(gate, up, True), silu_product(gate, up, False)
    assert torch.equal(once, (gate.float() / (1 + (-gate.float()).exp()) * up.float()).bfloat16())
    assert torch.equal(each, F.silu(gate) * up)
    assert not torch.equal(each, once)
    gate, up = gate.requires_grad_(), up.requires_grad_()
    dgate, dup = torch.autograd.grad(silu_product(gate, up, True), (gate, up), dh)
    wide, sigmoid = gate.float(), torch.sigmoid(gate.float())
    slope = sigmoid * (1 + wide * (1 - sigmoid))
    torch.testing.assert_close(dgate, (dh.float() * up.float() * slope).bfloat16(), rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(dup, (dh.float() * wide * sigmoid).bfloat16(), rtol=2**-7, atol=1e-6)


OTHERS = {
    "norm": Rounding.each,
    "rotation": Rounding.each,
    "dense_activation": Rounding.each,
    "expert_activation": Rounding.once,
    "router_weights": RouterFormat.model,
    "router_logits": RouterLogits.float32,
    "routed_scale": RoutedScale.weights,
}
NO_EFFECT: dict[str, set[str]] = {
    "dense": {"expert_activation", "router_weights", "router_logits", "routed_scale"},
    "moe": {"dense_activation", "router_logits", "routed_scale"},
    "gpt_oss": {"dense_activation", "router_logits", "routed_scale"},
    "deepseek": {"rotation", "router_weights"},
}


@pytest.mark.parametrize(
    ("family", "config"), zip(NO_EFFECT, (DENSE, MOE, GPT_OSS, DEEPSEEK), strict=True), ids=list(NO_EFFECT)
)
def test_an_item_changes_the_models_that_have_its_operation(family: str, config: dict[str, object]) -> None:
    batch = packed((40, 3))

    def logits(**changes: object) -> Tensor:
        trainer = trainer_config(numerics=by_place(**{"combine": CombineMode.fp32_once, **changes}))
        with torch.no_grad():
            return logits_of(make_decoder(config, trainer, dtype=torch.bfloat16), batch)

    default = logits()
    moved = {name for name, choice in OTHERS.items() if not torch.equal(logits(**{name: choice}), default)}
    assert moved == OTHERS.keys() - NO_EFFECT[family]


@pytest.mark.parametrize(("config", "rotation", "table"), [
    (GPT_OSS, Rounding.once, torch.float32), (GPT_OSS, Rounding.each, torch.bfloat16),
    (MOE, Rounding.once, torch.bfloat16),
])  # fmt: skip
def test_the_table_of_rotations_is_rounded_where_vllms_is(
    config: dict[str, object], rotation: Rounding, table: torch.dtype
) -> None:
    """vLLM's gpt-oss has it in float32 and casts it in the graph, where torch.compile fuses the cast away."""
    decoder = make_decoder(config, trainer_config(numerics=by_place(rotation=rotation)), dtype=torch.bfloat16)
    (rope,) = decoder.ropes(torch.arange(4))
    assert {x.dtype for x in rope} == {table}


def test_items_are_equal_in_float32() -> None:
    """Up to the order of float32 operations."""
    batch = packed()
    for name, choice in OTHERS.items():
        trainer = trainer_config(numerics=by_place(**{name: choice}))
        with torch.no_grad():
            mine, default = (logits_of(make_decoder(MOE, t), batch) for t in (trainer, trainer_config()))
        assert torch.allclose(mine, default, atol=1e-5)
