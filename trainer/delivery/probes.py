"""Two figures of what engines get, from a few rows of every publish, which are not counted in the watermark.

    changed = share of some rows' elements with other bits in the engine's format * trained elements / all elements

Trained elements are those of matrices under an adapter or, in full training, of all matrices; everything else counts as
unchanged. The rows are spread evenly over the trained elements and stay the same for the run, so that they are written
by a few prepared launches, and what was sent of them is all that is kept.

    kept  = <added, s B A> / <s B A, s B A>          over the rows looked at, in float32; `added`: what engines get
                                                     beyond the base, in their format
    error = |1 - kept|                               0: engines get the update; 1: they keep the base

Rounding to nearest loses what is less than half a step of the engine's format; rounding by thresholds is noise that is
larger than a small update, but its mean is right, and so is the share within error / sqrt(elements). These rows move on
from version to version.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.trainer.weights.fused_experts import FusedTensor
from slipstream.trainer.weights.quantization import BLOCK
from slipstream.trainer.weights.shards import HeldTensor
from slipstream.weight_sync.layout import DTYPE_BYTES, Region
from slipstream.weight_sync.pipeline.packing import CompiledReads, FillSlot, PackedRead
from slipstream.weight_sync.plan.budget import aligned

PLACES, PLACE_ELEMENTS = 16, 1 << 12
"""Runs of rows, and elements of each."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
MATRICES, MATRIX_ELEMENTS = 8, 1 << 13
"""Matrices of a publish, and elements of each."""


class ChangedShare:
    """Which share of an engine's elements has changed since the version before. Takes a quarter of a megabyte.

    Args:
        dtypes: Tensor -> the format in which engines get it.
    """

    def __init__(
        self,
        held: Sequence[HeldTensor | FusedTensor],
        dtypes: Mapping[str, str],
        compile_reads: Callable[[Sequence[PackedRead]], CompiledReads],
    ) -> None:
        trained = [
            one for one in held if len(one.region.shape) > 1 and (one.delta is not None or one.parameter.requires_grad)
        ]
        ends = list(itertools.accumulate(one.region.num_elements for one in trained))
        self._trained = ends[-1] / sum(one.region.num_elements for one in held) if ends else 0.0
        self._device = trained[0].base.device if trained else torch.device("cpu")
        self._compile_reads = compile_reads
        self._reads: list[PackedRead] = []
        self._parts: list[tuple[int, slice]] = []
        """Where elements of one size lie in the buffer."""
        regions = [_region(trained, ends, int((number + 0.5) / PLACES * ends[-1])) for number in range(PLACES) if ends]
        num_bytes = 0

        def size_of(place: tuple[str, Region]) -> int:
            return DTYPE_BYTES[dtypes[place[0]]]

        for size, of_size in itertools.groupby(sorted(regions, key=size_of), key=size_of):
            first = num_bytes
            for tensor, region in of_size:
                axes = tuple(range(len(region.shape)))
                self._reads.append(PackedRead(tensor, region, axes, dtypes[tensor], num_bytes))
                num_bytes += aligned(self._reads[-1].num_bytes)
            self._parts.append((size, slice(first, num_bytes)))
        self._num_bytes = num_bytes
        self._num_elements = sum(read.region.num_elements for read in self._reads)
        self._sent: tuple[Tensor, FillSlot] | None = None
        """The bytes of the version looked at last, and what fills them."""
        self._version: int | None = None
        self._num_changed: Tensor | None = None

    @torch.no_grad()
    def look(self, version: int) -> None:
        """Write the rows, and compare them with those of the version before. Nothing waits for the device.

        Another look at the same version, by a later round of its publish, changes nothing.
        """
        if version == self._version or not self._reads:
            return
        self._version = version
        if self._sent is None:
            sent = torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._device)
            self._sent = sent, self._compile_reads(self._reads)(sent)
            self._sent[1]()
            return
        sent, fill = self._sent
        before = sent.clone()
        fill()
        changed = [before[part].view(_BITS[size]).ne(sent[part].view(_BITS[size])).sum() for size, part in self._parts]
        self._num_changed = torch.stack(changed).sum()

    def share(self) -> float | None:
        """Between the last two versions looked at; None at the first, and where nothing is trained."""
        if self._num_changed is None:
            return None
        return float(self._num_changed) / self._num_elements * self._trained


def _region(held: Sequence[HeldTensor | FusedTensor], ends: Sequence[int], place: int) -> tuple[str, Region]:
    """A tensor's name, and its rows from the one on that has the place-th trained element; in one row of blocks."""
    index = bisect_right(ends, place)
    one = held[index]
    *outer, num_rows, num_columns = one.region.shape
    element = place - (ends[index - 1] if index else 0)
    *leading, row, _ = (int(at) for at in np.unravel_index(element, one.region.shape))
    first = one.region.start[-2]
    stop = min(first + num_rows, ((first + row) // BLOCK + 1) * BLOCK)
    count = min(max(1, PLACE_ELEMENTS // num_columns), stop - first - row)
    start = (*(a + b for a, b in zip(one.region.start, leading, strict=False)), first + row, one.region.start[-1])
    return one.tensor, Region(start, (*(1 for _ in outer), count, num_columns))


class UpdateProbe:
    """How much of an adapter's update engines lack. A look takes less than half a megabyte beside a merge's scratch.

    Args:
        added: (matrix, region) -> what engines get beyond the base; the region lies in one row of blocks.
    """

    def __init__(self, held: Sequence[HeldTensor], added: Callable[[HeldTensor, Region], Tensor]) -> None:
        self._held, self._added = list(held), added
        self._sums: Tensor | None = None

    @torch.no_grad()
    def look(self, version: int, gathered_a: dict[str, Tensor]) -> None:
        """Take the rows of a version, whose weights can be read; nothing waits for the device."""
        count = min(MATRICES, len(self._held))
        self._sums = None
        for place in range(count):  # spread over the layers
            index = (place * len(self._held) // count + version) % len(self._held)
            sums = self._of(self._held[index], version, gathered_a)
            self._sums = sums if self._sums is None else self._sums + sums

    def error(self) -> float | None:
        """What was found at the last look; None where nothing is adapted, or the adapter adds nothing yet."""
        if self._sums is None:
            return None
        inner, square = self._sums.tolist()
        return abs(1.0 - inner / square) if square > 0 else None

    def _of(self, held: HeldTensor, version: int, gathered_a: dict[str, Tensor]) -> Tensor:
        start, stop = held.region.start[0], held.region.stop[0]
        blocks = range(start // BLOCK, -(-stop // BLOCK))
        block = blocks[version % len(blocks)]
        first = max(start, block * BLOCK)
        rows = max(1, MATRIX_ELEMENTS // held.region.shape[1])
        num_rows = min(rows, stop - first, (block + 1) * BLOCK - first)
        region = Region((first, 0), (num_rows, held.region.shape[1]))
        operands = held.run(region).operands(gathered_a)
        factor = operands.a_EKN[operands.first_row // operands.rows_a_factor]
        update = operands.scale * (operands.b_GRK[0].float() @ factor.float())
        got = self._added(held, region)
        return torch.stack([(got * update).sum(dtype=torch.float64), update.square().sum(dtype=torch.float64)])
