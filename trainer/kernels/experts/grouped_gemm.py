"""One matrix product per expert over rows sorted by expert, in Triton.

    product    out[rows of e] = (x[rows of e] @ M[e] (+ low[rows of e] @ P[e]^T) (+ bias[e])) (* weights[rows of e])
    gradient   out[e] = left[rows of e]^T @ right[rows of e]

All of it happens in the product's own accumulator, is rounded once, and needs no pass over the output. The kernel adds
an adapter's second factor, of any rank, before the product, in steps over the rank: the shared memory of these steps is
free again when the product begins. (If it did so after the product, the compiler would not overlap the main loop's
steps when weights are not transposed.) Operands come through tensor descriptors, which read beyond an expert's rows and
columns: into a neighbour's, whose part of the result is not written, or beyond the tensor, where they give zeros. The
native loop of trainer.moe.grouped defines the result.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.trainer.kernels.experts.groups import RowGroups
from slipstream.trainer.kernels.launch import Tiling, cdiv, padded_rank, precision_of, programs

WIDE = Tiling(128, 256, warps=8, stages=3)
NARROW = Tiling(128, 128, warps=8, stages=3)
SHORT = Tiling(64, 128, warps=4, stages=4)
"""See `product_tiling`. The short one is for groups of few rows."""


def product_tiling(mean_rows: int, element_size: int, capability: int) -> tuple[Tiling, int]:
    """The tile, and how many row tiles share columns, by rows per expert, bytes per element and compute capability. On
    long groups, reads from the cache bound the product, and a wide tile reads each operand less often. It needs tensor
    cores that read shared memory themselves (Hopper, data-centre Blackwell); elsewhere registers spill."""
    if mean_rows < 64:
        return SHORT, 1
    return (WIDE if element_size <= 2 and capability in (9, 10) else NARROW), 8 if mean_rows >= 1024 else 2


@cache
def _capability(device: torch.device) -> int:
    """The GPU's major compute capability; Hopper's if kernels are interpreted or compiled for another machine."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def grouped_product_triton(
    x_SK: Tensor,
    matrices_EKN: Tensor,
    groups: RowGroups,
    low_SR: Tensor | None = None,
    p_ENR: Tensor | None = None,
    bias_EN: Tensor | None = None,
    weights_S: Tensor | None = None,
) -> Tensor:
    """[S, N]. Matrices or their transposes are contiguous, rows a multiple of 16 bytes; P may have any strides."""
    num_rows, depth = x_SK.shape
    num_experts, _, num_columns = matrices_EKN.shape
    out_SN = x_SK.new_empty(num_rows, num_columns)
    if num_rows == 0:
        return out_SN
    is_turned = matrices_EKN.stride(1) == 1
    stored = (matrices_EKN.transpose(1, 2) if is_turned else matrices_EKN).flatten(0, 1)
    rank = 0 if low_SR is None else low_SR.shape[1]
    tiling, shared = product_tiling(groups.expected_rows // num_experts, x_SK.element_size(), _capability(x_SK.device))
    step = 128 // x_SK.element_size()
    tiles = groups.tiles(tiling.rows)
    programs(_product, (tiles.shape[0] * cdiv(num_columns, tiling.columns),))(
        TensorDescriptor.from_tensor(x_SK, [tiling.rows, step]),
        TensorDescriptor.from_tensor(stored, [tiling.columns, step] if is_turned else [step, tiling.columns]),
        out_SN, low_SR, p_ENR, bias_EN, weights_S, tiles, tiles.shape[0], depth, num_columns,
        *((0, 0, 0) if p_ENR is None else p_ENR.stride()),
        HAS_BIAS=bias_EN is not None, HAS_WEIGHTS=weights_S is not None, IS_TURNED=is_turned, SHARED=shared,
        RANK=rank, PADDED_RANK=padded_rank(rank), RANK_STEP=min(tiling.columns // 4, padded_rank(rank)),
        BLOCK_M=tiling.rows, BLOCK_N=tiling.columns, BLOCK_K=step, STAGES=tiling.stages,
        PRECISION=precision_of(x_SK), num_warps=tiling.warps,
    )  # fmt: skip
    return out_SN


def grouped_gradient_triton(left_SM: Tensor, right_SN: Tensor, groups: RowGroups) -> Tensor:
    shape = (groups.num_experts, left_SM.shape[1], right_SN.shape[1])
    out_EMN = left_SM.new_empty(shape)
    programs(_gradient, (cdiv(shape[2], 128), cdiv(shape[1], 64), shape[0]))(
        left_SM, right_SN, out_EMN, groups.ends_E, shape[1], shape[2],
        BLOCK_M=64, BLOCK_N=128, BLOCK_K=64 if left_SM.element_size() == 2 else 32,
        PRECISION=precision_of(left_SM), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out_EMN


@triton.jit(do_not_specialize=["num_row_tiles"])
def _product(
    x_desc, m_desc, out_ptr, low_ptr, p_ptr, bias_ptr, weights_ptr, tiles_ptr, num_row_tiles, depth, num_columns,
    p_expert_stride, p_row_stride, p_rank_stride,
    HAS_BIAS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, IS_TURNED: tl.constexpr, SHARED: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, RANK_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs walk columns for SHARED row tiles at a time, so that neighbours find the same weights in the cache."""
    num_column_tiles = tl.cdiv(num_columns, BLOCK_N)
    band = tl.program_id(0) // (SHARED * num_column_tiles)
    place = tl.program_id(0) % (SHARED * num_column_tiles)
    rows_in_band = tl.minimum(num_row_tiles - band * SHARED, SHARED)
    tile = tiles_ptr + (band * SHARED + place % rows_in_band) * 3
    expert, first, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if first < stop:
        first_column = place // rows_in_band * BLOCK_N
        rows = first + tl.arange(0, BLOCK_M)
        columns = first_column + tl.arange(0, BLOCK_N)
        is_row, is_column = rows < stop, columns < num_columns
        rows = rows.to(tl.int64)
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        if RANK > 0:
            for at in tl.range(0, PADDED_RANK, RANK_STEP, num_stages=2):
                ranks = at + tl.arange(0, RANK_STEP)
                is_rank = ranks < RANK
                low = tl.load(
                    low_ptr + rows[:, None] * RANK + ranks[None, :], is_row[:, None] & is_rank[None, :], other=0.0
                )
                p = tl.load(
                    p_ptr + expert.to(tl.int64) * p_expert_stride
                    + columns[None, :] * p_row_stride + ranks[:, None] * p_rank_stride,
                    mask=is_rank[:, None] & is_column[None, :],
                    other=0.0,
                )  # fmt: skip
                acc = tl.dot(low, p.to(low.dtype), acc, input_precision=PRECISION)
        for start in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
            x = x_desc.load([first, start])
            if IS_TURNED:
                m = m_desc.load([expert * num_columns + first_column, start]).T
            else:
                m = m_desc.load([expert * depth + start, first_column])
            acc = tl.dot(x, m, acc, input_precision=PRECISION)
        if HAS_BIAS:
            bias_at = bias_ptr + expert.to(tl.int64) * num_columns + columns
            acc += tl.load(bias_at, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if HAS_WEIGHTS:
            acc *= tl.load(weights_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
        out = out_ptr + rows[:, None] * num_columns + columns[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _gradient(
    left_ptr, right_ptr, out_ptr, ends_ptr, num_rows, num_columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    across = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_across, is_column = across < num_rows, columns < num_columns
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(begin, end, BLOCK_K):
        rows = first + tl.arange(0, BLOCK_K)
        is_row = rows < end
        rows = rows.to(tl.int64)
        left_at = left_ptr + rows[None, :] * num_rows + across[:, None]
        left = tl.load(left_at, mask=is_across[:, None] & is_row[None, :], other=0.0)
        right_at = right_ptr + rows[:, None] * num_columns + columns[None, :]
        right = tl.load(right_at, mask=is_row[:, None] & is_column[None, :], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    at = expert.to(tl.int64) * num_rows * num_columns + across[:, None].to(tl.int64) * num_columns + columns[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=is_across[:, None] & is_column[None, :])
