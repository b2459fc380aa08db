"""AdamW with moments in any float format or in 8-bit codes, one kernel a parameter.

    m += (1 - b1) (g - m);  v += (1 - b2) (g^2 - v);  p = p (1 - lr decay) - lr m / c1 / (sqrt(v / c2) + eps)

Owns the arithmetic, which is float32, and the roundings: moments to nearest, bfloat16 parameters stochastically.
8-bit moments are torchao's: 256 values share a scale, codes index a map of 256 values in rising order. The definition
is torchao's update, which other devices than CUDA run. Callers: trainer.adamw.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 256
"""Values that share a scale."""
ROWS = 4
"""Groups of one program."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A moment in 8 bits."""

    codes: Tensor
    scale: Tensor
    values: Tensor
    """float32 [256], rising."""


def adamw_triton(
    parameter: Tensor,
    gradient: Tensor,
    moment: Tensor | Codes,
    square: Tensor | Codes,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    num_updates: int,
    seed: int,
) -> None:
    """One update in place.

    Args:
        parameter: contiguous; float32, or bfloat16, which is rounded stochastically.
        gradient: of its shape.
        moment, square: of its shape; both codes or neither.
        num_updates: with this one.
        seed: of the rounding; another one for every parameter and update.
    """
    is_coded = isinstance(moment, Codes)
    assert is_coded == isinstance(square, Codes)
    first, second = (
        (x.codes, x.scale, x.values) if isinstance(x, Codes) else (x, None, None) for x in (moment, square)
    )
    size = parameter.numel()
    _adamw[(triton.cdiv(size, ROWS * GROUP),)](
        parameter, gradient.contiguous(), *first, *second, size, lr, lr * weight_decay, 1 - betas[0], 1 - betas[1], eps,
        1 / (1 - betas[0] ** num_updates), 1 / (1 - betas[1] ** num_updates), seed,
        IS_CODED=is_coded, DOES_ROUND=parameter.dtype is torch.bfloat16, ROWS=ROWS, GROUP=GROUP,  # pyright: ignore[reportArgumentType]
        num_warps=4,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip


@triton.jit
def _read(ptr, scale_ptr, values_ptr, at, groups, inside, is_group, IS_CODED: tl.constexpr):
    if IS_CODED:
        codes = tl.load(ptr + at, mask=inside, other=0).to(tl.int32)
        scale = tl.load(scale_ptr + groups, mask=is_group, other=1.0)
        return tl.load(values_ptr + codes) * scale[:, None]
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write(ptr, scale_ptr, values_ptr, at, groups, inside, is_group, x, IS_CODED: tl.constexpr):
    if IS_CODED:
        scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-12)
        tl.store(scale_ptr + groups, scale, mask=is_group)
        x = x / scale[:, None]
        codes = tl.zeros(x.shape, dtype=tl.int32)
        for bit in tl.static_range(8):
            higher = codes + (128 >> bit)
            codes = tl.where(x >= tl.load(values_ptr + higher), higher, codes)
        above = tl.minimum(codes + 1, 255)
        low, high = tl.load(values_ptr + codes), tl.load(values_ptr + above)
        codes = tl.where(x - low >= (high - low) * 0.5, above, codes)
        tl.store(ptr + at, codes.to(tl.uint8), mask=inside)
    else:
        tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _adamw(
    p_ptr, g_ptr, m_ptr, m_scale_ptr, m_values_ptr, v_ptr, v_scale_ptr, v_values_ptr, size,
    lr, decay, new_share, new_square_share, eps, correction, square_correction, seed,
    IS_CODED: tl.constexpr, DOES_ROUND: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    groups = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside, is_group = at < size, groups * GROUP < size
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m = _read(m_ptr, m_scale_ptr, m_values_ptr, at, groups, inside, is_group, IS_CODED)
    v = _read(v_ptr, v_scale_ptr, v_values_ptr, at, groups, inside, is_group, IS_CODED)
    m += new_share * (g - m)
    v += new_square_share * (g * g - v)
    _write(m_ptr, m_scale_ptr, m_values_ptr, at, groups, inside, is_group, m, IS_CODED)
    _write(v_ptr, v_scale_ptr, v_values_ptr, at, groups, inside, is_group, v, IS_CODED)
    p = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
    p = p - decay * p - lr * (m * correction) / (tl.sqrt(v * square_correction) + eps)
    if DOES_ROUND:  # a random number below one unit of the last bit kept, then the bits below are dropped
        noise = tl.randint(seed, at.to(tl.int32)) & 0xFFFF
        bits = (p.to(tl.int32, bitcast=True) + noise.to(tl.int32)) & -65536
        p = bits.to(tl.float32, bitcast=True)
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside)
