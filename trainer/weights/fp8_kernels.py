"""Block scales and the cast to block-FP8 of merged weights: two Triton kernels around merge_kernel.py's tile.

`block_scales.py` says what they compute and holds the torch form. Both compute the merged values of a tile anew and
keep them in registers, so that a cast reads the base once and writes one byte a value.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from slipstream.trainer.weights.quantization import BLOCK
from slipstream.weight_sync.merging.merge_kernel import (
    NOT_SPECIALIZED,
    ROUNDING,
    TILE_COLUMNS,
    merged_tile,
    rounding_of,
    tile_thresholds,
    tiles_of,
)
from slipstream.weight_sync.merging.merge_operands import MergeOperands
from slipstream.weight_sync.merging.rounding_kernel import cut_bits

_BLOCK_N = tl.constexpr(TILE_COLUMNS)
assert BLOCK % TILE_COLUMNS == 0, "a tile's columns must lie in one block"


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "num_scale_rows"])
def _largest_of_blocks(
    matrices,
    num_rows,
    skipped_rows,
    first_tile,
    band_rows,
    tiles_a_band,
    first_row,
    pitch,
    row_block_ptr,
    row_block_band_stride,
    scales_ptr,
    scales_stride,
    num_scale_rows,
    FP8_BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
):
    """scales[row_block[row], column // FP8_BLOCK] = max(itself, |merged|) over a tile. Scales are 0 before."""
    merged, _, band, at, is_row, _, _ = merged_tile(  # pyright: ignore[reportGeneralTypeIssues]
        matrices, num_rows, skipped_rows, first_tile, band_rows, tiles_a_band, first_row, pitch, RANK, PADDED_RANK
    )  # fmt: skip
    largest = tl.max(tl.abs(merged), 1)
    row_block = tl.load(row_block_ptr + band * row_block_band_stride + at, mask=is_row, other=num_scale_rows)
    first = tl.min(row_block, 0)
    last = tl.max(tl.where(row_block < num_scale_rows, row_block, -1), 0)
    column_block = tl.program_id(0) * _BLOCK_N // FP8_BLOCK
    for one in range(first, last + 1):  # a tile of 64 rows lies in few blocks
        of_block = tl.max(tl.where(row_block == one, largest, 0.0), 0)
        tl.atomic_max(scales_ptr + one * scales_stride + column_block, of_block, sem="relaxed")


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, *ROUNDING])
def _cast_to_blocks(
    matrices,
    num_rows,
    skipped_rows,
    first_tile,
    band_rows,
    tiles_a_band,
    first_row,
    pitch,
    row_block_ptr,
    row_block_band_stride,
    scales_ptr,
    scales_stride,
    out_ptr,
    out_band_stride,
    out_stride,
    out_column_stride,
    key,
    stack_row,
    first_column,
    DITHERED: tl.constexpr,
    LARGEST: tl.constexpr,
    FP8_BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
):
    """out = merged / its block's scale, in the format of `out`. The first column is the weight's `first_column`. If
    DITHERED, what the adapter adds to the base's own code is rounded by the thresholds of `key`."""
    merged, base, band, at, is_row, columns, is_column = merged_tile(  # pyright: ignore[reportGeneralTypeIssues]
        matrices, num_rows, skipped_rows, first_tile, band_rows, tiles_a_band, first_row, pitch, RANK, PADDED_RANK
    )  # fmt: skip
    inside = is_row[:, None] & is_column[None, :]
    row_block = tl.load(row_block_ptr + band * row_block_band_stride + at, mask=is_row, other=0).to(tl.int64)
    column_block = (first_column + columns) // FP8_BLOCK
    scales = tl.load(scales_ptr + row_block[:, None] * scales_stride + column_block[None, :], mask=inside, other=1.0)
    if DITHERED:
        code = tl.clamp(tl.div_rn(base, scales), -LARGEST, LARGEST).to(out_ptr.dtype.element_ty).to(tl.float32)
        quotient = tl.clamp(code + tl.div_rn(merged - base, scales), -LARGEST, LARGEST)
        thresholds = tile_thresholds(
            key, stack_row, first_row, pitch, skipped_rows, first_column, band, at, columns
        )  # fmt: skip
        part = (thresholds >> 12).to(tl.float32) * 9.5367431640625e-07  # 2^-20
        small = tl.floor(tl.abs(quotient) * 512.0 + part) * 0.001953125
        small = tl.where(quotient < 0, -small, small)
        quotient = tl.where(tl.abs(quotient) < 0.015625, small, cut_bits(quotient, thresholds, 20))
        quotient = tl.clamp(quotient, -LARGEST, LARGEST)
    else:
        quotient = tl.clamp(tl.div_rn(merged, scales), -LARGEST, LARGEST)
    out = out_ptr + band * out_band_stride
    out += at[:, None] * out_stride + columns[None, :].to(tl.int64) * out_column_stride
    tl.store(out, quotient.to(out_ptr.dtype.element_ty), mask=inside)


def measurer(operands: MergeOperands, row_block_GR: Tensor, scales: Tensor) -> Callable[[], object]:
    """A function that raises `scales`, zeros before, to the largest absolute value of each block: one launch.

    Args:
        operands: Rows with all their columns.
        row_block_GR: int32, rows contiguous within a band; the row of `scales` that each row belongs to. Rows of the
            last row of `scales` are left out.
        scales: Float32, columns contiguous.
    """
    tiles = tiles_of(operands)
    launch: Any = _largest_of_blocks[tiles.grid]
    blocks = (row_block_GR, tiles.band_stride(row_block_GR), scales, scales.stride(0), len(scales) - 1)
    return partial(launch, *tiles.arguments, *blocks, FP8_BLOCK=BLOCK, **tiles.constants)


def caster(
    operands: MergeOperands, row_block_GR: Tensor, scales: Tensor, largest: float, out_GRN: Tensor
) -> Callable[[], object]:
    """A function that writes merged / scale, cut off at `largest`, into `out`, float8_e4m3fn: one launch. `row_block`
    and `scales` are as for measurer(), of all columns; `out` has any strides."""
    tiles = tiles_of(operands)
    launch: Any = _cast_to_blocks[tiles.grid]
    blocks = (row_block_GR, tiles.band_stride(row_block_GR), scales, scales.stride(0))
    places = (out_GRN, tiles.band_stride(out_GRN), out_GRN.stride(1), out_GRN.stride(2))
    return partial(
        launch, *tiles.arguments, *blocks, *places, *rounding_of(operands), DITHERED=operands.key is not None,
        LARGEST=largest, FP8_BLOCK=BLOCK, **tiles.constants,
    )  # fmt: skip
