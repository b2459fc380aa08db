"""Gate and up of an expert have one A: a slot's second copy is derived at commit."""

import pytest
import torch

from slipstream.rollout.layouts.offline_slots import offline_slot
from slipstream.weight_sync.layout import PostLoad, TensorMeta

adapter_slots = pytest.importorskip(
    "slipstream.rollout.in_vllm.adapter_slots", reason="needs vLLM", exc_type=ImportError
)
EXPERTS = "model.layers.0.mlp.experts"


def factors() -> list[TensorMeta]:
    """Two experts of hidden 8, width 4, rank 2; and an output projection of 8 x 8."""
    shapes = {"gate": ((2, 8), (4, 2)), "up": ((2, 8), (4, 2)), "down": ((2, 4), (8, 2))}
    modules = {f"{EXPERTS}.{e}.{leaf}_proj": both for e in range(4) for leaf, both in shapes.items()}
    modules["model.layers.0.self_attn.o_proj"] = ((2, 8), (8, 2))
    return [
        TensorMeta(f"base_model.model.{name}.lora_{side}.weight", shape, "float32")
        for name, both in modules.items()
        for side, shape in zip("AB", both)
    ]


@pytest.mark.parametrize("is_split", [True, False])
def test_a_slot_is_cut_as_the_engine_is(is_split: bool) -> None:
    for rank in range(2):
        layout = offline_slot(factors(), rank, tp_size=2, enable_expert_parallel=is_split, num_kv_heads=2)
        shapes = {param.name.removeprefix("model.layers.0."): param.shape for param in layout.params}
        assert shapes["self_attn.o_proj.lora_a.0"] == (1, 2, 4)
        assert shapes["mlp.experts.w13_lora_a.0"] == ((2 if is_split else 4), 2, 8)
        assert shapes["mlp.experts.w13_lora_b.1"] == ((2, 4, 2) if is_split else (4, 2, 2))
        assert shapes["mlp.experts.w2_lora_a.0"] == ((2, 2, 4) if is_split else (4, 2, 2))
        held = {int(load.tensor.split(".")[7]) for load in layout.loads if ".experts." in load.tensor}
        assert held == ({2 * rank, 2 * rank + 1} if is_split else {0, 1, 2, 3})
        assert not any("up_proj.lora_A" in load.tensor for load in layout.loads)


def test_the_second_a_is_copied_and_everything_else_is_left_alone() -> None:
    layout = offline_slot(factors(), 0, tp_size=1, enable_expert_parallel=False, num_kv_heads=2)
    assert adapter_slots.with_shared_a(layout) == layout  # what is computed is what a live engine declares
    derived = [param.name for param in layout.params if param.post_load is PostLoad.derived]
    assert derived == [f"{EXPERTS}.w13_lora_a.1"]
    params = {param.name: torch.randn(param.shape) for param in layout.params}
    before = {name: tensor.clone() for name, tensor in params.items()}
    adapter_slots.copy_shared_a(params, layout)
    for name, tensor in params.items():
        expected = before[f"{EXPERTS}.w13_lora_a.0"] if name in derived else before[name]
        assert torch.equal(tensor, expected), name
