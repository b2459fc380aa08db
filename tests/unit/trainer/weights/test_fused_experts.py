"""Promise of trainer/weights/fused_experts.py: any rectangle of a fused checkpoint tensor is that rectangle of the
merged whole."""

from typing import Any

import pytest
import torch
from cases.packed_reads import part_of
from cases.tiny_configs import GEMMA4_MOE, GPT_OSS
from cases.tiny_models import make_decoder
from hypothesis import given, settings, strategies as st

from slipstream.trainer.weights.fused_experts import FusedTensor, deinterleave, interleave
from slipstream.trainer.weights.shards import local_shards
from slipstream.weight_sync.layout import Region

DECODER = make_decoder(GPT_OSS)
FUSED = {held.tensor: held for held in local_shards(DECODER) if isinstance(held, FusedTensor)}
LAYER = "model.layers.1.mlp.experts."
STACKED = {h.tensor: h for h in local_shards(make_decoder(GEMMA4_MOE)) if isinstance(h, FusedTensor)}
"""In the trainer's own layout."""


def merged(held: FusedTensor, region: Region) -> torch.Tensor:
    out = torch.full(region.shape, torch.nan)
    held.run(region).write(out, {})
    return out


def test_a_whole_is_the_checkpoints_layout_of_base_plus_adapter():
    layer: Any = DECODER.model.layers[1]
    bank = layer.mlp.experts
    delta = bank.lora.scale * torch.einsum("eor,eri->eoi", bank.gate_up_lora_B, bank.gate_up_lora_A)
    weight = bank.gate_up_proj + delta
    held = FUSED[LAYER + "gate_up_proj"]
    whole = merged(held, held.region)
    assert torch.allclose(whole[:, :, 0::2], weight[:, :24].transpose(1, 2), atol=1e-6)  # gate
    assert torch.allclose(whole[:, :, 1::2], weight[:, 24:].transpose(1, 2), atol=1e-6)  # up


@pytest.mark.parametrize(
    "held",
    [
        *(FUSED[LAYER + leaf] for leaf in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")),
        *(STACKED[f"model.layers.1.experts.{leaf}"] for leaf in ("gate_up_proj", "down_proj")),
    ],
    ids=lambda held: held.tensor,
)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_rectangle_is_bitwise_that_of_the_whole(held, data):
    whole = merged(held, held.region)
    start, shape = [], []
    for size in held.region.shape:
        start.append(data.draw(st.integers(0, size - 1)))
        shape.append(data.draw(st.integers(1, size - start[-1])))
    region = Region(tuple(start), tuple(shape))
    assert torch.equal(merged(held, region), part_of(whole, region))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_engines_parts_of_all_experts_of_a_stack_are_one_run(tp_size):
    """Expert by expert gate and up, as engines hold them, so that one kernel writes them all."""
    held = STACKED["model.layers.1.experts.gate_up_proj"]
    num_experts, rows, columns = held.region.shape
    height = rows // 2 // tp_size
    run: Any = None
    for expert in range(num_experts):
        for first in (0, rows // 2):
            part = held.run(Region((expert, first, 0), (1, height, columns)))
            run = part if run is None else run.joined(part)
    out = torch.empty(run.shape)
    run.write(out, {})
    wanted = merged(held, held.region).unflatten(1, (2, rows // 2))[:, :, :height]
    assert torch.equal(out.view(wanted.shape), wanted)


@pytest.mark.parametrize("hf_config", [GPT_OSS, GEMMA4_MOE], ids=["turned", "as the trainer"])
def test_a_rank_holds_its_own_experts_of_a_checkpoint_tensor(hf_config, monkeypatch):
    """A rank whose first expert is the third: the rectangle begins there, and reading it is as from a first rank."""
    decoder: Any = make_decoder(hf_config)
    layer = decoder.model.layers[1]
    before = {held.tensor: held for held in local_shards(decoder) if isinstance(held, FusedTensor)}
    monkeypatch.setattr((layer.mlp if hf_config is GPT_OSS else layer.moe).experts, "first_expert", 2)
    found = {held.tensor: held for held in local_shards(decoder) if isinstance(held, FusedTensor)}
    of_layer = [name for name in before if ".layers.1." in name]
    assert len(of_layer) == (4 if hf_config is GPT_OSS else 2)
    for name in of_layer:
        first, third = before[name], found[name]
        assert third.region == Region((2, *first.region.start[1:]), first.region.shape), name
        assert torch.equal(merged(third, third.region), merged(first, first.region))
        part = Region((3, *first.region.start[1:]), (1, *first.region.shape[1:]))
        assert torch.equal(merged(third, part)[0], merged(first, first.region)[1]), name


def test_gate_and_up_in_turns_and_back():
    rows = torch.arange(2 * 6 * 3).view(2, 6, 3)
    assert interleave(rows)[0, :, 0].tolist() == [0, 9, 3, 12, 6, 15]
    assert torch.equal(deinterleave(interleave(rows)), rows)
