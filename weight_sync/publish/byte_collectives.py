"""Collectives of byte strings over a torch process group: what torch's object collectives do, without pickle.

Owns sizes, padding and their limit. Does not own what the bytes mean (collectives.py), nor the group. Every function is
collective: all ranks of the group call the same ones in the same order. A message over MAX_BYTES is an error on every
rank, because all ranks see its size before any of them allocates memory for it.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from slipstream.weight_sync.errors import ProtocolError

MAX_BYTES = 1 << 30
"""Longest message of one rank. The longest in use is a rank's part of a plan: tens of MB for 256 ranks of Kimi-K2."""


def broadcast_bytes(data: bytes, group: dist.ProcessGroup | None) -> bytes:
    """Rank 0's bytes, on every rank."""
    (size,) = _sizes(len(data), group)[:1]
    message = _padded(data if dist.get_rank(group) == 0 else b"", size, group)
    dist.broadcast(message, group=group, group_src=0)
    return _bytes(message, size)


def scatter_bytes(parts: Sequence[bytes], group: dist.ProcessGroup | None) -> bytes:
    """parts[i] of rank 0, on rank i; the parts of other ranks are ignored."""
    is_source = dist.get_rank(group) == 0
    sizes = torch.tensor([len(part) for part in parts] if is_source else [0] * dist.get_world_size(group))
    sizes = sizes.to(_device(group))
    dist.broadcast(sizes, group=group, group_src=0)
    size = _checked([int(size) for size in sizes])
    received = _padded(b"", size, group)
    dist.scatter(
        received, [_padded(part, size, group) for part in parts] if is_source else None, group=group, group_src=0
    )
    return _bytes(received, int(sizes[dist.get_rank(group)]))


def gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's bytes, on rank 0; the others get nothing."""
    sizes = _sizes(len(data), group)
    is_sink, size = dist.get_rank(group) == 0, max(sizes)
    received = [_padded(b"", size, group) for _ in sizes] if is_sink else None
    dist.gather(_padded(data, size, group), received, group=group, group_dst=0)
    return [_bytes(one, own) for one, own in zip(received or [], sizes)]


def all_gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's bytes, on every rank."""
    sizes = _sizes(len(data), group)
    received = [_padded(b"", max(sizes), group) for _ in sizes]
    _all_gather(received, _padded(data, max(sizes), group), group)
    return [_bytes(one, own) for one, own in zip(received, sizes, strict=True)]


def _all_gather(received: list[torch.Tensor], own: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    cast(Any, dist).all_gather(received, own, group=group)  # torch has no types for its arguments


def _sizes(own: int, group: dist.ProcessGroup | None) -> list[int]:
    """Every rank's size. Raises ProtocolError, on all ranks, if one is over the limit."""
    device = _device(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    _all_gather(sizes, torch.tensor([own], device=device), group)
    found = [int(size) for size in sizes]
    _checked(found)
    return found


def _checked(sizes: Sequence[int]) -> int:
    """The largest size, at least one byte: some backends refuse empty tensors."""
    if not all(0 <= size <= MAX_BYTES for size in sizes):
        raise ProtocolError(f"trainer ranks send messages of {list(sizes)} bytes; at most {MAX_BYTES} are read")
    return max(1, *sizes)


def _padded(data: bytes, size: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    message = torch.zeros(max(1, size), dtype=torch.uint8)
    message[: len(data)] = torch.as_tensor(np.frombuffer(data, np.uint8).copy())
    return message.to(_device(group))


def _bytes(message: torch.Tensor, size: int) -> bytes:
    return message[:size].cpu().numpy().tobytes()


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which the group's backend takes tensors."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
