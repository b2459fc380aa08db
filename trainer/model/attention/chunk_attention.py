"""Causal attention of chunks of longer sequences by cuDNN, whose causal kernel takes as many queries as keys.

    keys of a chunk         first .................... | left over | those of its own tokens
    rectangle, not causal   every query of the chunk
    square, causal                                       no query,   the chunk's queries

A chunk (context.py) sees the keys before it, and its own up to each query. Two calls compute that: a rectangle over the
first keys, as many as a plan of cuDNN has, and a square over the others. Their outputs are added, weighted by their
parts of the softmax's sum (Rabe and Staats 2021, https://arxiv.org/abs/2112.05682). In backward both calls get the
whole output and the whole sum, from which each gives its share of the gradients.

Owns this division. Does not own the kernels, padded lengths (flash_attention.py), nor the choice (attend.py).

Shapes: as in flash_attention.py; C queries of a chunk, S keys of it, R of these in the rectangle.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.trainer.model.attention.flash_attention import AttentionCall, FlashAttention, length_step, padded_length


def chunk_attention(q_TND: Tensor, k_KGD: Tensor, v_KGV: Tensor, call: AttentionCall) -> Tensor:
    """Attention of chunks, whose keys lie where `call.sequences.keys` tells. Returns [T, N, V]."""
    return FlashAttention.apply(q_TND, k_KGD, v_KGV, None, call, _all_values, _all_gradients)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk that has tokens: where its queries and keys lie, and how many keys the rectangle has."""

    queries: slice
    keys: slice
    num_first: int

    @property
    def num_queries(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def num_empty(self) -> int:
        """Rows of the square before the first query."""
        return self.keys.stop - self.keys.start - self.num_first - self.num_queries


def chunks_of(call: AttentionCall) -> Iterator[_Chunk]:
    """The chunks that have queries, in order."""
    assert call.sequences.keys is not None
    both = (itertools.pairwise(one.starts) for one in (call.sequences, call.sequences.keys))
    for (first, stop), (first_key, last_key) in zip(*both, strict=True):
        if first < stop:
            before = last_key - first_key - (stop - first)
            step = length_step(max(1, before))
            yield _Chunk(slice(first, stop), slice(first_key, last_key), before // step * step)


def _all_values(q_TND: Tensor, k_KGD: Tensor, v_KGV: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    parts = [_values(q_TND[one.queries], k_KGD[one.keys], v_KGV[one.keys], one, call) for one in chunks_of(call)]
    return torch.cat([out for out, _ in parts]), torch.cat([sums for _, sums in parts], 1)


def _all_gradients(
    dout_TNV: Tensor, q_TND: Tensor, k_KGD: Tensor, v_KGV: Tensor, out_TNV: Tensor, log_sums: Sequence[Tensor],
    call: AttentionCall,
) -> list[Tensor]:  # fmt: skip
    parts = [
        _gradients(
            dout_TNV[one.queries], q_TND[one.queries], out_TNV[one.queries], log_sums[0][:, one.queries],
            k_KGD[one.keys], v_KGV[one.keys], one, call,
        )
        for one in chunks_of(call)
    ]  # fmt: skip
    return [torch.cat(grads) for grads in zip(*parts, strict=True)]


def _values(q_CND: Tensor, k_SGD: Tensor, v_SGV: Tensor, chunk: _Chunk, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """[C, N, V], and [N, C]: the log of each softmax's sum, float32."""
    first, before, count = chunk.num_first, chunk.num_empty, chunk.num_queries
    out_CNV, sums_NC = _forward(_rows(q_CND, before), _rows(k_SGD[first:]), _rows(v_SGV[first:]), call, is_causal=True)
    out_CNV, sums_NC = out_CNV[before : before + count], sums_NC[:, before : before + count]
    if not first:
        return out_CNV, sums_NC
    more_CNV, more_NC = _forward(_rows(q_CND), _exactly(k_SGD[:first]), _exactly(v_SGV[:first]), call, is_causal=False)
    more_CNV, more_NC = more_CNV[:count], more_NC[:, :count]
    whole_NC = torch.logaddexp(sums_NC, more_NC)
    own_CN1, more_CN1 = ((sums - whole_NC).exp().t()[..., None] for sums in (sums_NC, more_NC))
    return (out_CNV * own_CN1 + more_CNV * more_CN1).to(out_CNV.dtype), whole_NC


def _gradients(
    dout_CNV: Tensor, q_CND: Tensor, out_CNV: Tensor, sums_NC: Tensor, k_SGD: Tensor, v_SGV: Tensor, chunk: _Chunk,
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    first, before, count = chunk.num_first, chunk.num_empty, chunk.num_queries
    dout, q, out = (_rows(x, before) for x in (dout_CNV, q_CND, out_CNV))
    k, v, sums = _rows(k_SGD[first:]), _rows(v_SGV[first:]), _padded_sums(sums_NC, before)
    dq, dk, dv = _backward(dout, q, out, sums, k, v, call, is_causal=True)
    num_own = len(k_SGD) - first
    dq, dk, dv = dq[before : before + count], dk[:num_own], dv[:num_own]
    if not first:
        return dq, dk, dv
    dout, q, out = (_rows(x) for x in (dout_CNV, q_CND, out_CNV))
    k, v, sums = _exactly(k_SGD[:first]), _exactly(v_SGV[:first]), _padded_sums(sums_NC, 0)
    more_dq, more_dk, more_dv = _backward(dout, q, out, sums, k, v, call, is_causal=False)
    return dq + more_dq[:count], torch.cat((more_dk, dk)), torch.cat((more_dv, dv))


def _forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Rows of the output, and [N, rows] of log sums."""
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, sums = forward(q, k, v, None, True, 0.0, is_causal, False, scale=call.scale)[:2]
    return out[0].transpose(0, 1), sums[0, :, :, 0]


def _backward(
    dout: Tensor, q: Tensor, out: Tensor, sums: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *, is_causal: bool
) -> list[Tensor]:
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # seed and offset of a dropout
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    lengths = q.shape[2], k.shape[2]
    grads = backward(
        dout, q, k, v, out, sums, unused, unused, None, None, None, *lengths, 0.0, is_causal, scale=call.scale
    )
    return [grad[0].transpose(0, 1) for grad in grads]


def _rows(x_CND: Tensor, before: int = 0) -> Tensor:
    """[1, N, padded length, D], with so many rows of zeros before the others."""
    after = padded_length(before + len(x_CND)) - before - len(x_CND)
    return _exactly(F.pad(x_CND, (0, 0, 0, 0, before, after)) if before + after else x_CND)


def _exactly(x_RND: Tensor) -> Tensor:
    return x_RND.transpose(0, 1)[None]


def _padded_sums(sums_NC: Tensor, before: int) -> Tensor:
    """[1, N, padded length, 1]. Anything finite will do where no query is: nothing comes from the output there."""
    after = padded_length(before + sums_NC.shape[1]) - before - sums_NC.shape[1]
    return F.pad(sums_NC, (before, after))[None, ..., None].contiguous()
