"""Which share of the elements that engines get has changed since the publish before, from a few rows of every publish.

    changed = share of the rows' elements with other bits in the engine's format * trained elements / all elements

Trained elements are those of matrices under an adapter or, in full training, of all matrices; everything else counts as
unchanged. Rows are drawn so that every trained element is as likely as any other, move on from version to version, and
what is sent of them is kept until the next look. Owns: which rows, what was sent of them, and the share. Does not own
how weights are written (merged_source.py). A look holds less than half a megabyte beside the scratch of a merge, which
is not counted in the watermark.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.weights.fused_experts import FusedTensor
from trainer.weights.quantization import BLOCK
from trainer.weights.shards import HeldTensor
from weight_sync.layout import Region

ROWS, ELEMENTS = 8, 1 << 13
"""Runs of rows of a publish, and elements of each."""
STEP = (5**0.5 - 1) / 2
"""Of the places from version to version, in parts of the distance of two places: no place comes twice."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class ChangedShare:
    """See the module's docstring.

    Args:
        held: All that this rank holds.
        write: (tensor, region, out) -> None: writes what engines get.
        dtype_of: Tensor -> the format in which engines get it.
    """

    def __init__(
        self,
        held: Sequence[HeldTensor | FusedTensor],
        write: Callable[[HeldTensor | FusedTensor, Region, Tensor], None],
        dtype_of: Callable[[str], torch.dtype],
    ) -> None:
        self._held = [
            one for one in held if len(one.region.shape) > 1 and (one.delta is not None or one.parameter.requires_grad)
        ]
        self._write, self._dtype_of = write, dtype_of
        self._ends = list(itertools.accumulate(one.region.num_elements for one in self._held))
        num_elements = sum(one.region.num_elements for one in held)
        self._trained = self._ends[-1] / num_elements if self._ends else 0.0
        self._sent: list[tuple[HeldTensor | FusedTensor, Region, Tensor]] = []
        """Of the version looked at last."""
        self._version: int | None = None
        self._counts: Tensor | None = None

    @torch.no_grad()
    def look(self, version: int) -> None:
        """Compare the rows of the version before with what they are now, and take others. Nothing waits for the device.

        Another look at the same version, by a later wave of its publish, changes nothing.
        """
        if version == self._version or not self._held:
            return
        changed = [self._sent_now(one, region).ne(sent).sum() for one, region, sent in self._sent]
        self._counts = torch.stack(changed) if changed else None
        self._sizes = [sent.numel() for _, _, sent in self._sent]
        places = [self._place(number, version) for number in range(ROWS)]
        self._sent = [(one, region, self._sent_now(one, region)) for one, region in places]
        self._version = version

    def share(self) -> float | None:
        """Of the last two versions looked at; None at the first, and where nothing is trained."""
        if self._counts is None:
            return None
        shares = np.array(self._counts.tolist()) / self._sizes
        return float(shares.mean()) * self._trained

    def _place(self, number: int, version: int) -> tuple[HeldTensor | FusedTensor, Region]:
        """The matrix and the rows of a publish's `number`-th place."""
        place = int((number + version * STEP % 1.0) / ROWS * self._ends[-1])
        index = bisect_right(self._ends, place)
        one = self._held[index]
        *outer, num_rows, num_columns = one.region.shape
        element = place - (self._ends[index - 1] if index else 0)
        *leading, row, _ = (int(at) for at in np.unravel_index(element, one.region.shape))
        first = one.region.start[-2]
        stop = min(first + num_rows, ((first + row) // BLOCK + 1) * BLOCK)  # in one row of blocks
        count = min(max(1, ELEMENTS // num_columns), stop - first - row)
        start = (*(a + b for a, b in zip(one.region.start, leading, strict=False)), first + row, one.region.start[-1])
        return one, Region(start, (*(1 for _ in outer), count, num_columns))

    def _sent_now(self, one: HeldTensor | FusedTensor, region: Region) -> Tensor:
        """The bits of what engines get of a region."""
        out = torch.empty(region.shape, dtype=self._dtype_of(one.tensor), device=one.base.device)
        self._write(one, region, out)
        return out.view(_BITS[out.element_size()])
