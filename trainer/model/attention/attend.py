"""Causal attention over packed sequences: the kernels, and the choice of one for a model.

Owns the choice, which is made once per model and reported:

    cudnn   cuDNN's kernels (flash_attention.py), sequences of one length at a time (Hopper and data-centre Blackwell,
            16-bit, the head widths of `CUDNN_WIDTHS`); twice as fast as varlen there for long sequences. A microbatch
            of short ones, or a window, goes through varlen
    varlen  torch's flash attention on packed rows (CUDA, 16-bit)
    flex    torch.nn.attention.flex_attention on packed rows (CUDA, 16-bit), for heads with sinks: it gives the log of
            the softmax's sum, by which a sink scales the output
    padded  scaled_dot_product_attention over a right-padded batch (anything else). Causal attention needs no key mask
            there: a query never looks right, and padding is on the right.

Chunks of longer sequences (context.py) have the same choice; chunk_attention.py lays them out for cuDNN. An engine's
kernel may compute the values of cudnn, varlen and flex. Does not own projections, norms or RoPE
(grouped_queries.py, latent.py).

Shapes: T packed tokens, N query heads, G key/value heads, D query/key head_dim, V value head_dim, B sequences, L
longest sequence.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.conf.architecture.attention_spec import GqaSpec, MlaSpec
from slipstream.trainer.model.attention.chunk_attention import chunk_attention
from slipstream.trainer.model.attention.flash_attention import (
    AttentionCall,
    EngineKernel,
    FlashAttention,
    cudnn_attention,
    cudnn_gradients_of_rows,
    varlen_attention,
    varlen_gradients,
)
from slipstream.trainer.model.packed_sequences import LONG, PackedSequences

logger = logging.getLogger(__name__)


class AttentionBackend(StrEnum):
    cudnn = "cudnn"
    varlen = "varlen"
    flex = "flex"
    padded = "padded"


def choose_attention_backend(
    device: torch.device, dtype: torch.dtype, attention: GqaSpec | MlaSpec
) -> AttentionBackend:
    """On CUDA with a 16-bit dtype: flex for sinks; cudnn if it is the fastest and takes the heads; varlen for keys of a
    multiple of 8 up to 256, and values that are no wider. Otherwise padded."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return AttentionBackend.padded
    if attention.sinks:
        return AttentionBackend.flex
    if not torch.backends.cuda.is_flash_attention_available():
        return AttentionBackend.padded
    heads = (attention.num_heads, attention.num_kv_heads, attention.qk_head_dim, attention.v_head_dim)
    if heads[2:] in CUDNN_WIDTHS and _cudnn_takes(device, dtype, *heads):
        return AttentionBackend.cudnn
    fits = attention.qk_head_dim % 8 == 0 and attention.v_head_dim <= attention.qk_head_dim <= 256
    return AttentionBackend.varlen if fits else AttentionBackend.padded


CUDNN_WIDTHS = ((64, 64), (128, 128), (192, 128))
"""Widths of keys and values for which cuDNN's kernels were the fastest that were timed (docs/LOG.md)."""

CHUNK_TOLERANCE = 0.02
"""Relative, of the norm of each result: two kernels that round to 16 bits in other places."""


@functools.cache
def _cudnn_takes(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int
) -> bool:
    """Try one sequence, forward and backward, because the widths that cuDNN takes depend on its version and the GPU."""
    if not torch.backends.cudnn.is_available() or torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return False
    shapes = ((num_heads, key_dim), (num_kv_heads, key_dim), (num_kv_heads, 2 * value_dim))
    with torch.device("cpu"), torch.enable_grad():  # as in a step; whoever builds a decoder does it on meta
        q, k, kv = (torch.zeros(LONG, *shape, dtype=dtype, device=device) for shape in shapes)
        q, k, v = (x.requires_grad_() for x in (q, k, kv[..., value_dim:]))  # a latent's values lie beside its keys
        call = AttentionCall(PackedSequences.from_cu_seqlens(torch.tensor([0, LONG]), LONG, device), 1.0)
        refusal = refusal_of(lambda: cudnn_attention(q, k, v, call).sum().backward())
    if refusal is not None:
        logger.warning("attention: cuDNN refuses heads of %d and %d, so varlen: %s", key_dim, value_dim, refusal)
    return refusal is None


@functools.cache
def _cudnn_takes_chunks(
    device: torch.device, dtype: torch.dtype, num_heads: int, key_dim: int, num_kv_heads: int, value_dim: int
) -> bool:
    """Try one chunk, forward and backward, beside varlen, because what cuDNN does with more keys than queries depends
    on its version."""
    num_keys = 2 * LONG + 100
    queries, keys = (
        PackedSequences.from_cu_seqlens(torch.tensor([0, count]), count, device) for count in (LONG, num_keys)
    )
    call = AttentionCall(replace(queries, keys=keys), key_dim**-0.5)
    draw = torch.Generator(device).manual_seed(0)  # a run's own random numbers stay what they are
    shapes = (
        (LONG, num_heads, key_dim), (num_keys, num_kv_heads, key_dim), (num_keys, num_kv_heads, value_dim),
        (LONG, num_heads, value_dim),
    )  # fmt: skip
    q, k, v, dout = (torch.randn(shape, generator=draw, device=device, dtype=dtype) for shape in shapes)

    def results(kernel: Callable[[Tensor, Tensor, Tensor, AttentionCall], Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            out = kernel(inputs[0], inputs[1], inputs[2], call)
            return [out, *torch.autograd.grad(out, inputs, dout)]

    found: list[Tensor] = []
    refusal = refusal_of(lambda: found.extend(results(chunk_attention)))
    if refusal is None:
        pairs = zip(found, results(varlen_attention), strict=True)
        if all((one - other).norm() <= CHUNK_TOLERANCE * other.norm() for one, other in pairs):
            return True
    logger.warning("attention: cuDNN does not take chunks of sequences, so varlen: %s", refusal or "other values")
    return False


def refusal_of(attempt: Callable[[], None]) -> RuntimeError | None:
    """The error by which a kernel refuses its arguments; None if it takes them. An error of the device is raised: it
    says nothing about the arguments."""
    try:
        attempt()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError as error:
        return error
    return None


def attend(
    q_TND: Tensor,
    k_TGD: Tensor,
    v_TGV: Tensor,
    call: AttentionCall,
    backend: AttentionBackend,
    engine: EngineKernel | None = None,
) -> Tensor:
    """softmax(scale * q k^T, causal, each sequence alone) v, [T, N, V]; values by `engine`, if it is given."""
    sequences, sinks_N = call.sequences, call.sinks_N
    if sequences.gather is not None:
        assert engine is None and sinks_N is None, "neither takes keys of other ranks"
        k_TGD, v_TGV = sequences.gather(k_TGD, v_TGV)
    if q_TND.shape[0] == 0:
        # No kernel takes zero rows. All inputs stay in the graph: under FSDP2 a parameter without a gradient on one
        # rank changes the size of that rank's reduce-scatter.
        repeats = q_TND.shape[1] // k_TGD.shape[1]
        unused = (k_TGD.sum(-1, keepdim=True) + v_TGV).repeat_interleave(repeats, dim=1)
        unused = unused + q_TND.sum(-1, keepdim=True)
        return unused if sinks_N is None else unused + sinks_N.to(unused.dtype)[:, None]
    is_whole = sequences.keys is None
    is_long = backend is AttentionBackend.cudnn and call.window is None and sequences.is_long
    if engine is not None:
        by_cudnn = is_long and is_whole and sinks_N is None
        gradients = cudnn_gradients_of_rows if by_cudnn else varlen_gradients
        return FlashAttention.apply(q_TND, k_TGD, v_TGV, sinks_N, call, engine, gradients)
    if backend is AttentionBackend.flex:
        kernel = flex_attention
    elif sinks_N is not None:
        kernel = sink_attention
    elif is_long and is_whole:
        kernel = cudnn_attention
    elif is_long and _cudnn_takes_chunks(q_TND.device, q_TND.dtype, *q_TND.shape[1:], *v_TGV.shape[1:]):
        kernel = chunk_attention
    else:
        is_flash = backend in (AttentionBackend.cudnn, AttentionBackend.varlen)
        kernel = varlen_attention if is_flash else padded_attention
    return kernel(q_TND, k_TGD, v_TGV, call)


def padded_attention(q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, call: AttentionCall) -> Tensor:
    """Causal attention by scaled_dot_product_attention over a right-padded batch. Returns [T, N, V]."""
    sequences = call.sequences
    keys = sequences.keys or sequences
    mask = None if keys is sequences and call.window is None else _visible(sequences, call.window)
    out = F.scaled_dot_product_attention(
        sequences.pad(q_TND),
        keys.pad(k_TGD),
        keys.pad(v_TGV),
        attn_mask=mask,
        is_causal=mask is None,
        scale=call.scale,
        enable_gqa=q_TND.shape[1] != k_TGD.shape[1],
    )
    return sequences.unpad(out)


def sink_attention(q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, call: AttentionCall) -> Tensor:
    """As padded_attention, with sinks, by plain products. Memory grows with the square of the length."""
    sequences, sinks_N = call.sequences, call.sinks_N
    assert sinks_N is not None
    repeats = q_TND.shape[1] // k_TGD.shape[1]
    k_BNLD, v_BNLV = (sequences.pad(x).repeat_interleave(repeats, dim=1) for x in (k_TGD, v_TGV))
    logits_BNLL = (sequences.pad(q_TND) @ k_BNLD.transpose(2, 3)).float() * call.scale
    hidden_LL = ~_visible(sequences, call.window)
    sinks = sinks_N.float()[None, :, None, None].expand(*logits_BNLL.shape[:3], 1)
    probs = torch.cat((logits_BNLL.masked_fill(hidden_LL, -torch.inf), sinks), dim=-1).softmax(-1)[..., :-1]
    return sequences.unpad(probs.to(v_BNLV.dtype) @ v_BNLV)


def flex_attention(q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, call: AttentionCall) -> Tensor:
    """Causal attention over packed rows by flex_attention, compiled on CUDA. Returns [T, N, V]. A sink s adds exp(s) to
    the softmax's sum Z, so that the output is multiplied by Z / (Z + exp(s)) = sigmoid(log Z - s)."""
    from torch.nn.attention import flex_attention as flex

    sequences, window = call.sequences, call.window
    if window not in sequences.block_masks:
        sequences.block_masks[window] = _block_mask(sequences, window)
    mask = sequences.block_masks[window]
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TND, k_TGD, v_TGV))
    run = _compiled_flex() if q_TND.is_cuda else flex.flex_attention
    options: dict[str, Any] = {"scale": call.scale, "enable_gqa": q.shape[1] != k.shape[1]}
    out, log_sum = run(q, k, v, block_mask=mask, return_lse=True, **options)
    out_TNV = out[0].transpose(0, 1)
    if call.sinks_N is None:
        return out_TNV
    kept_TN = torch.sigmoid(log_sum[0].transpose(0, 1) - call.sinks_N.float())
    return out_TNV * kept_TN[..., None].to(out_TNV.dtype)


def _block_mask(sequences: PackedSequences, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    device, num_tokens = sequences.padded_row_T.device, sequences.padded_row_T.shape[0]
    sequence_of_T = torch.searchsorted(sequences.cu_seqlens[1:], torch.arange(num_tokens, device=device), right=True)
    reach = num_tokens if window is None else window

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < reach) & (sequence_of_T[query] == sequence_of_T[key])

    return create_block_mask(sees, None, None, num_tokens, num_tokens, device=str(device))


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention as run

    return torch.compile(run, dynamic=True)


def _visible(sequences: PackedSequences, window: int | None) -> Tensor:
    """bool [L, L]: which keys a query sees; of chunks [B, 1, L, longest of the keys], whose last query sees the last
    key."""
    keys, device = sequences.keys or sequences, sequences.cu_seqlens.device
    distance = torch.arange(sequences.max_length, device=device)[:, None] - torch.arange(keys.max_length, device=device)
    if keys is not sequences:
        distance = distance + (keys.cu_seqlens.diff() - sequences.cu_seqlens.diff())[:, None, None, None]
    return (distance >= 0) & (distance < (keys.max_length if window is None else window))
