"""Matrices with adapters for bench/slow_links.py: the sender's side of a publish of factors, without a model."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.weight_sync.layout import Region, SourceLayout, SourceShard, TensorMeta
from slipstream.weight_sync.merging.factors import A_SUFFIX, B_SUFFIX, Merge
from slipstream.weight_sync.merging.merge import merger
from slipstream.weight_sync.merging.merge_operands import MergeOperands


def merges_of(matrices: Mapping[str, Tensor], rank: int) -> tuple[Merge, ...]:
    """An adapter of this rank in float32 for every matrix, rounded by thresholds."""
    return tuple(
        Merge(
            name, TensorMeta(name + A_SUFFIX, (rank, columns), "float32"),
            TensorMeta(name + B_SUFFIX, (rows, rank), "float32"), 2.0, 0, rows, 0, key,
        )
        for key, (name, (rows, columns)) in enumerate((name, tuple(one.shape)) for name, one in matrices.items())
    )  # fmt: skip


class LoraMatrices:
    """WeightSource over matrices and their adapters.

    Args:
        matrices: Frozen.
        merges: Of merges_of().
        is_merged: False: the matrices as they are.
    """

    temporary_bytes = 16 << 20
    """More than the scratch of a merge."""

    def __init__(self, matrices: Mapping[str, Tensor], merges: tuple[Merge, ...], *, is_merged: bool = True) -> None:
        generator = torch.Generator().manual_seed(2)
        factors = {meta.name: meta.shape for merge in merges for meta in (merge.a, merge.b)}
        self.factors = {name: torch.randn(shape, generator=generator) * 0.01 for name, shape in factors.items()}
        self._held = {**matrices, **self.factors}
        self._merges = {merge.tensor: merge for merge in merges} if is_merged else {}

    def layout(self) -> SourceLayout:
        shapes = {name: (tuple(held.shape), str(held.dtype)) for name, held in self._held.items()}
        metas = tuple(TensorMeta(name, shape, dtype.removeprefix("torch.")) for name, (shape, dtype) in shapes.items())
        return SourceLayout(0, metas, tuple(SourceShard(m.name, Region((0, 0), m.shape)) for m in metas))

    def begin(self, version: int) -> int:
        return 0

    def read(self, tensor: str, region: Region, out: Tensor) -> None:
        held, merge = self._held[tensor][tuple(map(slice, region.start, region.stop))], self._merges.get(tensor)
        if merge is None:
            out.copy_(held)
            return
        first, stop = region.start[0], region.stop[0]
        b, a = self.factors[merge.b.name][first:stop], self.factors[merge.a.name]
        operands = MergeOperands(held[None], b[None], a[None], merge.scale, first, merge.rows_a_factor, key=merge.key)
        merger(replace(operands, first_column=region.start[1]), out[None])()

    def end(self) -> None:
        """Nothing to drop."""
