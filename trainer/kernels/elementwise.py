"""What a layer computes element by element, in one pass over memory each way: a dense feed-forward's activation, and
the sum at the layer's end.

silu(gate) * up; with GELU, torch's passes.

    once   h = cast(silu(gate) * up), all steps float32, as where torch.compile fuses them (vLLM's engines)
    else   h = cast(cast(silu(gate)) * up), as vLLM's own kernel and transformers
    backward, from dh:   dup = dh * silu(gate)    dgate = dh * up * silu'(gate)

Backward rounds once, and keeps gate and up alone.

The sum of what entered the layer, and what its two halves add:

    wide = (x + attended) + (scale * fed + shared)        float32, not rounded in between
    y    = cast(wide)

A compiled vLLM engine computes one kernel from these addends: the sum after attention, the scaled sum of the experts
and the shared experts' addition are not rounded on the way (Inductor leaves out casts between operations that it fuses;
read in what it wrote for vLLM 0.25.1 with torch 2.11). The next norm reads `wide`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.trainer.kernels.launch import cdiv, is_for_triton, programs

BLOCK = 2048


def silu_product_torch(gate: Tensor, up: Tensor, once: bool) -> Tensor:
    return _product(F.silu, gate, up, once)


def gelu_product(gate: Tensor, up: Tensor, once: bool) -> Tensor:
    """The same with GELU, approximated by tanh."""
    return _product(partial(F.gelu, approximate="tanh"), gate, up, once)


def _product(activate: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor, once: bool) -> Tensor:
    if not once:
        return activate(gate) * up
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (activate(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def silu_product(gate: Tensor, up: Tensor, once: bool) -> Tensor:
    """SwiGLU's product (Shazeer 2020, https://arxiv.org/abs/2002.05202), of the shape and dtype of gate and up."""
    if not is_for_triton(gate):
        return silu_product_torch(gate, up, once)
    return _SiluProduct.apply(gate, up, once)


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, once: bool) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return silu_product_triton(gate, up, once)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return *silu_product_backward_triton(gate, up, dh.contiguous()), None


def silu_product_triton(gate: Tensor, up: Tensor, once: bool) -> Tensor:
    out = torch.empty_like(gate)
    size = gate.numel()
    programs(_silu_product, (cdiv(size, BLOCK),))(gate, up, out, size, ONCE=once, BLOCK=BLOCK, num_warps=8)
    return out


def silu_product_backward_triton(gate: Tensor, up: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    size = gate.numel()
    programs(_silu_product_backward, (cdiv(size, BLOCK),))(gate, up, dh, dgate, dup, size, BLOCK=BLOCK, num_warps=8)
    return dgate, dup


@triton.jit
def _silu_product(gate_ptr, up_ptr, out_ptr, size, ONCE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    silu = gate * tl.sigmoid(gate)
    if not ONCE:
        silu = silu.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + at, (silu * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _silu_product_backward(gate_ptr, up_ptr, dh_ptr, dgate_ptr, dup_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(dup_ptr + at, (dh * gate * sigmoid).to(dup_ptr.dtype.element_ty), mask=inside)
    tl.store(dgate_ptr + at, (dh * up * slope).to(dgate_ptr.dtype.element_ty), mask=inside)


def residual_sum_torch(
    x: Tensor, attended: Tensor, fed: Tensor, shared: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    added = fed.float() if scale == 1.0 else fed.float() * scale
    added = added if shared is None else added + shared.float()
    wide = (x.float() + attended.float()) + added
    return wide.to(x.dtype, copy=True), wide


def residual_sum(
    x: Tensor, attended: Tensor, middle: Tensor, fed: Tensor, shared: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(y, wide) of the formula above, with x's shape; `wide` gets no gradient.

    Args:
        x: what entered the layer.
        attended: what attention added.
        middle: their sum, rounded. It gets the gradient in the place of both, and its values are not read.
        fed: what the feed-forward adds, or its routed experts.
        shared: what shared experts add.
    """
    return _ResidualSum.apply(x.detach(), attended.detach(), middle, fed, shared, scale)


class _ResidualSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, middle: Tensor, fed: Tensor, shared: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        ctx.has_shared, ctx.scale = shared is not None, scale
        compute = residual_sum_triton if is_for_triton(x) else residual_sum_torch
        y, wide = compute(x, attended, fed, shared, scale)
        ctx.mark_non_differentiable(wide)
        return y, wide

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dfed = dy if ctx.scale == 1.0 else dy * ctx.scale
        return None, None, dy, dfed, dy if ctx.has_shared else None, None


def residual_sum_triton(
    x: Tensor, attended: Tensor, fed: Tensor, shared: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    wide = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    addends = (None if part is None else part.contiguous() for part in (x, attended, fed, shared))
    programs(_residual_sum, (cdiv(x.numel(), BLOCK),))(
        *addends, y, wide, x.numel(), scale, HAS_SHARED=shared is not None, BLOCK=BLOCK, num_warps=8
    )
    return y, wide


@triton.jit
def _residual_sum(
    x_ptr, attended_ptr, fed_ptr, shared_ptr, y_ptr, wide_ptr, size, scale,
    HAS_SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    middle = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    middle += tl.load(attended_ptr + at, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(fed_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_SHARED:
        added += tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)
    wide = middle + added
    tl.store(y_ptr + at, wide.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(wide_ptr + at, wide, mask=inside)
