"""Products in which one dim is an adapter's rank: what an adapter adds to rows, and the gradients of its factors.

    rows[i] += low[i] @ P[e]^T + bias[e]              out[e] = sum over rows i of e: w[i] left[i]^T right[source[i]]

bfloat16 rows are sums of weight_sync.merging.rounding.rounded_sum: updates far below a step of a row's elements arrive
in the mean.

Both are bound by memory, and each reads the wide operand once. A gradient reads it as it was before the gather that
sorted the rows: there a token is one row instead of K, and the cache has it for the other K - 1 reads. One thread block
per output tile sums gradients in float32 over rows in order and writes them in the parameter's dtype: float32
parameters get unrounded gradients, and an expert without rows gets zeros. Of many rows, those of an expert with more
than twice its share are cut into parts, lest one thread block sum them while all others are done; a second kernel adds
the parts' sums in order.
"""

from typing import Any

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
    next_power_of_2,
    padded_rank,
    precision_of,
    programs,
    tiling_of,
)
from slipstream.weight_sync.merging.rounding import rounded_sum
from slipstream.weight_sync.merging.rounding_kernel import rounded_sum as rounded_sum_of_tiles

ADD = {
    128: Tiling(64, 64, warps=4, stages=3),
    1024: Tiling(64, 32, warps=8, stages=2),
    2048: Tiling(32, 32, warps=8, stages=2),
}
GRADIENT = {
    32: Tiling(64, 128, warps=4, stages=2),
    256: Tiling(64, 128, warps=4, stages=3),
    1024: Tiling(64, 64, warps=8, stages=3),
    2048: Tiling(32, 32, warps=8, stages=3),
}
SPAN = 256
"""Columns per program of `add_low_rank`."""
CUT_FROM_ROWS = 1 << 16
"""From so many rows on, long experts are cut. Below, the host's launches take longer than what it saves."""


def add_low_rank_torch(
    rows_SN: Tensor, low_SR: Tensor | None, p_ENR: Tensor | None, bias_EN: Tensor | None, groups: RowGroups
) -> Tensor:
    """Add low @ P[e]^T and the expert's bias to rows, in place, rounded once; see the top for bfloat16.

    Args:
        rows_SN: contiguous.
        low_SR: [S, r], or None.
        p_ENR: one (N, r) factor per expert, any float dtype and strides, taken in low's dtype; None with low.
        bias_EN: one vector per expert, or None.
    """
    wide = torch.promote_types(rows_SN.dtype, torch.float32)
    out_SN = rows_SN.to(wide, copy=True)
    if low_SR is not None and p_ENR is not None:
        for expert, rows in groups.slices():
            added = low_SR[rows].to(wide) @ factor_of(p_ENR, expert, low_SR.dtype).to(wide).t()
            out_SN[rows] = _sum(rows_SN.dtype, out_SN[rows], added if bias_EN is None else added + bias_EN[expert])
    elif bias_EN is not None:
        out_SN += bias_EN.to(wide)[groups.expert_of_row_S]
    return rows_SN.copy_(out_SN)


def _sum(dtype: torch.dtype, values: Tensor, added: Tensor) -> Tensor:
    return rounded_sum(values, added) if dtype is torch.bfloat16 else values + added


def add_dense_low_rank_torch(rows_TN: Tensor, low_TR: Tensor, p_NR: Tensor, scale: float) -> Tensor:
    if rows_TN.dtype is not torch.bfloat16:
        return rows_TN.addmm_(low_TR, p_NR.t(), alpha=scale)
    return rows_TN.copy_(rounded_sum(rows_TN, (low_TR.float() @ p_NR.float().t()).mul_(scale)))


def low_rank_gradient_torch(
    left_SR: Tensor,
    right_XN: Tensor,
    groups: RowGroups,
    out_ERN: Tensor,
    source_S: Tensor | None = None,
    weights_S: Tensor | None = None,
) -> Tensor:
    """Write (w * left)[rows of e]^T @ right[rows of e] for every expert. Returns out_ERN.

    Args:
        left_SR: the narrow side.
        right_XN: the wide side, contiguous.
        out_ERN: (E, r, N), any strides (a transposed view for a gradient of shape (E, N, r)).
        source_S: int64; row i's wide side is right[source[i]]. None: right[i].
        weights_S: the narrow side is multiplied by these and rounded again; None: all one.
    """
    wide = torch.promote_types(left_SR.dtype, torch.float32)
    right_SN = right_XN if source_S is None else right_XN[source_S]
    if weights_S is not None:
        left_SR = (left_SR.to(wide) * weights_S.to(wide)[:, None]).to(left_SR.dtype)
    out_ERN.zero_()
    for expert, rows in groups.slices():
        out_ERN[expert] = left_SR[rows].to(wide).t() @ right_SN[rows].to(wide)
    return out_ERN


def add_low_rank_triton(
    rows_SN: Tensor, low_SR: Tensor | None, p_ENR: Tensor | None, bias_EN: Tensor | None, groups: RowGroups
) -> Tensor:
    num_rows, num_columns = rows_SN.shape
    rank = 16 if low_SR is None else low_SR.shape[1]
    if num_rows and not (p_ENR is None and bias_EN is None):
        tiling = tiling_of(ADD, rank, rows_SN.element_size())
        tiles = groups.tiles(tiling.rows)
        programs(_add_low_rank, (cdiv(num_columns, SPAN), tiles.shape[0]))(
            rows_SN, low_SR, p_ENR, bias_EN, tiles, num_rows, num_columns, rank, 1.0,
            *((0, 0, 0) if p_ENR is None else p_ENR.stride()),
            HAS_LORA=p_ENR is not None, HAS_BIAS=bias_EN is not None, **_shape(rank, tiling, rows_SN),
        )  # fmt: skip
    return rows_SN


def add_dense_low_rank_triton(rows_TN: Tensor, low_TR: Tensor, p_NR: Tensor, scale: float) -> Tensor:
    (num_rows, num_columns), rank = rows_TN.shape, low_TR.shape[1]
    if num_rows:
        tiling = tiling_of(ADD, rank, rows_TN.element_size())
        programs(_add_low_rank, (cdiv(num_columns, SPAN), cdiv(num_rows, tiling.rows)))(
            rows_TN, low_TR, p_NR, None, None, num_rows, num_columns, low_TR.stride(0), scale, 0, *p_NR.stride(),
            HAS_LORA=True, HAS_BIAS=False, **_shape(rank, tiling, rows_TN),
        )  # fmt: skip
    return rows_TN


def _shape(rank: int, tiling: Tiling, rows: Tensor) -> dict[str, Any]:
    return {
        "IS_BFLOAT16": rows.dtype is torch.bfloat16, "RANK": rank, "PADDED_RANK": padded_rank(rank),
        "BLOCK_M": tiling.rows, "BLOCK_N": tiling.columns, "SPAN": SPAN, "STAGES": tiling.stages,
        "PRECISION": precision_of(rows), "num_warps": tiling.warps,
    }  # fmt: skip


def low_rank_gradient_triton(
    left_SR: Tensor,
    right_XN: Tensor,
    groups: RowGroups,
    out_ERN: Tensor,
    source_S: Tensor | None = None,
    weights_S: Tensor | None = None,
) -> Tensor:
    num_experts, rank, num_columns = groups.num_experts, left_SR.shape[1], right_XN.shape[1]
    tiling = tiling_of(GRADIENT, rank, left_SR.element_size())
    num_blocks, num_parts = cdiv(num_columns, tiling.columns), num_experts
    parts_P3 = sums_PRN = None
    part_rows = next_power_of_2(cdiv(2 * max(groups.expected_rows, 1), num_experts))
    if groups.expected_rows >= CUT_FROM_ROWS:
        parts_P3 = groups.tiles(part_rows)
        num_parts = parts_P3.shape[0]
        sums_PRN = torch.empty(num_parts, rank, num_columns, dtype=torch.float32, device=left_SR.device)
    shape = {
        "RANK": rank, "PADDED_RANK": padded_rank(rank), "IS_TRANSPOSED": out_ERN.stride(1) == 1 and rank > 1,
        "BLOCK_N": tiling.columns,
    }  # fmt: skip
    programs(_low_rank_gradient, (num_blocks * num_parts,))(
        left_SR, right_XN, source_S, weights_S, out_ERN, groups.ends_E, parts_P3, sums_PRN, num_parts, num_columns,
        *out_ERN.stride(), HAS_SOURCE=source_S is not None, HAS_WEIGHTS=weights_S is not None,
        IS_CUT=parts_P3 is not None, BLOCK_M=tiling.rows, STAGES=tiling.stages, PRECISION=precision_of(left_SR),
        num_warps=tiling.warps, **shape,
    )  # fmt: skip
    if parts_P3 is not None:
        programs(_add_parts, (num_blocks * num_experts,))(
            sums_PRN, out_ERN, groups.counts_E, num_experts, num_columns, *out_ERN.stride(),
            EXPERTS=next_power_of_2(num_experts), PART_ROWS=part_rows, num_warps=tiling.warps, **shape,
        )  # fmt: skip
    return out_ERN


add_low_rank = by_device(add_low_rank_torch, add_low_rank_triton)


def add_dense_low_rank(rows_TN: Tensor, low_TR: Tensor, p_NR: Tensor, scale: float = 1.0) -> Tensor:
    """Add scale * low @ P^T to rows, in place, rounded once; see the top for bfloat16. Returns rows_TN.

    Args:
        rows_TN: contiguous.
        low_TR: in the format of rows; columns are contiguous.
        p_NR: in the format of rows, any strides.
    """
    is_for_kernel = rows_TN.is_cuda and rows_TN.dtype is torch.bfloat16
    return (add_dense_low_rank_triton if is_for_kernel else add_dense_low_rank_torch)(rows_TN, low_TR, p_NR, scale)


low_rank_gradient = by_device(low_rank_gradient_torch, low_rank_gradient_triton)


@triton.jit(do_not_specialize=["num_rows"])
def _add_low_rank(
    rows_ptr, low_ptr, p_ptr, bias_ptr, tiles_ptr, num_rows, num_columns, low_stride, scale,
    p_expert_stride, p_row_stride, p_rank_stride,
    HAS_LORA: tl.constexpr, HAS_BIAS: tl.constexpr, IS_BFLOAT16: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Without tiles all rows have one P."""
    if tiles_ptr is None:
        expert, first = tl.zeros([], dtype=tl.int64), tl.program_id(1) * BLOCK_M
        stop = tl.minimum(first + BLOCK_M, num_rows)
    else:
        tile = tiles_ptr + tl.program_id(1) * 3
        expert, first, stop = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if first < stop:
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < stop
        rows = rows.to(tl.int64)
        ranks = tl.arange(0, PADDED_RANK)
        is_rank = ranks < RANK
        low_at = rows[:, None] * low_stride + ranks[None, :]
        low = tl.load(low_ptr + low_at, is_row[:, None] & is_rank[None, :], other=0.0) if HAS_LORA else 0.0
        for start in tl.range(0, SPAN, BLOCK_N, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
            columns = tl.program_id(0) * SPAN + start + tl.arange(0, BLOCK_N)
            is_column = columns < num_columns
            inside = is_row[:, None] & is_column[None, :]
            at = rows_ptr + rows[:, None] * num_columns + columns[None, :]
            values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            added = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            if HAS_LORA:
                p = tl.load(
                    p_ptr + expert * p_expert_stride + columns[None, :] * p_row_stride + ranks[:, None] * p_rank_stride,
                    mask=is_rank[:, None] & is_column[None, :],
                    other=0.0,
                )
                added = tl.dot(low, p.to(low_ptr.dtype.element_ty), input_precision=PRECISION) * scale
            if HAS_BIAS:
                bias = tl.load(bias_ptr + expert * num_columns + columns, mask=is_column, other=0.0)
                added += bias.to(tl.float32)[None, :]
            if HAS_LORA and IS_BFLOAT16:
                values = rounded_sum_of_tiles(values, added, columns)
            else:
                values += added
            tl.store(at, values.to(rows_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _low_rank_gradient(
    left_ptr, right_ptr, source_ptr, weights_ptr, out_ptr, ends_ptr, parts_ptr, sums_ptr, num_parts, num_columns,
    out_expert_stride, out_rank_stride, out_column_stride,
    HAS_SOURCE: tl.constexpr, HAS_WEIGHTS: tl.constexpr, IS_CUT: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part is an expert, or if they are cut one of RowGroups.tiles; what is not a whole expert is summed in sums_ptr.
    With a source, neighbouring programs share columns, so that a token's K experts find it in the cache; without, they
    share rows."""
    if HAS_SOURCE:
        part, block = tl.program_id(0) % num_parts, tl.program_id(0) // num_parts
    else:
        num_blocks = tl.cdiv(num_columns, BLOCK_N)
        part, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    expert = tl.load(parts_ptr + part * 3) if IS_CUT else part
    first_row = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    last_row = tl.load(ends_ptr + expert)
    begin = tl.load(parts_ptr + part * 3 + 1) if IS_CUT else first_row
    end = tl.load(parts_ptr + part * 3 + 2) if IS_CUT else last_row
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    ranks = tl.arange(0, PADDED_RANK)
    is_column, is_rank = columns < num_columns, ranks < RANK
    acc = tl.zeros([PADDED_RANK, BLOCK_N], dtype=tl.float32)
    for first in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < end
        rows = rows.to(tl.int64)
        left = tl.load(
            left_ptr + rows[None, :] * RANK + ranks[:, None], mask=is_rank[:, None] & is_row[None, :], other=0.0
        )
        if HAS_WEIGHTS:
            weights = tl.load(weights_ptr + rows, mask=is_row, other=0.0)
            left = (left.to(tl.float32) * weights.to(tl.float32)[None, :]).to(left.dtype)
        if HAS_SOURCE:
            rows = tl.load(source_ptr + rows, mask=is_row, other=0)
        right = tl.load(
            right_ptr + rows[:, None] * num_columns + columns[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    if IS_CUT:
        is_whole = (begin == first_row) & (end == last_row)
        at = sums_ptr + (part.to(tl.int64) * RANK + ranks[:, None]) * num_columns + columns[None, :]
        tl.store(at, acc, mask=is_rank[:, None] & is_column[None, :] & (begin < end) & (is_whole == 0))
        is_column &= is_whole & (begin < end)
    out = out_ptr + expert.to(tl.int64) * out_expert_stride
    _store_factor(
        out, acc, ranks, columns, is_rank, is_column, out_rank_stride, out_column_stride, IS_TRANSPOSED=IS_TRANSPOSED
    )


@triton.jit
def _add_parts(
    sums_ptr, out_ptr, counts_ptr, num_experts, num_columns, out_expert_stride, out_rank_stride, out_column_stride,
    EXPERTS: tl.constexpr, PART_ROWS: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradients of experts with several parts, and the zeros of those with none."""
    num_blocks = tl.cdiv(num_columns, BLOCK_N)
    expert, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0).to(tl.int32)
    num_parts = (counts + PART_ROWS - 1) // PART_ROWS
    first = tl.sum(tl.where(experts < expert, num_parts, 0), 0)
    own = tl.sum(tl.where(experts == expert, num_parts, 0), 0)
    if own != 1:
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        ranks = tl.arange(0, PADDED_RANK)
        is_column, is_rank = columns < num_columns, ranks < RANK
        inside = is_rank[:, None] & is_column[None, :]
        acc = tl.zeros([PADDED_RANK, BLOCK_N], dtype=tl.float32)
        at = sums_ptr + (first.to(tl.int64) * RANK + ranks[:, None]) * num_columns + columns[None, :]
        for _ in range(own):
            acc += tl.load(at, mask=inside, other=0.0)
            at += RANK * num_columns
        out = out_ptr + expert.to(tl.int64) * out_expert_stride
        _store_factor(
            out, acc, ranks, columns, is_rank, is_column, out_rank_stride, out_column_stride,
            IS_TRANSPOSED=IS_TRANSPOSED,
        )  # fmt: skip


@triton.jit
def _store_factor(
    out, acc, ranks, columns, is_rank, is_column, out_rank_stride, out_column_stride, IS_TRANSPOSED: tl.constexpr
):
    value = acc.to(out.dtype.element_ty)
    if IS_TRANSPOSED:  # the rank is the output's fast index: transpose the tile so that threads write adjacent elements
        at = out + columns[:, None] * out_column_stride + ranks[None, :] * out_rank_stride
        tl.store(at, tl.trans(value), mask=is_column[:, None] & is_rank[None, :])
    else:
        at = out + ranks[:, None] * out_rank_stride + columns[None, :] * out_column_stride
        tl.store(at, value, mask=is_rank[:, None] & is_column[None, :])
