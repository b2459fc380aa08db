"""Stable counting sort of expert ids: three launches, nothing read back by the host.

    1  each program counts the experts among its BLOCK ids        2  running sums, expert by expert over programs
    3  each program places its ids: start of (expert, program) + how many of its earlier ids have the same expert;
       the first one writes each expert's rows

Stable means that an expert's rows keep the order of their tokens, which decides the order of sums in weight gradients.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.trainer.kernels.launch import by_device, cdiv, next_power_of_2, programs

BLOCK = 128


class ExpertOrder(NamedTuple):
    """Choices sorted by expert. Example: experts [[1, 0], [1, 2]] give choices [1, 0, 2, 3] and tokens [0, 0, 1, 1]."""

    choice_of_row_S: Tensor
    """int64."""
    token_of_row_S: Tensor
    """int64; choice // top_k."""
    row_of_choice_S: Tensor
    """int64; the inverse of choice_of_row_S."""
    counts_E: Tensor
    """int64; rows of each expert."""
    ends_E: Tensor
    """int32; one past each expert's last row."""


def sort_by_expert_torch(experts_S: Tensor, num_experts: int, top_k: int = 1) -> ExpertOrder:
    """Sort choices by their expert.

    Args:
        experts_S: int64 ids in 0..num_experts-1, contiguous.
    """
    choice_of_row_S = experts_S.argsort(stable=True)
    row_of_choice_S = torch.empty_like(choice_of_row_S)
    row_of_choice_S[choice_of_row_S] = torch.arange(experts_S.numel(), device=experts_S.device)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=experts_S.device)
    counts_E.scatter_add_(0, experts_S, torch.ones_like(experts_S))
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    return ExpertOrder(choice_of_row_S, choice_of_row_S // top_k, row_of_choice_S, counts_E, ends_E)


def sort_by_expert_triton(experts_S: Tensor, num_experts: int, top_k: int = 1) -> ExpertOrder:
    num_ids = experts_S.numel()
    if not num_ids:
        return sort_by_expert_torch(experts_S, num_experts, top_k)
    choices, tokens, rows, counts_E = (experts_S.new_empty(size) for size in (num_ids, num_ids, num_ids, num_experts))
    num_blocks, padded = cdiv(num_ids, BLOCK), next_power_of_2(num_experts)
    counts_EB = experts_S.new_empty(num_experts, num_blocks, dtype=torch.int32)
    ends_E = experts_S.new_empty(num_experts, dtype=torch.int32)
    grid = (num_blocks,)
    programs(_count, grid)(
        experts_S, counts_EB, num_ids, num_blocks, num_experts,
        EXPERTS=padded, BLOCK=BLOCK,
    )  # fmt: skip
    ends_EB = counts_EB.flatten().cumsum(0, dtype=torch.int32)
    programs(_place, grid)(
        experts_S, counts_EB, ends_EB, choices, tokens, rows, counts_E, ends_E, num_ids, num_blocks, num_experts,
        TOP_K=top_k, EXPERTS=padded, BLOCK=BLOCK,
    )  # fmt: skip
    return ExpertOrder(choices, tokens, rows, counts_E, ends_E)


sort_by_expert = by_device(sort_by_expert_torch, sort_by_expert_triton)


@triton.jit(do_not_specialize=["num_ids", "num_blocks"])
def _count(experts_ptr, counts_ptr, num_ids, num_blocks, num_experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(experts_ptr + at, mask=at < num_ids, other=-1).to(tl.int32)
    experts = tl.arange(0, EXPERTS)
    counts = tl.sum((ids[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + experts * num_blocks + block, counts, mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_ids", "num_blocks"])
def _place(
    experts_ptr, counts_ptr, ends_ptr, choices_ptr, tokens_ptr, rows_ptr, all_counts_ptr, all_ends_ptr,
    num_ids, num_blocks, num_experts,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    tl.store(choices_ptr + row, at.to(tl.int64), mask=inside)
    tl.store(tokens_ptr + row, (at // TOP_K).to(tl.int64), mask=inside)
    if block == 0:
        experts = tl.arange(0, EXPERTS)
        is_expert = experts < num_experts
        ends = tl.load(ends_ptr + (experts + 1) * num_blocks - 1, mask=is_expert, other=0)
        begins = tl.load(ends_ptr + experts * num_blocks - 1, mask=is_expert & (experts > 0), other=0)
        tl.store(all_ends_ptr + experts, ends, mask=is_expert)
        tl.store(all_counts_ptr + experts, (ends - begins).to(tl.int64), mask=is_expert)
