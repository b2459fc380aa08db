"""Flash attention: values by one kernel, gradients by the same or another one.

    varlen  torch's flash attention on packed rows
    cudnn   cuDNN's kernels, neighbouring sequences of one length at a time
    engine  values by an engine's kernel (trainer/engine_ops), gradients by either of the others

    forward   out, log of each softmax's sum                             kept for a recomputation, and for backward
    backward  P = exp(scale * q k^T - log sum), from there as always     who computed the sums does not matter

A sink s is one more term in the sum, exp(s), and adds nothing to out. So the kernels' backward holds with the whole
sum, and ds = -sum over tokens of exp(s - log sum) * <dout, out>.
Does not own the choice of a kernel (attend.py).

Shapes: T packed tokens, N query heads, G key/value heads, D query/key head_dim, V value head_dim.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.trainer.model.host_activations import HostLayer, MovedTensor
from slipstream.trainer.model.packed_sequences import PackedSequences


class KeptAttention:
    """Results of one layer's attention between its forward and the recomputation of that layer in its backward."""

    def __init__(self) -> None:
        self._results: Any = None
        self._moved: tuple[HostLayer, MovedTensor] | None = None

    def put(self, results: Any) -> None:
        """Keep the output, and the tensors that its backward needs."""
        self._results = results

    def move(self, on_host: HostLayer) -> None:
        """Move the output to host memory, unless nothing is kept or it is there."""
        if self._results is None or self._moved is not None:
            return
        out, *others = self._results
        moved = on_host.move(out)
        if moved is not None:
            self._results, self._moved = (out.shape, *others), (on_host, moved)

    def take(self) -> Any:
        """Return what was kept and forget it; None if nothing was kept."""
        (results, moved), self._results, self._moved = (self._results, self._moved), None, None
        if moved is None:
            return results
        shape, *others = results
        return moved[0].get(moved[1]).view(shape), *others


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a kernel of causal attention is told beside q, k and v. Each sequence sees itself alone."""

    sequences: PackedSequences
    scale: float
    """Factor of q . k."""
    window: int | None = None
    """A query sees this many keys, itself among them; None: all before it."""
    sinks_N: Tensor | None = None
    """One more logit per head in the softmax, without a value."""
    kept: KeptAttention | None = None
    """Keeps the results, so that a recomputation need not compute them again (cudnn, varlen, an engine's)."""


Values = Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, ...]]
"""Takes q [T, N, D], k and v; gives the output [T, N, V], then logs of sums as the gradients' function takes them."""
Gradients = Callable[..., Sequence[Tensor]]
"""Gradients of q, k and v, of (dout, q, k, v, out, logs of sums, AttentionCall)."""
EngineKernel = Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, Tensor]]
"""An engine's kernel of causal attention over packed sequences: of queries, keys and values [T, N, V], and [N, T] in
float32, the natural logarithm of each softmax's sum, a sink's term included."""


class FlashAttention(torch.autograd.Function):
    """Calls aten's operators or an engine's, so that a recomputed forward can take the first one's results. Returns
    [T, N, V]."""

    @staticmethod
    def forward(
        ctx: Any, q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, sinks_N: Tensor | None, call: AttentionCall,
        values: Values, gradients: Gradients,
    ) -> Tensor:  # fmt: skip
        results = None if call.kept is None else call.kept.take()
        if results is None:
            results = values(q_TND, k_TGD, v_TGV, call)
            if call.kept is not None:
                call.kept.put(results)
        ctx.save_for_backward(q_TND, k_TGD, v_TGV, sinks_N, *results)
        ctx.call, ctx.gradients = call, gradients
        return results[0].detach()  # autograd marks the returned tensor, so a second call must return another one

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TNV: Tensor) -> tuple[Tensor | None, ...]:
        q_TND, k_TGD, v_TGV, sinks_N, out_TNV, *log_sums = ctx.saved_tensors
        grads = ctx.gradients(dout_TNV, q_TND, k_TGD, v_TGV, out_TNV, log_sums, ctx.call)
        dsinks_N = None
        if sinks_N is not None and ctx.needs_input_grad[3]:
            shares_NT = torch.exp(sinks_N.float()[:, None] - log_sums[0])
            dsinks_N = -(shares_NT * (dout_TNV.float() * out_TNV.float()).sum(-1).t()).sum(1).to(sinks_N.dtype)
        return *grads, dsinks_N, None, None, None


def varlen_attention(q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, call: AttentionCall) -> Tensor:
    """Flash attention over packed rows. Returns [T, N, V]. The kernel needs values as wide as keys, so narrower ones
    (latent attention) are padded with zeros."""
    width = v_TGV.shape[2]
    v_TGD = F.pad(v_TGV, (0, q_TND.shape[2] - width))
    return FlashAttention.apply(q_TND, k_TGD, v_TGD, None, call, _varlen_values, varlen_gradients)[..., :width]


def _varlen_values(q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, call: AttentionCall) -> tuple[Tensor, ...]:
    where, span = _varlen_arguments(call)
    return torch.ops.aten._flash_attention_forward(q_TND, k_TGD, v_TGD, *where, False, **span)[:2]


def varlen_gradients(
    dout_TNV: Tensor, q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, out_TNV: Tensor, log_sums: Sequence[Tensor],
    call: AttentionCall,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k and v by torch's flash attention.

    Args:
        log_sums: One, float32 [N, T], natural logarithms. Probabilities are computed again from them, so that with a
            sink's part in the sum they are those beside the sink.
    """
    width, wide = v_TGV.shape[2], q_TND.shape[2]
    dout, v, out = (F.pad(x, (0, wide - width)) if width < wide else x for x in (dout_TNV, v_TGV, out_TNV))
    where, span = _varlen_arguments(call)
    state = torch.empty(2, dtype=torch.uint64, device=q_TND.device)  # of the random numbers of a dropout
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout.contiguous(), q_TND, k_TGD, v, out, log_sums[0], *where, state, state[0], **span
    )
    return dq, dk, dv[..., :width]


def _varlen_arguments(call: AttentionCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(where sequences lie, dropout and causality; scale and window), as aten's operators take them: the last query
    of a sequence sees its last key."""
    queries, window = call.sequences, call.window
    keys = queries.keys or queries
    span = {"scale": call.scale, "window_size_left": None, "window_size_right": None}
    if window is not None:
        span |= {"window_size_left": window - 1, "window_size_right": 0}
    lengths = (queries.max_length, keys.max_length)
    return (queries.cu_seqlens, keys.cu_seqlens, *lengths, 0.0, window is None), span


def cudnn_attention(q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, call: AttentionCall) -> Tensor:
    """Attention by cuDNN: neighbouring sequences of one length in one call. Returns [T, N, V]. cuDNN compiles one plan
    per shape, so lengths are rounded up to `padded_length`."""
    return FlashAttention.apply(q_TND, k_TGD, v_TGV, None, call, _cudnn_values, cudnn_gradients)


def _cudnn_values(q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, call: AttentionCall) -> tuple[Tensor, ...]:
    parts, starts = [], call.sequences.starts
    for run in runs_of_equal_length(starts):
        qkv = (cut_out(x, run) for x in (q_TND, k_TGD, v_TGV))
        forward = torch.ops.aten._scaled_dot_product_cudnn_attention
        parts.append(forward(*qkv, None, True, 0.0, True, False, scale=call.scale)[:2])
    return put_back([part[0] for part in parts], starts), *(part[1] for part in parts)


def padded_length(length: int) -> int:
    """The next of eight lengths between two powers of two, from 1024 on; below, a multiple of 128."""
    step = length_step(length)
    return -(-length // step) * step


def length_step(length: int) -> int:
    """What padded lengths near this one are multiples of; so is the longest one that is no longer."""
    return max(128, (1 << (length - 1).bit_length()) // 16)


def cudnn_gradients(
    dout_TNV: Tensor, q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, out_TNV: Tensor, log_sums: Sequence[Tensor],
    call: AttentionCall,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k and v by cuDNN.

    Args:
        log_sums: Of each run of equal lengths, float32 [count, N, padded length, 1], natural logarithms; anything
            finite in the padding.
    """
    grads, starts = [], call.sequences.starts
    unused = torch.empty((), dtype=torch.int64, device=q_TND.device)  # seed and offset of a dropout
    for run, sums in zip(runs_of_equal_length(starts), log_sums, strict=True):
        dout, *qkv, out = (cut_out(x, run) for x in (dout_TNV, q_TND, k_TGD, v_TGV, out_TNV))
        length = padded_length(run[2])
        grads.append(
            torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                dout, *qkv, out, sums, unused, unused, None, None, None, length, length, 0.0, True, scale=call.scale
            )
        )
    return [put_back(list(parts), starts) for parts in zip(*grads, strict=True)]


def cudnn_gradients_of_rows(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Sequence[Tensor], call: AttentionCall
) -> list[Tensor]:
    """cudnn_gradients, given one [N, T] tensor of log sums, as an engine's kernel returns it."""
    return cudnn_gradients(dout, q, k, v, out, cut_out_log_sums(log_sums[0], call.sequences.starts), call)


def cut_out_log_sums(log_sums_NT: Tensor, starts: tuple[int, ...]) -> list[Tensor]:
    """Logarithms of sums of packed rows as cudnn_gradients takes them."""
    parts = []
    for first, count, length in runs_of_equal_length(starts):
        sums = log_sums_NT[:, first : first + count * length].unflatten(1, (count, length)).transpose(0, 1)
        parts.append(F.pad(sums, (0, padded_length(length) - length))[..., None].contiguous())
    return parts


def runs_of_equal_length(starts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(first row, number of sequences, their length) of each run of neighbours of one length. Leaves out empty ones.

    Example: (0, 5, 5, 10, 12) gives [(0, 2, 5), (10, 1, 2)].
    """
    lengths = (stop - start for start, stop in itertools.pairwise(starts))
    runs, first = [], 0
    for length, equal in itertools.groupby(length for length in lengths if length):
        count = len(list(equal))
        runs.append((first, count, length))
        first += count * length
    return runs


def cut_out(x_TND: Tensor, run: tuple[int, int, int]) -> Tensor:
    """A run's sequences as [count, N, padded length, D], each with zeros after its end; a view if nothing is padded."""
    first, count, length = run
    rows = x_TND[first : first + count * length].unflatten(0, (count, length))
    missing = padded_length(length) - length
    return (F.pad(rows, (0, 0, 0, 0, 0, missing)) if missing else rows).transpose(1, 2)


def put_back(parts: list[Tensor], starts: tuple[int, ...]) -> Tensor:
    """The inverse of `cut_out` of all runs: [T, N, D]."""
    runs = zip(parts, runs_of_equal_length(starts), strict=True)
    rows = [part.transpose(1, 2)[:, :length].flatten(0, 1) for part, (_, _, length) in runs]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
