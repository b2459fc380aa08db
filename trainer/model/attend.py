"""Causal attention over packed sequences: the kernels, and where sequences lie.

Owns the bookkeeping of a packed microbatch (`PackedSequences`) and the choice of kernel, made once a model and
reported:

    varlen  torch.nn.attention.varlen, flash attention on packed rows (CUDA, 16-bit)
    padded  scaled_dot_product_attention over a right-padded batch (anything else). Causal attention needs no key mask
            there: a query never looks right, and padding is on the right.

Does not own projections, norms or RoPE (attention.py).

Shapes: T packed tokens, N query heads, G key/value heads, D query/key head_dim, V value head_dim, B sequences, L
longest sequence.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class AttentionBackend(StrEnum):
    """Kernel of the attention."""

    varlen = "varlen"
    padded = "padded"


def choose_attention_backend(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """varlen where flash attention can run: CUDA, a 16-bit dtype, head_dim a multiple of 8 up to 256."""
    try:
        importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return AttentionBackend.padded
    fits = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256
    return AttentionBackend.varlen if device.type == "cuda" and fits else AttentionBackend.padded


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Where sequences lie in a microbatch: made once a forward, shared by all layers.

    Example: lengths (2, 3) give cu_seqlens [0, 2, 5] and a padded (2, 3) batch, of which the tokens are rows
    [0, 1, 3, 4, 5] once it is flattened.
    """

    cu_seqlens: Tensor
    """int32 [B + 1] on the compute device."""
    num_sequences: int
    max_length: int
    slots_T: Tensor
    """int64 [T]; token t is row slots[t] of the padded batch flattened to [B * L]."""

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, num_tokens: int, device: torch.device) -> PackedSequences:
        """Args: cu_seqlens int [B + 1], preferably on the CPU, because lengths decide shapes.

        Raises:
            ValueError: it does not rise from 0 to num_tokens.
        """
        starts = cu_seqlens.to("cpu", torch.int64)
        lengths = starts.diff()
        if starts.numel() == 0 or starts[0] != 0 or starts[-1] != num_tokens or bool((lengths < 0).any()):
            raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens {num_tokens}, got {starts.tolist()}")
        max_length = int(lengths.max()) if lengths.numel() else 0
        shifts = torch.arange(lengths.numel()) * max_length - starts[:-1]
        slots = torch.arange(num_tokens) + torch.repeat_interleave(shifts, lengths)
        return cls(starts.to(device, torch.int32), lengths.numel(), max_length, slots.to(device))


def attend(
    q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, sequences: PackedSequences, backend: AttentionBackend, scale: float
) -> Tensor:
    """softmax(scale * q k^T, causal, each sequence alone) v. Returns [T, N, V]."""
    if q_TND.shape[0] == 0:
        # No kernel takes zero rows. All three stay in the graph: under FSDP2 a parameter without a gradient on one
        # rank changes the size of that rank's reduce-scatter.
        repeats = q_TND.shape[1] // k_TGD.shape[1]
        unused = (k_TGD.sum(-1, keepdim=True) + v_TGV).repeat_interleave(repeats, dim=1)
        return unused + q_TND.sum(-1, keepdim=True)
    kernel = varlen_attention if backend is AttentionBackend.varlen else padded_attention
    return kernel(q_TND, k_TGD, v_TGV, sequences, scale)


def padded_attention(q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, sequences: PackedSequences, scale: float) -> Tensor:
    """Causal attention by scaled_dot_product_attention over a right-padded batch. Returns [T, N, V]."""
    batch, length, slots = sequences.num_sequences, sequences.max_length, sequences.slots_T

    def pad(x: Tensor) -> Tensor:
        rows = x.new_zeros(batch * length, *x.shape[1:]).index_copy(0, slots, x)
        return rows.view(batch, length, *x.shape[1:]).transpose(1, 2)

    enable_gqa = q_TND.shape[1] != k_TGD.shape[1]
    out = F.scaled_dot_product_attention(
        pad(q_TND), pad(k_TGD), pad(v_TGV), is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, slots)


def varlen_attention(q_TND: Tensor, k_TGD: Tensor, v_TGV: Tensor, sequences: PackedSequences, scale: float) -> Tensor:
    """Causal flash attention over packed rows. Returns [T, N, V].

    The kernel wants values as wide as keys: narrower ones (latent attention) are padded with zeros. torch 2.11 takes
    fewer key heads than query heads as they are; from 2.13 on that must be asked for.
    """
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0), "scale": scale}
    if q_TND.shape[1] != k_TGD.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    length, cu_seqlens, width = sequences.max_length, sequences.cu_seqlens, v_TGV.shape[2]
    v_TGD = F.pad(v_TGV, (0, q_TND.shape[2] - width))
    out = varlen_attn(q_TND, k_TGD, v_TGD, cu_seqlens, cu_seqlens, length, length, **options)
    assert isinstance(out, Tensor)
    return out[..., :width]
