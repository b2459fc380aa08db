"""Promises of trainer/lora.py on CUDA, whose matrix products round where those of a CPU do not."""

import pytest
import torch

from slipstream.conf.schema import LoraConfig
from slipstream.trainer.lora import Linear, apply_together

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), [(576, 576), (576, 1536), (2048, 4096), (4096, 4096)])
def test_products_of_adapters_far_below_a_step_of_the_outputs_arrive(bias, in_features, out_features):
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = {"bias": bias, "weight_dtype": torch.bfloat16, "lora": LoraConfig(rank=32, alpha=64.0)}
        linears = [Linear(in_features, out_features, **made) for _ in range(2)]
        x = torch.randn(2048, in_features).bfloat16()
    for linear in linears:
        for parameter, std in (
            (linear.weight, in_features**-0.5), (linear.lora_A, in_features**-0.5), (linear.lora_B, 2e-5),
        ):  # fmt: skip
            torch.nn.init.normal_(parameter, std=std)
        if linear.bias is not None:
            torch.nn.init.normal_(linear.bias)
    with torch.no_grad():
        for linear, out in zip(linears, apply_together(linears, x), strict=True):
            base = x.double() @ linear.weight.double().t()
            base += 0 if linear.bias is None else linear.bias.double()
            update = 2.0 * x.double() @ linear.lora_A.double().t() @ linear.lora_B.double().t()
            # Outputs are about 1 and off by 2^-9; the update is about 2.3e-4. 2048 * 576 outputs: 10 / sqrt(1.2e6).
            kept = float(((out.double() - base) * update).sum() / update.square().sum())
            assert kept == pytest.approx(1.0, abs=0.05)
