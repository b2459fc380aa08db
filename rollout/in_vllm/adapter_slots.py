"""Inside a vLLM worker process: the engine's adapter slots, and the layout that vLLM's own loading gives a slot.

Slot i is entry i of every stacked LoRA tensor of the engine. At start each slot gets an adapter with a number of its
own, which is never unloaded. Requests name that number; the slot holds what a one-sided write last left there.

    slot  LoRA id   stacked tensors                                    who may read it
    0     1         layers.0.self_attn.qkv_proj.lora_a.0[0], ...       requests that name id 1
    1     2         ...                              [1]               requests that name id 2

Owns: recording one slot's layout, one Receiver per slot, and the copy of what gate and up share. Does not own: which
slot is free or which version it holds (rollout/adapters/slot_leases.py, in the rollout worker).
Invariant: after a commit a slot holds the same bytes as if vLLM had loaded the adapter from disk.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.lora.request import LoRARequest

from slipstream.rollout.errors import UnsupportedWeights
from slipstream.rollout.in_vllm.vllm_patches import adapters_from_memory
from slipstream.rollout.receivers import SlotReceivers
from slipstream.weight_sync.layout import DestLayout, PostLoad, TensorMeta
from slipstream.weight_sync.record.recorder import record_layout
from slipstream.weight_sync.record.repeated_layers import layer_of, layers_by_kind
from slipstream.weight_sync.replica.messages import EngineRank
from slipstream.weight_sync.replica.receiver import Receiver
from slipstream.weight_sync.transport.base import Transport

_EXPERT_BUFFERS = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")
_LINEAR_BUFFERS = ("lora_a_stacked", "lora_b_stacked")
_GATE_A, _UP_A = ".w13_lora_a.0", ".w13_lora_a.1"


def slot_receivers(
    worker: Any, tensors: Sequence[TensorMeta], transport: Transport, rank: int
) -> tuple[SlotReceivers, EngineRank]:
    """Make the receivers of all slots of one engine rank, which registers their memory. Call it once. Returns them, the
    layout that all slots have, and the addresses of each.

    Args:
        worker: vLLM's worker, with LoRA enabled.
        tensors: Every factor of the adapter, at the slots' rank.
        rank: This engine rank inside its replica.
    """
    manager = worker.model_runner.lora_manager
    num_slots: int = manager.lora_config.max_loras
    buffers = slot_buffers(manager._adapter_manager.modules, num_slots)
    layout = with_shared_a(record_slot(manager, buffers, tensors, rank))
    slots = [{name: stacked[slot] for name, stacked in buffers.items()} for slot in range(num_slots)]
    receivers = [
        Receiver(params, layout, transport, recompute=functools.partial(copy_shared_a, params, layout))
        for params in slots
    ]
    first, *others = (one.describe() for one in receivers)
    return SlotReceivers(receivers, slots), replace(first, others=tuple(one.binding.addresses for one in others))


def with_shared_a(layout: DestLayout) -> DestLayout:
    """The layout with one A for the gate and up projections of an expert, so that it crosses the link once: vLLM keeps
    one for each; the trainer has one for both (trainer/weights/adapter_names.py). A commit copies the second A, a
    quarter of an expert adapter's bytes, from the first in device memory."""
    names = {param.name: param for param in layout.params}
    shared = {
        name for name, param in names.items() if name.endswith(_UP_A) and _gate_a(name) in names
        if names[_gate_a(name)].shape == param.shape
    }  # fmt: skip
    return DestLayout(
        layout.rank,
        tuple(replace(p, post_load=PostLoad.derived) if p.name in shared else p for p in layout.params),
        tuple(load for load in layout.loads if load.param not in shared),
        tuple(fill for fill in layout.fills if fill.param not in shared),
    )


@torch.inference_mode()
def copy_shared_a(params: Mapping[str, Tensor], layout: DestLayout) -> None:
    """Fill the derived parameters of `with_shared_a`."""
    derived = [param.name for param in layout.params if param.post_load is PostLoad.derived]
    if derived:
        torch._foreach_copy_([params[name] for name in derived], [params[_gate_a(name)] for name in derived])
    # Wait for the copy: as soon as the commit is known, requests on another stream may read the slot.
    if any(tensor.is_cuda for tensor in params.values()):
        torch.cuda.current_stream().synchronize()


def _gate_a(name: str) -> str:
    return name.removesuffix(_UP_A) + _GATE_A


def slot_buffers(modules: Mapping[str, Any], num_slots: int) -> dict[str, Tensor]:
    """Every stacked LoRA tensor, (num_slots, ...), by "<module>.<factor>.<number>". Raises UnsupportedWeights if a
    module does not keep its factors stacked over the slots."""
    buffers: dict[str, Tensor] = {}
    for name, module in modules.items():
        attributes = _EXPERT_BUFFERS if hasattr(module, _EXPERT_BUFFERS[0]) else _LINEAR_BUFFERS
        for attribute in attributes:
            for number, stacked in enumerate(getattr(module, attribute)):
                if stacked.shape[0] != num_slots or not stacked.is_contiguous():
                    raise UnsupportedWeights(
                        f"{name}.{attribute} of shape {tuple(stacked.shape)} is not stacked over {num_slots} slots"
                    )
                buffers[f"{name}.{attribute.removesuffix('_stacked')}.{number}"] = stacked
    if not buffers:
        raise UnsupportedWeights("vLLM wrapped no module of this model for LoRA: it supports none of its targets")
    return buffers


def record_slot(manager: Any, buffers: Mapping[str, Tensor], tensors: Sequence[TensorMeta], rank: int) -> DestLayout:
    """Let vLLM load an adapter of recording tensors into every slot, and pin it there. The slots' bytes do not change.

    Every slot is given every layer, because vLLM keeps more of an adapter than its factors: experts skip a slot whose
    adapter came without theirs. Recorded is every layer of the first slot, and the first layer of each kind of the
    others, which must be as in the first: recording them all would take as long again for each slot.

    Args:
        manager: vLLM's WorkerLoRAManager.
        buffers: `slot_buffers`.

    Raises UnsupportedWeights if slots differ, or vLLM put an adapter into another slot.
    """
    num_slots = manager.lora_config.max_loras
    manager.remove_all_adapters()  # vLLM's warm-up left some
    params = {f"{slot}/{name}": stacked[slot] for name, stacked in buffers.items() for slot in range(num_slots)}

    def load(stream: Iterable[tuple[str, Tensor]]) -> None:
        factors = dict(stream)
        with adapters_from_memory(manager, factors) as folder:
            for slot in range(num_slots):
                manager.add_adapter(LoRARequest(f"slot {slot}", slot + 1, folder))
                manager.pin_adapter(slot + 1)

    sampled = _sampled(buffers, tensors)
    left_out = {f"{slot}/{name}" for slot in range(1, num_slots) for name in buffers if name not in sampled}
    whole = record_layout(load, params, tensors, rank, left_out=left_out)
    held = manager._adapter_manager.lora_index_to_id
    if held != [slot + 1 for slot in range(num_slots)]:
        raise UnsupportedWeights(f"vLLM put adapters 1 to {num_slots} into slots {held}, not one after the other")
    first, *others = (_only(whole, {f"{slot}/{name}": name for name in buffers}) for slot in range(num_slots))
    if any(other != _only(first, {name: name for name in sampled}) for other in others):
        raise UnsupportedWeights("vLLM loads the same adapter differently into its slots")
    return first


def _sampled(buffers: Iterable[str], tensors: Sequence[TensorMeta]) -> set[str]:
    """The buffers of the first layer of each kind, and those of no layer."""
    kinds = layers_by_kind((meta.name, (meta.shape, meta.dtype)) for meta in tensors)
    others = {layer for layers in kinds for layer in layers[1:]}
    return {name for name in buffers if layer_of(name) not in others}


def _only(whole: DestLayout, names: Mapping[str, str]) -> DestLayout:
    """The part of a layout that is about some parameters, renamed."""
    return DestLayout(
        whole.rank,
        tuple(replace(one, name=names[one.name]) for one in whole.params if one.name in names),
        tuple(replace(one, param=names[one.param]) for one in whole.loads if one.param in names),
        tuple(replace(one, param=names[one.param]) for one in whole.fills if one.param in names),
    )


@contextlib.contextmanager
def without_adapters(worker: Any) -> Iterator[None]:
    """While the block runs, the model's layers have no LoRA wrappers, and parameters have their plain names: vLLM's
    load_weights cannot find a wrapped layer's under their checkpoint names."""
    runner_manager = getattr(getattr(worker, "model_runner", None), "lora_manager", None)
    if runner_manager is None:
        yield
        return
    model = worker.get_model()
    wrapped = dict(runner_manager._adapter_manager.modules)
    prefixes: list[tuple[Any, str]] = []
    try:
        for name, module in wrapped.items():
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module.base_layer)
            experts = getattr(module.base_layer, "routed_experts", None)
            if experts is not None and hasattr(experts, "lora_base_layer_prefix"):
                prefixes.append((experts, experts.lora_base_layer_prefix))
                experts.lora_base_layer_prefix = ""
        yield
    finally:
        for name, module in wrapped.items():
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module)
        for experts, prefix in prefixes:
            experts.lora_base_layer_prefix = prefix


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """While the block runs, this thread's device work runs beside the engine's, not between its steps. It has priority:
    it takes a millisecond per publish, and would otherwise queue behind the kernels of vLLM's steps."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
        yield
