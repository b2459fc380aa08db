"""RMSNorm, RMSNorm of a sum, and the norm of heads with their rotation: one pass over memory each, both ways.

    rms_norm      y = w * cast(x / rms(x))
    add_rms_norm  s = x + delta;  y = w * cast(s / rms(s))
    norm_rotate   y = rotate(w * cast(x / rms(x))), or rotate(x), over the heads of queries or keys

Owns the casts, which are transformers': the norm in float32, rounded to the compute dtype before the weight; every
product and sum of the rotation rounded. Backward rounds once, and computes rms again from the input, so that nothing
but the inputs is kept. The torch forms are the definition, differentiated by autograd, and what other devices than
CUDA run. Callers: trainer.model.norm, trainer.model.attention.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def rms_norm_torch(x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """The definition of `rms_norm`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight_K.to(x.dtype) * wide.to(x.dtype)


def rotate_torch(x_TND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs are halves of the dims that turn; dims past those stay as they are."""
    turning, fixed = x_TND.tensor_split((2 * cos.shape[-1],), dim=-1)
    first, second = turning.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, fixed), dim=-1)


def rms_norm(x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467), of x's shape and dtype."""
    if not is_for_triton(x):
        return rms_norm_torch(x, weight_K, eps)
    return _RmsNorm.apply(x, None, weight_K.to(x.dtype), eps)[1]  # type: ignore[index]


def add_rms_norm(x: Tensor, delta: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMSNorm)."""
    if not is_for_triton(x):
        total = x + delta
        return total, rms_norm_torch(total, weight_K, eps)
    return _RmsNorm.apply(x, delta, weight_K.to(x.dtype), eps)  # type: ignore[return-value]


def norm_rotate(x_TND: Tensor, weight_D: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """The heads' norm where there is one, then the rotation.

    Args:
        x_TND: queries or keys.
        weight_D: None: no norm.
        eps: of the norm.
        cos, sin: [T, 1, turning dims / 2], in x's dtype.
    """
    if is_for_triton(x_TND) and (weight_D is None or not weight_D.requires_grad):
        return _NormRotate.apply(x_TND, None if weight_D is None else weight_D.to(x_TND.dtype), eps, cos, sin)  # type: ignore[return-value]
    return rotate_torch(x_TND if weight_D is None else rms_norm_torch(x_TND, weight_D, eps), cos, sin)


def is_for_triton(x: Tensor) -> bool:
    """Whether kernels run on it."""
    return x.is_cuda and x.dtype in FLOATS and x.numel() > 0


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, delta: Tensor | None, weight_K: Tensor, eps: float
    ) -> tuple[Tensor | None, Tensor]:
        total, out = rms_norm_triton(x, delta, weight_K, eps)
        ctx.save_for_backward(x if total is None else total, weight_K)
        ctx.eps, ctx.has_delta = eps, delta is not None
        return total, out

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        total, weight_K = ctx.saved_tensors
        dx = rms_norm_backward_triton(total, weight_K, dout, dtotal if ctx.has_delta else None, ctx.eps)
        dweight = None
        if ctx.needs_input_grad[2]:
            wide = total.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + ctx.eps)
            dweight = (wide.to(total.dtype).float() * dout).flatten(0, -2).sum(0).to(weight_K.dtype)
        return dx, dx if ctx.has_delta else None, dweight, None


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_TND: Tensor, weight_D: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_TND, weight_D, cos, sin)
        ctx.eps = eps
        return norm_rotate_triton(x_TND, weight_D, eps, cos, sin)

    @staticmethod
    def backward(ctx: Any, dout_TND: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TND, weight_D, cos, sin = ctx.saved_tensors
        return norm_rotate_triton(x_TND, weight_D, ctx.eps, cos, sin, dout_TND), None, None, None, None


def rms_norm_triton(x: Tensor, delta: Tensor | None, weight_K: Tensor, eps: float) -> tuple[Tensor | None, Tensor]:
    """(x + delta or None, the norm)."""
    rows_SK = x.reshape(-1, x.shape[-1])
    size = rows_SK.shape[1]
    rows_SK = rows_SK if rows_SK.stride(1) == 1 else rows_SK.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if delta is None else torch.empty_like(out)
    _rms_norm[(rows_SK.shape[0],)](
        rows_SK, None if delta is None else delta.contiguous(), weight_K, total, out, size, rows_SK.stride(0), eps,
        HAS_DELTA=delta is not None, BLOCK=triton.next_power_of_2(size),  # pyright: ignore[reportArgumentType]
        num_warps=_warps(size),  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return total, out


def rms_norm_backward_triton(x: Tensor, weight_K: Tensor, dout: Tensor, dtotal: Tensor | None, eps: float) -> Tensor:
    """The gradient of x, plus dtotal."""
    rows_SK = x.reshape(-1, x.shape[-1])
    size = rows_SK.shape[1]
    rows_SK = rows_SK if rows_SK.stride(1) == 1 else rows_SK.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms_norm_backward[(rows_SK.shape[0],)](
        rows_SK, weight_K, dout.contiguous(), None if dtotal is None else dtotal.contiguous(), dx, size,
        rows_SK.stride(0), eps,
        HAS_TOTAL=dtotal is not None, BLOCK=triton.next_power_of_2(size),  # pyright: ignore[reportArgumentType]
        num_warps=_warps(size),  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return dx


def norm_rotate_triton(
    x_TND: Tensor, weight_D: Tensor | None, eps: float, cos: Tensor, sin: Tensor, dout_TND: Tensor | None = None
) -> Tensor:
    """Forward; given the output's gradient, the input's."""
    tokens, heads, dim = x_TND.shape
    x_TND = x_TND if x_TND.stride(2) == 1 else x_TND.contiguous()
    if dout_TND is not None and dout_TND.stride(2) != 1:
        dout_TND = dout_TND.contiguous()
    out_TND = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    block = min(8, triton.next_power_of_2(heads))
    _norm_rotate[(tokens, triton.cdiv(heads, block))](
        x_TND, weight_D, cos, sin, dout_TND, out_TND, heads, dim, x_TND.stride(0), x_TND.stride(1),
        *((0, 0) if dout_TND is None else dout_TND.stride()[:2]), eps,  # pyright: ignore[reportCallIssue]
        HALF=cos.shape[-1], HAS_NORM=weight_D is not None, IS_BACKWARD=dout_TND is not None,
        HEADS=block, BLOCK=triton.next_power_of_2(dim),  # pyright: ignore[reportArgumentType]
        num_warps=4 if dim >= 64 else 1,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return out_TND


def _warps(size: int) -> int:
    return 8 if size >= 4096 else 4 if size >= 512 else 1


@triton.jit
def _rms_norm(
    x_ptr, delta_ptr, weight_ptr, total_ptr, out_ptr, size, x_stride, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype)
        tl.store(total_ptr + row * size + columns, x, mask=inside)
        x = x.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)).to(dtype).to(tl.float32)
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
    x_ptr, weight_ptr, cos_ptr, sin_ptr, dout_ptr, out_ptr, num_heads, dim, x_token_stride, x_head_stride,
    dout_token_stride, dout_head_stride, eps,
    HALF: tl.constexpr, HAS_NORM: tl.constexpr, IS_BACKWARD: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A dim's partner is HALF away; it is loaded a second time, from the cache."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, BLOCK)
    partners = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    is_dim, turns = dims < dim, dims < 2 * HALF
    inside = (heads < num_heads) & is_dim[None, :]
    dtype = out_ptr.dtype.element_ty
    x_at = x_ptr + token * x_token_stride + heads * x_head_stride
    angles = token * HALF + tl.where(dims < HALF, dims, dims - HALF)
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
            x = (weight * (x * inverse).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            other = (other_weight * (other * inverse).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        result = (x * cos).to(dtype).to(tl.float32) + sign * (other * sin).to(dtype).to(tl.float32)
    tl.store(out_ptr + (token * num_heads + heads) * dim + dims[None, :], result.to(dtype), mask=inside)
