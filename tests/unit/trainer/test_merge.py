"""Promise of trainer/merge.py: a rectangle's merge is bitwise the same slice of the whole tensor's merge."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.merge import merge_region


def make_factors(out_features: int, in_features: int, rank: int, dtype: torch.dtype, aligned: bool):
    generator = torch.Generator().manual_seed(out_features * in_features * rank)
    base = torch.randn(out_features, in_features, generator=generator).to(dtype)
    b = torch.randn(out_features, rank, generator=generator)
    # One float32 after a 64-byte boundary: what an expert's A inside a stacked parameter may be.
    storage = torch.randn(rank * in_features + 1, generator=generator)
    a = storage[0 if aligned else 1 :][: rank * in_features].view(rank, in_features)
    return base, b, a


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_rectangle_is_bitwise_the_slice_of_the_whole(data):
    out_features = data.draw(st.integers(1, 600))
    in_features = data.draw(st.integers(1, 300))
    rank = data.draw(st.sampled_from([1, 3, 4, 8, 16, 64]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    base, b, a = make_factors(out_features, in_features, rank, dtype, data.draw(st.booleans()))
    whole = torch.empty(out_features, in_features, dtype=dtype)
    merge_region(base, b, a, 0.7, whole, first_row=0)

    first_row = data.draw(st.integers(0, out_features - 1))
    stop_row = data.draw(st.integers(first_row + 1, out_features))
    first_column = data.draw(st.integers(0, in_features - 1))
    stop_column = data.draw(st.integers(first_column + 1, in_features))
    window = (slice(first_row, stop_row), slice(first_column, stop_column))
    part = torch.empty(base[window].shape[::-1], dtype=dtype).t()  # strided, as a permuted staging slot is
    merge_region(base[window], b[window[0]], a, 0.7, part, first_row=first_row, first_column=first_column)
    assert torch.equal(part, whole[window])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_formula(dtype):
    """Against float64. Values here are of magnitude 10: a bfloat16 result is within 2^-8 of its size, a
    float32 one within 2^-20.
    """
    base, b, a = make_factors(300, 70, 8, dtype, aligned=True)
    out = torch.empty_like(base)
    merge_region(base, b, a, 0.5, out, first_row=0)
    exact = base.double() + 0.5 * b.double() @ a.double()
    bound = 2**-8 if dtype is torch.bfloat16 else 2**-20
    assert ((out.double() - exact).abs() <= bound * (1 + exact.abs())).all()
