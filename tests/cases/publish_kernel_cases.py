"""Kernels of a publish of whole parameters beside their torch definitions; see kernel_cases.py."""

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from cases.kernel_inputs import TILE_ROWS, WIDTH, assert_near, draw, dtypes_of, is_tried
from slipstream.trainer.weights import fp8_kernels
from slipstream.trainer.weights.quantization import BLOCK
from slipstream.trainer.weights.row_runs import Rows
from slipstream.weight_sync.hash_kernel import BLOCKS_A_PROGRAM, add_hashes
from slipstream.weight_sync.integrity import _tables, _within_keys, hash_with_torch
from slipstream.weight_sync.merging import merge, merge_kernel
from slipstream.weight_sync.merging.merge import round_into
from slipstream.weight_sync.merging.merge_operands import MergeOperands
from slipstream.weight_sync.merging.rounding import dithered, thresholds


def merged_bands(
    base: Tensor, b: Tensor, a: Tensor, scale: float, rows: Rows, columns: slice, key: int | None = None
) -> Tensor:
    """Rows of the kernel's merge, into columns one after the other; and, by thresholds, in place, as engines merge."""
    rows_a_factor = len(base) // len(a)
    base_GRN = rows.of(base)[..., columns]
    out_GRN = torch.full_like(base_GRN.transpose(1, 2), torch.nan).transpose(1, 2)
    skipped, first_row = divmod(rows.start, rows_a_factor)
    operands = MergeOperands(
        base_GRN, rows.of(b), a[skipped:], scale, first_row, rows_a_factor, rows.pitch, columns.start, key,
        500 + skipped * rows_a_factor,
    )  # fmt: skip
    merge_kernel.merger(operands, out_GRN)()
    if key is not None:
        live_GRN = base_GRN.clone(memory_format=torch.contiguous_format)
        merge_kernel.merger(replace(operands, base_GRN=live_GRN), live_GRN)()
        assert torch.equal(live_GRN, out_GRN)
    return out_GRN


def case_hashes_of_ranges(device: str) -> None:
    """Ranges that begin and end anywhere, read 16, 4 or 1 bytes at a time by one program or several: each has the hash
    of its torch form, and one without bytes adds nothing."""
    bytes_a_program = BLOCKS_A_PROGRAM * 4096
    data = torch.randint(0, 256, (bytes_a_program + 30_000,), generator=torch.Generator().manual_seed(1))
    data = data.to(torch.uint8).to(device)
    data = data[-data.data_ptr() % 64 :]
    places = (
        (0, 4096, 0), (16, 16, 16), (4, 8, 4), (1, 4999, 4095), (0, 0, 8), (16, 20_000, 8192 - 16),
        (32, bytes_a_program + 16, 0), (3, 1, 4096 * 9), (8, 12_288, 4096 + 4),
    )  # fmt: skip
    ranges = [(data[start : start + size], offset) for start, size, offset in places]
    tables = _tables(ranges)
    assert sorted((table.alignment, len(table.rows)) for table in tables) == [(1, 2), (4, 2), (16, 4)]
    sums = torch.zeros(len(ranges), dtype=torch.int64, device=device)
    for table in tables:
        add_hashes(
            sums, table.rows, _within_keys(sums.device), table.across,
            alignment=table.alignment, max_blocks=table.max_blocks,
        )  # fmt: skip
    assert sums.tolist() == [int(hash_with_torch(one, offset_bytes=offset)) for one, offset in ranges]
    assert sums[4] == 0


def case_merge(device: str) -> None:
    """One band under several A, and bands of one A each: near the torch form, and bitwise what the whole stack has.

    On a CPU the inputs are integers and the scale is 1/2, so that sums are exact in any order: the interpreter of
    Triton multiplies with the BLAS library, which picks its kernel, and so its order of a sum, by CPU and by shape. It
    cuts off what bfloat16 does not hold.
    """
    num_factors, rows_a_factor = 3, 2 * TILE_ROWS + 22
    shapes = [(num_factors * rows_a_factor, WIDTH), (num_factors * rows_a_factor, 4), (num_factors, 4, WIDTH)]
    drawn = [draw(*shape, device=device, seed=seed) for seed, shape in enumerate(shapes)]
    scale = 0.7
    if device == "cpu":
        drawn, scale = [(20 * values).round() for values in drawn], 0.5
    formats = itertools.product((torch.float32, torch.bfloat16), (None, 2**31 - 7))
    for i, (dtype, key) in enumerate(formats):
        base, b, a = drawn[0].to(dtype), *drawn[1:]
        everything = slice(0, WIDTH)
        whole = merged_bands(base, b, a, scale, Rows(0, len(base)), everything, key)[0]
        wanted = torch.empty(base.shape, dtype=dtype)
        operands = MergeOperands(
            base.cpu()[None], b.cpu()[None], a.cpu(), scale, 0, rows_a_factor, key=key, stack_row=500
        )  # fmt: skip
        merge.merger(operands, wanted[None])()
        assert_near(whole.cpu(), wanted, f"whole {dtype}")
        if dtype is torch.bfloat16:  # of equal float32 values, equal bits
            exact = merged_bands(base.float(), b, a, scale, Rows(0, len(base)), everything)[0].cpu()
            cut = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32)
            wanted = (cut if device == "cpu" else exact).to(dtype)
            if key is not None:
                round_into(wanted, exact, key, torch.arange(500, 500 + len(base)), 0)
                assert not torch.equal(wanted, exact.to(dtype)) and not torch.equal(wanted, cut.to(dtype))
            assert torch.equal(whole.cpu(), wanted)
        bands = (
            (Rows(TILE_ROWS, 2 * rows_a_factor), everything),  # from amid one A to amid another
            (Rows(rows_a_factor + 5, 70), slice(7, 40)),
            (Rows(3, 70, 6, rows_a_factor // 2), everything),  # a TP rank's part of gate and of up
            (Rows(rows_a_factor // 2, 75, 4, rows_a_factor // 2), slice(8, 9)),
            (Rows(5, rows_a_factor - 5, 3, rows_a_factor), everything),
            (Rows(9, 64, 2, 2 * rows_a_factor), slice(0, 33)),
        )
        for rows, columns in [band for j, band in enumerate(bands) if is_tried(device, i, j, one_of=3)]:
            merged = merged_bands(base, b, a, scale, rows, columns, key)
            assert torch.equal(merged, rows.of(whole)[..., columns]), (rows, columns, dtype)


def case_block_fp8(device: str) -> None:
    """Scales of blocks, and the cast to FP8, of the merge kernel's own values: the bits of torch's operations.

    Rows of blocks are of 50 rows here, so that tiles begin, end and lie amid them; some rows are in no block. On a CPU
    the inputs are small integers, as in case_merge, and neither quotients nor codes are cast: Triton's interpreter
    forgets the carry of a rounding to FP8.
    """
    num_factors, rows_a_factor, width = 2, TILE_ROWS + 22, BLOCK + 40
    shapes = [(num_factors * rows_a_factor, width), (num_factors * rows_a_factor, 4), (num_factors, 4, width)]
    drawn = [draw(*shape, device=device, seed=seed) for seed, shape in enumerate(shapes)]
    scale = 0.7
    if device == "cpu":
        drawn, scale = [(2 * values).round() for values in drawn], 0.5
    b, a = drawn[1:]
    row_block = torch.arange(num_factors * rows_a_factor, dtype=torch.int32, device=device) // 50
    num_blocks = int(row_block[-1]) + 1
    row_block[100:130] = num_blocks
    for (place, dtype), rank in itertools.product(enumerate(dtypes_of(device)), (4, 0)):
        if not is_tried(device, place, rank // 4):
            continue
        base = drawn[0].to(dtype, copy=True)
        base[50:100, BLOCK:] = 0.0
        operands = MergeOperands(base[None], b[None, :, :rank], a[:, :rank], scale, 0, rows_a_factor)
        merged = torch.empty(base.shape, device=device)
        merge_kernel.merger(operands, merged[None])()
        scales = torch.zeros(num_blocks + 1, -(-width // BLOCK), device=device)
        fp8_kernels.measurer(operands, row_block[None], scales)()
        wanted = torch.zeros_like(scales)
        for block, columns in enumerate(merged.abs().split(BLOCK, dim=1)):
            wanted[:, block].scatter_reduce_(0, row_block.long(), columns.amax(1), "amax")
        assert torch.equal(scales[:-1], wanted[:-1]), (dtype, rank)
        assert not scales[-1].any()
        scales = (scales / torch.tensor(448.0, device=device)).masked_fill_(scales == 0, 1.0)
        quotients = merged / scales[row_block.long()].repeat_interleave(BLOCK, 1)[:, :width]
        values = quotients.clamp_(-448.0, 448.0).to(torch.float32 if device == "cpu" else torch.float8_e4m3fn)
        for rows, first_column in (
            (Rows(0, len(base)), 0),
            (Rows(TILE_ROWS + 9, rows_a_factor), BLOCK - 3),
            (Rows(3, 30, 4, rows_a_factor // 2), 17),
        ):
            skipped, first_row = divmod(rows.start, rows_a_factor)
            part = MergeOperands(
                rows.of(base)[..., first_column:], rows.of(b)[..., :rank], a[skipped:, :rank], scale, first_row,
                rows_a_factor, rows.pitch, first_column,
            )  # fmt: skip
            out = torch.zeros(part.base_GRN.transpose(1, 2).shape, dtype=values.dtype, device=device).transpose(1, 2)
            fp8_kernels.caster(part, rows.of(row_block), scales, 448.0, out)()
            wanted = rows.of(values.float())[..., first_column:]
            assert torch.equal(out.float(), wanted), (rows, first_column, dtype, rank)
            fp8_kernels.caster(
                replace(part, key=99, stack_row=skipped * rows_a_factor), rows.of(row_block), scales, 448.0, out
            )()
            scales_RN = scales[row_block.long()].repeat_interleave(BLOCK, 1)[:, :width]
            codes = (base.float() / scales_RN).clamp_(-448.0, 448.0).to(values.dtype).float()
            sums = (codes + (merged - base.float()) / scales_RN).clamp_(-448.0, 448.0).cpu()
            drawn_RN = thresholds(99, torch.arange(len(base)), range(width))
            wanted = rows.of(dithered(sums, drawn_RN, torch.float8_e4m3fn).to(device))[..., first_column:]
            assert torch.equal(out.float(), wanted), ("dithered", rows, first_column, dtype, rank)
