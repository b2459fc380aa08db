"""The formula of `merge.py` as one Triton kernel, over a whole stack of adapters at once.

Owns the kernel alone; `merge.py`, its only caller, says what it computes and holds the torch form. Every element is
the same sequence of float32 operations wherever its tile begins: the sum over the rank runs in a fixed order inside
one thread block, and columns of zeros pad it. Hence any rectangle has the bits of the whole.
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
"""Of the products: float32 multiply-adds. "tf32x3" runs on tensor cores and differs in the last bits of float32."""


@triton.jit(do_not_specialize=["num_rows", "first_row", "first_tile"])
def _merge(
    base_ptr,
    b_ptr,
    a_ptr,
    out_ptr,
    scale,
    num_rows,
    num_columns,
    first_row,
    first_tile,
    rows_a_factor,
    tiles_a_factor,
    base_stride,
    b_stride,
    a_stack_stride,
    a_stride,
    out_stride,
    out_column_stride,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile; its rows lie under one factor A. Rows count from the first row of the first A."""
    tile = tl.program_id(1) + first_tile
    factor = tile // tiles_a_factor
    rows = (tile % tiles_a_factor) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = factor * rows_a_factor + rows - first_row
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = (rows < rows_a_factor) & (at >= 0) & (at < num_rows)
    is_column = columns < num_columns
    at = at.to(tl.int64)
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
    base_RN: Tensor, b_RK: Tensor, a_EKN: Tensor, scale: float, out_RN: Tensor, first_row: int, rows_a_factor: int
) -> Callable[[], object]:
    """merge.merger on CUDA tensors: one launch, on the current stream. Columns of base, A and B are contiguous."""
    num_rows, num_columns = base_RN.shape
    rank = b_RK.shape[1]
    block_k = min(TILE_RANK, max(16, triton.next_power_of_2(rank)))
    tiles_a_factor = -(-rows_a_factor // TILE_ROWS)

    def tile_of(row: int) -> int:
        return row // rows_a_factor * tiles_a_factor + row % rows_a_factor // TILE_ROWS

    first_tile = tile_of(first_row)
    grid = (triton.cdiv(num_columns, TILE_COLUMNS), tile_of(first_row + num_rows - 1) - first_tile + 1)
    launch: Any = _merge[grid]
    return partial(
        launch,
        base_RN,
        b_RK,
        a_EKN,
        out_RN,
        scale,
        num_rows,
        num_columns,
        first_row,
        first_tile,
        rows_a_factor,
        tiles_a_factor,
        base_RN.stride(0),
        b_RK.stride(0),
        a_EKN.stride(0),
        a_EKN.stride(1),
        out_RN.stride(0),
        out_RN.stride(1),
        RANK=rank,
        PADDED_RANK=triton.cdiv(rank, block_k) * block_k,
        BLOCK_M=TILE_ROWS,
        BLOCK_N=TILE_COLUMNS,
        BLOCK_K=block_k,
        PRECISION=PRECISION,
        num_warps=4,
    )
