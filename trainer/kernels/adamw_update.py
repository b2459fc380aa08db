"""AdamW with moments in any float format or in 8-bit codes, one launch for all tensors of a size.

    m += (1 - b1) (g - m);  v += (1 - b2) (g^2 - v);  p = p (1 - lr decay) - lr m / c1 / (sqrt(v / c2) + eps)

A launch finds its tensors through a table of addresses. Adapters on every expert bank of every layer are hundreds of
tensors of few sizes: launching a kernel for each would take the host longer than the device takes to update all.

Owns the arithmetic, which is float32, and the roundings: moments to nearest, but bfloat16 parameters and squares
stochastically, and no square to 0 (step/adamw.py says why). 8-bit moments are torchao's: 256 values share a scale, and
codes index a map of 256 values in rising order. torchao's update defines the rest, and runs on devices other than CUDA.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.trainer.kernels.launch import cdiv, programs

GROUP = 256
"""Values that share a scale."""
ROWS = 4
ENTRIES, ALIGNMENT = 8, 16
"""Numbers per tensor in the table; alignment, in bytes, of most addresses."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A moment in 8 bits."""

    codes: Tensor
    scale: Tensor
    values: Tensor
    """float32 [256], rising."""


def adamw_triton(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Sequence[Tensor | Codes],
    squares: Sequence[Tensor | Codes],
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
        parameters: contiguous; float32, or bfloat16, which is rounded stochastically.
        gradients: one per parameter, of its shape and dtype.
        moments, squares: one per parameter, of its shape; both are codes or neither is. All `moments` share one map of
            values, and so do all `squares`.
        num_updates: number of updates, this one included.
        seed: of the stochastic rounding; give another one at every update. The tensor at `index` uses seed + index.
    """
    gradients = [gradient.contiguous() for gradient in gradients]
    kinds: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    entries = []
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        first, second = _parts(moments[index]), _parts(squares[index])
        held = (parameter, gradient, first[0], second[0])
        assert (first[1] is None) == (second[1] is None)
        assert gradient.dtype is parameter.dtype
        scales = [0 if x is None else x.data_ptr() for x in (first[1], second[1])]
        addresses = [x.data_ptr() for x in held]
        entries.append([*addresses, *scales, seed + index, 0])
        is_aligned = all(address % ALIGNMENT == 0 for address in addresses)
        kinds[parameter.numel(), is_aligned, first[1] is not None, *(x.dtype for x in held)].append(index)
    order = [index for indices in kinds.values() for index in indices]
    table = torch.tensor([entries[index] for index in order], dtype=torch.int64)
    table = table.to(parameters[0].device, non_blocking=True)
    start = 0
    for (size, is_aligned, is_coded, *_), indices in kinds.items():
        one = indices[0]
        programs(_adamw, (cdiv(size, ROWS * GROUP), len(indices)))(
            table[start:], parameters[one], *_parts(moments[one]), *_parts(squares[one]), size,
            lr, lr * weight_decay, 1 - betas[0], 1 - betas[1], eps,
            1 / (1 - betas[0] ** num_updates), 1 / (1 - betas[1] ** num_updates),
            IS_CODED=is_coded, DOES_ROUND=parameters[one].dtype is torch.bfloat16,
            IS_ALIGNED=is_aligned, ENTRIES=ENTRIES, ALIGNMENT=ALIGNMENT, ROWS=ROWS, GROUP=GROUP,
            num_warps=4,
        )  # fmt: skip
        start += len(indices)


def _parts(moment: Tensor | Codes) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return (moment.codes, moment.scale, moment.values) if isinstance(moment, Codes) else (moment, None, None)


@triton.jit
def _tensor(entry, like, IS_ALIGNED: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The pointer stored at an entry of the table, with the type of `like`."""
    ptr = tl.load(entry).to(like.dtype)
    if IS_ALIGNED:
        ptr = tl.multiple_of(ptr, ALIGNMENT)
    return ptr


@triton.jit
def _read(ptr, scale_ptr, values_ptr, at, groups, inside, is_group, IS_CODED: tl.constexpr):
    if IS_CODED:
        codes = tl.load(ptr + at, mask=inside, other=0).to(tl.int32)
        scale = tl.load(scale_ptr + groups, mask=is_group, other=1.0)
        return tl.load(values_ptr + codes) * scale[:, None]
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _round_at_random(x, noise):
    """To bfloat16: a random number below one unit of the last bit kept is added, then the bits below are dropped."""
    bits = (x.to(tl.int32, bitcast=True) + (noise & 0xFFFF)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _write(
    ptr, scale_ptr, values_ptr, at, groups, inside, is_group, x, noise, IS_CODED: tl.constexpr, IS_SQUARE: tl.constexpr
):
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
        if IS_SQUARE:
            codes = tl.maximum(codes, 1)
        tl.store(ptr + at, codes.to(tl.uint8), mask=inside)
    else:
        if IS_SQUARE and ptr.dtype.element_ty == tl.bfloat16:
            x = _round_at_random(x, noise)
        tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _adamw(
    table_ptr, like_p_ptr, like_m_ptr, like_m_scale_ptr, m_values_ptr, like_v_ptr, like_v_scale_ptr, v_values_ptr, size,
    lr, decay, new_share, new_square_share, eps, correction, square_correction,
    IS_CODED: tl.constexpr, DOES_ROUND: tl.constexpr, IS_ALIGNED: tl.constexpr,
    ENTRIES: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Arguments called `like` only tell the compiler the types of the pointers in the table."""
    entry = table_ptr + tl.program_id(1) * ENTRIES
    p_ptr = _tensor(entry, like_p_ptr, IS_ALIGNED, ALIGNMENT)
    g_ptr = _tensor(entry + 1, like_p_ptr, IS_ALIGNED, ALIGNMENT)
    m_ptr = _tensor(entry + 2, like_m_ptr, IS_ALIGNED, ALIGNMENT)
    v_ptr = _tensor(entry + 3, like_v_ptr, IS_ALIGNED, ALIGNMENT)
    m_scale_ptr, v_scale_ptr = like_m_scale_ptr, like_v_scale_ptr
    if IS_CODED:
        m_scale_ptr = _tensor(entry + 4, like_m_scale_ptr, False, ALIGNMENT)
        v_scale_ptr = _tensor(entry + 5, like_v_scale_ptr, False, ALIGNMENT)
    seed = tl.load(entry + 6).to(tl.int32)
    groups = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside, is_group = at < size, groups * GROUP < size
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m = _read(m_ptr, m_scale_ptr, m_values_ptr, at, groups, inside, is_group, IS_CODED)
    v = _read(v_ptr, v_scale_ptr, v_values_ptr, at, groups, inside, is_group, IS_CODED)
    m += new_share * (g - m)
    v += new_square_share * (g * g - v)
    noise = tl.randint(seed, at.to(tl.int32)).to(tl.int32)
    _write(m_ptr, m_scale_ptr, m_values_ptr, at, groups, inside, is_group, m, noise, IS_CODED, False)
    _write(v_ptr, v_scale_ptr, v_values_ptr, at, groups, inside, is_group, v, noise >> 16, IS_CODED, True)
    p = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
    p = p - decay * p - lr * (m * correction) / (tl.sqrt(v * square_correction) + eps)
    if DOES_ROUND:
        p = _round_at_random(p, noise)
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside)
