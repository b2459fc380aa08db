"""What an engine rank would hold after a publish into a recorded layout."""

import torch
from torch import Tensor

from slipstream.weight_sync.layout import DestLayout, Region, SourceLayout, SourceShard, TensorMeta
from slipstream.weight_sync.plan.plan import build_plan


def replay_plan(layout: DestLayout, metas: tuple[TensorMeta, ...], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Send everything by a plan of two trainer ranks; returns flat memory per parameter."""
    sources = []
    for rank in range(2):
        shards = []
        for meta in metas:
            half = -(-meta.shape[0] // 2)
            first, stop = rank * half, min((rank + 1) * half, meta.shape[0])
            rest = meta.shape[1:]
            shards.append(SourceShard(meta.name, Region((first, *(0,) * len(rest)), (stop - first, *rest))))
        sources.append(SourceLayout(rank, metas, tuple(shards)))
    plan = build_plan(sources, [[layout]], max_task_bytes=5000)
    memory = {p.name: torch.zeros(p.num_elements, dtype=getattr(torch, p.dtype)) for p in layout.params}
    for rank in range(2):
        for task in plan.tasks[rank]:
            flat = memory[task.param]
            for piece in task.pieces:
                window = tuple(slice(a, b) for a, b in zip(piece.region.start, piece.region.stop, strict=True))
                block = tensors[piece.tensor][window].permute(piece.axes).reshape(-1)
                first = task.dest_offset_bytes // flat.element_size() + piece.offset_elements
                flat[first : first + block.numel()] = block
    for fill in layout.fills:
        memory[fill.param][fill.offset : fill.offset + fill.num_elements] = fill.value
    return memory
