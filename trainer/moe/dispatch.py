"""Bring every token to its experts, and the outputs back.

    tokens [T] --expand--> slots sorted by expert [S = T*K] --all-to-all--> rows from all ranks, by sender
           --regroup--> rows by local expert, then sender [R] --experts--> ... and the same way back

Owns the order of rows and the all-to-all. Row counts are exact: there is no padding and no capacity, and a rank with
zero rows still joins every collective, forward and backward. Every backward is a gather with a fixed order (no
atomics). Without an expert-parallel group, nothing is sent and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the expert-parallel group sends each other for one layer."""

    group: dist.ProcessGroup
    send_splits: list[int]
    """Rows of this rank's tokens that each ep_rank's experts get."""
    receive_splits: list[int]
    """Rows that this rank's experts get from each ep_rank."""
    by_expert_R: Tensor
    """int64; row i in expert order is row by_expert[i] in sender order."""
    by_sender_R: Tensor
    """The inverse."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The way of one microbatch's rows through one layer."""

    slot_of_row_S: Tensor
    """int64; row i, sorted by expert, is slot slot_of_row[i] = t * K + k."""
    row_of_slot_TK: Tensor
    """The inverse, one entry per slot."""
    counts_e: Tensor
    """int64 [E_local]; rows of each local expert after the exchange."""
    exchange: Exchange | None
    """None: this rank holds every expert."""


def plan_dispatch(experts_TK: Tensor, num_experts: int, group: dist.ProcessGroup | None) -> Dispatch:
    """Sort slots by expert and, with a group, agree on row counts (a small all-to-all, one wait for the device)."""
    flat_S = experts_TK.flatten()
    slot_of_row_S = flat_S.argsort(stable=True)
    row_of_slot_TK = _inverse(slot_of_row_S).view_as(experts_TK)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=flat_S.device)
    counts_E.scatter_add_(0, flat_S, torch.ones_like(flat_S))
    if group is None:
        return Dispatch(slot_of_row_S, row_of_slot_TK, counts_E, None)

    num_ranks = group.size()
    received_E = torch.empty_like(counts_E)
    dist.all_to_all_single(received_E, counts_E, group=group)
    received_re = received_E.view(num_ranks, -1)
    totals = torch.stack((counts_E.view(num_ranks, -1).sum(1), received_re.sum(1))).tolist()

    expert_of_row = torch.arange(received_re.shape[1], device=flat_S.device).repeat(num_ranks)
    expert_of_row = expert_of_row.repeat_interleave(received_E, output_size=sum(totals[1]))
    by_expert_R = expert_of_row.argsort(stable=True)
    exchange = Exchange(group, totals[0], totals[1], by_expert_R, _inverse(by_expert_R))
    return Dispatch(slot_of_row_S, row_of_slot_TK, received_re.sum(0), exchange)


def dispatch(x_TH: Tensor, plan: Dispatch) -> Tensor:
    """[T, H] tokens -> [R, H] rows, grouped by local expert."""
    rows_SH = _Expand.apply(x_TH, plan.slot_of_row_S, plan.row_of_slot_TK)
    exchange = plan.exchange
    if exchange is None:
        return rows_SH  # type: ignore[return-value]
    rows_RH = _AllToAll.apply(rows_SH, exchange.send_splits, exchange.receive_splits, exchange.group)
    return _Permute.apply(rows_RH, exchange.by_expert_R, exchange.by_sender_R)  # type: ignore[return-value]


def undispatch(rows_RH: Tensor, plan: Dispatch) -> Tensor:
    """[R, H] expert outputs -> [S, H] at the tokens' owner, sorted by expert as `dispatch` sent them."""
    exchange = plan.exchange
    if exchange is None:
        return rows_RH
    rows_RH = _Permute.apply(rows_RH, exchange.by_sender_R, exchange.by_expert_R)
    return _AllToAll.apply(rows_RH, exchange.receive_splits, exchange.send_splits, exchange.group)  # type: ignore[return-value]


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.numel(), device=permutation.device)
    return inverse


def _all_to_all(rows: Tensor, send_splits: list[int], receive_splits: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(receive_splits), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), receive_splits, send_splits, group=group)
    return out


class _AllToAll(torch.autograd.Function):
    """Rows to their ranks; the gradient goes back with the splits swapped."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: Tensor, send_splits: list[int], receive_splits: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits, ctx.group = (send_splits, receive_splits), group
        return _all_to_all(rows, send_splits, receive_splits, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        send_splits, receive_splits = ctx.splits
        return _all_to_all(grad, receive_splits, send_splits, ctx.group), None, None, None


class _Permute(torch.autograd.Function):
    """rows[order]; the gradient is a gather by the inverse, where autograd's own would add with atomics."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


class _Expand(torch.autograd.Function):
    """Copy each token to its K rows; the gradient is the float32 sum over slots in slot order, rounded once."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, slot_of_row_S: Tensor, row_of_slot_TK: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(row_of_slot_TK)
        return x_TH[slot_of_row_S // row_of_slot_TK.shape[1]]

    @staticmethod
    def backward(ctx: Any, grad_SH: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (row_of_slot_TK,) = ctx.saved_tensors
        grad_TH = torch.zeros(row_of_slot_TK.shape[0], grad_SH.shape[1], dtype=torch.float32, device=grad_SH.device)
        for slot in range(row_of_slot_TK.shape[1]):
            grad_TH += grad_SH[row_of_slot_TK[:, slot]].float()
        return grad_TH.to(grad_SH.dtype), None, None
