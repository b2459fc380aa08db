"""A source, and in host memory the bytes that it gave at the last publish: what changed is found by comparing.

For weights whose earlier values nothing else knows: a checkpoint on disk, tensors of any trainer, full training, and
merged weights in block-FP8. (Those in bfloat16 are computed again: trainer/delivery/merged_source.py.)

    fill a slot    source --> slot, and if changes are wanted: slot != kept --> marks; slot --> kept

Kept bytes are as large as what this rank packs in a publish, and page-locked if there is CUDA. Invariant: where they
are not known to be those of the publish before, everything is marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from slipstream.weight_sync.layout import Region, SourceLayout
from slipstream.weight_sync.page_lock import host_bytes
from slipstream.weight_sync.pipeline.packing import CompiledReads, FillSlot, PackedRead, compile_reads
from slipstream.weight_sync.plan.budget import aligned
from slipstream.weight_sync.source import WeightSource

SCRATCH_BYTES = 16 << 20
"""Kept bytes that are on the device at once, to be compared there; on a CPU none have to be."""
_NEVER = -2


class KeptSource:
    """MarkingSource over any WeightSource; see the module's docstring.

    Args:
        watermark_bytes: weight_sync.watermark_bytes; scratch is at most a sixteenth of it.
        device: Of the slots.
    """

    def __init__(self, source: WeightSource, watermark_bytes: int, device: torch.device | str) -> None:
        self._source = source
        self._device = torch.device(device)
        self._scratch_bytes = kept_scratch_bytes(self._device.type, watermark_bytes)
        self._scratch: Tensor | None = None
        self._loads: WeakValueDictionary[tuple[PackedRead, ...], _Kept] = WeakValueDictionary()
        """What a plan loads; dropped with it."""
        self._publish = 0
        """Counts those that came to their end."""

    @property
    def temporary_bytes(self) -> int:
        return self._source.temporary_bytes + self._scratch_bytes

    def layout(self) -> SourceLayout:
        return self._source.layout()

    def begin(self, version: int) -> int:
        return self._source.begin(version) + self._scratch_bytes

    def read(self, tensor: str, region: Region, out: Tensor) -> None:
        self._source.read(tensor, region, out)

    def end(self) -> None:
        self._source.end()

    def keep(self) -> None:
        """The publish succeeded: the next one is compared with what it packed."""
        self._publish += 1

    def compile_reads(self, reads: Sequence[PackedRead]) -> CompiledReads:
        filling = self.compile_marked_reads(reads)
        return lambda slot: filling(slot, None)

    def compile_marked_reads(self, reads: Sequence[PackedRead]) -> Callable[[Tensor, Tensor | None], FillSlot]:
        filling, kept = compile_reads(self._source, reads), self._kept(reads)

        def with_marks(slot: Tensor, marks: Tensor | None) -> FillSlot:
            fill = filling(slot)
            kept.reserve(is_locked=slot.is_cuda)

            def fill_and_mark() -> None:
                fill()
                if marks is not None:
                    kept.mark(slot, marks, self._publish, self._compare)
                kept.take(slot, self._publish)

            return fill_and_mark

        return with_marks

    def _kept(self, reads: Sequence[PackedRead]) -> _Kept:
        """What is kept of these reads, whether they are marked or not."""
        key = tuple(reads)
        kept = self._loads.get(key)
        if kept is None:
            kept = _Kept(max((read.offset_bytes + read.num_bytes for read in reads), default=0))
            self._loads[key] = kept
        return kept

    def _compare(self, values: Tensor, kept: Tensor, differs: Tensor) -> None:
        if not values.is_cuda:
            torch.ne(values, kept, out=differs)
            return
        if self._scratch is None:
            self._scratch = torch.empty(self._scratch_bytes // 2, dtype=torch.int16, device=values.device)
        for first in range(0, len(values), len(self._scratch)):
            part = slice(first, first + len(self._scratch))
            before = self._scratch[: len(kept[part])]
            before.copy_(kept[part], non_blocking=True)
            torch.ne(values[part], before, out=differs[part])


def kept_scratch_bytes(device_type: str, watermark_bytes: int) -> int:
    return min(SCRATCH_BYTES, aligned(watermark_bytes // 16)) if device_type == "cuda" else 0


class _Kept:
    """What a load held when it was packed last."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = aligned(num_bytes)  # packets and slots are, too
        self._values = torch.empty(0, dtype=torch.int16)
        self._publish = _NEVER
        """In which it was packed."""

    def reserve(self, *, is_locked: bool) -> None:
        """Take its memory once, as slots are allocated: to page-lock it in the first publish would make engines wait,
        and an earlier plan's is free by then."""
        if self._values.nbytes < self._num_bytes:
            self._values = host_bytes(self._num_bytes, is_locked=is_locked).view(torch.int16)

    def take(self, slot: Tensor, publish: int) -> None:
        self._values.copy_(self._elements(slot), non_blocking=True)
        self._publish = publish

    def mark(
        self, slot: Tensor, marks: Tensor, publish: int, compare: Callable[[Tensor, Tensor, Tensor], None]
    ) -> None:
        """Mark the elements of a slot that differ; all, if what is kept is not of the publish before this one."""
        values = self._elements(slot)
        own_marks = marks[: len(values)]
        if self._publish != publish - 1:
            own_marks.fill_(1)
        else:
            compare(values, self._values, own_marks.view(torch.bool))

    def _elements(self, slot: Tensor) -> Tensor:
        return slot[: self._num_bytes].view(torch.int16)
