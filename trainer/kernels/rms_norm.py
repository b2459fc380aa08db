"""RMSNorm, RMSNorm of a sum, and the norm of heads with their rotation: one pass over memory each, both ways.

    rms_norm      y = w * cast(x / rms(x))
    add_rms_norm  s = x + delta;  y = w * cast(s / rms(s))
    norm_rotate   y = rotate(w * cast(x / rms(x))), or rotate(x), over the heads of queries and of keys

Owns the casts, by default transformers': the norm is computed in float32 and rounded to the compute dtype before the
weight is applied; every product and sum of the rotation is rounded. With `once`, all steps are float32 and the result
is rounded, as where torch.compile fuses them (vLLM's engines); s is rounded for the caller, and not for its norm. A
norm that comes later than its sum is given the sum before it was rounded (`wide`) for that. Backward rounds once, and
computes rms again from the input, so that only inputs are kept.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.trainer.kernels.launch import cdiv, is_for_triton, next_power_of_2, programs

ROTATE = 4, 1
"""The most heads, and the warps, of a program of `norm_rotate`."""


def rms_norm_torch(x: Tensor, weight_K: Tensor, eps: float, once: bool = False, wide: Tensor | None = None) -> Tensor:
    normed = x.view_as(x).float()  # view_as is a node of the graph: x gets one gradient from here, as from the kernel
    if wide is not None:
        normed = normed + (wide - normed).detach()  # exact: x is `wide`, rounded
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
    if once:
        return (weight_K.to(x.dtype).float() * normed).to(x.dtype)
    return weight_K.to(x.dtype) * normed.to(x.dtype)


def add_rms_norm_torch(
    x: Tensor, delta: Tensor, weight_K: Tensor, eps: float, once: bool = False
) -> tuple[Tensor, Tensor]:
    total = x + delta
    if not once:
        return total, rms_norm_torch(total, weight_K, eps)
    wide = rms_norm_torch(x.float() + delta.float(), weight_K.to(x.dtype), eps, once)
    return total, wide.to(x.dtype)


def norm_rotate_torch(
    x_TND: Tensor, weight_D: Tensor | None, eps: float, cos: Tensor, sin: Tensor, once: bool = False
) -> Tensor:
    if not once:
        return rotate_torch(x_TND if weight_D is None else rms_norm_torch(x_TND, weight_D, eps), cos, sin)
    wide = x_TND.view_as(x_TND).float()
    wide = wide if weight_D is None else rms_norm_torch(wide, weight_D.to(x_TND.dtype), eps, once)
    return rotate_torch(wide, cos.float(), sin.float()).to(x_TND.dtype)


def rotate_torch(x_TND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dims of each head: dim i pairs with the one half the turning dims away. Later dims stay."""
    turning, fixed = x_TND.tensor_split((2 * cos.shape[-1],), dim=-1)
    first, second = turning.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, fixed), dim=-1)


def rms_norm(x: Tensor, weight_K: Tensor, eps: float, once: bool = False, wide: Tensor | None = None) -> Tensor:
    """RMSNorm over the last dim (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467), of x's shape and dtype.

    Args:
        weight_K: in any float dtype; taken in x's.
        once: round the result alone; without it the norm, too, before it is weighted.
        wide: with `once`, x before it was rounded, in float32: the norm is of that. x alone gets a gradient.
    """
    if not is_for_triton(x):
        return rms_norm_torch(x, weight_K, eps, once, wide)
    return _RmsNorm.apply(x, None, weight_K.to(x.dtype), eps, once, wide)[1]


def add_rms_norm(x: Tensor, delta: Tensor, weight_K: Tensor, eps: float, once: bool = False) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMSNorm)."""
    if not is_for_triton(x):
        return add_rms_norm_torch(x, delta, weight_K, eps, once)
    return _RmsNorm.apply(x, delta, weight_K.to(x.dtype), eps, once, None)


def norm_rotate(
    q_TND: Tensor,
    k_TGD: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    once: bool = False,
) -> tuple[Tensor, Tensor]:
    """Apply the heads' norm, if there is one, then the rotation.

    Args:
        q_weight_D, k_weight_D: both None: no norm.
        cos, sin: [T, 1, turning dims / 2], in x's dtype; with `once` also float32.
    """
    given = ((q_TND, q_weight_D), (k_TGD, k_weight_D))
    if is_for_triton(q_TND) and not any(weight is not None and weight.requires_grad for _, weight in given):
        weights = (None if weight is None else weight.to(x.dtype) for x, weight in given)
        return _NormRotate.apply(q_TND, k_TGD, *weights, eps, cos, sin, once)
    q, k = (norm_rotate_torch(x, weight, eps, cos, sin, once) for x, weight in given)
    return q, k


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight_K: Tensor, eps: float, once: bool, wide: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        total, out = rms_norm_triton(x if wide is None else wide, delta, weight_K, eps, once)
        ctx.save_for_backward(x if total is None else total, weight_K)
        ctx.eps, ctx.has_delta = eps, delta is not None
        return total, out

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dout: Tensor) -> tuple[Tensor | None, ...]:
        total, weight_K = ctx.saved_tensors
        dx = rms_norm_backward_triton(total, weight_K, dout, dtotal if ctx.has_delta else None, ctx.eps)
        dweight = None
        if ctx.needs_input_grad[2]:
            wide = total.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + ctx.eps)
            dweight = (wide.to(total.dtype).float() * dout).flatten(0, -2).sum(0).to(weight_K.dtype)
        return dx, dx if ctx.has_delta else None, dweight, None, None, None


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TND: Tensor,
        k_TGD: Tensor,
        q_weight_D: Tensor | None,
        k_weight_D: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        once: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q_TND, k_TGD, q_weight_D, k_weight_D, cos, sin)
        ctx.eps = eps
        return norm_rotate_triton((q_TND, k_TGD), (q_weight_D, k_weight_D), eps, cos, sin, once=once)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        q_TND, k_TGD, q_weight_D, k_weight_D, cos, sin = ctx.saved_tensors
        weights = (q_weight_D, k_weight_D)
        return *norm_rotate_triton((q_TND, k_TGD), weights, ctx.eps, cos, sin, douts), *[None] * 6


def rms_norm_triton(
    x: Tensor, delta: Tensor | None, weight_K: Tensor, eps: float, once: bool = False
) -> tuple[Tensor | None, Tensor]:
    """(x + delta or None, the norm), in weight_K's dtype."""
    rows_SK = _rows(x)
    size = rows_SK.shape[1]
    out = torch.empty(x.shape, dtype=weight_K.dtype, device=x.device)
    total = None if delta is None else torch.empty_like(out)
    programs(_rms_norm, (rows_SK.shape[0],))(
        rows_SK, None if delta is None else delta.contiguous(), weight_K, total, out, size, rows_SK.stride(0), eps,
        HAS_DELTA=delta is not None, ONCE=once, BLOCK=next_power_of_2(size),
        num_warps=_warps(size),
    )  # fmt: skip
    return total, out


def rms_norm_backward_triton(x: Tensor, weight_K: Tensor, dout: Tensor, dtotal: Tensor | None, eps: float) -> Tensor:
    """The gradient of x, plus dtotal."""
    rows_SK = _rows(x)
    size = rows_SK.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    programs(_rms_norm_backward, (rows_SK.shape[0],))(
        rows_SK, weight_K, dout.contiguous(), None if dtotal is None else dtotal.contiguous(), dx, size,
        rows_SK.stride(0), eps,
        HAS_TOTAL=dtotal is not None, BLOCK=next_power_of_2(size),
        num_warps=_warps(size),
    )  # fmt: skip
    return dx


def norm_rotate_triton(
    heads: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    eps: float,
    cos: Tensor,
    sin: Tensor,
    douts: Sequence[Tensor] | None = None,
    *,
    once: bool = False,
) -> tuple[Tensor, Tensor]:
    """Forward of queries and keys; given the outputs' gradients, their backward."""
    tokens, _, dim = heads[0].shape
    arguments: list[Any] = []
    blocks, outs = [], []
    most_heads, num_warps = ROTATE
    for x, weight, dout in zip(heads, weights, douts or (None, None), strict=True):
        x = x if x.stride(2) == 1 else x.contiguous()
        dout = dout if dout is None or dout.stride(2) == 1 else dout.contiguous()
        outs.append(torch.empty(x.shape, dtype=x.dtype, device=x.device))
        blocks.append(min(most_heads, next_power_of_2(x.shape[1])))
        arguments += [x, weight, dout, outs[-1], x.shape[1], *x.stride()[:2]]
        arguments += (0, 0) if dout is None else dout.stride()[:2]
    num_blocks = [cdiv(out.shape[1], block) for out, block in zip(outs, blocks, strict=True)]
    programs(_norm_rotate, (tokens, sum(num_blocks)))(
        *arguments, cos, sin, dim, eps, num_blocks[0],
        HALF=cos.shape[-1], HAS_NORM=weights[0] is not None, IS_BACKWARD=douts is not None, ONCE=once,
        Q_HEADS=blocks[0], K_HEADS=blocks[1], BLOCK=next_power_of_2(dim), ALIGNED=math.gcd(cos.shape[-1], 8),
        num_warps=num_warps if dim >= 64 else 1,
    )  # fmt: skip
    return outs[0], outs[1]


def _rows(x: Tensor) -> Tensor:
    """x as [S, K] with a contiguous last dim."""
    rows_SK = x.reshape(-1, x.shape[-1])
    return rows_SK if rows_SK.stride(1) == 1 else rows_SK.contiguous()


def _warps(size: int) -> int:
    return 8 if size >= 4096 else 4 if size >= 512 else 1


@triton.jit
def _rms_norm(
    x_ptr, delta_ptr, weight_ptr, total_ptr, out_ptr, size, x_stride, eps,
    HAS_DELTA: tl.constexpr, ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        total = x.to(dtype)
        tl.store(total_ptr + row * size + columns, total, mask=inside)
        if not ONCE:
            x = total.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    if not ONCE:
        normed = normed.to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, (weight * normed).to(dtype), mask=inside)


@triton.jit
def _rms_norm_backward(
    x_ptr, weight_ptr, dout_ptr, dtotal_ptr, dx_ptr, size, x_stride, eps, HAS_TOTAL: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    dnormed = tl.load(dout_ptr + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    dnormed *= tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    x *= inverse
    dx = inverse * (dnormed - x * (tl.sum(dnormed * x, 0) / size))
    if HAS_TOTAL:
        dx += tl.load(dtotal_ptr + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_ptr + row * size + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rotate(
    q_ptr, q_weight_ptr, q_dout_ptr, q_out_ptr, q_num_heads, q_token_stride, q_head_stride,
    q_dout_token_stride, q_dout_head_stride,
    k_ptr, k_weight_ptr, k_dout_ptr, k_out_ptr, k_num_heads, k_token_stride, k_head_stride,
    k_dout_token_stride, k_dout_head_stride,
    cos_ptr, sin_ptr, dim, eps, num_q_blocks,
    HALF: tl.constexpr, HAS_NORM: tl.constexpr, IS_BACKWARD: tl.constexpr, ONCE: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A program handles some heads of one token's queries, or of its keys."""
    block = tl.program_id(1)
    if block < num_q_blocks:
        _norm_rotate_heads(
            q_ptr, q_weight_ptr, q_dout_ptr, q_out_ptr, q_num_heads, q_token_stride, q_head_stride,
            q_dout_token_stride, q_dout_head_stride, cos_ptr, sin_ptr, dim, eps, block,
            HALF, HAS_NORM, IS_BACKWARD, ONCE, Q_HEADS, BLOCK, ALIGNED,
        )  # fmt: skip
    else:
        _norm_rotate_heads(
            k_ptr, k_weight_ptr, k_dout_ptr, k_out_ptr, k_num_heads, k_token_stride, k_head_stride,
            k_dout_token_stride, k_dout_head_stride, cos_ptr, sin_ptr, dim, eps, block - num_q_blocks,
            HALF, HAS_NORM, IS_BACKWARD, ONCE, K_HEADS, BLOCK, ALIGNED,
        )  # fmt: skip


@triton.jit
def _norm_rotate_heads(
    x_ptr, weight_ptr, dout_ptr, out_ptr, num_heads, x_token_stride, x_head_stride, dout_token_stride, dout_head_stride,
    cos_ptr, sin_ptr, dim, eps, block,
    HALF: tl.constexpr, HAS_NORM: tl.constexpr, IS_BACKWARD: tl.constexpr, ONCE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A dim's partner is HALF away. Each dim is loaded twice, the second time from the cache, and in words of ALIGNED
    dims: HALF is a multiple of it."""
    token = tl.program_id(0).to(tl.int64)
    heads = block * HEADS + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, BLOCK)
    partners = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    partners = tl.max_contiguous(tl.multiple_of(partners, ALIGNED), ALIGNED)
    is_dim, turns = dims < dim, dims < 2 * HALF
    inside = (heads < num_heads) & is_dim[None, :]
    dtype = out_ptr.dtype.element_ty
    x_at = x_ptr + token * x_token_stride + heads * x_head_stride
    turned = tl.where(dims < HALF, dims, dims - HALF)
    angles = token * HALF + tl.max_contiguous(tl.multiple_of(turned, ALIGNED), ALIGNED)
    cos = tl.load(cos_ptr + angles, mask=turns, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angles, mask=turns, other=0.0).to(tl.float32)[None, :]
    sign = tl.where(dims < HALF, -1.0, 1.0)[None, :]
    x = tl.load(x_at + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    inverse = tl.full([HEADS, 1], 1.0, dtype=tl.float32)
    weight = tl.full([1, BLOCK], 1.0, dtype=tl.float32)
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / dim + eps)[:, None]
        weight = tl.load(weight_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    if IS_BACKWARD:
        dout_at = dout_ptr + token * dout_token_stride + heads * dout_head_stride
        own = tl.load(dout_at + dims[None, :], mask=inside, other=0.0).to(tl.float32)
        other = tl.load(dout_at + partners[None, :], mask=inside, other=0.0).to(tl.float32)
        result = own * cos - sign * other * sin
        if HAS_NORM:
            result *= weight
            x *= inverse
            result = inverse * (result - x * (tl.sum(result * x, 1) / dim)[:, None])
    else:
        other = tl.load(x_at + partners[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            other_weight = tl.load(weight_ptr + partners, mask=is_dim, other=0.0).to(tl.float32)[None, :]
            x *= inverse
            other *= inverse
            if ONCE:
                x, other = weight * x, other_weight * other
            else:
                x = (weight * x.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
                other = (other_weight * other.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        own_part, other_part = x * cos, other * sin
        if not ONCE:
            own_part, other_part = own_part.to(dtype).to(tl.float32), other_part.to(dtype).to(tl.float32)
        result = own_part + sign * other_part
    tl.store(out_ptr + (token * num_heads + heads) * dim + dims[None, :], result.to(dtype), mask=inside)
