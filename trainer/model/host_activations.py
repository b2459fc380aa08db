"""What layers keep for their backward, in host memory meanwhile.

    forward, layer g      move: the copy stream writes x, delta and attention's output to the host
             layer g+2+n  layer g's copies on the device are freed, once the copy stream has read them
             the last n   move nothing
    backward, layer g+1   the copy stream reads layer g back, while layer g+1 computes
             layer g      waits for that, and layer g-1 is read

n layers fit the room that there is (`HostPool.room_bytes`). While copies take longer than the layers' own work,
the forward waits for them only after n layers more.

Owns the copies, their order and the memory on both sides. Does not own which tensors a layer names (layer.py).
Invariants: the device holds the named tensors of at most 2 + n layers, and those of the last of the forward stay; bits
do not change. All copies use one stream, so they run in the order in which they were asked for, and a chunk of
host memory that returns to the pool can be written again at once. Each layer knows the one before it and nothing knows
a later one, so memory is free when the graph has forgotten it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 28
"""Bytes of page-locked memory allocated at a time. torch rounds such an allocation up to a power of two."""


class HostPool:
    """Chunks of host memory, page-locked for a GPU, and the stream that copies to and from them.

    It grows to what the largest microbatch needs, and keeps that. Page-locking a GB takes a good part of a second.

    Args:
        room_bytes: called when a pass begins. How much device memory may hold layers that wait to be copied, and in
            the end the layers that are not copied. It is the memory of gradients that do not exist yet: a backward
            makes them layer by layer, from the last layer on, and at each layer frees what was kept for it.
    """

    def __init__(self, device: torch.device, room_bytes: Callable[[], int]) -> None:
        self.streams: Any = torch.get_device_module(device)
        """torch.cuda, or torch.cpu, whose streams do nothing."""
        self.copies = self.streams.Stream()
        self.room_bytes = room_bytes
        self._is_pinned = device.type == "cuda"
        self.free: list[Tensor] = []

    def chunk(self) -> Tensor:
        if self.free:
            return self.free.pop()
        return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._is_pinned)


class HostStack:
    """The host memory of one forward pass; the pool has it again when the pass's graph is gone."""

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self._chunks: list[Tensor] = []
        self.num_bytes = 0
        weakref.finalize(self, pool.free.extend, self._chunks)

    def take(self, num_bytes: int) -> list[Tensor]:
        """Pieces, uint8, that have so many bytes together."""
        pieces = []
        while num_bytes:
            index, start = divmod(self.num_bytes, CHUNK_BYTES)
            if index == len(self._chunks):
                self._chunks.append(self.pool.chunk())
            size = min(num_bytes, CHUNK_BYTES - start)
            pieces.append(self._chunks[index][start : start + size])
            self.num_bytes, num_bytes = self.num_bytes + size, num_bytes - size
        return pieces


class HostPass:
    """A forward pass: which of its layers move, and when they leave the device. Forgotten when the pass is over."""

    def __init__(self, pool: HostPool, num_layers: int) -> None:
        self._stack = HostStack(pool)
        self._num_layers, self._room_bytes = num_layers, pool.room_bytes()
        self._layers: list[HostLayer] = []
        """Those that have begun to move."""
        self._num_begun = self._num_gone = 0
        self._bytes_before = self._most_bytes = 0
        """What all layers before the last that began have moved; what the one that moved most has."""

    def next_layer(self) -> HostLayer | None:
        """Begin a layer. Returns None for one that moves nothing."""
        num_bytes = self._stack.num_bytes
        self._most_bytes = max(self._most_bytes, num_bytes - self._bytes_before)
        self._bytes_before = num_bytes
        num_fitting = self._room_bytes // self._most_bytes if self._most_bytes else 0
        while self._num_gone < self._num_begun - 1 - num_fitting:
            self._layers[self._num_gone].leave_device()
            self._num_gone += 1
        self._num_begun += 1
        if self._num_begun > self._num_layers - num_fitting:
            return None
        self._layers.append(HostLayer(self._stack, self._layers[-1] if self._layers else None))
        return self._layers[-1]


class MovedTensor:
    """A tensor in host memory, on the device, or both."""

    def __init__(self, tensor: Tensor, pieces: list[Tensor]) -> None:
        self.on_device: Tensor | None = tensor.detach().view(-1)
        self.pieces = pieces
        self._size, self._dtype, self._device = tensor.numel(), tensor.dtype, tensor.device

    def parts(self) -> list[Tensor]:
        """The device's bytes, cut as the host's are; allocated if there are none."""
        if self.on_device is None:
            self.on_device = torch.empty(self._size, dtype=self._dtype, device=self._device)
        return list(self.on_device.view(torch.uint8).split([len(piece) for piece in self.pieces]))


class HostLayer:
    """What one layer keeps for its backward, of one forward pass.

    Args:
        before: of the layer before in the same pass; None for the first.
    """

    def __init__(self, stack: HostStack, before: HostLayer | None) -> None:
        self._stack, self._before = stack, before
        self._moved: dict[int, MovedTensor] = {}
        self._written = self._read = None

    def move(self, tensor: Tensor) -> MovedTensor | None:
        """Copy a tensor to the host, if it is not there yet. It must not change any more.

        Returns:
            None for a tensor that is empty or not contiguous: it stays where it is.
        """
        if not tensor.numel() or not tensor.is_contiguous():
            return None
        moved = self._found(tensor)
        if moved is None:
            moved = MovedTensor(tensor, self._stack.take(tensor.numel() * tensor.element_size()))
            self._moved[tensor.data_ptr()] = moved
            self._written = self._copy([moved], to_host=True)
        return moved

    def get(self, moved: MovedTensor) -> Tensor:
        """The tensor on the device, flat. Begins to read the layer before."""
        self._enter_device()
        if self._read is not None:
            self._streams.current_stream().wait_event(self._read)
            self._read = None
        if self._before is not None:
            self._before._enter_device()
            self._before = None
        assert moved.on_device is not None
        return moved.on_device

    def leave_device(self) -> None:
        """Free the device's copies, after the copy stream has read them."""
        if self._written is not None:
            self._streams.current_stream().wait_event(self._written)
        for moved in self._moved.values():
            moved.on_device = None

    def saving(self) -> AbstractContextManager[None]:
        """Inside, autograd saves the moved tensors as they are here; all others it saves as ever."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpacked)

    @property
    def _streams(self) -> Any:
        return self._stack.pool.streams

    def _found(self, tensor: Tensor) -> MovedTensor | None:
        moved = self._moved.get(tensor.data_ptr())
        is_whole = moved is not None and moved.on_device is not None and moved.on_device.numel() == tensor.numel()
        return moved if is_whole and tensor.is_contiguous() else None

    def _pack(self, tensor: Tensor) -> Any:
        moved = self._found(tensor)
        return tensor if moved is None else (self, moved, tensor.shape)

    def _enter_device(self) -> None:
        """Begin to read what is in host memory alone."""
        absent = [moved for moved in self._moved.values() if moved.on_device is None]
        if absent:
            self._read = self._copy(absent, to_host=False)

    def _copy(self, tensors: list[MovedTensor], *, to_host: bool) -> Any:
        """Ask the copy stream to copy. Returns the event of its end."""
        copies = self._stack.pool.copies
        parts = [part for moved in tensors for part in moved.parts()]
        pieces = [piece for moved in tensors for piece in moved.pieces]
        copies.wait_stream(self._streams.current_stream())
        with self._streams.stream(copies):
            for part, piece in zip(parts, pieces, strict=True):
                target, source = (piece, part) if to_host else (part, piece)
                target.copy_(source, non_blocking=True)
        return copies.record_event()


def _unpacked(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    layer, moved, shape = saved
    return layer.get(moved).view(shape)
