"""Promises of weight_sync/record/recorder.py about loaders that gather experts with torch.stack before they copy."""

import pytest
import torch
from cases.packed_reads import part_of

from slipstream.weight_sync.errors import RecordError
from slipstream.weight_sync.layout import DestLayout, Region, TensorMeta
from slipstream.weight_sync.record.recorder import record_layout

E, R, K = 4, 3, 5


def metas() -> list[TensorMeta]:
    return [TensorMeta(f"experts.{e}.a", (R, K), "float32") for e in range(E)]


def replayed(layout: DestLayout, values: dict[str, torch.Tensor], param: torch.Tensor) -> torch.Tensor:
    """What a publish by this layout leaves in the parameter."""
    out = torch.full_like(param, -1.0).reshape(-1)
    for load in layout.loads:
        part = part_of(values[load.tensor], load.region).permute(load.axes)
        out.as_strided(part.shape, load.stride, load.offset).copy_(part)
    for fill in layout.fills:
        out[fill.offset : fill.offset + fill.num_elements] = fill.value
    return out.view_as(param)


@pytest.mark.parametrize(
    "part",
    [
        (slice(None), slice(None), slice(None)),
        (slice(1, 3), slice(None), slice(None)),  # experts of one rank
        (slice(None), slice(1, 3), slice(None)),  # rows of one rank
        (slice(2, 4), slice(None), slice(2, 5)),  # columns of one rank
    ],
)
def test_a_stack_of_experts_is_replayed_as_one_load_an_expert(part: tuple[slice, ...]):
    values = {meta.name: torch.randn(R, K) for meta in metas()}
    wanted = torch.stack(list(values.values()))[part]
    buffer = torch.zeros(2, *wanted.shape)  # the second of two slots, zeroed first, as vLLM's set_lora does

    def load(tensors):
        stacked = torch.stack([tensor for _, tensor in tensors], dim=0)
        buffer[1] = 0
        buffer[1, :, : wanted.shape[1]].copy_(stacked[part], non_blocking=True)

    layout = record_layout(load, {"slot": buffer[1]}, metas(), 0)
    assert torch.equal(replayed(layout, values, buffer[1]), wanted)
    assert not buffer.any(), "recording must not write"
    assert all(load.region.intersect(Region((0, 0), (R, K))) == load.region for load in layout.loads)


@pytest.mark.parametrize(
    ("gather", "what"),
    [
        (lambda parts: torch.cat(parts), "joins it with other tensors"),
        (lambda parts: torch.stack(parts, dim=1), "joins it with other tensors"),
        (lambda parts: torch.stack([*parts, torch.zeros(R, K, device="meta")]), "joins it with other tensors"),
        (lambda parts: torch.stack(parts).mul_(2), "changes the values of a stack"),
        (lambda parts: torch.stack(parts) * 2, "no part of a checkpoint tensor"),
        (lambda parts: torch.stack(parts).transpose(0, 1), "only parts of its entries"),
    ],
)
def test_a_gathering_that_is_not_a_stack_of_whole_tensors_is_refused(gather, what: str):
    buffer = torch.zeros(E * R, K)

    def load(tensors):
        value = gather([tensor for _, tensor in tensors])
        buffer.view(value.shape)[...].copy_(value) if value.numel() == buffer.numel() else buffer.copy_(value[0])

    with pytest.raises(RecordError, match=what):
        record_layout(load, {"slot": buffer}, metas(), 0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_number_assigned_to_a_part_is_a_fill_on_any_device(device: str):
    """Off the CPU, `buffer[0] = 2.5` is a copy from a tensor that torch makes of the number."""
    buffer = torch.zeros(2, 3, device=device)

    def load(tensors):
        buffer[0] = 2.5
        ((_, tensor),) = tensors
        buffer[1].copy_(tensor)

    layout = record_layout(load, {"p": buffer}, [TensorMeta("t", (3,), "float32")], 0)
    assert [(fill.offset, fill.num_elements, fill.value) for fill in layout.fills] == [(0, 3, 2.5)]
