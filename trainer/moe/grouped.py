"""One matrix product per expert over rows sorted by expert: y[rows of e] = x[rows of e] @ W[e]^T, forward and backward.

Owns the choice of kernel and its traps:

    grouped_mm  torch.nn.functional.grouped_mm. Every stride must be a multiple of 16 bytes (so a LoRA rank of 4 in
                bfloat16 cannot); a gradient with stride 0 is refused; rows past the last offset are never written
                (there are none: row counts are exact); zero rows in all are refused by some builds; the weight
                gradient of a group without rows is garbage on some GPUs.
    native      a loop of matrix products, one an expert; waits for the device once to learn the row counts.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch
from torch import Tensor


class GroupedBackend(StrEnum):
    """Kernel of the grouped products."""

    grouped_mm = "grouped_mm"
    native = "native"


def choose_grouped_backend(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> GroupedBackend:
    """The kernel for products whose row lengths are `sizes`.

    CUDA: bfloat16 from compute capability 8.0 on, which is all that torch 2.11 takes. CPU: any float dtype, from torch
    2.13 on.
    """
    if not hasattr(torch.nn.functional, "grouped_mm") or any(size * dtype.itemsize % 16 for size in sizes):
        return GroupedBackend.native
    if device.type == "cuda":
        fits = dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fits = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
    return GroupedBackend.grouped_mm if fits else GroupedBackend.native


def grouped_linear(x_SK: Tensor, weight_ENK: Tensor, counts_E: Tensor, backend: GroupedBackend) -> Tensor:
    """Apply expert e's weight to its rows.

    Args:
        x_SK: rows sorted by expert.
        weight_ENK: one (N, K) weight an expert, of x's dtype.
        counts_E: int64, rows of each expert; sums to S.

    Returns:
        [S, N].
    """
    return _GroupedLinear.apply(x_SK, weight_ENK, counts_E, backend)  # type: ignore[return-value]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_SK: Tensor, weight_ENK: Tensor, counts_E: Tensor, backend: GroupedBackend
    ) -> Tensor:
        ctx.save_for_backward(x_SK, weight_ENK, counts_E)
        ctx.backend = backend
        return _rows_times(x_SK, weight_ENK.transpose(1, 2), counts_E, backend)

    @staticmethod
    def backward(ctx: Any, grad_SN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        x_SK, weight_ENK, counts_E = ctx.saved_tensors
        grad_SN = grad_SN.contiguous()
        grad_x = _rows_times(grad_SN, weight_ENK, counts_E, ctx.backend) if ctx.needs_input_grad[0] else None
        grad_weight = _outer(grad_SN, x_SK, counts_E, ctx.backend) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None


def _ends(counts_E: Tensor) -> Tensor:
    return counts_E.cumsum(0, dtype=torch.int32)


def _rows_times(x_SK: Tensor, matrices_EKN: Tensor, counts_E: Tensor, backend: GroupedBackend) -> Tensor:
    """x[rows of e] @ matrices[e]."""
    if x_SK.shape[0] == 0:
        return x_SK.new_empty(0, matrices_EKN.shape[2])
    if backend is GroupedBackend.grouped_mm:
        return torch.nn.functional.grouped_mm(x_SK, matrices_EKN, offs=_ends(counts_E))
    out_SN = x_SK.new_empty(x_SK.shape[0], matrices_EKN.shape[2])
    start = 0
    for expert, count in enumerate(counts_E.tolist()):
        if count:
            torch.mm(x_SK[start : start + count], matrices_EKN[expert], out=out_SN[start : start + count])
        start += count
    return out_SN


def _outer(grad_SN: Tensor, x_SK: Tensor, counts_E: Tensor, backend: GroupedBackend) -> Tensor:
    """grad[rows of e]^T @ x[rows of e]; zero for an expert without rows."""
    shape = (counts_E.shape[0], grad_SN.shape[1], x_SK.shape[1])
    if x_SK.shape[0] == 0:
        return x_SK.new_zeros(shape)
    if backend is GroupedBackend.grouped_mm:
        out_ENK = torch.nn.functional.grouped_mm(grad_SN.t(), x_SK, offs=_ends(counts_E))
        return out_ENK.masked_fill_((counts_E == 0)[:, None, None], 0)
    out_ENK = x_SK.new_zeros(shape)
    start = 0
    for expert, count in enumerate(counts_E.tolist()):
        if count:
            torch.mm(grad_SN[start : start + count].t(), x_SK[start : start + count], out=out_ENK[expert])
        start += count
    return out_ENK
