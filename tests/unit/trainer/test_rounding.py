"""Promises of weight_sync/merging/rounding.py: the mean of rounded values is the value, a value of the format stays,
and the threshold of an element depends on the seed, the parameter, and its place there alone.
"""

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from slipstream.weight_sync.merging.rounding import FP8_MAX, dithered, key_of, rounded_sum, thresholds

FORMATS = [torch.bfloat16, torch.float8_e4m3fn]


def drawn(key: int, rows: int, columns: range, first_row: int = 0) -> torch.Tensor:
    return thresholds(key, torch.arange(first_row, first_row + rows), columns)


def mix(bits: int) -> int:
    """MurmurHash3's finalizer, in Python's integers."""
    bits = (bits ^ bits >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return bits ^ bits >> 16


def by_hand(key: int, row: int, column: int) -> int:
    """The finalizer twice."""
    return mix(mix(row * 0x9E3779B1 + key & 0xFFFFFFFF) ^ column * 0x85EBCA77 & 0xFFFFFFFF)


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**22), st.integers(0, 2**16))
def test_thresholds_are_those_of_the_hash(key, row, column):
    got = drawn(key, 2, range(column, column + 3), row)
    wanted = [[by_hand(key, row + i, column + j) for j in range(3)] for i in range(2)]
    assert (got.numpy().view(np.uint32) == np.array(wanted, dtype=np.uint32)).all()


def test_a_key_tells_seeds_and_parameters_apart():
    keys = {key_of(seed, f"layers.{layer}.{leaf}") for seed in range(9) for layer in range(9) for leaf in "abc"}
    assert len(keys) == 9 * 9 * 3
    assert all(0 <= key < 2**31 for key in keys)
    for seed, name in ((3, "a"), (4, "a"), (3, "b")):  # a resume by another release draws the same thresholds
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest()
        assert key_of(seed, name) == int.from_bytes(digest, "little") % 2**31


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("size", [1.0, 1e-3, 2.0**-10, 300.0])
def test_the_mean_is_right(dtype, size):
    """Over n = 2^18 elements of one value, 0.3 steps of the format above one of its values. An error has a standard
    deviation of at most half a step, so that five of their mean's are 5 step / 2 / sqrt(n). To nearest, 0.3 are lost.
    """
    step = max(2.0 ** (math.floor(math.log2(size)) - 3), 2.0**-9) if dtype is torch.float8_e4m3fn else size * 2**-7
    below = float(torch.tensor(size).to(dtype).float())
    value = below + 0.3 * step
    values = torch.full((512, 512), value)
    for sign in (1, -1):
        rounded = dithered(sign * values, drawn(7, 512, range(512)), dtype)
        assert abs(float(rounded.double().mean()) - sign * value) < 5 * step / 2 / 512
        assert len(rounded.unique()) == 2
        nearest = float(torch.tensor(sign * value).to(dtype).float())
        assert abs(nearest - sign * value) > 0.1 * step


@pytest.mark.parametrize("dtype", FORMATS)
def test_values_of_the_format_stay_and_others_go_to_a_neighbour(dtype):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(300, 200, generator=generator) * torch.logspace(-6, 2, 200)
    values = values.clamp(-FP8_MAX, FP8_MAX)
    kept = values.to(dtype).float()
    bits = drawn(3, 300, range(200))
    assert torch.equal(dithered(kept, bits, dtype), kept)
    table = torch.arange(0x7F80 if dtype is torch.bfloat16 else 0x7F)  # codes of the format's sizes, in order
    table = table.to(torch.int16 if dtype is torch.bfloat16 else torch.uint8).view(dtype).float()
    above = torch.searchsorted(table, values.abs())
    rounded = dithered(values, bits, dtype)
    is_neighbour = (rounded.abs() == table[above]) | (rounded.abs() == table[(above - 1).clamp(min=0)])
    assert is_neighbour.all()
    assert torch.equal(rounded.signbit(), values.signbit())


def test_zeros_infinities_and_what_is_no_number_stay():
    values = torch.tensor([[0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan]]).repeat(64, 1)
    values[:, 5] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # NaN of all ones, which a sum would wrap
    rounded = dithered(values, drawn(3, 64, range(6)), torch.bfloat16)
    assert torch.equal(rounded[:, :4], values[:, :4])
    assert rounded[:, 4:].isnan().all()


def test_a_sum_is_rounded_by_the_bits_of_both_addends_and_the_column():
    generator = torch.Generator().manual_seed(1)
    values, added = torch.randn(7, 9, generator=generator).bfloat16(), torch.randn(7, 9, generator=generator) / 100
    got = rounded_sum(values, added)
    bits = [tensor.numpy().view(np.uint32).astype(int) for tensor in (values.float(), added, values.float() + added)]
    for row, column in np.ndindex(7, 9):
        of_values, of_added, of_sum = (int(one[row, column]) for one in bits)
        drawn_bits = mix((of_added + of_values * 0x9E3779B1 ^ column * 0x85EBCA77) & 0xFFFFFFFF)
        assert int(got.numpy().view(np.uint32)[row, column]) == of_sum + (drawn_bits >> 16) & 0xFFFF0000
    assert torch.equal(rounded_sum(values[3:4], added[3:4]), got[3:4]), "wherever a row stands"
    assert torch.equal(rounded_sum(values, torch.zeros_like(added)), values.float())


def test_the_mean_of_sums_is_right_where_each_addend_is_less_than_half_a_step():
    added = torch.rand(64, 512, generator=torch.Generator().manual_seed(1)) * 2.0**-9
    values = torch.ones(64, 512).bfloat16()
    assert torch.equal((values + added.bfloat16()).float(), values.float()), "to nearest all are lost"
    got = rounded_sum(values, added).double() - 1
    assert got.unique().tolist() == [0.0, 2.0**-7]
    assert abs(float((got - added.double()).mean())) < 5 * 2.0**-8 / (64 * 512) ** 0.5


def test_small_changes_change_few_elements():
    """Of values that move by a hundredth of a step, a hundredth crosses its threshold: bytes of a delta stay few."""
    values = 1 + torch.rand(512, 512, generator=torch.Generator().manual_seed(2)) * 2**-7
    bits = drawn(5, 512, range(512))
    before, after = (dithered(moved, bits, torch.bfloat16) for moved in (values, values + 0.01 * 2**-7))
    assert 0.008 < float((before != after).float().mean()) < 0.012
