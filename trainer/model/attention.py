"""The decoder's attentions: their modules, and the order of their operations up to the heads' projection.

    GqaSpec  GroupedQueryAttention  q, k, v, o; heads share keys and values in groups
    MlaSpec  LatentAttention        q and kv through low-rank latents; one rotated key part for all heads; perhaps an
                                    indexer that chooses keys (indexer.py)
    DeltaNetSpec  GatedDeltaNet     of the layers that it names (delta_net.py)

Owns parameter names, which are the checkpoint's; ModelSpec lists their shapes. Every projection is a Linear, so
adapters, merging and publishing need not know the kind of attention. Does not own arithmetic (forward.py, attend.py).

Shapes: T packed tokens, N query heads, G key/value heads, D query/key head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.conf.architecture.attention_spec import GqaSpec, MlaSpec
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.schema import LoraConfig, Rounding, Roundings
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.attend import AttentionBackend
from slipstream.trainer.model.delta_net import GatedDeltaNet
from slipstream.trainer.model.indexer import Indexer
from slipstream.trainer.model.norm import RMSNorm, unit_heads
from slipstream.trainer.model.operations import Operation

TURNED = ("q_rotary", "k_rotary")


def make_attention(
    spec: ModelSpec,
    layer: int,
    *,
    weight_dtype: torch.dtype,
    lora: LoraConfig | None,
    backend: AttentionBackend,
    numerics: Roundings,
) -> GroupedQueryAttention | LatentAttention | GatedDeltaNet:
    """The attention that the spec asks for in this layer."""
    linears = {
        shape.name: Linear(shape.in_features, shape.out_features, bias=shape.bias, weight_dtype=weight_dtype, lora=lora)
        for shape in spec.attention_linears(layer)
    }
    if spec.delta_net is not None and spec.is_delta_net(layer):
        return GatedDeltaNet(spec.delta_net, spec.rms_norm_eps, linears, weight_dtype, numerics)
    if isinstance(spec.attention, MlaSpec):
        return LatentAttention(spec, spec.attention, linears, weight_dtype, backend, numerics)
    gqa = spec.attention_of(layer)
    assert isinstance(gqa, GqaSpec)
    return GroupedQueryAttention(spec, gqa, gqa.window(layer), linears, weight_dtype, backend, numerics)


class GroupedQueryAttention(nn.Module):
    """q, k, v projections, q/k norms, RoPE, attention with a window and sinks, output projection. A family may lack
    norms, windows, sinks or v."""

    q_proj: Linear
    k_proj: Linear
    o_proj: Linear

    def __init__(
        self,
        spec: ModelSpec,
        gqa: GqaSpec,
        window: int | None,
        linears: dict[str, Linear],
        weight_dtype: torch.dtype,
        backend: AttentionBackend,
        numerics: Roundings,
    ) -> None:
        super().__init__()
        self.heads = [(count, gqa.head_dim) for count in (gqa.num_heads, gqa.num_kv_heads, gqa.num_kv_heads)]
        self.scale, self.backend, self.window = gqa.softmax_scale, backend, window
        for name, linear in linears.items():
            self.add_module(name, linear)
        self.sinks = nn.Parameter(torch.empty(gqa.num_heads, dtype=weight_dtype)) if gqa.sinks else None
        self.eps, self.q_norm, self.k_norm = spec.rms_norm_eps, None, None
        self.rotates_once = numerics.rotation is Rounding.once
        self.is_gated, self.norms_all_heads, self.norms_values = gqa.gated, gqa.norms_all_heads, gqa.norms_values
        self.norms_alone = gqa.norms_all_heads or spec.norms_add_one
        """The norms are of whole queries and keys, or in operations of their own, and thus rounded before the rotation,
        as any norm is."""
        if gqa.qk_norm:
            rounding = numerics.norm if gqa.norms_all_heads else numerics.rotation
            self.q_norm, self.k_norm = (
                RMSNorm(
                    size,
                    eps=spec.rms_norm_eps,
                    weight_dtype=weight_dtype,
                    rounding=rounding,
                    adds_one=spec.norms_add_one,
                )
                for name, size in gqa.vectors().items()
                if name.endswith("norm.weight")
            )

    def split_heads(self, q_TO: Tensor, k_TO: Tensor) -> tuple[Tensor, Tensor]:
        """[T, N, D] and [T, G, D]."""
        return q_TO.unflatten(1, self.heads[0]), k_TO.unflatten(1, self.heads[1])

    def normed(self, q_TO: Tensor, k_TO: Tensor) -> tuple[Tensor, Tensor]:
        """Both after norms that are not the rotation's."""
        assert self.q_norm is not None and self.k_norm is not None
        if self.norms_all_heads:
            return self.q_norm(q_TO), self.k_norm(k_TO)
        q_TND, k_TGD = self.split_heads(q_TO, k_TO)
        return self.q_norm(q_TND).flatten(1), self.k_norm(k_TGD).flatten(1)

    @property
    def gives(self) -> str:
        """What the heads' projection takes."""
        return "gated" if self.is_gated else "attn"

    def operations(self, x: str, prefix: str) -> Iterator[Operation]:
        """From the norm of the stream, named x, to what `gives` names."""
        q, k, v, out, *turned = (f"{prefix}{name}" for name in ("q_proj", "k_proj", "v_proj", "attn", *TURNED))
        projections: list[Any] = [self.q_proj, self.k_proj]
        both, gate, gated, given = q, f"{prefix}gate", f"{prefix}gated", (q, k, v)
        if "v_proj" in self._modules:
            projections.append(self.get_submodule("v_proj"))
        else:
            v, given = k, (q, k)
        yield Operation(f"{prefix}qkv_proj", (x,), given, lambda at, x: at.by.linears(projections, x))
        if self.is_gated:  # a head's query and gate lie beside each other
            q, width = f"{prefix}query", (self.heads[0][0], 2, self.heads[0][1])
            yield Operation(
                f"{prefix}q_split",
                (both,),
                (q, gate),
                lambda at, x: [part.flatten(1) for part in x.unflatten(1, width).unbind(2)],
                is_view=True,
            )
        if self.norms_values:
            values, v, head_dim = v, f"{prefix}v_norm", self.heads[2][1]
            yield Operation(v, (values,), (v,), lambda at, x: (unit_heads(x, head_dim, self.eps),))
        yield Operation(f"{prefix}rotary_emb", (q, k), (*turned,), lambda at, q, k: at.by.rotate(self, q, k, at))
        yield Operation(out, (*turned, v), (out,), lambda at, q, k, v: (at.by.attend(self, q, k, v, at),))
        if self.is_gated:
            yield Operation(gated, (out, gate), (gated,), lambda at, x, gate: (x * gate.sigmoid(),))


class LatentAttention(nn.Module):
    """Multi-head latent attention, unabsorbed: keys and values are expanded from their latent for every head.

    Training uses each key in one forward pass only, so the absorbed form, which engines decode with, would cost more.
    """

    gives = "attn"
    """As GroupedQueryAttention.gives."""
    kv_a_proj_with_mqa: Linear
    kv_b_proj: Linear
    o_proj: Linear

    def __init__(
        self,
        spec: ModelSpec,
        mla: MlaSpec,
        linears: dict[str, Linear],
        weight_dtype: torch.dtype,
        backend: AttentionBackend,
        numerics: Roundings,
    ) -> None:
        super().__init__()
        self.mla, self.interleaved, self.backend = mla, spec.rope.interleaved, backend
        for name, linear in linears.items():
            self.add_module(name, linear)
        self.indexer = None
        if mla.q_lora_rank is not None:
            if mla.indexer is not None:
                self.indexer = Indexer(mla.indexer, spec.hidden_size, mla.q_lora_rank, weight_dtype)
            self.q_a_layernorm = RMSNorm(
                mla.q_lora_rank, eps=mla.norm_eps, weight_dtype=weight_dtype, rounding=numerics.norm
            )
        self.kv_a_layernorm = RMSNorm(
            mla.kv_lora_rank, eps=mla.norm_eps, weight_dtype=weight_dtype, rounding=numerics.norm
        )

    def operations(self, x: str, prefix: str) -> Iterator[Operation]:
        """From the norm of the stream, named x, to `attn`."""
        query, latents, kv_norm, kv_b, latent, turning, out = (f"{prefix}{name}" for name in (
            "q_proj" if self.mla.q_lora_rank is None else "q_a_proj", "kv_a_proj_with_mqa", "kv_a_layernorm",
            "kv_b_proj", "kv_latent", "k_turning", "attn",
        ))  # fmt: skip
        first, widths = query, (self.mla.kv_lora_rank, self.mla.qk_rope_head_dim)
        firsts: Any = [self.get_submodule(first.removeprefix(prefix)), self.kv_a_proj_with_mqa]
        yield Operation(f"{prefix}fused_qkv_a_proj", (x,), (first, latents), lambda at, x: at.by.linears(firsts, x))
        if self.mla.q_lora_rank is not None:
            q_norm, query, q_b = f"{prefix}q_a_layernorm", f"{prefix}q_b_proj", [self.get_submodule("q_b_proj")]
            yield Operation(q_norm, (first,), (q_norm,), lambda at, x: (at.by.norm(self.q_a_layernorm, x),))
            yield Operation(query, (q_norm,), (query,), lambda at, x: at.by.linears(q_b, x))
        split = f"{prefix}kv_a_split"
        yield Operation(split, (latents,), (latent, turning), lambda at, x: x.split(widths, dim=-1), is_view=True)
        yield Operation(kv_norm, (latent,), (kv_norm,), lambda at, x: (at.by.norm(self.kv_a_layernorm, x),))
        yield Operation(kv_b, (kv_norm,), (kv_b,), lambda at, x: at.by.linears([self.kv_b_proj], x))
        given = (query, turning, kv_b) if self.indexer is None else (query, turning, kv_b, x, q_norm)
        yield Operation(out, given, (out,), lambda at, *given: (at.by.attend_latent(self, *given, at=at),))
