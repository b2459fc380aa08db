"""Experts act in every slot of an engine with adapters, in every layer, once the slots are recorded; and gate and up of
an expert have one A: a slot's second copy is derived at commit.

vLLM runs no adapters of experts without a GPU, so these are its own experts' layers but for their construction, and its
own adapter model; the manager between them is the test's and does what vLLM's does. tests/gpu has whole engines.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from slipstream.rollout.in_vllm.adapter_slots import copy_shared_a, record_slot, slot_buffers, with_shared_a
from slipstream.rollout.layouts.offline_slots import offline_slot
from slipstream.weight_sync.layout import PostLoad, TensorMeta

SLOTS, LAYERS, EXPERTS, HIDDEN, WIDTH, RANK = 3, 4, 2, 8, 4, 2
SIZES = {"gate": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN), "up": (HIDDEN, WIDTH)}
"""In the order in which vLLM's layer is given them."""


def experts_of_a_layer() -> Any:
    """vLLM's layer, with its own stacked factors."""
    layer = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    nn.Module.__init__(layer)
    layer.tp_size, layer.tp_rank, layer.fully_sharded, layer._w13_slices = 1, 0, False, 2

    def stacked(*shape: int, copies: int = 1) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ones(SLOTS, EXPERTS, *shape) for _ in range(copies))

    layer.w13_lora_a_stacked = stacked(RANK, HIDDEN, copies=2)
    layer.w13_lora_b_stacked = stacked(WIDTH, RANK, copies=2)
    layer.w2_lora_a_stacked = stacked(RANK, WIDTH)
    layer.w2_lora_b_stacked = stacked(HIDDEN, RANK)
    layer.adapter_enabled = torch.zeros(SLOTS + 1, dtype=torch.int)
    return layer


class Manager:
    """What adapter_slots.py needs of vLLM's WorkerLoRAManager."""

    _lora_model_cls = LoRAModel

    def __init__(self, num_layers: int) -> None:
        self.lora_config = SimpleNamespace(max_loras=SLOTS)
        modules = {f"model.layers.{number}.mlp.experts": experts_of_a_layer() for number in range(num_layers)}
        self._adapter_manager = SimpleNamespace(modules=modules, lora_index_to_id=[None] * SLOTS)

    def remove_all_adapters(self) -> None: ...

    def pin_adapter(self, number: int) -> None: ...

    def add_adapter(self, request: LoRARequest) -> None:
        helper = PEFTHelper.from_local_dir(request.lora_path, max_position_embeddings=None)
        loaded = self._lora_model_cls.from_local_checkpoint(
            request.lora_path, set(), peft_helper=helper, lora_model_id=request.lora_int_id, dtype=torch.float32
        )
        slots = self._adapter_manager.lora_index_to_id
        index = slots.index(None)
        slots[index] = request.lora_int_id
        for name, module in self._adapter_manager.modules.items():
            factors = [
                [loaded.loras.get(f"{name}.{expert}.{part}_proj") for expert in range(EXPERTS)] for part in SIZES
            ]
            if factors[0][0] is None:
                module.reset_lora(index)
                continue
            module.set_lora(
                index,
                [torch.stack([one.lora_a for one in part]) for part in factors],
                [torch.stack([one.lora_b for one in part]) for part in factors],
            )


def factors_of(num_layers: int) -> list[TensorMeta]:
    """The factors of every expert, as the trainer sends them."""
    return [
        TensorMeta(f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{part}_proj.{side}", shape, "float32")
        for layer in range(num_layers)
        for expert in range(EXPERTS)
        for part, (wide, out) in SIZES.items()
        for side, shape in (("lora_A.weight", (RANK, wide)), ("lora_B.weight", (out, RANK)))
    ]


def test_experts_act_in_every_slot_and_layer_that_the_first_slot_has() -> None:
    """The last layer is adapted in no slot."""
    manager = Manager(LAYERS + 1)
    modules = manager._adapter_manager.modules
    buffers = slot_buffers({name: module for name, module in modules.items() if f".{LAYERS}." not in name}, SLOTS)
    layout = record_slot(manager, buffers, factors_of(LAYERS), rank=0)
    acts = [module.adapter_enabled.tolist() for module in modules.values()]
    assert acts == [[1] * SLOTS + [0]] * LAYERS + [[0] * (SLOTS + 1)]
    assert {param.name for param in layout.params} == set(buffers)
    assert all(bool((tensor == 1).all()) for tensor in buffers.values())  # no byte of a slot has changed


OF_EXPERTS = "model.layers.0.mlp.experts"


def factors_of_a_layer() -> list[TensorMeta]:
    """Two experts of hidden 8, width 4, rank 2; and an output projection of 8 x 8."""
    shapes = {"gate": ((2, 8), (4, 2)), "up": ((2, 8), (4, 2)), "down": ((2, 4), (8, 2))}
    modules = {f"{OF_EXPERTS}.{e}.{leaf}_proj": both for e in range(4) for leaf, both in shapes.items()}
    modules["model.layers.0.self_attn.o_proj"] = ((2, 8), (8, 2))
    return [
        TensorMeta(f"base_model.model.{name}.lora_{side}.weight", shape, "float32")
        for name, both in modules.items()
        for side, shape in zip("AB", both)
    ]


@pytest.mark.parametrize("is_split", [True, False])
def test_a_slot_is_cut_as_the_engine_is(is_split: bool) -> None:
    for rank in range(2):
        layout = offline_slot(factors_of_a_layer(), rank, tp_size=2, enable_expert_parallel=is_split, num_kv_heads=2)
        shapes = {param.name.removeprefix("model.layers.0."): param.shape for param in layout.params}
        assert shapes["self_attn.o_proj.lora_a.0"] == (1, 2, 4)
        assert shapes["mlp.experts.w13_lora_a.0"] == ((2 if is_split else 4), 2, 8)
        assert shapes["mlp.experts.w13_lora_b.1"] == ((2, 4, 2) if is_split else (4, 2, 2))
        assert shapes["mlp.experts.w2_lora_a.0"] == ((2, 2, 4) if is_split else (4, 2, 2))
        held = {int(load.tensor.split(".")[7]) for load in layout.loads if ".experts." in load.tensor}
        assert held == ({2 * rank, 2 * rank + 1} if is_split else {0, 1, 2, 3})
        assert not any("up_proj.lora_A" in load.tensor for load in layout.loads)


def test_the_second_a_is_copied_and_everything_else_is_left_alone() -> None:
    layout = offline_slot(factors_of_a_layer(), 0, tp_size=1, enable_expert_parallel=False, num_kv_heads=2)
    assert with_shared_a(layout) == layout  # what is computed is what a live engine declares
    derived = [param.name for param in layout.params if param.post_load is PostLoad.derived]
    assert derived == [f"{OF_EXPERTS}.w13_lora_a.1"]
    params = {param.name: torch.randn(param.shape) for param in layout.params}
    before = {name: tensor.clone() for name, tensor in params.items()}
    copy_shared_a(params, layout)
    for name, tensor in params.items():
        expected = before[f"{OF_EXPERTS}.w13_lora_a.0"] if name in derived else before[name]
        assert torch.equal(tensor, expected), name
