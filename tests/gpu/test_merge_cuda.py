"""The merge kernel: any rectangle has the bits of the whole stack, and the values are those of the torch form."""

import pytest
import torch
from fakes.merging import merge_rows
from torch import nn

from slipstream.trainer.weights.row_runs import LoraDelta, RowRun, Rows

pytestmark = pytest.mark.gpu

WINDOWS = [
    (0, 700, 0, 200),
    (0, 350, 0, 200),
    (50, 410, 0, 200),
    (349, 351, 7, 100),
    (130, 260, 128, 200),
    (699, 700, 1, 2),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rank", [4, 32, 64])
@pytest.mark.parametrize("rows", [350, 128])
def test_any_rectangle_is_bitwise_the_slice_of_the_whole_stack(dtype: torch.dtype, rank: int, rows: int) -> None:
    num_factors = -(-700 // rows)
    torch.manual_seed(rank)
    base = torch.randn(num_factors * rows, 200, device="cuda").to(dtype)
    b = torch.randn(num_factors * rows, rank, device="cuda")
    a = torch.randn(num_factors, rank, 200, device="cuda")
    whole = torch.empty_like(base)
    merge_rows(base, b, a, 0.7, whole, first_row=0, rows_a_factor=rows)
    on_cpu = torch.empty(base.shape, dtype=dtype)
    merge_rows(base.cpu(), b.cpu(), a.cpu(), 0.7, on_cpu, first_row=0, rows_a_factor=rows)
    # Another order of the sum over the rank: float32 partial sums here reach about 40, so 2^-24 * 40 a step.
    tolerance = 2**-7 if dtype is torch.bfloat16 else 2**-16
    torch.testing.assert_close(whole.cpu(), on_cpu, rtol=tolerance, atol=tolerance)
    for first, stop, left, right in WINDOWS:
        skipped, place = divmod(first, rows)
        for is_transposed in (False, True):
            shape = (right - left, stop - first) if is_transposed else (stop - first, right - left)
            out = torch.empty(shape, dtype=dtype, device="cuda")
            out = out.t() if is_transposed else out
            merge_rows(
                base[first:stop, left:right],
                b[first:stop],
                a[skipped:],
                0.7,
                out,
                first_row=place,
                rows_a_factor=rows,
                first_column=left,
            )
            assert torch.equal(out, whole[first:stop, left:right])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_merged", [True, False])
@pytest.mark.parametrize("tp_size", [2, 8])
def test_bands_at_a_pitch_are_bitwise_slices_of_the_whole_stack(
    dtype: torch.dtype, is_merged: bool, tp_size: int
) -> None:
    """Every TP rank's rows of gate and of up, of all experts of Qwen3-30B-A3B's width, in one launch or copy."""
    num_experts, width, columns = 5, 768, 200
    torch.manual_seed(tp_size)
    base = torch.randn(num_experts * 2 * width, columns, device="cuda").to(dtype)
    b = torch.randn(num_experts * 2 * width, 32, device="cuda")
    a = torch.randn(num_experts, 32, columns, device="cuda")
    whole, delta = base.clone(), None
    if is_merged:
        merge_rows(base, b, a, 0.7, whole, first_row=0, rows_a_factor=2 * width)
        delta = LoraDelta("a", nn.Parameter(a), nn.Parameter(b), 2 * width, 0, 0.7)
    weight, height = nn.Parameter(base), width // tp_size
    for tp_rank in range(tp_size):
        for window in (slice(0, columns), slice(7, 100)):
            rows = Rows(tp_rank * height, height, 2 * num_experts, width)
            run = RowRun(weight, delta, rows, window)
            out = torch.full(run.shape, torch.nan, dtype=dtype, device="cuda")
            with torch.no_grad():
                run.write(out, {})
            wanted = whole.view(2 * num_experts, tp_size, height, columns)[:, tp_rank, :, window]
            assert torch.equal(out, wanted.flatten(0, 1))


def test_many_rows_land_far_apart() -> None:
    """Offsets past 2^31 bytes."""
    rows, columns = 1536, 2048
    base = torch.randn(700 * rows, columns, device="cuda", dtype=torch.bfloat16)
    b, a = torch.randn(700 * rows, 8, device="cuda"), torch.randn(700, 8, columns, device="cuda")
    out = torch.empty_like(base)
    merge_rows(base, b, a, 0.5, out, first_row=0, rows_a_factor=rows)
    last = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    merge_rows(base[-rows:], b[-rows:], a[-1:], 0.5, last, first_row=0, rows_a_factor=rows)
    assert torch.equal(out[-rows:], last)
    assert not torch.equal(last, base[-rows:])
    delta = LoraDelta("a", nn.Parameter(a), nn.Parameter(b), rows, 0, 0.5)
    run = RowRun(nn.Parameter(base), delta, Rows(rows // 4, rows // 2, 700, rows), slice(0, columns))
    halves = torch.empty(run.shape, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        run.write(halves, {})
    assert torch.equal(halves[-rows // 2 :], out[-rows * 3 // 4 : -rows // 4])


def test_bfloat16_factors_are_multiplied_in_float32() -> None:
    rows, columns = 300, 256
    base = torch.randn(2 * rows, columns, device="cuda")
    b, a = (torch.randn(shape, device="cuda").bfloat16() for shape in ((2 * rows, 8), (2, 8, columns)))
    got, wanted = torch.empty_like(base), torch.empty_like(base)
    merge_rows(base, b, a, 0.7, got, first_row=0, rows_a_factor=rows)
    merge_rows(base, b.float(), a.float(), 0.7, wanted, first_row=0, rows_a_factor=rows)
    assert torch.equal(got, wanted)
