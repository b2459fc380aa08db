"""Promise of trainer/lora.py and the expert adapters:

split adapters equal merged weights, start as nothing, and switch off.
"""

import pytest
import torch
from cases.moe_cases import NUM_EXPERTS, make_batch, make_experts
from cases.tiny_configs import MIXED, MOE
from cases.tiny_models import (
    base_logits_of,
    hf_logits,
    hf_model,
    logits_of,
    make_decoder,
    packed,
    relative_error,
    trainer_config,
)

from slipstream.conf.schema import LoraConfig, TrainMode
from slipstream.trainer.lora import Linear
from slipstream.trainer.moe import experts as arithmetic
from slipstream.trainer.moe.dispatch import plan_dispatch
from slipstream.trainer.moe.experts import Experts


def test_fresh_adapters_change_nothing():
    batch = packed()
    fresh = make_decoder(MIXED, nonzero_b=False)
    base = make_decoder(MIXED, trainer_config(TrainMode.full))
    assert torch.equal(logits_of(fresh, batch), logits_of(base, batch))


def test_adapted_logits_are_those_of_merged_weights():
    batch = packed()
    decoder, oracle = make_decoder(MIXED), hf_model(MIXED)
    weights = dict(oracle.named_parameters())
    with torch.no_grad():
        for name, module in decoder.named_modules():
            if isinstance(module, Linear) and module.lora is not None:
                weights[f"{name}.weight"] += module.lora.scale * module.lora_B @ module.lora_A
            elif isinstance(module, Experts):
                assert module.lora is not None
                for leaf in ("gate_up", "down"):
                    a, b = getattr(module, f"{leaf}_lora_A"), getattr(module, f"{leaf}_lora_B")
                    weights[f"{name}.{leaf}_proj"] += module.lora.scale * torch.einsum("eor,eri->eoi", b, a)
    assert relative_error(logits_of(decoder, batch), hf_logits(oracle, batch)) < 1e-5
    assert relative_error(hf_logits(oracle, batch), hf_logits(hf_model(MIXED), batch)) > 1e-2  # adapters matter here


def test_the_forward_without_adapters_is_the_base_policys():
    batch = packed()
    decoder = make_decoder(MOE)
    adapted = logits_of(decoder, batch)
    base = logits_of(make_decoder(MOE, trainer_config(TrainMode.full)), batch)
    assert torch.equal(base_logits_of(decoder, batch), base)
    assert torch.equal(logits_of(decoder, batch), adapted)


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


def test_choosing_what_to_adapt():
    only_experts = LoraConfig(rank=4, targets=("experts",))
    names = {n for n, p in make_decoder(MIXED, trainer_config(lora=only_experts)).named_parameters() if p.requires_grad}
    assert names
    assert all(".mlp.experts." in name for name in names)


def test_bfloat16_stays_near_float32():
    batch = packed()
    wide, narrow = logits_of(make_decoder(MOE), batch), logits_of(make_decoder(MOE, dtype=torch.bfloat16), batch)
    # 2^-8 a rounding, a dozen roundings a layer, two layers; a flipped expert would cost far more than the bound.
    assert relative_error(narrow, wide) < 0.06


@pytest.mark.parametrize(("copied_rows", "dtype"), [(0, torch.bfloat16), (1 << 30, torch.float32)])
def test_expert_adapters_that_are_read_often_are_copied_into_the_format_of_the_tokens(monkeypatch, copied_rows, dtype):
    """And not into that of the router's weights, which may be wider."""
    read: list[torch.dtype] = []
    project = arithmetic.gather_project

    def noting(rows, source, adapter, *rest, **more):
        read.append(adapter.dtype)
        return project(rows, source, adapter, *rest, **more)

    monkeypatch.setattr(arithmetic, "gather_project", noting)
    monkeypatch.setattr(arithmetic, "COPIED_ROWS", copied_rows)
    x, weights, ids, grad_out = make_batch(torch.bfloat16)
    out = make_experts(dtype=torch.bfloat16)(x, weights.detach().float(), plan_dispatch(ids, NUM_EXPERTS, None))
    out.backward(grad_out)
    assert read == [dtype] * 2, "forward and backward"
