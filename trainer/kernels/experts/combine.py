"""Sums over a token's K rows, in a fixed order: out[t] = sum over choices k of w[t, k] * rows[row_of_choice[t, k]].

A choice whose row is -1 adds nothing.

Owns the order and the roundings. CombineMode chooses what they match:

    fp32_once   products and sum in float32 over choices 0, 1, ..., one rounding: closest to the real number
    vllm_like   products rounded to the compute dtype, float32 sum over choices, one rounding, as vLLM's moe_sum. On
                GPUs the product that makes the rows has applied the weights, so that they are rounded once, as vLLM's
    hf_eager    products and partial sums rounded, experts in ascending order: transformers' index_add_

No mode uses atomics, so the same inputs give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.conf.schema import CombineMode
from slipstream.trainer.kernels.launch import cdiv, next_power_of_2, programs


def weighted_sum_torch(
    rows_SH: Tensor, weights_TK: Tensor | None, row_of_choice_TK: Tensor, mode: CombineMode, out_TH: Tensor
) -> Tensor:
    rows_SH = torch.cat([rows_SH, rows_SH.new_zeros(1, rows_SH.shape[1])])  # row -1
    wide = torch.promote_types(rows_SH.dtype, torch.float32)
    does_round_products, does_round_sums = _roundings(mode)
    shape = (row_of_choice_TK.shape[0], rows_SH.shape[1])
    sums_TH = torch.zeros(shape, dtype=wide, device=rows_SH.device)
    for choice in range(row_of_choice_TK.shape[1]):
        product = rows_SH[row_of_choice_TK[:, choice]].to(wide)
        if weights_TK is not None:
            product = product * weights_TK[:, choice, None].to(wide)
        if does_round_products:
            product = product.to(rows_SH.dtype).to(wide)
        sums_TH += product
        if does_round_sums:
            sums_TH = sums_TH.to(rows_SH.dtype).to(wide)
    return out_TH.copy_(sums_TH)


def weighted_sum_triton(
    rows_SH: Tensor, weights_TK: Tensor | None, row_of_choice_TK: Tensor, mode: CombineMode, out_TH: Tensor
) -> Tensor:
    (num_tokens, top_k), num_columns = row_of_choice_TK.shape, rows_SH.shape[1]
    does_round_products, does_round_sums = _roundings(mode)
    if num_tokens:
        block = min(1024, next_power_of_2(num_columns))
        programs(_weighted_sum, (num_tokens, cdiv(num_columns, block)))(
            rows_SH, weights_TK, row_of_choice_TK, out_TH, num_columns,
            TOP_K=top_k, HAS_WEIGHTS=weights_TK is not None, ROUND_PRODUCTS=does_round_products,
            ROUND_SUMS=does_round_sums, BLOCK=block, num_warps=4 if block >= 512 else 1,
        )  # fmt: skip
    return out_TH


def weighted_sum(
    rows_SH: Tensor,
    weights_TK: Tensor | None,
    row_of_choice_TK: Tensor,
    mode: CombineMode = CombineMode.fp32_once,
    out_dtype: torch.dtype | None = None,
    out_TH: Tensor | None = None,
) -> Tensor:
    """Sum each token's rows. Returns [T, H].

    Args:
        rows_SH: one row per choice, contiguous.
        weights_TK: contiguous; None: all one.
        row_of_choice_TK: int64, contiguous; the row of choice (t, k), or -1. Rows are sorted by expert.
        out_dtype: of the sums; None: that of rows.
        out_TH: where they are written, contiguous; None: in new memory.
    """
    if mode is CombineMode.hf_eager:  # ascending rows are ascending experts
        row_of_choice_TK, order_TK = row_of_choice_TK.sort(-1)
        weights_TK = None if weights_TK is None else weights_TK.gather(1, order_TK)
    implementation = weighted_sum_triton if rows_SH.is_cuda else weighted_sum_torch
    if out_TH is None:
        shape = (row_of_choice_TK.shape[0], rows_SH.shape[1])
        out_TH = rows_SH.new_empty(shape, dtype=out_dtype or rows_SH.dtype)
    return implementation(rows_SH, weights_TK, row_of_choice_TK, mode, out_TH)


def _roundings(mode: CombineMode) -> tuple[bool, bool]:
    """Whether products, and whether partial sums, are rounded to the compute dtype."""
    return mode is not CombineMode.fp32_once, mode is CombineMode.hf_eager


@triton.jit
def _weighted_sum(
    rows_ptr, weights_ptr, row_of_choice_ptr, out_ptr, num_columns,
    TOP_K: tl.constexpr, HAS_WEIGHTS: tl.constexpr, ROUND_PRODUCTS: tl.constexpr, ROUND_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    dtype = rows_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(row_of_choice_ptr + token * TOP_K + choice)
        product = tl.load(rows_ptr + row * num_columns + columns, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            product *= tl.load(weights_ptr + token * TOP_K + choice).to(tl.float32)
        if ROUND_PRODUCTS:
            product = product.to(dtype).to(tl.float32)
        acc += product
        if ROUND_SUMS:
            acc = acc.to(dtype).to(tl.float32)
    tl.store(out_ptr + token * num_columns + columns, acc.to(out_ptr.dtype.element_ty), mask=inside)
