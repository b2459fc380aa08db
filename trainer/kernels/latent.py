"""Heads of latent attention: rotate queries and build every head's keys, in one pass over memory each way.

    q [T,N,F+R]  fixed | turning --rotate-->                  q [T,N,F+R]
    kv [T,N,F+V] fixed | values  ---------------------------> k [T,N,F+R] fixed | turned,  v [T,N,V], a view of kv
    turning [T,R] one key part for all heads --rotate--> ----'

Owns the casts, which are transformers': every product and sum of the rotation is rounded. Backward rounds once, and
sums the shared part's gradient over heads in float32; of the inputs it needs only the angles. Interleaved pairs come
out as halves, in queries and keys alike, which does not change their products.

Shapes: T packed tokens, N heads, F dims that stay, R dims that turn, V value head_dim.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.trainer.kernels.launch import cdiv, is_for_triton, next_power_of_2, programs
from slipstream.trainer.kernels.rms_norm import rotate_torch

HEADS = 8


def latent_heads_torch(
    q_TND: Tensor, kv_TNE: Tensor, turning_TR: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, num_turning = q_TND.shape[1], turning_TR.shape[1]
    num_fixed = q_TND.shape[2] - num_turning

    def turned(x_TNR: Tensor) -> Tensor:
        return rotate_torch(torch.cat((x_TNR[..., 0::2], x_TNR[..., 1::2]), -1) if interleaved else x_TNR, cos, sin)

    q_TND = torch.cat((q_TND[..., :num_fixed], turned(q_TND[..., num_fixed:])), dim=-1)
    shared_TNR = turned(turning_TR[:, None]).expand(-1, num_heads, -1)
    return q_TND, torch.cat((kv_TNE[..., :num_fixed], shared_TNR), dim=-1), kv_TNE[..., num_fixed:]


def latent_heads(
    q_TND: Tensor, kv_TNE: Tensor, turning_TR: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values for the kernels of attention. Returns q [T, N, D], k [T, N, D], v [T, N, V].

    Args:
        q_TND: queries before rotation, D = F + R.
        kv_TNE: keys' fixed parts beside values, E = F + V.
        turning_TR: the key part that all heads share.
        cos, sin: [T, 1, R / 2], in q's dtype.
        interleaved: dims 2i and 2i + 1 of the turning part are a pair; else i and i + R / 2.
    """
    if not is_for_triton(q_TND):
        return latent_heads_torch(q_TND, kv_TNE, turning_TR, cos, sin, interleaved=interleaved)
    return _LatentHeads.apply(q_TND, kv_TNE, turning_TR, cos, sin, interleaved)


class _LatentHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_TND: Tensor, kv_TNE: Tensor, turning_TR: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        q, k = latent_heads_triton(q_TND, kv_TNE, turning_TR, cos, sin, interleaved)
        return q, k, kv_TNE[..., q_TND.shape[2] - turning_TR.shape[1] :]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_TND: Tensor, dk_TND: Tensor, dv_TNV: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grads = latent_heads_backward_triton(dq_TND, dk_TND, dv_TNV, cos, sin, ctx.interleaved)
        return *grads, None, None, None


def latent_heads_triton(
    q_TND: Tensor, kv_TNE: Tensor, turning_TR: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    tokens, heads, width = q_TND.shape
    half = turning_TR.shape[1] // 2
    q_TND, kv_TNE = q_TND.contiguous(), kv_TNE.contiguous()
    turning_TR = turning_TR if turning_TR.stride(1) == 1 else turning_TR.contiguous()
    q_out, k_out = torch.empty_like(q_TND), torch.empty_like(q_TND)
    programs(_latent_heads, (tokens, cdiv(heads, HEADS)))(
        q_TND, kv_TNE, turning_TR, cos, sin, q_out, k_out, heads, width - 2 * half, kv_TNE.shape[2],
        turning_TR.stride(0), **_sizes(half, width - 2 * half, 0, interleaved),
    )  # fmt: skip
    return q_out, k_out


def latent_heads_backward_triton(
    dq_TND: Tensor, dk_TND: Tensor, dv_TNV: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dq_TND, dk_TND, dv_TNV = (x if x.stride(2) == 1 else x.contiguous() for x in (dq_TND, dk_TND, dv_TNV))
    tokens, heads, width = dq_TND.shape
    half, values = cos.shape[-1], dv_TNV.shape[2]
    fixed = width - 2 * half
    dq = torch.empty((tokens, heads, width), dtype=dq_TND.dtype, device=dq_TND.device)
    dkv, dturning = dq.new_empty(tokens, heads, fixed + values), dq.new_empty(tokens, 2 * half)
    programs(_latent_heads_backward, (tokens,))(
        dq_TND, dk_TND, dv_TNV, cos, sin, dq, dkv, dturning, heads, fixed, values,
        *dq_TND.stride()[:2], *dk_TND.stride()[:2], *dv_TNV.stride()[:2],
        **_sizes(half, fixed, values, interleaved),
    )  # fmt: skip
    return dq, dkv, dturning


def _sizes(half: int, fixed: int, values: int, interleaved: bool) -> dict[str, Any]:
    return {
        "HALF": half,
        "INTERLEAVED": interleaved,
        "HEADS": HEADS,
        "BLOCK_HALF": next_power_of_2(half),
        "BLOCK": next_power_of_2(max(fixed, values)),
        "num_warps": 4,
        "enable_fp_fusion": False,  # in float32 a fused product and sum would skip a rounding
    }


@triton.jit
def _latent_heads(
    q_ptr, kv_ptr, turning_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, num_heads, fixed, kv_width, turning_stride,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    is_head = heads < num_heads
    dtype = q_out_ptr.dtype.element_ty
    row = (token * num_heads + heads) * (fixed + 2 * HALF)
    kv_row = (token * num_heads + heads) * kv_width

    dims = tl.arange(0, BLOCK)[None, :]
    stays = is_head & (dims < fixed)
    tl.store(q_out_ptr + row + dims, tl.load(q_ptr + row + dims, mask=stays), mask=stays)
    tl.store(k_out_ptr + row + dims, tl.load(kv_ptr + kv_row + dims, mask=stays), mask=stays)

    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = pairs < HALF
    turns = is_head & is_pair
    first_at, second_at = (2 * pairs, 2 * pairs + 1) if INTERLEAVED else (pairs, HALF + pairs)
    cos = tl.load(cos_ptr + token * HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
    first = tl.load(q_ptr + row + fixed + first_at, mask=turns, other=0.0).to(tl.float32)
    second = tl.load(q_ptr + row + fixed + second_at, mask=turns, other=0.0).to(tl.float32)
    out = q_out_ptr + row + fixed + pairs
    tl.store(out, ((first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)).to(dtype), turns)
    out += HALF
    tl.store(out, ((second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)).to(dtype), turns)

    shared = turning_ptr + token * turning_stride
    first = tl.load(shared + first_at, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(shared + second_at, mask=is_pair, other=0.0).to(tl.float32)
    turned = ((first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)).to(dtype)
    out = k_out_ptr + row + fixed + pairs
    tl.store(out, tl.broadcast_to(turned, [HEADS, BLOCK_HALF]), turns)
    turned = ((second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)).to(dtype)
    tl.store(out + HALF, tl.broadcast_to(turned, [HEADS, BLOCK_HALF]), turns)


@triton.jit
def _latent_heads_backward(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, dq_out_ptr, dkv_ptr, dturning_ptr, num_heads, fixed, values,
    dq_token, dq_head, dk_token, dk_head, dv_token, dv_head,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Handles one token: sums the shared part's gradient over its heads and rotates the sum back once."""
    token = tl.program_id(0).to(tl.int64)
    dtype = dq_out_ptr.dtype.element_ty
    dims, pairs = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = pairs < HALF
    first_at, second_at = (2 * pairs, 2 * pairs + 1) if INTERLEAVED else (pairs, HALF + pairs)
    cos = tl.load(cos_ptr + token * HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
    first_sum = tl.zeros([HEADS, BLOCK_HALF], dtype=tl.float32)
    second_sum = tl.zeros([HEADS, BLOCK_HALF], dtype=tl.float32)
    for start in range(0, num_heads, HEADS):
        heads = start + tl.arange(0, HEADS)[:, None]
        is_head = heads < num_heads
        stays, turns, is_value = is_head & (dims < fixed), is_head & is_pair, is_head & (dims < values)
        dq, dk = dq_ptr + token * dq_token + heads * dq_head, dk_ptr + token * dk_token + heads * dk_head
        dv = dv_ptr + token * dv_token + heads * dv_head
        out = dq_out_ptr + (token * num_heads + heads) * (fixed + 2 * HALF)
        dkv = dkv_ptr + (token * num_heads + heads) * (fixed + values)
        tl.store(out + dims, tl.load(dq + dims, mask=stays), mask=stays)
        tl.store(dkv + dims, tl.load(dk + dims, mask=stays), mask=stays)
        tl.store(dkv + fixed + dims, tl.load(dv + dims, mask=is_value), mask=is_value)
        first = tl.load(dq + fixed + pairs, mask=turns, other=0.0).to(tl.float32)
        second = tl.load(dq + fixed + HALF + pairs, mask=turns, other=0.0).to(tl.float32)
        tl.store(out + fixed + first_at, (first * cos + second * sin).to(dtype), mask=turns)
        tl.store(out + fixed + second_at, (second * cos - first * sin).to(dtype), mask=turns)
        first_sum += tl.load(dk + fixed + pairs, mask=turns, other=0.0).to(tl.float32)
        second_sum += tl.load(dk + fixed + HALF + pairs, mask=turns, other=0.0).to(tl.float32)
    first = tl.sum(first_sum, 0)[None, :]
    second = tl.sum(second_sum, 0)[None, :]
    dturning = dturning_ptr + token * 2 * HALF
    tl.store(dturning + first_at, (first * cos + second * sin).to(dtype), mask=is_pair)
    tl.store(dturning + second_at, (second * cos - first * sin).to(dtype), mask=is_pair)
