"""Locks: experts that stay packed compute what their unpacked values do, one layer at a time in shared buffers."""

import pytest
import torch
from cases.moe_cases import make_experts, run

from slipstream.conf.architecture.moe_spec import ExpertFormat
from slipstream.trainer.moe.bank import PackedBank, Towards, UnpackBuffers
from slipstream.trainer.moe.experts import Experts


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
        gate_up, down = middle.packed.weights(Towards.output)
        plain.gate_up_proj.copy_(gate_up)
        plain.down_proj.copy_(down)
        for name, parameter in middle.named_parameters():
            getattr(plain, name).copy_(parameter)
    layers[0].packed.weights(Towards.output)  # another layer's values are in the buffers
    layers[2].packed.weights(Towards.output)
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
    assert asked == [Towards.output, Towards.input]
