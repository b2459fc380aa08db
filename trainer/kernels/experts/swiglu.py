"""An expert's activation with the adapters around it, forward and backward.

    gu = GU + xa @ Bgu[e]^T                       GU: base product;  xa: scale times the rows' low-rank projection
    h  = activation(gu)                           ha = scale * h @ Ad[e]^T
    backward, from dh' (gradient of h before the row's routing weight w):
    dh' += db @ Ad[e]                             dw = <h, dh'>:  the router's gradient, without the down output
    dgu  = activation'(gu) * w * dh'              hw = w * h:  what the down projection's weight gradients need
    dba  = scale * dgu @ Bgu[e]

Invariant: gate, up and h cross memory once; a program handles rows of one expert, and without a limit, a bend or an
adapter computes none of theirs. With activation.rounds_each, forward also rounds what vLLM's kernels write out on the
way: gu, and silu(gate) where nothing is clamped. Backward computes unrounded.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from slipstream.conf.architecture.activation import ExpertActivation
from slipstream.trainer.kernels.experts.groups import RowGroups
from slipstream.trainer.kernels.launch import (
    Tiling,
    by_device,
    factor_of,
    padded_rank,
    precision_of,
    programs,
    tiling_of,
)


@dataclass(frozen=True, slots=True)
class InnerAdapter:
    """The two factors that the activation's kernels apply. E experts, I expert width, r rank; any float dtype."""

    b_EIR: Tensor
    """(E, 2I, r): B of gate and up."""
    a_ERI: Tensor
    """(E, r, I): A of down."""
    scale: float
    """alpha / rank."""

    @property
    def rank(self) -> int:
        return self.a_ERI.shape[1]


TABLE_ROWS = 64
"""Rows of a tile in the table of `RowGroups.tiles`; a program handles a part of one."""
FORWARD, BACKWARD = Tiling(16, 256, warps=4, stages=3), Tiling(32, 64, warps=8, stages=3)
_WIDE = {
    256: Tiling(64, 16, warps=4, stages=3),
    1024: Tiling(32, 16, warps=8, stages=2),
    2048: Tiling(16, 16, warps=8, stages=2),
}
ADAPTED = {32: Tiling(64, 64, warps=4, stages=3), 128: Tiling(64, 32, warps=4, stages=3), **_WIDE}
ADAPTED_BACKWARD = {32: Tiling(16, 64, warps=1, stages=2), 128: Tiling(64, 64, warps=4, stages=2), **_WIDE}


def activate_torch(
    gu_SI: Tensor, xa_SR: Tensor | None, adapter: InnerAdapter | None, groups: RowGroups, activation: ExpertActivation
) -> tuple[Tensor, Tensor | None]:
    """Compute h, and its projection for the down adapter.

    Args:
        gu_SI: [S, 2I] base product with its bias, gate columns first.
        xa_SR: scale times rows times A of gate and up; None without an adapter.

    Returns:
        h [S, I] and ha [S, r] (None without an adapter), rounded once to gu's dtype.
    """
    wide_SI = _adapted(gu_SI, xa_SR, adapter, groups)
    if activation.rounds_each:
        wide_SI = wide_SI.to(gu_SI.dtype).to(wide_SI.dtype)
    h_SI = _gated(wide_SI, activation)[0].to(gu_SI.dtype)
    if activation.rounds_each and activation.limit is None:
        gate, up = wide_SI.to(gu_SI.dtype).chunk(2, -1)
        h_SI = (F.gelu(gate, approximate="tanh") if activation.cubic else F.silu(gate)) * up
    if adapter is None:
        return h_SI, None
    ha_SR = h_SI.new_empty(h_SI.shape[0], adapter.rank)
    for expert, rows in groups.slices():
        ha_SR[rows] = (h_SI[rows] @ factor_of(adapter.a_ERI, expert, h_SI.dtype).t()) * adapter.scale
    return h_SI, ha_SR


def activate_backward_torch(
    gu_SI: Tensor,
    xa_SR: Tensor | None,
    adapter: InnerAdapter | None,
    dh_SI: Tensor,
    db_SR: Tensor | None,
    weights_S: Tensor,
    groups: RowGroups,
    activation: ExpertActivation,
    needs_h: bool,
    may_overwrite_gu: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Gradients around the activation. May overwrite dh.

    Args:
        gu_SI, xa_SR, adapter, groups, activation: as in `activate`.
        dh_SI: [S, I] output gradient times the base down weight, without routing weights.
        db_SR: scale * output gradient times B of down; None without an adapter.
        may_overwrite_gu: whether the caller has no more use for gu.

    Returns:
        dgu [S, 2I], hw [S, I] (None unless asked for), dw [S] in float32, dba [S, r] (None without an adapter).
    """
    dtype = gu_SI.dtype
    wide = torch.promote_types(dtype, torch.float32)
    h_SI, slope_SI, gate_factor_SI = _gated(_adapted(gu_SI, xa_SR, adapter, groups), activation)
    grad_SI = dh_SI.to(wide)
    if adapter is not None and db_SR is not None:
        for expert, rows in groups.slices():
            grad_SI[rows] += db_SR[rows].to(wide) @ factor_of(adapter.a_ERI, expert, dtype).to(wide)
    dw_S = (h_SI * grad_SI).sum(-1)
    weighted_SI = grad_SI * weights_S.to(wide)[:, None]
    dgu_SI = torch.cat([weighted_SI * slope_SI, weighted_SI * gate_factor_SI], -1).to(dtype)
    hw_SI = (h_SI * weights_S.to(wide)[:, None]).to(dtype) if needs_h else None
    if adapter is None:
        return dgu_SI, hw_SI, dw_S, None
    dba_SR = dgu_SI.new_empty(dgu_SI.shape[0], adapter.rank)
    for expert, rows in groups.slices():
        dba_SR[rows] = (dgu_SI[rows] @ factor_of(adapter.b_EIR, expert, dtype)) * adapter.scale
    return dgu_SI, hw_SI, dw_S, dba_SR


def _adapted(gu_SI: Tensor, xa_SR: Tensor | None, adapter: InnerAdapter | None, groups: RowGroups) -> Tensor:
    """gate and up with adapter, unrounded."""
    wide = torch.promote_types(gu_SI.dtype, torch.float32)
    out_SI = gu_SI.to(wide, copy=True)
    if adapter is not None and xa_SR is not None:
        for expert, rows in groups.slices():
            low = xa_SR[rows].to(wide) @ factor_of(adapter.b_EIR, expert, xa_SR.dtype).to(wide).t()
            out_SI[rows] += low
    return out_SI


def _gated(gu_SI: Tensor, activation: ExpertActivation) -> tuple[Tensor, Tensor, Tensor]:
    """h, dh/dgate and dh/dup, in gu's dtype."""
    gate, up = gu_SI.chunk(2, -1)
    is_gate_free = is_up_free = torch.ones((), dtype=gate.dtype, device=gate.device)
    if activation.limit is not None:
        is_gate_free = (gate <= activation.limit).to(gate.dtype)
        is_up_free = (up.abs() <= activation.limit).to(gate.dtype)
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    bend = activation.cubic * gate.square()
    sigmoid = torch.sigmoid(activation.alpha * gate * (1 + bend))
    glu, up = gate * sigmoid, up + activation.up_offset
    slope = sigmoid * (1 + activation.alpha * gate * (1 + 3 * bend) * (1 - sigmoid))
    return up * glu, up * slope * is_gate_free, glu * is_up_free


def activate_triton(
    gu_SI: Tensor, xa_SR: Tensor | None, adapter: InnerAdapter | None, groups: RowGroups, activation: ExpertActivation
) -> tuple[Tensor, Tensor | None]:
    num_rows, width = gu_SI.shape[0], gu_SI.shape[1] // 2
    h_SI = gu_SI.new_empty(num_rows, width)
    ha_SR = None if adapter is None else gu_SI.new_empty(num_rows, adapter.rank)
    if num_rows:
        tiling = FORWARD if adapter is None else tiling_of(ADAPTED, adapter.rank, gu_SI.element_size())
        tiles = groups.tiles(TABLE_ROWS)
        programs(activate_rows, (tiles.shape[0] * TABLE_ROWS // tiling.rows,))(
            gu_SI, xa_SR, h_SI, ha_SR, tiles, width,
            *_adapter_arguments(adapter), **_constants(gu_SI, adapter, activation, tiling),
            ROUNDS_EACH=activation.rounds_each,
        )  # fmt: skip
    return h_SI, ha_SR


def activate_backward_triton(
    gu_SI: Tensor,
    xa_SR: Tensor | None,
    adapter: InnerAdapter | None,
    dh_SI: Tensor,
    db_SR: Tensor | None,
    weights_S: Tensor,
    groups: RowGroups,
    activation: ExpertActivation,
    needs_h: bool,
    may_overwrite_gu: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """The same as activate_backward_torch, by a kernel; overwrites dh, and gu if it may."""
    num_rows, width = dh_SI.shape
    dgu_SI = gu_SI if may_overwrite_gu else torch.empty_like(gu_SI)
    dw_S = torch.empty(num_rows, dtype=torch.float32, device=gu_SI.device)
    dba_SR = None if adapter is None else gu_SI.new_empty(num_rows, adapter.rank)
    if num_rows:
        tiling = BACKWARD if adapter is None else tiling_of(ADAPTED_BACKWARD, adapter.rank, gu_SI.element_size())
        tiles = groups.tiles(TABLE_ROWS)
        programs(activate_rows_backward, (tiles.shape[0] * TABLE_ROWS // tiling.rows,))(
            gu_SI, xa_SR, dh_SI, db_SR, weights_S, dgu_SI, dh_SI, dw_S, dba_SR, tiles, width,
            *_adapter_arguments(adapter),
            **_constants(gu_SI, adapter, activation, tiling) | {"NEEDS_H": needs_h},
        )  # fmt: skip
    return dgu_SI, dh_SI if needs_h else None, dw_S, dba_SR


def _adapter_arguments(adapter: InnerAdapter | None) -> tuple[Tensor | float | int | None, ...]:
    if adapter is None:
        return (None, 0, 0, 0, None, 0, 0, 0, 1.0)
    return (adapter.b_EIR, *adapter.b_EIR.stride(), adapter.a_ERI, *adapter.a_ERI.stride(), adapter.scale)


def _constants(
    gu_SI: Tensor, adapter: InnerAdapter | None, activation: ExpertActivation, tiling: Tiling
) -> dict[str, Any]:
    """Constants that a kernel is compiled for. Without a limit it computes no clamps."""
    rank = 16 if adapter is None else adapter.rank
    return {
        "ALPHA": activation.alpha, "CUBIC": activation.cubic,
        "LIMIT": activation.limit, "UP_OFFSET": activation.up_offset,
        "HAS_LORA": adapter is not None,
        "RANK": rank, "PADDED_RANK": padded_rank(rank),
        "TABLE_ROWS": TABLE_ROWS, "BLOCK_M": tiling.rows, "BLOCK_N": tiling.columns,
        "STAGES": tiling.stages, "PRECISION": precision_of(gu_SI), "num_warps": tiling.warps,
    }  # fmt: skip


activate = by_device(activate_torch, activate_triton)
activate_backward = by_device(activate_backward_torch, activate_backward_triton)


@triton.jit
def _part_of_tile(tiles_ptr, index, PARTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert, first row and one past the last row of part `index`, when each tile is cut into PARTS parts of BLOCK_M
    rows. So kernels with smaller tiles read the same table."""
    tile = tiles_ptr + index // PARTS * 3
    first = tl.load(tile + 1) + index % PARTS * BLOCK_M
    return tl.load(tile).to(tl.int64), first, tl.minimum(tl.load(tile + 2), first + BLOCK_M)


@triton.jit
def _adapted_tile(
    gu_ptr, b_ptr, xa, at, inside, columns, is_column, ranks, b_row_stride, b_rank_stride,
    RANK: tl.constexpr, HAS_LORA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of gate or up in float32, and the tile of B that it used. Pointers point to that half of the expert."""
    tile = tl.load(gu_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = xa
    if HAS_LORA:
        b = _factor_tile(b_ptr, columns, is_column, ranks, b_row_stride, b_rank_stride, RANK).to(xa.dtype)
        tile = tl.dot(xa, tl.trans(b), tile, input_precision=PRECISION)
    return tile, b


@triton.jit
def _factor_tile(ptr, rows, is_row, ranks, row_stride, rank_stride, RANK: tl.constexpr):
    at = rows[:, None] * row_stride + ranks[None, :] * rank_stride
    return tl.load(ptr + at, mask=is_row[:, None] & (ranks < RANK)[None, :], other=0.0)


@triton.jit
def _gated_tile(
    gate, up, ALPHA: tl.constexpr, CUBIC: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr
):  # fmt: skip
    """Three factors: h is the product of the first two, dh/dgate the third times up, without gradients of clamps."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    bent, steep = gate, 1.0
    if CUBIC != 0.0:
        bend = CUBIC * gate * gate
        bent, steep = gate * (1 + bend), 1 + 3 * bend
    sigmoid = tl.sigmoid(ALPHA * bent)
    glu = gate * sigmoid
    return up + UP_OFFSET, glu, sigmoid + ALPHA * glu * (1 - sigmoid) * steep


@triton.jit
def activate_rows(
    gu_ptr, xa_ptr, h_ptr, ha_ptr, tiles_ptr, width,
    b_ptr, b_expert_stride, b_row_stride, b_rank_stride, a_ptr, a_expert_stride, a_rank_stride, a_column_stride, scale,
    ALPHA: tl.constexpr, CUBIC: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, HAS_LORA: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, TABLE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    ROUNDS_EACH: tl.constexpr,
) -> None:  # fmt: skip
    expert, first, stop = _part_of_tile(tiles_ptr, tl.program_id(0), TABLE_ROWS // BLOCK_M, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    if first < stop:
        rows = tl.arange(0, BLOCK_M)
        is_row = rows < stop - first
        begin = first.to(tl.int64)
        gu_ptr += begin * 2 * width
        h_ptr += begin * width
        ranks = tl.arange(0, PADDED_RANK)
        low_at = rows[:, None] * RANK + ranks[None, :]
        is_low = is_row[:, None] & (ranks < RANK)[None, :]
        xa = tl.load(xa_ptr + begin * RANK + low_at, mask=is_low, other=0.0) if HAS_LORA else 0.0
        if HAS_LORA:
            b_ptr += expert * b_expert_stride
            a_ptr += expert * a_expert_stride
        ha = tl.zeros([BLOCK_M, PADDED_RANK], dtype=tl.float32)
        for start in tl.range(0, width, BLOCK_N, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK_N)
            is_column = columns < width
            inside = is_row[:, None] & is_column[None, :]
            at = rows[:, None] * (2 * width) + columns[None, :]
            gate, _ = _adapted_tile(
                gu_ptr, b_ptr, xa, at, inside, columns, is_column, ranks, b_row_stride, b_rank_stride,
                RANK, HAS_LORA, PRECISION,
            )  # fmt: skip
            up, _ = _adapted_tile(
                gu_ptr + width, b_ptr + width * b_row_stride if HAS_LORA else None,
                xa, at, inside, columns, is_column, ranks, b_row_stride, b_rank_stride,
                RANK, HAS_LORA, PRECISION,
            )  # fmt: skip
            if ROUNDS_EACH:
                gate, up = gate.to(h_ptr.dtype.element_ty).to(tl.float32), up.to(h_ptr.dtype.element_ty).to(tl.float32)
            up, glu, _ = _gated_tile(gate, up, ALPHA, CUBIC, LIMIT, UP_OFFSET)
            if ROUNDS_EACH and LIMIT is None:
                glu = glu.to(h_ptr.dtype.element_ty).to(tl.float32)
            h = (up * glu).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + rows[:, None] * width + columns[None, :], h, mask=inside)
            if HAS_LORA:
                a = _factor_tile(a_ptr, columns, is_column, ranks, a_column_stride, a_rank_stride, RANK)
                ha = tl.dot(h, a.to(h.dtype), ha, input_precision=PRECISION)
        if HAS_LORA:
            tl.store(ha_ptr + begin * RANK + low_at, (ha * scale).to(ha_ptr.dtype.element_ty), mask=is_low)


@triton.jit
def activate_rows_backward(
    gu_ptr, xa_ptr, dh_ptr, db_ptr, weights_ptr, dgu_ptr, hw_ptr, dw_ptr, dba_ptr, tiles_ptr, width,
    b_ptr, b_expert_stride, b_row_stride, b_rank_stride, a_ptr, a_expert_stride, a_rank_stride, a_column_stride, scale,
    ALPHA: tl.constexpr, CUBIC: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    NEEDS_H: tl.constexpr, HAS_LORA: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, TABLE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """dgu may overwrite gu, and hw may overwrite dh: one program reads and writes each element. Stores have pointers of
    their own. Otherwise the loop, which loads ahead, would keep those addresses in registers until it stores there, and
    fewer thread blocks would fit."""
    expert, first, stop = _part_of_tile(tiles_ptr, tl.program_id(0), TABLE_ROWS // BLOCK_M, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    if first < stop:
        rows = tl.arange(0, BLOCK_M)
        is_row = rows < stop - first
        begin = first.to(tl.int64)
        gu_ptr += begin * 2 * width
        dgu_ptr += begin * 2 * width
        dh_ptr += begin * width
        hw_ptr += begin * width
        ranks = tl.arange(0, PADDED_RANK)
        low_at = rows[:, None] * RANK + ranks[None, :]
        is_low = is_row[:, None] & (ranks < RANK)[None, :]
        xa = tl.load(xa_ptr + begin * RANK + low_at, mask=is_low, other=0.0) if HAS_LORA else 0.0
        db = tl.load(db_ptr + begin * RANK + low_at, mask=is_low, other=0.0) if HAS_LORA else 0.0
        if HAS_LORA:
            b_ptr += expert * b_expert_stride
            a_ptr += expert * a_expert_stride
        weight = tl.load(weights_ptr + begin + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
        dba = tl.zeros([BLOCK_M, PADDED_RANK], dtype=tl.float32)
        dw = tl.zeros([BLOCK_M], dtype=tl.float32)
        for start in tl.range(0, width, BLOCK_N, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK_N)
            is_column = columns < width
            inside = is_row[:, None] & is_column[None, :]
            at = rows[:, None] * (2 * width) + columns[None, :]
            gate_in, b_gate = _adapted_tile(
                gu_ptr, b_ptr, xa, at, inside, columns, is_column, ranks, b_row_stride, b_rank_stride,
                RANK, HAS_LORA, PRECISION,
            )  # fmt: skip
            up_in, b_up = _adapted_tile(
                gu_ptr + width, b_ptr + width * b_row_stride if HAS_LORA else None,
                xa, at, inside, columns, is_column, ranks, b_row_stride, b_rank_stride,
                RANK, HAS_LORA, PRECISION,
            )  # fmt: skip
            h_at = rows[:, None] * width + columns[None, :]
            dh = tl.load(dh_ptr + h_at, mask=inside, other=0.0).to(tl.float32)
            if HAS_LORA:
                a = _factor_tile(a_ptr, columns, is_column, ranks, a_column_stride, a_rank_stride, RANK)
                dh = tl.dot(db, tl.trans(a.to(db.dtype)), dh, input_precision=PRECISION)
            up, glu, slope = _gated_tile(gate_in, up_in, ALPHA, CUBIC, LIMIT, UP_OFFSET)
            h = up * glu
            dw += tl.sum(h * dh, 1)
            dh *= weight
            dgate, dup = dh * up * slope, dh * glu
            if LIMIT is not None:
                dgate = tl.where(gate_in <= LIMIT, dgate, 0.0)
                dup = tl.where(tl.abs(up_in) <= LIMIT, dup, 0.0)
            dgate, dup = dgate.to(dgu_ptr.dtype.element_ty), dup.to(dgu_ptr.dtype.element_ty)
            tl.store(dgu_ptr + at, dgate, mask=inside)
            tl.store(dgu_ptr + width + at, dup, mask=inside)
            if NEEDS_H:
                tl.store(hw_ptr + h_at, (weight * h).to(hw_ptr.dtype.element_ty), mask=inside)
            if HAS_LORA:
                dba = tl.dot(dgate, b_gate, dba, input_precision=PRECISION)
                dba = tl.dot(dup, b_up, dba, input_precision=PRECISION)
        tl.store(dw_ptr + begin + rows, dw, mask=is_row)
        if HAS_LORA:
            tl.store(dba_ptr + begin * RANK + low_at, (dba * scale).to(dba_ptr.dtype.element_ty), mask=is_low)
