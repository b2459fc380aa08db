"""Sparse attention (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556): an indexer chooses the keys that each query sees.

    score of a key = sum over the indexer's heads of weight * relu(q . k);  a query sees the top_k best keys before it

Owns the indexer's module, and attention in sequences of more than top_k tokens. The first top_k queries of each see
every key before them, by the kernels of any other attention (attend.py); so do all queries of shorter sequences, for
which nothing here is called (latent.py). Later queries are computed in blocks, and computed again in backward, so that
memory grows with a block times the keys before it, never with the square of the length.

Does not own a gradient: none passes the choice, and the indexer stays frozen, because its own loss (DeepSeek's warm-up
against the scores of attention) is not there. Numbers are not an engine's: vLLM rounds the indexer's queries and keys
to FP8, here scores are float32 (docs/families.md).

Shapes: T packed tokens, S queries of a block, K keys, N heads, D query/key head_dim, V value head_dim; I heads of the
indexer, E their width, H hidden, Q width of the queries' latent.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.conf.architecture.attention_spec import IndexerSpec
from slipstream.trainer.kernels.rms_norm import rotate_torch
from slipstream.trainer.model.attention.attend import AttentionBackend, attend
from slipstream.trainer.model.attention.flash_attention import AttentionCall
from slipstream.trainer.model.build import Build
from slipstream.trainer.model.packed_sequences import PackedSequences
from slipstream.trainer.recompute import Recomputed

BLOCK = 256
NORM_EPS = 1e-6
"""The norm of keys has it, whatever the config says (transformers and vLLM)."""


@dataclass(frozen=True, slots=True)
class Indexed:
    """What scores are made of."""

    q_TIE: Tensor
    k_TE: Tensor
    weights_TI: Tensor


class Indexer(nn.Module):
    """Its projections and the norm of its keys, under the checkpoint's names."""

    def __init__(self, spec: IndexerSpec, q_lora_rank: int, build: Build) -> None:
        super().__init__()
        self.spec, hidden_size = spec, build.spec.hidden_size
        self.wq_b = build.linear(q_lora_rank, spec.num_heads * spec.head_dim)
        self.wk = build.linear(hidden_size, spec.head_dim)
        self.k_norm = nn.LayerNorm(spec.head_dim, eps=NORM_EPS, dtype=torch.float32)
        self.weights_proj = build.linear(hidden_size, spec.num_heads)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x_TH: Tensor, latent_TQ: Tensor, rope: tuple[Tensor, Tensor]) -> Indexed:
        """Project, norm and rotate.

        Args:
            x_TH: The normed stream.
            latent_TQ: The normed latent of queries.
        """
        spec = self.spec
        q_TIE = self.wq_b(latent_TQ).unflatten(1, (spec.num_heads, spec.head_dim))
        k_TE = self.k_norm(self.wk(x_TH).float()).to(x_TH.dtype)
        weights_TI = self.weights_proj(x_TH).float() * (spec.num_heads * spec.head_dim) ** -0.5
        return Indexed(self._turned(q_TIE, rope), self._turned(k_TE[:, None], rope)[:, 0], weights_TI)

    def _turned(self, x_TIE: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Interleaved pairs come out as halves, in queries and keys alike, which does not change their products."""
        cos, sin = rope
        if self.spec.interleaved:
            turning, fixed = x_TIE.tensor_split((2 * cos.shape[-1],), dim=-1)
            x_TIE = torch.cat((turning[..., 0::2], turning[..., 1::2], fixed), dim=-1)
        return rotate_torch(x_TIE, cos, sin)


def sparse_attention(
    q_TND: Tensor,
    k_TND: Tensor,
    v_TNV: Tensor,
    indexed: Indexed,
    call: AttentionCall,
    top_k: int,
    backend: AttentionBackend,
) -> Tensor:
    """softmax(scale * q k^T) v over the chosen keys, each sequence alone. Returns [T, N, V]."""
    sequences = call.sequences
    assert sequences.starts, "lengths are on the host"
    assert sequences.gather is None, "ModelSpec.check_cp_size refuses shared sequences"
    device = q_TND.device
    spans = list(itertools.pairwise(sequences.starts))
    near = [min(stop - start, top_k) for start, stop in spans]
    rows = torch.cat([torch.arange(span[0], span[0] + length) for span, length in zip(spans, near, strict=True)])
    near_starts = torch.tensor([0, *itertools.accumulate(near)])
    q, k, v = (x.index_select(0, rows.to(device)) for x in (q_TND, k_TND, v_TNV))
    alone = PackedSequences.from_cu_seqlens(near_starts, len(rows), device)
    sees_all = attend(q, k, v, AttentionCall(alone, call.scale), backend)
    block = Recomputed([])
    attend_block = functools.partial(attend_chosen, top_k=top_k, scale=call.scale)
    outs: list[Tensor] = []
    for (start, stop), first in zip(spans, sees_all.split(near), strict=True):
        outs.append(first)
        for begin in range(start + top_k, stop, BLOCK):
            queries, keys = slice(begin, min(begin + BLOCK, stop)), slice(start, min(begin + BLOCK, stop))
            of_index = indexed.q_TIE[queries], indexed.k_TE[keys], indexed.weights_TI[queries]
            outs.append(block(attend_block, q_TND[queries], k_TND[keys], v_TNV[keys], *of_index))
    return torch.cat(outs)


def attend_chosen(
    q_SND: Tensor,
    k_KND: Tensor,
    v_KNV: Tensor,
    index_q_SIE: Tensor,
    index_k_KE: Tensor,
    weights_SI: Tensor,
    *,
    top_k: int,
    scale: float,
) -> Tensor:
    """A block's queries, the last of which sees up to the last key. Returns [S, N, V]."""
    sees_SK = chosen_keys(index_q_SIE, index_k_KE, weights_SI, top_k)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_SND, k_KND, v_KNV))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees_SK, scale=scale)[0].transpose(0, 1)


@torch.no_grad()
def chosen_keys(q_SIE: Tensor, k_KE: Tensor, weights_SI: Tensor, top_k: int) -> Tensor:
    """bool [S, K]: the top_k keys of each query, none of them behind it. Every query has as many before it."""
    num_queries, num_keys = len(q_SIE), len(k_KE)
    scores_SK, k_EK = q_SIE.new_zeros(num_queries, num_keys, dtype=torch.float32), k_KE.float().t()
    for q_SE, weight_S in zip(q_SIE.unbind(1), weights_SI.unbind(1), strict=True):
        scores_SK.addcmul_((q_SE.float() @ k_EK).relu_(), weight_S[:, None])
    key = torch.arange(num_keys, device=scores_SK.device)
    scores_SK.masked_fill_(key > key[num_keys - num_queries :, None], -torch.inf)
    best = scores_SK.topk(top_k, dim=1, sorted=False).indices
    return torch.zeros_like(scores_SK, dtype=torch.bool).scatter_(1, best, True)
