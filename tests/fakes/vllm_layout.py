"""What a vLLM engine of a Qwen3-MoE asks for, without vLLM: fused projections and experts stacked below each other, cut
as its parallel layers cut.
"""

import re
from collections.abc import Sequence
from math import prod

from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.weight_sync.layout import DestLayout, Load, Param, Region, TensorMeta

FUSED = (
    (r"(.*)\.[qkv]_proj\.weight", r"\1.qkv_proj.weight"),
    (r"(.*\.experts)\.\d+\.(?:gate|up)_proj\.weight", r"\1.w13_weight"),
    (r"(.*\.experts)\.\d+\.down_proj\.weight", r"\1.w2_weight"),
)


def engine_layouts(
    spec: ModelSpec, tp_size: int, *, has_split_experts: bool = False, tensors: Sequence[TensorMeta] = ()
) -> list[DestLayout]:
    """The layout of every rank; experts are whole, or divided over the ranks where they are split.

    Args:
        tensors: What engines want, if not the model's in bfloat16.
    """
    metas = tensors or spec.checkpoint_tensors("bfloat16")
    return [_engine_layout(metas, spec, rank, tp_size, has_split_experts) for rank in range(tp_size)]


def _engine_layout(
    metas: Sequence[TensorMeta], spec: ModelSpec, rank: int, tp_size: int, has_split_experts: bool
) -> DestLayout:
    elements: dict[str, int] = {}
    formats: dict[str, str] = {}
    loads: list[Load] = []
    for meta in metas:
        name, region = meta.name, _part_of(meta, rank, tp_size, has_split_experts, spec)
        if region is None:
            continue
        for pattern, fused in FUSED:
            name = re.sub(f"^{pattern}$", fused, name)
        stride = tuple(prod(region.shape[dim + 1 :]) for dim in range(len(region.shape)))
        loads.append(Load(meta.name, region, tuple(range(len(stride))), name, elements.get(name, 0), stride))
        elements[name] = elements.get(name, 0) + region.num_elements
        formats[name] = meta.dtype
    return DestLayout(rank, tuple(Param(name, (size,), formats[name]) for name, size in elements.items()), tuple(loads))


def _part_of(meta: TensorMeta, rank: int, tp_size: int, has_split_experts: bool, spec: ModelSpec) -> Region | None:
    """What one engine rank holds of a checkpoint tensor."""
    whole, expert = Region((0,) * len(meta.shape), meta.shape), re.search(r"\.experts\.(\d+)\.", meta.name)
    if expert is not None and has_split_experts:
        assert spec.moe is not None
        return whole if int(expert[1]) * tp_size // spec.moe.num_experts == rank else None
    if len(meta.shape) == 1 or meta.name.endswith(".mlp.gate.weight"):
        return whole
    dim = 1 if meta.name.endswith(("o_proj.weight", "down_proj.weight")) else 0
    start, shape = list(whole.start), list(whole.shape)
    shape[dim] //= tp_size
    start[dim] = rank * shape[dim]
    return Region(tuple(start), tuple(shape))
