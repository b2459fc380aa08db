"""A source, and in host memory the bytes that it gave at the last publish: what changed is found by comparing.

For weights whose earlier values nothing else knows: a checkpoint on disk, tensors of any trainer, full training, and
merged weights in block-FP8. (Those in bfloat16 are computed again: trainer/delivery/merged_source.py.)

    fill a slot    source --> slot, and if changes are wanted: slot != kept --> marks; slot --> kept

Kept bytes are as large as what this rank packs in a publish, and page-locked if there is CUDA. Invariant: where they
are not known to be those of the publish before, everything is marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
        filling, key = compile_reads(self._source, reads), tuple(reads)
        kept = self._loads.get(key)  # what is kept of these reads, whether they are marked or not
        if kept is None:
            self._loads[key] = kept = _Kept(
                aligned(max((one.offset_bytes + one.num_bytes for one in reads), default=0))
            )

        def with_marks(slot: Tensor, marks: Tensor | None) -> FillSlot:
            # Its memory is taken once, as slots are allocated: to page-lock it in the first publish would make engines
            # wait, and an earlier plan's is free by then.
            if kept.values.nbytes < kept.num_bytes:
                kept.values = host_bytes(kept.num_bytes, is_locked=slot.is_cuda).view(torch.int16)
            fill, values = filling(slot), slot[: kept.num_bytes].view(torch.int16)

            def fill_and_mark() -> None:
                fill()
                if marks is not None:
                    own_marks = marks[: len(values)]
                    if kept.publish == self._publish - 1:
                        self._compare(values, kept.values, own_marks.view(torch.bool))
                    else:
                        own_marks.fill_(1)
                kept.values.copy_(values, non_blocking=True)
                kept.publish = self._publish

            return fill_and_mark

        return with_marks

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


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Kept:
    """What a load held when it was packed last."""

    num_bytes: int
    """Aligned, as packets and slots are."""
    values: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int16))
    publish: int = _NEVER
    """In which it was packed."""
