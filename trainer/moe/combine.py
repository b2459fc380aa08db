"""From expert outputs back to tokens: out[t] = sum over slots k of w[t, k] * y[t, k].

Owns the order of the sum. It is taken in float32 and rounded once, at the token's owner, over slots 0, 1, ... whatever
rank computed them, so that outputs do not depend on the expert-parallel size. An atomic scatter-add would give other
bits each run; a library reduction, other bits for other numbers of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def combine(rows_SH: Tensor, weights_TK: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """Weighted sum of each token's K expert outputs.

    Args:
        rows_SH: expert outputs, S = T * K rows in dispatch order.
        weights_TK: routing weights.
        row_of_slot_TK: int64, the row of slot (t, k); a permutation of 0..S-1.

    Returns:
        [T, H] in rows' dtype.
    """
    return _Combine.apply(rows_SH, weights_TK, row_of_slot_TK)  # type: ignore[return-value]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SH: Tensor, weights_TK: Tensor, row_of_slot_TK: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows_SH, weights_TK, row_of_slot_TK)
        out_TH = torch.zeros(weights_TK.shape[0], rows_SH.shape[1], dtype=torch.float32, device=rows_SH.device)
        for slot in range(weights_TK.shape[1]):
            out_TH += rows_SH[row_of_slot_TK[:, slot]].float() * weights_TK[:, slot, None].float()
        return out_TH.to(rows_SH.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        rows_SH, weights_TK, row_of_slot_TK = ctx.saved_tensors
        grad_TH = grad_TH.float()
        grad_rows_SH, grad_weights_TK = torch.empty_like(rows_SH), torch.empty_like(weights_TK)
        for slot in range(weights_TK.shape[1]):
            rows_of_slot = row_of_slot_TK[:, slot]
            grad_rows_SH[rows_of_slot] = (grad_TH * weights_TK[:, slot, None].float()).to(rows_SH.dtype)
            grad_weights_TK[:, slot] = (grad_TH * rows_SH[rows_of_slot].float()).sum(-1).to(weights_TK.dtype)
        return grad_rows_SH, grad_weights_TK, None
