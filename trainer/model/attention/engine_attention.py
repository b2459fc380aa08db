"""Attention with values by an engine's kernel and gradients by torch's (Roundings.attention=engine).

    forward   kernel(q, k, v) -> out, log of each softmax's sum          the engine's bits, up to its order of blocks
    backward  P = exp(scale * q k^T - log sum), from there as always     varlen or cuDNN's, the trainer's own choice

A sink s is one more term in the sum, exp(s), and adds nothing to out. So the kernels' backward holds with the whole
sum, and ds = -sum over tokens of exp(s - log sum) * <dout, out>.
Does not own the engine's kernel (trainer/engine_ops/vllm_attention.py).

Shapes: T packed tokens, N query heads, G key/value heads, D query/key head_dim, V value head_dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.trainer.model.attention.flash_attention import (
    AttentionCall,
    cudnn_gradients,
    cut_out_log_sums,
    varlen_gradients,
)

EngineKernel = Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, Tensor]]
"""An engine's kernel of causal attention over packed sequences: of queries, keys and values [T, N, V], and [N, T] in
float32, the natural logarithm of each softmax's sum, a sink's term included."""


class EngineAttention(torch.autograd.Function):
    """Values by an engine's kernel, gradients by cuDNN's (`by_cudnn`, without sinks) or torch's. Returns [T, N, V]."""

    @staticmethod
    def forward(
        ctx: Any, q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, sinks_N: Tensor | None, kernel: EngineKernel,
        call: AttentionCall, by_cudnn: bool,
    ) -> Tensor:  # fmt: skip
        results = None if call.kept is None else call.kept.take()
        if results is None:
            results = kernel(q_TND, k_TGD, v_TGV, call)
            if call.kept is not None:
                call.kept.put(results)
        ctx.save_for_backward(q_TND, k_TGD, v_TGV, sinks_N, *results)
        ctx.call, ctx.by_cudnn = call, by_cudnn and sinks_N is None
        return results[0].detach()  # autograd marks the returned tensor, so a second call must return another one

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TNV: Tensor) -> tuple[Tensor | None, ...]:
        q_TND, k_TGD, v_TGV, sinks_N, out_TNV, log_sums_NT = ctx.saved_tensors
        tensors = (dout_TNV, q_TND, k_TGD, v_TGV, out_TNV)
        if ctx.by_cudnn:
            grads = cudnn_gradients(*tensors, cut_out_log_sums(log_sums_NT, ctx.call.sequences.starts), ctx.call)
        else:
            grads = varlen_gradients(*tensors, log_sums_NT, ctx.call)
        dsinks_N = None
        if sinks_N is not None and ctx.needs_input_grad[3]:
            shares_NT = torch.exp(sinks_N.float()[:, None] - log_sums_NT)
            dsinks_N = -(shares_NT * (dout_TNV.float() * out_TNV.float()).sum(-1).t()).sum(1).to(sinks_N.dtype)
        return *grads, dsinks_N, None, None, None
