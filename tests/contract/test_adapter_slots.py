"""Experts act in every slot of an engine with adapters, in every layer, once the slots are recorded.

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

from slipstream.rollout.in_vllm.adapter_slots import record_slot, slot_buffers
from slipstream.weight_sync.layout import TensorMeta

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
