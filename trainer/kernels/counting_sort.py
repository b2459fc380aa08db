"""Stable counting sort of expert ids: three launches, nothing read back by the host.

    1  each program counts the experts among its BLOCK ids        2  running sums, expert by expert over programs
    3  each program places its ids: start of (expert, program) + how many of its earlier ids have the same expert

Stable means that an expert's rows keep the order of their tokens: it decides the order of sums in weight gradients.
The torch form is the definition, and what other devices than CUDA run. Callers: trainer.moe.dispatch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


def sort_by_expert_torch(experts_S: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of `sort_by_expert`."""
    slot_of_row_S = experts_S.argsort(stable=True)
    row_of_slot_S = torch.empty_like(slot_of_row_S)
    row_of_slot_S[slot_of_row_S] = torch.arange(experts_S.numel(), device=experts_S.device)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=experts_S.device)
    counts_E.scatter_add_(0, experts_S, torch.ones_like(experts_S))
    return slot_of_row_S, row_of_slot_S, counts_E


def sort_by_expert_triton(experts_S: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """As sort_by_expert_torch."""
    num_ids = experts_S.numel()
    slot_of_row_S, row_of_slot_S = torch.empty_like(experts_S), torch.empty_like(experts_S)
    if not num_ids:
        return slot_of_row_S, row_of_slot_S, experts_S.new_zeros(num_experts)
    num_blocks, padded = triton.cdiv(num_ids, BLOCK), triton.next_power_of_2(num_experts)
    counts_EB = torch.empty(num_experts, int(num_blocks), dtype=torch.int32, device=experts_S.device)
    grid = (num_blocks,)
    _count[grid](
        experts_S, counts_EB, num_ids, num_blocks, num_experts,
        EXPERTS=padded, BLOCK=BLOCK,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    ends_EB = counts_EB.flatten().cumsum(0, dtype=torch.int32)
    _place[grid](
        experts_S, counts_EB, ends_EB, slot_of_row_S, row_of_slot_S, num_ids, num_blocks,
        BLOCK=BLOCK,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    ends_E = ends_EB[num_blocks - 1 :: num_blocks].to(torch.int64)
    return slot_of_row_S, row_of_slot_S, ends_E.diff(prepend=ends_E.new_zeros(1))


def sort_by_expert(experts_S: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort slots by their expert.

    Args:
        experts_S: int64 ids in 0..num_experts-1, contiguous.
        num_experts: E.

    Returns:
        slot_of_row_S, its inverse row_of_slot_S, and counts_E; all int64.
    """
    implementation = sort_by_expert_triton if experts_S.is_cuda else sort_by_expert_torch
    return implementation(experts_S, num_experts)


@triton.jit(do_not_specialize=["num_ids", "num_blocks"])
def _count(experts_ptr, counts_ptr, num_ids, num_blocks, num_experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(experts_ptr + at, mask=at < num_ids, other=-1).to(tl.int32)
    experts = tl.arange(0, EXPERTS)
    counts = tl.sum((ids[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + experts * num_blocks + block, counts, mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_ids", "num_blocks"])
def _place(experts_ptr, counts_ptr, ends_ptr, slots_ptr, rows_ptr, num_ids, num_blocks, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    inside = at < num_ids
    ids = tl.load(experts_ptr + at, mask=inside, other=0).to(tl.int32)
    others = tl.load(experts_ptr + at, mask=inside, other=-1).to(tl.int32)
    is_earlier_twin = (others[None, :] == ids[:, None]) & (lane[None, :] < lane[:, None])
    rank = tl.sum(is_earlier_twin.to(tl.int32), 1)
    cell = ids * num_blocks + block
    start = tl.load(ends_ptr + cell, mask=inside, other=0) - tl.load(counts_ptr + cell, mask=inside, other=0)
    row = (start + rank).to(tl.int64)
    tl.store(rows_ptr + at, row, mask=inside)
    tl.store(slots_ptr + row, at.to(tl.int64), mask=inside)
