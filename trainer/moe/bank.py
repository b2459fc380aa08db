"""Expert weights that stay packed: four bits per weight in memory, whole layers in the compute dtype while in use.

    layer    0      1      2      3              forward: while layer n's experts run, layer n + 1 is unpacked
    pair     a      b      a      b              beside them, on its own stream; backward: layer n - 1

Owns the packed bits of one layer (PackedBank) and the two pairs of buffers for unpacked weights that all layers share
(UnpackBuffers). Packed bits are buffers, not parameters, so that FSDP2 does not cast, gather or shard integers; a
checkpoint's bits are kept unchanged, NaN patterns included. Every rank of an expert mesh holds the same packed experts.
Does not own products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.conf.architecture.moe_spec import ExpertFormat
from slipstream.trainer.kernels.experts.dequant import GROUP, dequantize_int4, dequantize_mxfp4


class PackedBank(nn.Module):
    """One layer's experts. Buffers, for E experts, H hidden, I expert width:

    int4    gate_up_packed int32 (E, 2I, H/8)      gate_up_scale bfloat16 (E, 2I, H/32)     down_*: H rows of I
    mxfp4   gate_up_packed uint8 (E, 2I, H/32, 16) gate_up_scale uint8 (E, 2I, H/32)        down_*: H rows of I

    Rows are output features, gate first.
    """

    def __init__(
        self, expert_format: ExpertFormat, num_experts: int, hidden_size: int, width: int, unpacked: UnpackBuffers
    ) -> None:
        super().__init__()
        self.format = expert_format
        self.shapes = {"gate_up": (num_experts, 2 * width, hidden_size), "down": (num_experts, hidden_size, width)}
        self._unpacked = unpacked
        self._index = unpacked.add(self)
        for name, (experts, rows, columns) in self.shapes.items():
            if expert_format is ExpertFormat.int4:
                packed = torch.empty(experts, rows, columns // 8, dtype=torch.int32)
                scale = torch.empty(experts, rows, columns // GROUP, dtype=torch.bfloat16)
            else:
                packed = torch.empty(experts, rows, columns // GROUP, GROUP // 2, dtype=torch.uint8)
                scale = torch.empty(experts, rows, columns // GROUP, dtype=torch.uint8)
            self.register_buffer(f"{name}_packed", packed)
            self.register_buffer(f"{name}_scale", scale)

    def weights(self, towards: int) -> tuple[Tensor, Tensor]:
        """gate_up (E, 2I, H) and down (E, H, I). Valid until weights are asked for the layer after the next one.
        `towards`: 1 where the next layer is used next, in forward; -1: the layer before."""
        return self._unpacked.take(self._index, towards)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def unpack(self, gate_up: Tensor, down: Tensor) -> None:
        """Write the weights, on the current stream."""
        unpack = dequantize_int4 if self.format is ExpertFormat.int4 else dequantize_mxfp4
        for name, out in (("gate_up", gate_up), ("down", down)):
            unpack(self.get_buffer(f"{name}_packed"), self.get_buffer(f"{name}_scale"), out)


@dataclass(slots=True)
class _Pair:
    """gate_up and down of one layer in the compute dtype."""

    weights: tuple[Tensor, Tensor]
    held: int = -1
    """Index of the layer whose weights it holds."""
    ready: torch.cuda.Event | None = None
    """Recorded by the unpacking stream when that stream filled this pair."""


class UnpackBuffers:
    """Two layers' weights in the compute dtype; the next layer is filled while the present one is used. A pair is
    filled again only after all work that the current stream had queued when the layer after it was taken. That includes
    the last kernel that reads the pair."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._banks: list[PackedBank] = []
        self._pairs: list[_Pair] = []
        self._stream: torch.cuda.Stream | None = None
        self._last = 0

    def add(self, bank: PackedBank) -> int:
        """Register the next layer. Returns its index."""
        self._banks.append(bank)
        return len(self._banks) - 1

    def take(self, index: int, towards: int) -> tuple[Tensor, Tensor]:
        """Return layer `index` unpacked, for use on the current stream, and begin to unpack its neighbour."""
        device = self._banks[index].get_buffer("gate_up_packed").device
        if not self._pairs:
            self._allocate(device)
        here = next((i for i, pair in enumerate(self._pairs) if pair.held == index), None)
        if here is None:
            here = 1 - self._last
            self._wait(self._pairs[here])
            self._fill(self._pairs[here], index)
        pair = self._pairs[here]
        self._wait(pair)
        self._last = here
        neighbour = index + towards
        other = self._pairs[1 - here]
        if self._stream is not None and 0 <= neighbour < len(self._banks) and other.held != neighbour:
            self._wait(other)  # so that two fills of one pair run in order
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                self._fill(other, neighbour)
                other.ready = torch.cuda.Event()
                other.ready.record()
        return pair.weights

    def _allocate(self, device: torch.device) -> None:
        shapes = self._banks[0].shapes
        for _ in range(2):
            gate_up, down = (torch.empty(shapes[name], dtype=self._dtype, device=device) for name in shapes)
            self._pairs.append(_Pair((gate_up, down)))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _fill(self, pair: _Pair, index: int) -> None:
        self._banks[index].unpack(*pair.weights)
        pair.held = index

    @staticmethod
    def _wait(pair: _Pair) -> None:
        if pair.ready is not None:
            torch.cuda.current_stream().wait_event(pair.ready)
            pair.ready = None
