"""The fingerprint is what its definition says, in plain Python; what it never misses follows from that."""

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from slipstream.weight_sync import integrity
from slipstream.weight_sync.integrity import MIN_SCRATCH_BYTES, hash_bytes

MASK = (1 << 64) - 1


def splitmix64(value: int) -> int:
    value = (value + 1) * 0x9E3779B97F4A7C15 & MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def reference(data: bytes, offset_bytes: int = 0) -> int:
    """The definition, byte by byte."""
    total = 0
    for position, byte in enumerate(data, start=offset_bytes):
        word, shift = position // 4, 8 * (position % 4)
        within = splitmix64(0x51A95D3A + word % 1024) | 1
        across = splitmix64(0xB10C5EED + word // 1024) | 1
        total += (byte << shift) * within * across
    return total & MASK


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(st.binary(max_size=40), st.integers(0, 20_000))
def test_matches_its_definition(data: bytes, offset_bytes: int) -> None:
    assert hash_bytes(tensor_of(data), offset_bytes=offset_bytes) == reference(data, offset_bytes)


@pytest.mark.parametrize("offset_bytes", [0, 1, 2, 3, 4094, 4095, 4096, 4099])
def test_matches_its_definition_across_blocks_and_chunks(offset_bytes: int) -> None:
    data = random_bytes(3 * 4096 + 7)
    wanted = reference(bytes(data.tolist()), offset_bytes)
    assert hash_bytes(data, offset_bytes=offset_bytes) == wanted
    assert hash_bytes(data, offset_bytes=offset_bytes, scratch_bytes=MIN_SCRATCH_BYTES) == wanted


@pytest.mark.parametrize("offset_bytes", [1 << 18, (1 << 20) - 2, (5 << 20) + 1])
def test_a_range_far_into_a_parameter_matches_its_definition_and_adds_up(offset_bytes: int) -> None:
    """Zeros add nothing, so the definition need not walk over them."""
    data = random_bytes(2 * 4096 + 7)
    wanted = reference(bytes(data.tolist()), offset_bytes)
    assert hash_bytes(data, offset_bytes=offset_bytes) == wanted
    assert hash_bytes(torch.cat([torch.zeros(offset_bytes, dtype=torch.uint8), data])) == wanted
    parts = [hash_bytes(part, offset_bytes=offset_bytes + 5000 * i) for i, part in enumerate(data.split(5000))]
    assert sum(parts) & MASK == wanted


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_as_many_blocks_are_hashed_at_once_as_the_scratch_has_room_for(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, hash_chunk = [], integrity._hash_chunk
    monkeypatch.setattr(
        integrity, "_hash_chunk", lambda data, at: (chunks.append((at, at + len(data))), hash_chunk(data, at))[1]
    )
    hash_bytes(random_bytes(7 * 4096), offset_bytes=5, scratch_bytes=num_blocks * MIN_SCRATCH_BYTES + 100)
    ends = [*range(num_blocks * 4096, 7 * 4096 + 5, num_blocks * 4096), 7 * 4096 + 5]
    assert chunks == list(zip([5, *ends], ends))


def test_a_kernel_reads_a_range_in_units_that_divide_its_address_its_place_and_its_size() -> None:
    base = torch.zeros(64, dtype=torch.uint8)
    at_16, at_4, short, odd, nothing = base[:32], base[4:36], base[:20], base[:3], base[:0]
    ranges = [(at_16, 0), (at_16, 4), (at_4, 0), (short, 0), (odd, 0), (nothing, 0), (at_16, 4080), (at_16, 4064)]
    tables = integrity._tables(ranges)
    numbers = {table.alignment: table.rows[:, 5].tolist() for table in tables}
    num_blocks = {table.alignment: table.rows[:, 4].tolist() for table in tables}
    assert (numbers, num_blocks) == ({16: [0, 6, 7], 4: [1, 2, 3], 1: [4]}, {16: [1, 2, 1], 4: [1, 1, 1], 1: [1]})
    assert {table.alignment: (table.max_blocks, len(table.across)) for table in tables} == {
        16: (2, 2), 4: (1, 1), 1: (1, 1)
    }  # fmt: skip


@given(st.lists(st.integers(0, 9_001), max_size=6))
@settings(max_examples=40)
def test_any_partition_adds_up(cuts: list[int]) -> None:
    data = random_bytes(9_001)
    edges = [0, *sorted(cuts), 9_001]
    parts = [hash_bytes(data[a:b], offset_bytes=a) for a, b in itertools.pairwise(edges)]
    assert sum(parts) & MASK == hash_bytes(data)


def test_hash_sees_bytes_not_values() -> None:
    assert hash_bytes(torch.tensor([0.0])) != hash_bytes(torch.tensor([-0.0]))
    assert hash_bytes(torch.zeros(3)) == 0


def test_strided_data_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        hash_bytes(torch.zeros(4, 4).t()[1:])
