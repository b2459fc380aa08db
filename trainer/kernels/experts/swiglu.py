"""An expert's activation with the adapters around it, forward and backward.

    gu = GU + xa @ Bgu[e]^T                       GU: base product;  xa: scale times the rows' low-rank projection
    h  = activation(gu)                           ha = scale * h @ Ad[e]^T
    backward, from dh' (gradient of h before the row's routing weight w):
    dh' += db @ Ad[e]                             dw = <h, dh'>:  the router's gradient, without the down output
    dgu  = activation'(gu) * w * dh'              hw = w * h:  what the down projection's weight gradients need
    dba  = scale * dgu @ Bgu[e]

Invariant: gate, up and h cross memory once. With activation.rounds_each, forward also rounds what vLLM's kernels write
out on the way: gu, and silu(gate) where nothing is clamped. Backward computes unrounded. The torch forms define the
result, and run on devices other than CUDA.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.conf.architecture.activation import ExpertActivation
from slipstream.trainer.kernels.experts.groups import RowGroups
from slipstream.trainer.kernels.experts.swiglu_kernels import activate_rows, activate_rows_backward
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
"""Tilings with an adapter; see launch.tiling_of."""
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
    """The same as activate_torch, by a kernel."""
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
