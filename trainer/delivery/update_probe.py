"""How much of an adapter's update is in the merged weights that engines get: a few rows of a few matrices a publish.

    kept  = <added, s B A> / <s B A, s B A>          over the rows looked at, in float32; `added`: what engines get
                                                     beyond the base, in their format
    error = |1 - kept|                               0: engines get the update; 1: they keep the base

Rounding to nearest loses what is less than half a step of the engine's format; rounding by thresholds is noise that is
larger than a small update, but its mean is right, and so is the share within error / sqrt(elements). Owns: which rows,
and the sums. Does not own how weights are written (merged_source.py). Rows move on from version to version. A look
takes less than half a megabyte beside the scratch of a merge, which is not counted in the watermark.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.trainer.weights.quantization import BLOCK
from slipstream.trainer.weights.shards import HeldTensor
from slipstream.weight_sync.layout import Region

MATRICES, ELEMENTS = 8, 1 << 13
"""Matrices of a publish, and elements of each."""


class UpdateProbe:
    """See the module's docstring.

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
        rows = max(1, ELEMENTS // held.region.shape[1])
        num_rows = min(rows, stop - first, (block + 1) * BLOCK - first)
        region = Region((first, 0), (num_rows, held.region.shape[1]))
        operands = held.run(region).operands(gathered_a)
        factor = operands.a_EKN[operands.first_row // operands.rows_a_factor]
        update = operands.scale * (operands.b_GRK[0].float() @ factor.float())
        got = self._added(held, region)
        return torch.stack([(got * update).sum(dtype=torch.float64), update.square().sum(dtype=torch.float64)])
