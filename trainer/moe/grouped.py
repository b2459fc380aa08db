"""One matrix product per expert over rows sorted by expert. No autograd (experts.py has it).

Owns the choice of kernel. The kernels and their limits:

    grouped_mm  torch.nn.functional.grouped_mm. Every stride must be a multiple of 16 bytes; an operand with stride 0 is
                refused; rows past the last offset are never written (see RowGroups); some builds
                refuse zero rows in all; the weight gradient of a group without rows is garbage on some GPUs; transposed
                weights run as a loop over experts except on Hopper and Blackwell.
    triton      trainer.kernels.experts.grouped_gemm: any GPU of compute capability 8.0 on; the same strides. It adds
                adapter and bias and applies routing weights in its accumulator. On GPUs where grouped_mm is fast,
                grouped_mm computes the gradients of weights, and products of fewer than LIGHT_FLOP operations without
                those.
    native      a loop of matrix products, one per expert; waits for the device once to learn the row counts.
"""

from enum import StrEnum
from functools import cache

import torch
from torch import Tensor

from slipstream.trainer.kernels.experts.grouped_gemm import grouped_gradient_triton, grouped_product_triton
from slipstream.trainer.kernels.experts.groups import RowGroups
from slipstream.trainer.kernels.experts.low_rank import add_low_rank

LIGHT_FLOP = 4e11
"""Operations; a product of fewer is light. On an H200 Triton's product takes up to 15 % less time on the device than
grouped_mm's, but 80 us more on the host, and short steps wait for the host (docs/LOG.md)."""


class GroupedBackend(StrEnum):
    """Kernel of the grouped products; the module's docstring says what `triton` leaves to grouped_mm."""

    grouped_mm = "grouped_mm"
    triton = "triton"
    native = "native"


def choose_grouped_backend(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> GroupedBackend:
    """Choose the kernel for products whose row lengths are `sizes`. CUDA: triton from compute capability 8.0 on;
    grouped_mm on data-centre Blackwell, where triton was not measured. CPU: grouped_mm up to float32, from torch 2.13
    on."""
    if not all(size * dtype.itemsize % 16 == 0 for size in sizes):
        return GroupedBackend.native
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if has_fast_grouped_mm(device, dtype) and capability >= (10, 0):
            return GroupedBackend.grouped_mm
        return GroupedBackend.triton if capability >= (8, 0) else GroupedBackend.native
    is_recent = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
    return GroupedBackend.grouped_mm if is_recent and dtype is not torch.float64 else GroupedBackend.native


@cache
def has_fast_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether grouped_mm has kernels of its own: on Hopper and data-centre Blackwell, for bfloat16."""
    is_there = device.type == "cuda" and dtype is torch.bfloat16 and hasattr(torch.nn.functional, "grouped_mm")
    return is_there and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0), (10, 3))


def backend_of_product(
    backend: GroupedBackend, num_operations: int, *, is_plain: bool, is_grouped_mm_fast: bool
) -> GroupedBackend:
    """`backend`, but grouped_mm where Triton would take longer (see LIGHT_FLOP) and has nothing to add."""
    is_light = num_operations < LIGHT_FLOP and is_plain
    if backend is GroupedBackend.triton and is_light and is_grouped_mm_fast:
        return GroupedBackend.grouped_mm
    return backend


def grouped_product(
    x_SK: Tensor,
    matrices_EKN: Tensor,
    groups: RowGroups,
    backend: GroupedBackend,
    *,
    low_SR: Tensor | None = None,
    p_ENR: Tensor | None = None,
    bias_EN: Tensor | None = None,
    weights_S: Tensor | None = None,
) -> Tensor:
    """(x[rows of e] @ matrices[e] + low[rows of e] @ P[e]^T + bias[e]) * weights[rows of e] for every expert.

    Args:
        x_SK: rows sorted by expert, contiguous.
        matrices_EKN: in x's dtype; a transposed view is fine.
        low_SR, p_ENR: an adapter's second factor; see trainer.kernels.experts.low_rank.
        bias_EN: one contiguous vector per expert.
        weights_S: one factor per row, of backend triton alone.

    Returns:
        [S, N]. Rounded once by triton; by the others the product is rounded before adapter and bias are added.
    """
    if x_SK.shape[0] == 0:
        return x_SK.new_empty(0, matrices_EKN.shape[2])
    backend = backend_of_product(
        backend,
        2 * groups.expected_rows * x_SK.shape[1] * matrices_EKN.shape[2],
        is_plain=low_SR is None and bias_EN is None and weights_S is None,
        is_grouped_mm_fast=has_fast_grouped_mm(x_SK.device, x_SK.dtype),
    )
    if backend is GroupedBackend.triton:
        return grouped_product_triton(x_SK, matrices_EKN, groups, low_SR, p_ENR, bias_EN, weights_S)
    assert weights_S is None, "of triton alone"
    if backend is GroupedBackend.grouped_mm:
        out_SN = torch.nn.functional.grouped_mm(x_SK, matrices_EKN, offs=groups.ends_E)
    else:
        out_SN = x_SK.new_empty(x_SK.shape[0], matrices_EKN.shape[2])
        for expert, rows in groups.slices():
            torch.mm(x_SK[rows], matrices_EKN[expert], out=out_SN[rows])
    return add_low_rank(out_SN, low_SR, p_ENR, bias_EN, groups)


def grouped_gradient(left_SM: Tensor, right_SN: Tensor, groups: RowGroups, backend: GroupedBackend) -> Tensor:
    """left[rows of e]^T @ right[rows of e] for every expert, [E, M, N]; zero for an expert without rows."""
    shape = (groups.num_experts, left_SM.shape[1], right_SN.shape[1])
    if left_SM.shape[0] == 0:
        return left_SM.new_zeros(shape)
    if backend is GroupedBackend.triton and has_fast_grouped_mm(left_SM.device, left_SM.dtype):
        backend = GroupedBackend.grouped_mm
    if backend is GroupedBackend.grouped_mm:
        out_EMN = torch.nn.functional.grouped_mm(left_SM.t(), right_SN, offs=groups.ends_E)
        return out_EMN.masked_fill_((groups.counts_E == 0)[:, None, None], 0)
    if backend is GroupedBackend.triton:
        return grouped_gradient_triton(left_SM, right_SN, groups)
    out_EMN = left_SM.new_zeros(shape)
    for expert, rows in groups.slices():
        torch.mm(left_SM[rows].t(), right_SN[rows], out=out_EMN[expert])
    return out_EMN
