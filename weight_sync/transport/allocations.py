"""The allocations that hold tensors: a link registers these, because CUDA IPC exports nothing smaller."""

from collections.abc import Sequence

import torch

from slipstream.weight_sync.errors import TransferFailed
from slipstream.weight_sync.transport.base import MemoryRange, range_of


def storage_range(tensor: torch.Tensor) -> MemoryRange:
    """The whole storage that a tensor is a view of."""
    storage = tensor.untyped_storage()
    return MemoryRange(storage.data_ptr(), storage.nbytes())


def segments_of(tensors: Sequence[torch.Tensor]) -> dict[MemoryRange, MemoryRange]:
    """The caching allocator's segment that holds each CUDA tensor. A segment is one cudaMalloc, which IPC exports."""
    if not tensors:
        return {}
    segments = [
        (MemoryRange(s["address"], s["total_size"]), bool(s.get("is_expandable")))
        for s in torch.cuda.memory.memory_snapshot()  # pyright: ignore[reportUnknownMemberType]
    ]
    found: dict[MemoryRange, MemoryRange] = {}
    for tensor in tensors:
        address = tensor.data_ptr()
        holder = next(
            ((item, expandable) for item, expandable in segments if item.address <= address < item.stop), None
        )
        if holder is None:
            raise TransferFailed(
                f"a tensor of {tensor.numel() * tensor.element_size()} bytes at {address:#x} is not in torch's caching"
                " allocator (sleep mode or a custom allocator?): it cannot be exported to other processes"
            )
        if holder[1]:
            raise TransferFailed(
                "weights are in expandable segments, which cannot be exported to other processes:"
                " remove expandable_segments from PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF)"
            )
        found[range_of(tensor)] = holder[0]
    return found
