"""Promise of weight_sync/merging/merge.py: a rectangle's merge is bitwise the same slice of the whole stack's merge; of
trainer/weights/row_runs.py: so are bands of rows at a pitch, which are one run.
"""

from itertools import pairwise

import pytest
import torch
from fakes.merging import merge_rows
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from slipstream.trainer.weights.row_runs import LoraDelta, RowRun, Rows
from slipstream.weight_sync.merging.factors import MERGE_ROWS
from slipstream.weight_sync.merging.merge import ALIGNMENT_BYTES, merger


def make_factors(num_factors: int, rows: int, columns: int, rank: int, dtype: torch.dtype, is_aligned: bool):
    generator = torch.Generator().manual_seed(num_factors * rows * columns * rank)
    base = torch.randn(num_factors * rows, columns, generator=generator).to(dtype)
    b = torch.randn(num_factors * rows, rank, generator=generator)
    # One float32 after a 64-byte boundary: what an expert's A inside a stacked parameter may be.
    storage = torch.randn(num_factors * rank * columns + 1, generator=generator)
    a = storage[0 if is_aligned else 1 :][: num_factors * rank * columns].view(num_factors, rank, columns)
    return base, b, a


@settings(max_examples=80)
@given(st.data())
def test_a_rectangle_is_bitwise_the_slice_of_the_whole_stack(data):
    num_factors = data.draw(st.integers(1, 3))
    rows = data.draw(st.integers(1, 600))
    columns = data.draw(st.integers(1, 300))
    rank = data.draw(st.sampled_from([1, 3, 4, 8, 16, 64]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    base, b, a = make_factors(num_factors, rows, columns, rank, dtype, data.draw(st.booleans()))
    key = data.draw(st.sampled_from([None, 12345]))
    whole = torch.empty_like(base)
    merge_rows(base, b, a, 0.7, whole, first_row=0, rows_a_factor=rows, key=key)

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
        key=key,
        stack_row=skipped * rows,
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


@pytest.mark.parametrize("shape", [(3, 8, 301), (2, 64, 257), (2, 3, 40)])
def test_factors_are_multiplied_where_they_are_aligned_and_have_the_same_bits_wherever_they_lie(shape, monkeypatch):
    """BLAS libraries choose a code path by alignment; which of them do so in a way that shows is the machine's."""
    num_factors, rank, columns = shape
    base, b, a = make_factors(num_factors, 300, columns, rank, torch.float32, is_aligned=False)
    got, wanted, addresses, multiply = torch.empty_like(base), torch.empty_like(base), [], torch.mm
    merge_rows(base, b, a.clone(), 0.7, wanted, first_row=0, rows_a_factor=300)
    monkeypatch.setattr(
        torch, "mm", lambda *two, out: addresses.extend(map(Tensor.data_ptr, two)) or multiply(*two, out=out)
    )
    merge_rows(base, b, a, 0.7, got, first_row=0, rows_a_factor=300)
    assert torch.equal(got, wanted)
    assert addresses and not any(address % ALIGNMENT_BYTES for address in addresses)


def test_a_row_is_multiplied_at_its_own_place_of_a_block_whatever_rows_are_asked_for(monkeypatch):
    """Where its place shows in its bits is the BLAS library's: here the places themselves are looked at."""
    base, b, a = make_factors(1, 600, 5, 1, torch.float32, is_aligned=True)
    b, places = torch.arange(1.0, 601.0)[:, None], {}

    def noted(block: Tensor, factor: Tensor, out: Tensor) -> None:
        places.update({int(block[place, 0]) - 1: place for place in block[:, 0].nonzero().flatten().tolist()})
        torch.matmul(block, factor, out=out)

    monkeypatch.setattr(torch, "mm", noted)
    for first, stop in ((0, 600), (37, 600), (255, 257), (300, 301)):
        places.clear()
        merge_rows(
            base[first:stop], b[first:stop], a, 1.0, torch.empty(stop - first, 5), first_row=first, rows_a_factor=600
        )
        assert places == {row: row % MERGE_ROWS for row in range(first, stop)}


def test_a_small_update_is_right_in_the_mean_and_lost_to_nearest():
    """Updates of a tenth of a bfloat16 step of weights near 1: along themselves, engines get all of them by thresholds,
    within what 300 * 200 errors of at most half a step's standard deviation make of their sum, and nothing to nearest.
    """
    step = 2**-7
    base = torch.full((300, 200), 1.0, dtype=torch.bfloat16)
    b, a = torch.full((300, 1), 0.1 * step), torch.ones(1, 1, 200)
    got = {}
    for key in (None, 12345):
        out = torch.empty_like(base)
        merge_rows(base, b, a, 1.0, out, first_row=0, rows_a_factor=300, key=key)
        got[key] = float((out.double() - 1).mean()) / (0.1 * step)
    assert got[None] == 0
    assert abs(got[12345] - 1) < 5 * 0.5 / 0.1 / (300 * 200) ** 0.5


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


def row_numbers(rows: Rows) -> list[int]:
    """Each row of bands, in order."""
    return [rows.start + band * rows.pitch + row for band in range(rows.num_bands) for row in range(rows.height)]


@settings(max_examples=80)
@given(st.data())
def test_bands_at_a_pitch_are_one_run_and_bitwise_slices_of_the_whole_stack(data):
    """Bands of one or several A each, on a rank whose first row is any one under its A; any columns; merged or bare;
    into any strides."""
    num_bands, height = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 300))
    pitch = height + data.draw(st.integers(1, 300))
    start = data.draw(st.integers(0, 100))
    held = start + (num_bands - 1) * pitch + height
    rows_a_factor = data.draw(st.sampled_from([pitch, 2 * pitch, max(1, pitch // 2), held]))
    cut = data.draw(st.integers(0, rows_a_factor - 1))
    num_factors = -(-(cut + held) // rows_a_factor)
    columns, rank = data.draw(st.integers(1, 60)), data.draw(st.sampled_from([1, 4, 16]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    base, b, a = make_factors(num_factors, rows_a_factor, columns, rank, dtype, data.draw(st.booleans()))
    whole = base.clone()
    delta = None
    if data.draw(st.booleans()):
        key = data.draw(st.sampled_from([None, 12345]))
        delta = LoraDelta("a", nn.Parameter(a), nn.Parameter(b[cut:]), rows_a_factor, cut, 0.7, key, 77)
        merge_rows(base, b, a, 0.7, whole, first_row=0, rows_a_factor=rows_a_factor, key=key, stack_row=77)
    left = data.draw(st.integers(0, columns - 1))
    window = slice(left, data.draw(st.integers(left + 1, columns)))

    weight = nn.Parameter(base[cut:])
    bands = [RowRun(weight, delta, Rows(start + i * pitch, height), window) for i in range(num_bands)]
    run: RowRun | None = bands[0]
    for band in bands[1:]:
        run = run and run.joined(band)
    firsts = [cut + band.rows.start for band in bands]
    is_under_one_a = all(first // rows_a_factor == (first + height - 1) // rows_a_factor for first in firsts)
    assert (run is not None) == (delta is None or is_under_one_a)
    if run is None:
        return
    assert run.rows == Rows(start, height, num_bands, pitch)
    out = torch.full(run.shape[::-1], torch.nan, dtype=dtype).t()
    with torch.no_grad():
        run.write(out, {})
    assert torch.equal(out, whole[cut:][row_numbers(run.rows), window])


def test_what_follows_at_no_pitch_is_a_run_of_its_own():
    two = Rows(10, 4).joined(Rows(20, 4))
    assert two == Rows(10, 4, num_bands=2, pitch=10)
    assert two.joined(Rows(30, 4)) == Rows(10, 4, num_bands=3, pitch=10)
    assert Rows(10, 4).joined(Rows(14, 7)) == Rows(10, 11)
    for following in (Rows(31, 4), Rows(30, 3), Rows(30, 5), Rows(24, 4), Rows(20, 4)):
        assert two.joined(following) is None, following
    for following in (Rows(12, 4), Rows(2, 4), Rows(20, 3), two):
        assert Rows(10, 4).joined(following) is None, following


def test_rows_of_other_columns_or_of_another_parameter_are_a_run_of_their_own():
    weight, other = (nn.Parameter(torch.zeros(8, 6)) for _ in range(2))
    run = RowRun(weight, None, Rows(0, 2), slice(0, 3))
    assert run.joined(RowRun(weight, None, Rows(2, 2), slice(0, 3))) == RowRun(weight, None, Rows(0, 4), slice(0, 3))
    assert run.joined(RowRun(weight, None, Rows(2, 2), slice(3, 6))) is None
    assert run.joined(RowRun(weight, None, Rows(2, 2), slice(0, 6))) is None
    assert run.joined(RowRun(other, None, Rows(2, 2), slice(0, 3))) is None


def test_bands_that_end_with_their_a_are_one_run_and_those_that_reach_into_the_next_one_are_not():
    weight, b = nn.Parameter(torch.zeros(13, 2)), nn.Parameter(torch.zeros(13, 1))
    delta = LoraDelta("a", nn.Parameter(torch.zeros(3, 1, 2)), b, 4, 0, 1.0)
    for start, is_one in ((0, True), (1, False)):
        first, second = (RowRun(weight, delta, Rows(at, 4), slice(0, 2)) for at in (start, start + 8))
        assert (first.joined(second) is not None) == is_one


def test_rows_under_a_later_a_are_rounded_by_their_own_thresholds():
    base, b, a = make_factors(3, 4, 32, 2, torch.bfloat16, is_aligned=True)
    whole = torch.empty_like(base)
    merge_rows(base, b, a, 0.7, whole, first_row=0, rows_a_factor=4, key=12345, stack_row=77)
    delta = LoraDelta("a", nn.Parameter(a), nn.Parameter(b), 4, 0, 0.7, 12345, 77)
    run = RowRun(nn.Parameter(base), delta, Rows(9, 3), slice(0, 32))
    out = torch.empty(run.shape, dtype=torch.bfloat16)
    with torch.no_grad():
        run.write(out, {})
    assert torch.equal(out, whole[9:12])


def test_what_is_given_to_a_merge_is_of_the_rows_and_of_nothing_else():
    """Rows that nothing merges into; and rows of a rank whose first one is the third under its A."""
    weight = nn.Parameter(torch.randn(20, 6))
    bare = RowRun(weight, None, Rows(2, 3), slice(1, 5))
    operands, out = bare.operands({}), torch.empty(1, 3, 4)
    assert (operands.b_GRK.shape, operands.scale, bare.parameters) == ((1, 3, 0), 0.0, (weight,))
    with torch.no_grad():
        merger(operands, out)()
    assert torch.equal(out[0], weight[2:5, 1:5])

    base, b, a = make_factors(1, 40, 32, 2, torch.bfloat16, is_aligned=True)
    whole = torch.empty_like(base)
    merge_rows(base, b, a, 0.7, whole, first_row=0, rows_a_factor=40, key=12345, stack_row=77)
    held, of_a, of_b = nn.Parameter(base[3:30]), nn.Parameter(a[0]), nn.Parameter(b[3:30])
    delta = LoraDelta("a", of_a, of_b, 40, 3, 0.7, 12345, 77)
    run = RowRun(held, delta, Rows(1, 4, 3, 8), slice(0, 32))
    assert (delta.rank, run.shape) == (2, (12, 32))
    assert [id(one) for one in run.parameters] == [id(one) for one in (held, of_a, of_b)]
    assert (run.stack_rows() - 77).tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]
    out = torch.empty(run.shape, dtype=torch.bfloat16)
    with torch.no_grad():
        run.write(out, {})
    assert torch.equal(out, whole[run.stack_rows() - 77])


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 5), st.integers(1, 40))
def test_parts_are_the_rows_in_order_and_none_has_too_many(start, height, num_bands, gap, max_rows):
    rows = Rows(start, height, num_bands, height + gap)
    parts = list(rows.parts(max_rows))
    assert [row for _, part in parts for row in row_numbers(part)] == row_numbers(rows)
    assert parts[0][0] == 0
    assert all(later - first == len(part) for (first, part), (later, _) in pairwise(parts))
    assert max(len(part) for _, part in parts) <= max_rows
    whole = torch.arange(400).view(200, 2)
    for _, part in parts:
        assert part.of(whole).shape == (part.num_bands, part.height, 2)
        assert part.of(whole).flatten(0, 1)[:, 0].floor_divide(2).tolist() == row_numbers(part)
