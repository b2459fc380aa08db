"""The formula of `merge.py` as one Triton kernel, over a whole stack of adapters at once.

An element is computed by the same float32 operations wherever its tile begins: one thread block sums over the rank,
padded with columns of zeros, in a fixed order. Hence any rectangle has the bits of the whole, and so have bands of rows
at a pitch, and what fp8_kernels.py computes of the same rows.
"""

# pyright: basic
# Triton is untyped.
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.weight_sync.merging.merge_operands import MergeOperands
from slipstream.weight_sync.merging.rounding_kernel import COLUMN_FACTOR, ROW_FACTOR, cut_bits, mix

TILE_ROWS, TILE_COLUMNS, TILE_RANK = 64, 64, 32
SMALL_RANK = 16
"""A rank up to this one is padded to it, a larger one to whole TILE_RANKs."""
PRECISION = "ieee"
"""The products are float32 multiply-adds. "tf32x3" runs on tensor cores and differs in the last bits of float32."""
_BLOCK_M, _BLOCK_N, _BLOCK_K = tl.constexpr(TILE_ROWS), tl.constexpr(TILE_COLUMNS), tl.constexpr(TILE_RANK)
_SMALL_K, _PRECISION = tl.constexpr(SMALL_RANK), tl.constexpr(PRECISION)
NOT_SPECIALIZED = (
    "num_rows", "skipped_rows", "first_tile", "band_rows", "tiles_a_band", "first_row", "pitch"
)  # fmt: skip
"""Integers whose values do not make Triton compile a kernel again."""
ROUNDING = ("key", "stack_row", "first_column")
"""Likewise; see `rounding_of`."""


class Matrices(NamedTuple):
    base: Any
    b: Any
    a: Any
    scale: Any
    num_columns: Any
    rows_a_factor: Any
    base_band_stride: Any
    base_stride: Any
    b_band_stride: Any
    b_stride: Any
    a_stack_stride: Any
    a_stride: Any


@triton.jit
def merged_tile(
    matrices,
    num_rows,
    skipped_rows,
    first_tile,
    band_rows,
    tiles_a_band,
    first_row,
    pitch,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
):
    """The program's tile, whose rows lie in one band, under one factor A. Pointers are at row `skipped_rows` of the
    first band.

    Returns:
        The merged values, float32, 0 outside; those of the base; the band; rows, counted from that of the pointers;
        which of them there are; columns; which of them there are.
    """
    tile = tl.program_id(1) + first_tile
    band = tile // tiles_a_band
    rows = (tile % tiles_a_band) * _BLOCK_M + tl.arange(0, _BLOCK_M)
    at = band * band_rows + rows - skipped_rows
    is_row = (rows < band_rows) & (at >= 0) & (at < num_rows)
    columns = tl.program_id(0) * _BLOCK_N + tl.arange(0, _BLOCK_N)
    is_column = columns < matrices.num_columns
    factor = (first_row + band * pitch) // matrices.rows_a_factor
    band = band.to(tl.int64)
    at = (rows - skipped_rows).to(tl.int64)
    b_ptr = matrices.b + band * matrices.b_band_stride
    a_ptr = matrices.a + factor.to(tl.int64) * matrices.a_stack_stride
    acc = tl.zeros([_BLOCK_M, _BLOCK_N], dtype=tl.float32)
    BLOCK_K: tl.constexpr = _SMALL_K if PADDED_RANK <= _SMALL_K else _BLOCK_K
    for first in tl.static_range(0, PADDED_RANK, BLOCK_K):
        ranks = first + tl.arange(0, BLOCK_K)
        is_rank = ranks < RANK
        b = tl.load(
            b_ptr + at[:, None] * matrices.b_stride + ranks[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0
        )
        a = tl.load(
            a_ptr + ranks[:, None] * matrices.a_stride + columns[None, :],
            mask=is_rank[:, None] & is_column[None, :],
            other=0.0,
        )
        acc = tl.dot(b.to(tl.float32) * matrices.scale, a.to(tl.float32), acc, input_precision=_PRECISION)
    inside = is_row[:, None] & is_column[None, :]
    base = matrices.base + band * matrices.base_band_stride + at[:, None] * matrices.base_stride + columns[None, :]
    base_values = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    return acc + base_values, base_values, band, at, is_row, columns, is_column


@triton.jit
def tile_thresholds(key, stack_row, first_row, pitch, skipped_rows, first_column, band, at, columns):
    """weight_sync.merging.rounding.thresholds of a tile's elements, as uint32."""
    rows = stack_row + first_row + band * pitch + at + skipped_rows
    rows = mix(rows.to(tl.uint32) * ROW_FACTOR + key.to(tl.uint32))
    return mix(rows[:, None] ^ ((first_column + columns).to(tl.uint32) * COLUMN_FACTOR)[None, :])


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, *ROUNDING])
def _merge(
    matrices,
    num_rows,
    skipped_rows,
    first_tile,
    band_rows,
    tiles_a_band,
    first_row,
    pitch,
    last_b_ptr,
    last_a_ptr,
    out_ptr,
    marks_ptr,
    out_band_stride,
    out_stride,
    out_column_stride,
    key,
    stack_row,
    first_column,
    DITHERED: tl.constexpr,
    MARKED: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
):
    """out = merged, in the format of `out`; if DITHERED, bfloat16, by the thresholds of `key`.

    If MARKED, in bfloat16: a mark is 1 where the factors of the last time give other bits. The base comes from memory
    once: the second tile finds it in the cache.
    """
    if MARKED:
        last_matrices = Matrices(
            matrices.base, last_b_ptr, last_a_ptr, matrices.scale, matrices.num_columns, matrices.rows_a_factor,
            matrices.base_band_stride, matrices.base_stride, matrices.b_band_stride, matrices.b_stride,
            matrices.a_stack_stride, matrices.a_stride,
        )  # fmt: skip
        last, _, band, at, is_row, columns, is_column = merged_tile(  # pyright: ignore[reportGeneralTypeIssues]
            last_matrices, num_rows, skipped_rows, first_tile, band_rows, tiles_a_band, first_row, pitch, RANK,
            PADDED_RANK,
        )  # fmt: skip
    merged, _, band, at, is_row, columns, is_column = merged_tile(  # pyright: ignore[reportGeneralTypeIssues]
        matrices, num_rows, skipped_rows, first_tile, band_rows, tiles_a_band, first_row, pitch, RANK, PADDED_RANK
    )  # fmt: skip
    if DITHERED:
        thresholds = tile_thresholds(
            key, stack_row, first_row, pitch, skipped_rows, first_column, band, at, columns
        )  # fmt: skip
        merged = cut_bits(merged, thresholds, 16)
        if MARKED:
            last = cut_bits(last, thresholds, 16)
    place = band * out_band_stride + at[:, None] * out_stride + columns[None, :].to(tl.int64) * out_column_stride
    inside = is_row[:, None] & is_column[None, :]
    values = merged.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, values, mask=inside)
    if MARKED:
        marks = values.to(tl.int16, bitcast=True) != last.to(tl.bfloat16).to(tl.int16, bitcast=True)
        tl.store(marks_ptr + place, marks.to(tl.uint8), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How tiles cover the operands of a merge, each under one factor A, and what every kernel here is told of it."""

    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    """From matrices to pitch."""
    constants: dict[str, Any]
    rows_a_band: int | None
    """Rows from one band's start to the next one's, where a single band was split into one band per factor."""

    def band_stride(self, tensor_GR: Tensor) -> int:
        """Elements from one band's start to the next one's, of any tensor (G, R, ...) beside the operands."""
        return _band_stride(tensor_GR, self.rows_a_band)


def tiles_of(operands: MergeOperands) -> Tiles:
    """Tiles over all rows and columns. Columns of base, A and B are contiguous."""
    base, b, a = operands.base_GRN, operands.b_GRK, operands.a_of_columns()
    num_bands, band_rows, num_columns = base.shape
    first_row, pitch, num_rows, skipped_rows = operands.first_row, operands.pitch, num_bands * band_rows, 0
    rows_a_band = None
    if num_bands == 1:  # may lie under several A: the kernel gets one band per A, the first and last ones cut
        rows_a_band = band_rows = pitch = operands.rows_a_factor
        skipped_rows, first_row = first_row, 0
    tiles_a_band = -(-band_rows // TILE_ROWS)

    def tile_of(row: int) -> int:
        return row // band_rows * tiles_a_band + row % band_rows // TILE_ROWS

    first_tile = tile_of(skipped_rows)
    grid = (-(-num_columns // TILE_COLUMNS), tile_of(skipped_rows + num_rows - 1) - first_tile + 1)
    base_band, b_band = (_band_stride(tensor, rows_a_band) for tensor in (base, b))
    matrices = Matrices(
        base, b, a, operands.scale, num_columns, operands.rows_a_factor, base_band, base.stride(1), b_band, b.stride(1),
        a.stride(0), a.stride(1),
    )  # fmt: skip
    arguments = (matrices, num_rows, skipped_rows, first_tile, band_rows, tiles_a_band, first_row, pitch)
    rank = b.shape[2]
    block_k = SMALL_RANK if rank <= SMALL_RANK else TILE_RANK
    constants = {"RANK": rank, "PADDED_RANK": triton.cdiv(rank, block_k) * block_k, "num_warps": 4}
    return Tiles(grid, arguments, constants, rows_a_band)


def merger(
    operands: MergeOperands, out_GRN: Tensor, last: MergeOperands | None = None, marks_GRN: Tensor | None = None
) -> Callable[[], object]:
    """merge.merger on CUDA tensors, or merge.marker with the last two: one launch, on the current stream."""
    tiles = tiles_of(operands)
    before = tiles.arguments[0]
    if last is not None:
        others = tiles_of(last)
        now, before = tiles.arguments[0], others.arguments[0]
        assert now[3:] == before[3:] and tiles.arguments[1:] == others.arguments[1:], "both lie alike"
        assert marks_GRN is not None and marks_GRN.stride() == out_GRN.stride()
        assert now.b.dtype is before.b.dtype and now.a.dtype is before.a.dtype
    launch: Any = _merge[tiles.grid]
    outs = (out_GRN, out_GRN if marks_GRN is None else marks_GRN)
    places = (tiles.band_stride(out_GRN), out_GRN.stride(1), out_GRN.stride(2))
    is_dithered = operands.key is not None and out_GRN.dtype is torch.bfloat16
    return partial(
        launch, *tiles.arguments, before.b, before.a, *outs, *places, *rounding_of(operands),
        DITHERED=is_dithered, MARKED=last is not None, **tiles.constants,
    )  # fmt: skip


def rounding_of(operands: MergeOperands) -> tuple[int, int, int]:
    return operands.key or 0, operands.stack_row, operands.first_column


def _band_stride(tensor_GR: Tensor, rows_a_band: int | None) -> int:
    return tensor_GR.stride(0) if rows_a_band is None else rows_a_band * tensor_GR.stride(1)
