"""Promise of trainer/merge.py: a rectangle's merge is bitwise the same slice of the whole stack's merge."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.merge import merge_rows


def make_factors(num_factors: int, rows: int, columns: int, rank: int, dtype: torch.dtype, is_aligned: bool):
    generator = torch.Generator().manual_seed(num_factors * rows * columns * rank)
    base = torch.randn(num_factors * rows, columns, generator=generator).to(dtype)
    b = torch.randn(num_factors * rows, rank, generator=generator)
    # One float32 after a 64-byte boundary: what an expert's A inside a stacked parameter may be.
    storage = torch.randn(num_factors * rank * columns + 1, generator=generator)
    a = storage[0 if is_aligned else 1 :][: num_factors * rank * columns].view(num_factors, rank, columns)
    return base, b, a


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_a_rectangle_is_bitwise_the_slice_of_the_whole_stack(data):
    num_factors = data.draw(st.integers(1, 3))
    rows = data.draw(st.integers(1, 600))
    columns = data.draw(st.integers(1, 300))
    rank = data.draw(st.sampled_from([1, 3, 4, 8, 16, 64]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    base, b, a = make_factors(num_factors, rows, columns, rank, dtype, data.draw(st.booleans()))
    whole = torch.empty_like(base)
    merge_rows(base, b, a, 0.7, whole, first_row=0, rows_a_factor=rows)

    first_row = data.draw(st.integers(0, len(base) - 1))
    stop_row = data.draw(st.integers(first_row + 1, len(base)))
    first_column = data.draw(st.integers(0, columns - 1))
    stop_column = data.draw(st.integers(first_column + 1, columns))
    window = (slice(first_row, stop_row), slice(first_column, stop_column))
    part = torch.empty(base[window].shape[::-1], dtype=dtype).t()  # strided, as a permuted staging slot is
    skipped, place = divmod(first_row, rows)
    merge_rows(
        base[window],
        b[window[0]],
        a[skipped:],
        0.7,
        part,
        first_row=place,
        rows_a_factor=rows,
        first_column=first_column,
    )
    assert torch.equal(part, whole[window])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_formula(dtype):
    """Against float64. Values here are of magnitude 10: a bfloat16 result is within 2^-8 of its size, a
    float32 one within 2^-20.
    """
    base, b, a = make_factors(2, 300, 70, 8, dtype, is_aligned=True)
    out = torch.empty_like(base)
    merge_rows(base, b, a, 0.5, out, first_row=0, rows_a_factor=300)
    delta = torch.cat([0.5 * b[i * 300 : (i + 1) * 300].double() @ a[i].double() for i in range(2)])
    exact = base.double() + delta
    bound = 2**-8 if dtype is torch.bfloat16 else 2**-20
    assert ((out.double() - exact).abs() <= bound * (1 + exact.abs())).all()


def test_bfloat16_factors_are_multiplied_in_float32():
    """trainer.lora.dtype=bfloat16: the same bits as factors of the same values in float32, above all no rounding of
    scale * B to bfloat16.
    """
    base, b, a = make_factors(2, 300, 130, 8, torch.float32, True)
    b, a = b.bfloat16(), a.bfloat16()
    got, wanted = torch.empty_like(base), torch.empty_like(base)
    merge_rows(base, b, a, 0.7, got, first_row=0, rows_a_factor=300)
    merge_rows(base, b.float(), a.float(), 0.7, wanted, first_row=0, rows_a_factor=300)
    assert torch.equal(got, wanted)
