"""Computes the layout of an adapter slot of an engine that does not run; adapter_slots.py records it in one that does.

The factors and the parallel sizes determine vLLM's stacked LoRA tensors, so they are computed (after vLLM 0.25.1,
`lora/layers`), for the modules that trainer/weights/adapter_names.py adapts:

    q, k, v; gate, up    one A each, whole; B's rows as the layer's outputs are split, k and v repeated
    o, down              A's columns as the layer's inputs are split; B whole
    experts, split       whole factors of this rank's experts, stacked
    experts, not split   all experts; B of gate and up by rows, A of down by columns

Gate and up of an expert share one A in this product, so the second copy is derived, as in adapter_slots.py. Only plans
use these layouts; a publish uses the live engine's.
"""

import re
from collections.abc import Sequence
from math import prod

from slipstream.rollout.errors import EngineError
from slipstream.weight_sync.layout import DestLayout, Load, Param, PostLoad, Region, TensorMeta

_FACTOR = re.compile(r"^base_model\.model\.(?P<parent>.+)\.(?P<leaf>\w+)_proj\.lora_(?P<side>[AB])\.weight$")
_EXPERT = re.compile(r"^(?P<bank>.+\.experts)\.(?P<number>\d+)$")
_EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")
_FUSED = {"q": ("qkv_proj", 0), "k": ("qkv_proj", 1), "v": ("qkv_proj", 2), "gate": ("gate_up_proj", 0),
          "up": ("gate_up_proj", 1), "o": ("o_proj", 0), "down": ("down_proj", 0)}  # fmt: skip
_SPLIT_INPUTS = ("o", "down")
_EXPERT_PARTS = {"gate": ("w13", 0), "up": ("w13", 1), "down": ("w2", 0)}


def offline_slot(
    tensors: Sequence[TensorMeta], rank: int, *, tp_size: int, enable_expert_parallel: bool, num_kv_heads: int
) -> DestLayout:
    """The layout of one slot of an engine rank, of factors as trainer.weights.adapter_names.adapter_tensors lists them.
    Raises EngineError if one belongs to a module that engines do not adapt, or does not divide over the ranks."""
    numbers = (int(found[1]) for found in (_EXPERT_NUMBER.search(meta.name) for meta in tensors) if found)
    experts = 1 + max(numbers, default=-1)
    is_split = enable_expert_parallel and tp_size > 1
    params: dict[str, Param] = {}
    loads: list[Load] = []
    base, extra = divmod(experts, tp_size)  # if tp_size does not divide experts, the first ranks have one more
    first = rank * base + min(rank, extra) if is_split else 0
    num_local = base + (rank < extra) if is_split else experts
    for meta in tensors:
        found = _FACTOR.match(meta.name)
        if found is None or found["leaf"] not in _FUSED:
            raise EngineError(f"engines have no adapter slot for {meta.name}")
        leaf, side = found["leaf"], found["side"]
        expert = _EXPERT.match(found["parent"])
        if expert is not None:
            index = int(expert["number"]) - first
            if not 0 <= index < num_local:
                continue
            part, number = _EXPERT_PARTS[leaf]
            name = f"{expert['bank']}.{part}_lora_{side.lower()}.{number}"
            region = _cut(meta, leaf, side, rank, 1 if is_split else tp_size, 0)
            shape, offset = (num_local, *region.shape), index * prod(region.shape)
            if leaf == "up" and side == "A":
                params.setdefault(name, Param(name, shape, meta.dtype, PostLoad.derived))
                continue
        else:
            module, number = _FUSED[leaf]
            name = f"{found['parent']}.{module}.lora_{side.lower()}.{number}"
            region = _cut(meta, leaf, side, rank, tp_size, num_kv_heads)
            shape, offset = (1, *region.shape), 0
        params.setdefault(name, Param(name, shape, meta.dtype))
        loads.append(Load(meta.name, region, (0, 1), name, offset, (region.shape[1], 1)))
    return DestLayout(rank, tuple(params.values()), tuple(loads))


def _cut(meta: TensorMeta, leaf: str, side: str, rank: int, num_parts: int, num_kv_heads: int) -> Region:
    whole = Region((0, 0), meta.shape)
    dim = 1 if leaf in _SPLIT_INPUTS else 0
    if num_parts == 1 or (side == "A") != (dim == 1):
        return whole
    if leaf in ("k", "v") and 0 < num_kv_heads < num_parts:
        rank, num_parts = rank * num_kv_heads // num_parts, num_kv_heads
    if meta.shape[dim] % num_parts:
        raise EngineError(f"{meta.name} of shape {list(meta.shape)} does not divide over {num_parts} engine ranks")
    size = meta.shape[dim] // num_parts
    start, shape = [0, 0], list(meta.shape)
    start[dim], shape[dim] = rank * size, size
    return Region(tuple(start), tuple(shape))
