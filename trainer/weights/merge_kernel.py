"""The formula of `merge.py` as one Triton kernel, over a whole stack of adapters at once.

Owns only the kernel; `merge.py` calls it, says what it computes and holds the torch form. An element is computed by the
same float32 operations wherever its tile begins: one thread block sums over the rank, padded with columns of zeros, in
a fixed order. Hence any rectangle has the bits of the whole, and so have bands of rows at a pitch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS, TILE_COLUMNS, TILE_RANK = 64, 64, 32
PRECISION = "ieee"
"""The products are float32 multiply-adds. "tf32x3" runs on tensor cores and differs in the last bits of float32."""


@triton.jit(
    do_not_specialize=["num_rows", "skipped_rows", "first_tile", "band_rows", "tiles_a_band", "first_row", "pitch"]
)
def _merge(
    base_ptr,
    b_ptr,
    a_ptr,
    out_ptr,
    scale,
    num_rows,
    num_columns,
    skipped_rows,
    first_tile,
    band_rows,
    tiles_a_band,
    first_row,
    pitch,
    rows_a_factor,
    base_band_stride,
    base_stride,
    b_band_stride,
    b_stride,
    a_stack_stride,
    a_stride,
    out_band_stride,
    out_stride,
    out_column_stride,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile; its rows lie in one band, under one factor A. Pointers are at row `skipped_rows` of the first band."""
    tile = tl.program_id(1) + first_tile
    band = tile // tiles_a_band
    rows = (tile % tiles_a_band) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = band * band_rows + rows - skipped_rows
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = (rows < band_rows) & (at >= 0) & (at < num_rows)
    is_column = columns < num_columns
    factor = (first_row + band * pitch) // rows_a_factor
    band = band.to(tl.int64)
    base_ptr += band * base_band_stride
    b_ptr += band * b_band_stride
    out_ptr += band * out_band_stride
    at = (rows - skipped_rows).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in tl.static_range(0, PADDED_RANK, BLOCK_K):
        ranks = first + tl.arange(0, BLOCK_K)
        is_rank = ranks < RANK
        b = tl.load(b_ptr + at[:, None] * b_stride + ranks[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0)
        a = tl.load(
            a_ptr + factor.to(tl.int64) * a_stack_stride + ranks[:, None] * a_stride + columns[None, :],
            mask=is_rank[:, None] & is_column[None, :],
            other=0.0,
        )
        acc = tl.dot(b.to(tl.float32) * scale, a.to(tl.float32), acc, input_precision=PRECISION)
    inside = is_row[:, None] & is_column[None, :]
    base = tl.load(base_ptr + at[:, None] * base_stride + columns[None, :], mask=inside, other=0.0)
    merged = acc + base.to(tl.float32)
    out = out_ptr + at[:, None] * out_stride + columns[None, :].to(tl.int64) * out_column_stride
    tl.store(out, merged.to(out_ptr.dtype.element_ty), mask=inside)


def merger(
    base_GRN: Tensor,
    b_GRK: Tensor,
    a_EKN: Tensor,
    scale: float,
    out_GRN: Tensor,
    first_row: int,
    rows_a_factor: int,
    pitch: int,
) -> Callable[[], object]:
    """merge.merger on CUDA tensors: one launch, on the current stream. Columns of base, A and B are contiguous."""
    num_bands, band_rows, num_columns = base_GRN.shape
    rank = b_GRK.shape[2]
    block_k = min(TILE_RANK, max(16, triton.next_power_of_2(rank)))
    num_rows, skipped_rows = num_bands * band_rows, 0
    band_strides = [tensor.stride(0) for tensor in (base_GRN, b_GRK, out_GRN)]
    if num_bands == 1:  # may lie under several A: the kernel gets one band per A, the first and last ones cut
        band_rows = pitch = rows_a_factor
        skipped_rows, first_row = first_row, 0
        band_strides = [rows_a_factor * tensor.stride(1) for tensor in (base_GRN, b_GRK, out_GRN)]
    tiles_a_band = -(-band_rows // TILE_ROWS)

    def tile_of(row: int) -> int:
        return row // band_rows * tiles_a_band + row % band_rows // TILE_ROWS

    first_tile = tile_of(skipped_rows)
    grid = (triton.cdiv(num_columns, TILE_COLUMNS), tile_of(skipped_rows + num_rows - 1) - first_tile + 1)
    launch: Any = _merge[grid]
    return partial(
        launch,
        base_GRN,
        b_GRK,
        a_EKN,
        out_GRN,
        scale,
        num_rows,
        num_columns,
        skipped_rows,
        first_tile,
        band_rows,
        tiles_a_band,
        first_row,
        pitch,
        rows_a_factor,
        band_strides[0],
        base_GRN.stride(1),
        band_strides[1],
        b_GRK.stride(1),
        a_EKN.stride(0),
        a_EKN.stride(1),
        band_strides[2],
        out_GRN.stride(1),
        out_GRN.stride(2),
        RANK=rank,
        PADDED_RANK=triton.cdiv(rank, block_k) * block_k,
        BLOCK_M=TILE_ROWS,
        BLOCK_N=TILE_COLUMNS,
        BLOCK_K=block_k,
        PRECISION=PRECISION,
        num_warps=4,
    )
