"""Multi-head latent attention: q and kv through low-rank latents, one rotated key part for all heads; perhaps an
indexer that chooses keys (indexer.py).

Shapes: T packed tokens, N heads, O width of projections, R dims that turn, V value head_dim.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from slipstream.conf.architecture.attention_spec import MlaSpec
from slipstream.trainer.kernels.latent import latent_heads
from slipstream.trainer.model.attention.attend import attend, choose_attention_backend
from slipstream.trainer.model.attention.flash_attention import AttentionCall
from slipstream.trainer.model.attention.indexer import Indexer, sparse_attention
from slipstream.trainer.model.attention.part import Attention
from slipstream.trainer.model.build import Build, RMSNorm
from slipstream.trainer.model.operations import Operation


class LatentAttention(Attention):
    """Unabsorbed: keys and values are expanded from their latent for every head. Training uses each key in one forward
    pass only, so the absorbed form, which engines decode with, would cost more."""

    def __init__(self, own: MlaSpec, build: Build) -> None:
        super().__init__(own, build)
        self.own, self.backend = own, choose_attention_backend(build.layout.device, build.compute_dtype, own)
        self.indexer = None
        if own.q_lora_rank is not None:
            if own.indexer is not None:
                self.indexer = Indexer(own.indexer, own.q_lora_rank, build)
            self.q_a_layernorm = _norm(own.q_lora_rank, own, build)
        self.kv_a_layernorm = _norm(own.kv_lora_rank, own, build)

    def operations(self, x: str, prefix: str) -> Iterator[Operation]:
        query, latents, kv_norm, kv_b, latent, turning, out = (f"{prefix}{name}" for name in (
            "q_proj" if self.own.q_lora_rank is None else "q_a_proj", "kv_a_proj_with_mqa", "kv_a_layernorm",
            "kv_b_proj", "kv_latent", "k_turning", "attn",
        ))  # fmt: skip
        first, widths = query, (self.own.kv_lora_rank, self.own.qk_rope_head_dim)
        firsts = [self.linear(first.removeprefix(prefix)), self.linear("kv_a_proj_with_mqa")]
        yield Operation(f"{prefix}fused_qkv_a_proj", (x,), (first, latents), lambda at, x: at.by.linears(firsts, x))
        if self.own.q_lora_rank is not None:
            q_norm, query, q_b = f"{prefix}q_a_layernorm", f"{prefix}q_b_proj", [self.linear("q_b_proj")]
            yield Operation(q_norm, (first,), (q_norm,), lambda at, x: (at.by.norm(self.q_a_layernorm, x),))
            yield Operation(query, (q_norm,), (query,), lambda at, x: at.by.linears(q_b, x))
        split, kv_b_proj = f"{prefix}kv_a_split", [self.linear("kv_b_proj")]
        yield Operation(split, (latents,), (latent, turning), lambda at, x: x.split(widths, dim=-1), is_view=True)
        yield Operation(kv_norm, (latent,), (kv_norm,), lambda at, x: (at.by.norm(self.kv_a_layernorm, x),))
        yield Operation(kv_b, (kv_norm,), (kv_b,), lambda at, x: at.by.linears(kv_b_proj, x))
        given = (query, turning, kv_b) if self.indexer is None else (query, turning, kv_b, x, q_norm)
        yield Operation(out, given, (out,), lambda at, *given: (self.attend(at, *given),))

    def attend(self, at: Any, q_TO: Tensor, turning_TR: Tensor, kv_TO: Tensor, *indexed: Tensor) -> Tensor:
        """[T, N * V], of queries, the keys' part that turns, the other keys and values, and what an indexer reads;
        `at` as Operation.run takes it."""
        own, call = self.own, AttentionCall(at.sequences, self.own.softmax_scale, kept=at.kept)
        assert self.backend is not None
        q_TND, kv_TNE = q_TO.unflatten(1, (own.num_heads, own.qk_head_dim)), kv_TO.unflatten(1, (own.num_heads, -1))
        qkv = latent_heads(q_TND, kv_TNE, turning_TR, *at.rope, interleaved=own.rope.interleaved)
        if self.indexer is not None and call.sequences.max_length > self.indexer.spec.top_k:
            chosen_by = self.indexer(*indexed, at.rope)
            return sparse_attention(*qkv, chosen_by, call, self.indexer.spec.top_k, self.backend).flatten(1)
        return attend(*qkv, call, self.backend, at.by.attention).flatten(1)


def _norm(size: int, own: MlaSpec, build: Build) -> RMSNorm:
    return RMSNorm(size, eps=own.norm_eps, weight_dtype=build.weight_dtype, rounding=build.numerics.norm)
