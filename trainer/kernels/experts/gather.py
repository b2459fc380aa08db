"""Rows in expert order, and their low-rank projection while they are in registers.

    rows[i] = x[source[i]]        low[i] = scale * rows[i] @ P[e]^T        dots[i] = <rows[i], v[e]>

The copy that sorts rows also multiplies them with an adapter's first factor, so that the factor costs no second read of
the rows. (Forward: tokens and A. Backward: output gradients and B, and the bias for the router's gradient.) A grouped
product [W; A] would also read them once, but computes a whole tile of columns for the r columns of A
(figures: docs/decisions/0008). A token is read from memory once, and from the cache for its other K - 1 copies: all
programs take the same few columns of their rows before the next ones, or, when each program takes whole rows, programs
that run side by side take the same part of every expert's rows.

"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.trainer.kernels.experts.groups import RowGroups
from slipstream.trainer.kernels.launch import (
    Tiling,
    by_device,
    cdiv,
    factor_of,
    padded_rank,
    precision_of,
    programs,
    tiling_of,
)

GATHER, GATHER_FROM_HOST = Tiling(32, 128, warps=8, stages=1), Tiling(1, 1024, warps=4, stages=1)
PROJECT = {
    128: Tiling(64, 128, warps=4, stages=2),
    256: Tiling(64, 64, warps=4, stages=3),
    1024: Tiling(64, 32, warps=8, stages=3),
    2048: Tiling(32, 32, warps=8, stages=2),
}
CACHE_BYTES = 32 << 20
"""Bytes of tokens that stay in the cache in any order of reading. An H200's cache has 50 MB; writes use it, too."""


def gather_rows_torch(x: Tensor, source_S: Tensor, ends_E: Tensor | None = None) -> Tensor:
    return x[source_S]


def gather_project_torch(
    x: Tensor, source_S: Tensor, p_ERK: Tensor, groups: RowGroups, scale: float = 1.0, v_EK: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gather rows and project them; sums in float32 (float64 for float64), each result rounded once.

    Args:
        x: rows of K elements.
        source_S: int64; which row of x is row i in expert order.
        p_ERK: one (r, K) factor per expert, any float dtype and strides; taken in x's dtype.
        groups: which expert each row belongs to after the gather.
        v_EK: one vector per expert, or None.

    Returns:
        rows_SK and low_SR in x's dtype; dots_S float32, None without v_EK.
    """
    rows_SK = x[source_S]
    low_SR = rows_SK.new_empty(rows_SK.shape[0], p_ERK.shape[1])
    for expert, rows in groups.slices():
        low_SR[rows] = (rows_SK[rows] @ factor_of(p_ERK, expert, x.dtype).t()) * scale
    dots_S = None
    if v_EK is not None:
        wide = torch.promote_types(x.dtype, torch.float32)
        dots_S = (rows_SK.to(wide) * v_EK.to(wide)[groups.expert_of_row_S]).sum(-1)
    return rows_SK, low_SR, dots_S


def gather_rows_triton(x: Tensor, source_S: Tensor, ends_E: Tensor | None = None) -> Tensor:
    num_rows, num_columns = source_S.shape[0], x.shape[1]
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=source_S.device)
    if num_rows:
        tiling = GATHER if x.is_cuda else GATHER_FROM_HOST
        programs(_gather, (cdiv(num_rows, tiling.rows), cdiv(num_columns, tiling.columns)))(
            x, source_S, out, ends_E, num_rows, num_columns, x.stride(0), 0 if ends_E is None else len(ends_E),
            BLOCK_M=tiling.rows, BLOCK_K=tiling.columns, num_warps=tiling.warps,
        )  # fmt: skip
    return out


def gather_project_triton(
    x: Tensor, source_S: Tensor, p_ERK: Tensor, groups: RowGroups, scale: float = 1.0, v_EK: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    num_rows, num_columns, rank = source_S.shape[0], x.shape[1], p_ERK.shape[1]
    rows_SK, low_SR = x.new_empty(num_rows, num_columns), x.new_empty(num_rows, rank)
    dots_S = None if v_EK is None else torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        tiling = tiling_of(PROJECT, rank, x.element_size())
        tiles = groups.tiles(tiling.rows, abreast=x.numel() * x.element_size() > CACHE_BYTES)
        programs(_gather_project, (tiles.shape[0],))(
            x, source_S, p_ERK, v_EK, rows_SK, low_SR, dots_S, tiles, scale,
            num_columns, x.stride(0), *p_ERK.stride(),
            RANK=rank, PADDED_RANK=padded_rank(rank), HAS_VECTOR=v_EK is not None,
            BLOCK_M=tiling.rows, BLOCK_K=tiling.columns, STAGES=tiling.stages, PRECISION=precision_of(x),
            num_warps=tiling.warps,
        )  # fmt: skip
    return rows_SK, low_SR, dots_S


def gather_rows(x: Tensor, source_S: Tensor, ends_E: Tensor | None = None) -> Tensor:
    """Row source[i] of x for every i, [S, K], on source's device. x may be in page-locked memory of the host. With
    ends (of RowGroups), rows from the last one on are not copied and hold anything."""
    return (gather_rows_triton if source_S.is_cuda else gather_rows_torch)(x, source_S, ends_E)


gather_project = by_device(gather_project_torch, gather_project_triton)


@triton.jit(do_not_specialize=["num_rows"])
def _gather(
    x_ptr, source_ptr, out_ptr, ends_ptr, num_rows, num_columns, x_stride, num_ends,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    if ends_ptr is not None:
        num_rows = tl.load(ends_ptr + num_ends - 1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    is_row = rows < num_rows
    inside = is_row[:, None] & (columns < num_columns)[None, :]
    source = tl.load(source_ptr + rows, mask=is_row, other=0)
    x = tl.load(x_ptr + source[:, None] * x_stride + columns[None, :], mask=inside)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :], x, mask=inside)


@triton.jit
def _gather_project(
    x_ptr, source_ptr, p_ptr, v_ptr, rows_ptr, low_ptr, dots_ptr, tiles_ptr, scale,
    num_columns, x_stride, p_expert_stride, p_rank_stride, p_column_stride,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, HAS_VECTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each step's product ends before the next copy of x begins, because its result is used (to no effect: rows past
    the last are zeros). Triton 3.6 and 3.7 give x no buffer to spare, as it is also stored; left to run on, products
    read parts of the next copy, in up to one row of 40."""
    tile = tiles_ptr + tl.program_id(0) * 3
    expert, first, stop = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if first < stop:
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < stop
        source = tl.load(source_ptr + rows, mask=is_row, other=0)
        rows = rows.to(tl.int64)
        ranks = tl.arange(0, PADDED_RANK)
        acc = tl.zeros([BLOCK_M, PADDED_RANK], dtype=tl.float32)
        dots = tl.zeros([BLOCK_M], dtype=tl.float32)
        for start in tl.range(0, num_columns, BLOCK_K, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK_K)
            is_column = columns < num_columns
            inside = is_row[:, None] & is_column[None, :]
            x = tl.load(x_ptr + source[:, None] * x_stride + columns[None, :], mask=inside, other=0.0)
            tl.store(rows_ptr + rows[:, None] * num_columns + columns[None, :], x, mask=inside)
            p = tl.load(
                p_ptr + expert * p_expert_stride + ranks[None, :] * p_rank_stride + columns[:, None] * p_column_stride,
                mask=(ranks < RANK)[None, :] & is_column[:, None],
                other=0.0,
            )
            acc = tl.dot(x, p.to(x.dtype), acc, input_precision=PRECISION)
            acc = tl.where(is_row[:, None], acc, 0.0)  # waits for the product
            if HAS_VECTOR:
                v = tl.load(v_ptr + expert * num_columns + columns, mask=is_column, other=0.0)
                dots += tl.sum(x.to(tl.float32) * v.to(tl.float32)[None, :], 1)
        low = (acc * scale).to(low_ptr.dtype.element_ty)
        tl.store(low_ptr + rows[:, None] * RANK + ranks[None, :], low, mask=is_row[:, None] & (ranks < RANK)[None, :])
        if HAS_VECTOR:
            tl.store(dots_ptr + rows, dots, mask=is_row)
