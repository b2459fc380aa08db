"""Promises of trainer/lora.py, and of which parameters train: adapters count although their products are below a step
of the outputs, start as nothing, and switch off."""

import pytest
import torch
from cases.tiny_configs import MIXED, MOE
from cases.tiny_models import base_logits_of, logits_of, make_decoder, packed, trainer_config

from slipstream.conf.schema import LoraConfig, TrainMode
from slipstream.trainer.lora import Linear, apply_together


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("together", [1, 3])
def test_products_of_adapters_far_below_a_step_of_bfloat16_outputs_arrive(bias, together):
    torch.manual_seed(0)
    linears = [
        Linear(64, 512, bias=bias, weight_dtype=torch.bfloat16, lora=LoraConfig(rank=8, alpha=16.0))
        for _ in range(together)
    ]
    for linear in linears:
        torch.nn.init.normal_(linear.weight, std=0.125)
        torch.nn.init.normal_(linear.lora_A, std=0.125)
        torch.nn.init.normal_(linear.lora_B, std=2e-4)
        linear.weight.requires_grad_(False)
        if linear.bias is not None:
            torch.nn.init.normal_(linear.bias)
            linear.bias.requires_grad_(False)
    x = torch.randn(256, 64).bfloat16().requires_grad_()
    outs = apply_together(linears, x)
    dys = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, dys)
    assert x.grad is not None
    dx_base, dx_update = torch.zeros(256, 64).double(), torch.zeros(256, 64).double()
    for linear, out, dy in zip(linears, outs, dys, strict=True):
        delta = 2.0 * linear.lora_B.double() @ linear.lora_A.double()
        base = x.double() @ linear.weight.double().t()
        base += 0 if linear.bias is None else linear.bias.double()
        # Outputs are about 1, whose step is 2^-7; the adapters' are about 2 * 2e-4 * 8^0.5 = 1.1e-3.
        assert kept(out, base, x.double() @ delta.t()) == pytest.approx(1.0, abs=0.05)
        dx_base += dy.double() @ linear.weight.double()
        dx_update += dy.double() @ delta
    assert kept(x.grad, dx_base, dx_update) == pytest.approx(1.0, abs=0.15)


def kept(got: torch.Tensor, base: torch.Tensor, update: torch.Tensor) -> float:
    """The share of the update that is in what was computed. Rounding is off by 2^-9 of an output, as much as the update
    is, or by less, with a sign that has nothing to do with the update's: the share's error is 1 / sqrt(131072)."""
    update = update.detach()
    return float(((got.detach().double() - base.detach()) * update).sum() / update.square().sum())


def test_beside_engines_with_slots_the_base_is_rounded_first_as_theirs_is():
    torch.manual_seed(0)
    linear = Linear(64, 512, weight_dtype=torch.bfloat16, lora=LoraConfig(rank=8, alpha=8.0))
    for parameter, std in ((linear.weight, 0.125), (linear.lora_A, 0.125), (linear.lora_B, 2e-4)):
        torch.nn.init.normal_(parameter, std=std)
    linear.weight.requires_grad_(False)
    x = torch.randn(256, 64).bfloat16()
    base, low = x @ linear.weight.t(), x @ linear.lora_A.bfloat16().t()
    (out,) = apply_together([linear], x, rounds_base_first=True)
    assert torch.equal(out, base.addmm(low, linear.lora_B.bfloat16().t()))


def test_adapters_start_as_nothing_and_a_forward_without_them_is_the_base_policys():
    batch = packed()
    base = logits_of(make_decoder(MIXED, trainer_config(TrainMode.full)), batch)
    assert torch.equal(logits_of(make_decoder(MIXED, nonzero_b=False), batch), base)
    decoder = make_decoder(MIXED)
    adapted = logits_of(decoder, batch)
    assert torch.equal(base_logits_of(decoder, batch), base)
    assert torch.equal(logits_of(decoder, batch), adapted) and not torch.equal(adapted, base)


def test_only_adapters_train_in_float32_on_a_base_in_the_models_format():
    decoder = make_decoder(MIXED, dtype=torch.bfloat16)
    for name, parameter in decoder.named_parameters():
        is_adapter = "lora_" in name
        assert parameter.requires_grad is is_adapter, name
        assert parameter.dtype is (torch.float32 if is_adapter else torch.bfloat16), name
    assert decoder(*packed()).dtype is torch.bfloat16


def test_full_training_trains_all_but_the_router_in_float32():
    for train_router in (False, True):
        decoder = make_decoder(MOE, trainer_config(TrainMode.full, train_router=train_router), dtype=torch.bfloat16)
        for name, parameter in decoder.named_parameters():
            assert parameter.dtype is torch.float32, name
            assert parameter.requires_grad is (train_router or not name.endswith("mlp.gate.weight")), name
        assert decoder(*packed()).dtype is torch.bfloat16
