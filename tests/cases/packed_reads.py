"""Parts of tensors, reads of a weight source into a slot, and what the slot must hold then."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from slipstream.weight_sync.layout import Region, TensorMeta
from slipstream.weight_sync.pipeline.packing import CompilingSource, PackedRead
from slipstream.weight_sync.source import WeightSource

Parts = Mapping[tuple[str, tuple[int, ...]], Tensor]
"""What was read, by tensor and start."""
T = TypeVar("T", covariant=True)


class Sliced(Protocol[T]):
    def __getitem__(self, key: tuple[slice, ...], /) -> T: ...


def part_of(whole: Sliced[T], region: Region) -> T:
    return whole[tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))]


def are_the_same_bits(one: Tensor, other: Tensor) -> bool:
    # A view of one column may call itself contiguous whatever its stride; a clone is dense.
    dense = (t.clone(memory_format=torch.contiguous_format) for t in (one, other))
    return one.dtype is other.dtype and torch.equal(*(t.view(torch.uint8) for t in dense))


def read_shards(source: WeightSource, dtype: torch.dtype) -> dict[tuple[str, tuple[int, ...]], Tensor]:
    read = {}
    for shard in source.layout().shards:
        read[shard.tensor, shard.region.start] = out = torch.full(shard.region.shape, -7.0, dtype=dtype)
        source.read(shard.tensor, shard.region, out)
    return read


def assert_covered(parts: Iterable[Parts], wholes: Mapping[str, Tensor], times: Mapping[str, int]) -> None:
    """Every part is a slice of its tensor, and together they hold each element once, or so often."""
    seen = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in wholes.items()}
    for read in parts:
        for (name, start), values in read.items():
            region = Region(start, tuple(values.shape))
            assert are_the_same_bits(values, part_of(wholes[name], region)), name
            part_of(seen[name], region).add_(1)
    for name, count in seen.items():
        assert (count == times.get(name, 1)).all(), name


class Reads(list[PackedRead]):
    """Their bytes lie one after the other."""

    num_bytes = 0

    def add(
        self, meta: TensorMeta, region: Region | None = None, axes: tuple[int, ...] = (), gap: int = 0, align: int = 1
    ) -> None:
        """Read the whole tensor in its own order, unless `region` or `axes` say otherwise."""
        region = region or Region((0,) * len(meta.shape), meta.shape)
        self.append(PackedRead(meta.name, region, axes or tuple(range(len(region.shape))), meta.dtype, self.num_bytes))
        self.num_bytes += -(-self[-1].num_bytes // align) * align + gap

    def check(self, source: CompilingSource, wholes: Mapping[str, Tensor]) -> None:
        """They fill a slot with slices of these tensors."""
        slot = torch.full((self.num_bytes,), 255, dtype=torch.uint8)
        source.compile_reads(self)(slot)()
        for read in self:
            assert are_the_same_bits(read.view(slot), part_of(wholes[read.tensor], read.region)), read


def drawn_reads(data: st.DataObject, metas: Sequence[TensorMeta]) -> Reads:
    """Tensors in checkpoint order, cut by rows and from a column on, some permuted, with gaps: what joins and what does
    not. Tensors of one shape may be cut alike, as by TP.
    """
    first = data.draw(st.integers(0, len(metas) - 1))
    is_kept = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    is_alike, is_narrow = data.draw(st.booleans()), data.draw(st.booleans())
    cuts, reads = dict[tuple[int, ...], int](), Reads()
    for meta in metas[first : first + data.draw(st.integers(1, 12))]:
        cut = data.draw(st.integers(1, meta.shape[0]))
        cut = cuts.setdefault(meta.shape, cut) if is_alike else cut
        left = data.draw(st.integers(0, meta.shape[-1] - 1)) if is_narrow and len(meta.shape) == 2 else 0
        for (start, stop), is_wanted in zip(((0, cut), (cut, meta.shape[0])), is_kept, strict=True):
            if start < stop and is_wanted:
                shape = (stop - start, *meta.shape[1:-1], meta.shape[-1] - left)[: len(meta.shape)]
                region = Region((start, *[0] * (len(meta.shape) - 2), left)[: len(meta.shape)], shape)
                axes = tuple(data.draw(st.permutations(range(len(meta.shape)))))
                reads.add(meta, region, axes, gap=data.draw(st.sampled_from([0, 0, 0, 64])), align=4)
    return reads
