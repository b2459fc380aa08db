"""Rectangles in memory become what slicing, permuting and casting give, in as few copies as neighbours allow."""

import itertools
from math import prod

import torch
from cases.packed_reads import part_of
from hypothesis import given, settings, strategies as st

from slipstream.weight_sync.disk.copies import Columns, Converted, Held, Run, blocks_of, compile_copies, split
from slipstream.weight_sync.disk.tensor_source import TensorSource
from slipstream.weight_sync.layout import Region, TensorMeta
from slipstream.weight_sync.pipeline.packing import PackedRead


def values(shape: tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(prod(shape))).to(getattr(torch, dtype))


def as_held(name: str, whole: torch.Tensor, region: Region) -> Held:
    data = part_of(whole, region).contiguous().reshape(-1).view(torch.uint8)
    return Held(name, region, str(whole.dtype).removeprefix("torch."), data)


@st.composite
def nested_regions(draw: st.DrawFn) -> tuple[tuple[int, ...], Region, Region]:
    """A tensor's shape, a rectangle of it that is held, a rectangle of that one."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))

    def inside(region: Region) -> Region:
        start, size = [], []
        for first, length in zip(region.start, region.shape, strict=True):
            skip = draw(st.integers(0, length - 1))
            start.append(first + skip)
            size.append(draw(st.integers(1, length - skip)))
        return Region(tuple(start), tuple(size))

    held = inside(Region((0,) * len(shape), shape))
    return shape, held, inside(held)


@settings(max_examples=200)
@given(nested_regions(), st.sampled_from(["float32", "bfloat16"]), st.sampled_from(["float32", "bfloat16"]), st.data())
def test_a_read_is_slicing_permuting_and_casting(
    regions: tuple[tuple[int, ...], Region, Region], stored: str, wanted: str, data: st.DataObject
) -> None:
    shape, held_region, region = regions
    whole = values(shape, stored)
    axes = tuple(data.draw(st.permutations(range(len(shape)))))
    scratch_bytes = data.draw(st.integers(8, 64))
    meta = TensorMeta("w", shape, stored)
    source = TensorSource(0, [meta], [as_held("w", whole, held_region)], scratch_bytes=scratch_bytes)
    read = PackedRead("w", region, axes, wanted, 16)
    slot = torch.full((16 + read.num_bytes + 3,), 7, dtype=torch.uint8)
    source.begin(0)
    source.compile_reads([read])(slot)()
    expected = part_of(whole, region)
    assert torch.equal(read.view(slot), expected.to(getattr(torch, wanted)))
    assert (slot[:16] == 7).all()
    assert (slot[-3:] == 7).all()
    assert source.begin(0) <= source.temporary_bytes <= max(scratch_bytes, 8)
    out = torch.empty(region.shape, dtype=getattr(torch, wanted))
    source.read("w", region, out)
    assert torch.equal(out, expected.to(out.dtype))


@given(nested_regions())
def test_blocks_name_every_byte_of_a_rectangle_once_in_order(regions: tuple[tuple[int, ...], Region, Region]) -> None:
    shape, held_region, region = regions
    held = Held("w", held_region, "bfloat16", torch.empty(2 * held_region.num_elements, dtype=torch.uint8))
    named = [
        block.offset + row * block.pitch + byte
        for block in blocks_of(held, region)
        for row in range(block.height)
        for byte in range(block.width)
    ]
    strides = [2 * prod(held_region.shape[dim + 1 :]) for dim in range(len(shape))]
    wanted = []
    for index in itertools.product(*(range(a, b) for a, b in zip(region.start, region.stop, strict=True))):
        at = sum((i - a) * stride for i, a, stride in zip(index, held_region.start, strides, strict=True))
        wanted += [at, at + 1]
    assert named == wanted


@given(nested_regions(), st.integers(1, 20))
def test_pieces_cover_a_rectangle_in_order_and_are_small(
    regions: tuple[tuple[int, ...], Region, Region], max_elements: int
) -> None:
    region = regions[2]
    pieces = list(split(region, max_elements))
    assert all(piece.num_elements <= max_elements for piece in pieces)
    points = [
        point
        for piece in pieces
        for point in itertools.product(*(range(a, b) for a, b in zip(piece.start, piece.stop, strict=True)))
    ]
    assert points == list(itertools.product(*(range(a, b) for a, b in zip(region.start, region.stop, strict=True))))


def test_neighbours_in_memory_and_slot_are_one_copy_and_others_are_not() -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    one = Held("a", Region((0, 0), (3, 4)), "bfloat16", memory[0:24])
    two = Held("b", Region((0, 0), (2, 4)), "bfloat16", memory[24:40])
    far = Held("c", Region((0,), (5,)), "bfloat16", memory[50:60])

    def read(held: Held, region: Region, offset: int, dtype: str = "bfloat16") -> tuple[Held, PackedRead]:
        return held, PackedRead(held.tensor, region, tuple(range(len(region.shape))), dtype, offset)

    whole = [read(one, one.region, 0), read(two, two.region, 24), read(far, far.region, 40)]
    joined = compile_copies(whole, 64)
    assert [(type(copy), copy.data.numel()) for copy in joined] == [(Run, 40), (Run, 10)]  # type: ignore[union-attr]
    gap = compile_copies([read(one, one.region, 0), read(two, two.region, 32)], 64)
    assert len(gap) == 2
    columns = compile_copies([read(one, Region((0, 2), (3, 2)), 0), read(two, two.region, 12, "float32")], 64)
    assert [type(copy) for copy in columns] == [Columns, Converted]
