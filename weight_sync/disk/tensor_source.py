"""A WeightSource over tensors in memory: pinned host memory (a checkpoint, an offloaded base) or a device.

Invariants: read() never communicates. When fill() has returned, work on the current stream sees the complete slot.
Temporary memory is one scratch buffer of at most `scratch_bytes`, on the slots' device.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.weight_sync.disk.copies import Converted, Copy, Held, compile_copies
from slipstream.weight_sync.errors import PlanError, WeightSyncError
from slipstream.weight_sync.layout import DTYPE_BYTES, Region, SourceLayout, SourceShard, TensorMeta
from slipstream.weight_sync.pipeline.packing import CompiledReads, PackedRead, view_as

SCRATCH_BYTES = 16 << 20
"""Large enough that casts are few compared with copies: 16 MiB are copied in 0.3 ms."""


class TensorSource:
    """See the module's docstring.

    Args:
        rank: This rank among those that publish together.
        tensors: Every checkpoint tensor, the same on all ranks.
        scratch_bytes: The most memory for casts; less is taken if every held rectangle is smaller.
    """

    def __init__(
        self, rank: int, tensors: Sequence[TensorMeta], held: Sequence[Held], *, scratch_bytes: int = SCRATCH_BYTES
    ) -> None:
        self._held: dict[str, list[Held]] = defaultdict(list)
        for item in held:
            self._held[item.tensor].append(item)
        self._layout = SourceLayout(rank, tuple(tensors), tuple(SourceShard(item.tensor, item.region) for item in held))
        largest = max((item.data.numel() for item in held), default=0)
        self.temporary_bytes = min(max(scratch_bytes, max(DTYPE_BYTES.values())), largest)
        self.missing = ""
        """Why the tensors must not be published yet, such as that a checkpoint is still being read; empty: they may."""
        self._scratch: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def layout(self) -> SourceLayout:
        return self._layout

    def begin(self, version: int) -> int:
        """Order the copies after the work that is queued on the caller's stream. Not collective."""
        if self.missing:
            raise WeightSyncError(self.missing)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return self.temporary_bytes

    def read(self, tensor: str, region: Region, out: Tensor) -> None:
        """See the protocol. Planned publishes use compile_reads()."""
        dtype = str(out.dtype).removeprefix("torch.")
        whole = PackedRead(tensor, region, tuple(range(len(region.shape))), dtype, 0)
        flat = torch.empty(whole.num_bytes, dtype=torch.uint8, device=out.device)
        self.compile_reads([whole])(flat)()
        out.copy_(view_as(flat, 0, dtype, region.shape))

    def compile_reads(self, reads: Sequence[PackedRead]) -> CompiledReads:
        """Compile reads into one copy per joined run; see copies.py."""
        copies = compile_copies([(self._find(read), read) for read in reads], self.temporary_bytes)
        needs_scratch = any(isinstance(copy, Converted) for copy in copies)

        def fill(slot: Tensor) -> None:
            scratch = self._scratch_on(slot.device) if needs_scratch else None
            if not slot.is_cuda:
                _copy_all(copies, slot, scratch)
                return
            stream = self._stream_on(slot.device)
            with torch.cuda.stream(stream):
                _copy_all(copies, slot, scratch)
            torch.cuda.current_stream(slot.device).wait_stream(stream)

        return lambda slot: partial(fill, slot)

    def end(self) -> None:
        """Nothing was gathered."""

    def _find(self, read: PackedRead) -> Held:
        for held in self._held.get(read.tensor, ()):
            if held.region.intersect(read.region) == read.region:
                return held
        holds = [held.region for held in self._held.get(read.tensor, ())]
        raise PlanError(
            f"rank {self._layout.rank} cannot read {read.region} of {read.tensor}: it holds {holds or 'none of it'}"
        )

    def _scratch_on(self, device: torch.device) -> Tensor:
        if self._scratch is None or self._scratch.device != device:
            self._scratch = torch.empty(self.temporary_bytes, dtype=torch.uint8, device=device)
        return self._scratch

    def _stream_on(self, device: torch.device) -> torch.cuda.Stream:
        """The copies' own stream; its first use is ordered after the work on the caller's stream."""
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream


def _copy_all(copies: Sequence[Copy], slot: Tensor, scratch: Tensor | None) -> None:
    for copy in copies:
        copy.copy(slot, scratch)
