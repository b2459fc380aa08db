"""silu(gate) * up of a dense feed-forward, forward and backward: one pass over memory each. With GELU, torch's passes.

    once   h = cast(silu(gate) * up), all steps float32, as where torch.compile fuses them (vLLM's engines)
    else   h = cast(cast(silu(gate)) * up), as vLLM's own kernel and transformers
    backward, from dh:   dup = dh * silu(gate)    dgate = dh * up * silu'(gate)

Backward rounds once, and keeps gate and up alone.
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
