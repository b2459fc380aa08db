"""The decoder's attentions: projections, norms and RoPE around the kernels of attend.py.

    GqaSpec  GroupedQueryAttention  q, k, v, o; heads share keys and values in groups
    MlaSpec  LatentAttention        q and kv through low-rank latents; one rotated key part for all heads

Owns parameter names, which are the checkpoint's; ModelSpec lists their shapes. Every projection is a Linear, so
adapters, merging and publishing need not know the kind of attention.

Shapes: T packed tokens, H hidden, N query heads, G key/value heads, D query/key head_dim, V value head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from conf.architecture.attention_spec import GqaSpec, MlaSpec
from conf.architecture.model_spec import ModelSpec
from conf.schema import LoraConfig, Rounding, Roundings
from trainer.kernels.latent import latent_heads
from trainer.kernels.rms_norm import norm_rotate
from trainer.lora import Linear, apply_together
from trainer.model.attend import AttentionBackend, attend
from trainer.model.engine_attention import EngineKernel
from trainer.model.flash_attention import KeptAttention
from trainer.model.norm import RMSNorm
from trainer.model.packed_sequences import PackedSequences


def make_attention(
    spec: ModelSpec,
    layer: int,
    *,
    weight_dtype: torch.dtype,
    lora: LoraConfig | None,
    backend: AttentionBackend,
    numerics: Roundings,
) -> nn.Module:
    """The attention that the spec asks for in this layer."""
    linears = {
        shape.name: Linear(shape.in_features, shape.out_features, bias=shape.bias, weight_dtype=weight_dtype, lora=lora)
        for shape in spec.attention.linears(spec.hidden_size)
    }
    if isinstance(spec.attention, MlaSpec):
        return LatentAttention(spec, spec.attention, linears, weight_dtype, backend, numerics)
    window = spec.attention.window(layer)
    return GroupedQueryAttention(spec, spec.attention, window, linears, weight_dtype, backend, numerics)


class GroupedQueryAttention(nn.Module):
    """q, k, v projections, q/k norms, RoPE, attention with a window and sinks, output projection. A family may lack
    norms, windows or sinks."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
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
        self.engine: EngineKernel | None = None
        """Computes the attention's values; set by trainer.engine_ops."""
        for name, linear in linears.items():
            self.add_module(name, linear)
        self.sinks = nn.Parameter(torch.empty(gqa.num_heads, dtype=weight_dtype)) if gqa.sinks else None
        self.eps, self.q_norm, self.k_norm = spec.rms_norm_eps, None, None
        self.rotates_once = numerics.rotation is Rounding.once
        self.norms_all_heads = gqa.norms_all_heads
        """The norms are of whole queries and keys, and thus rounded before the rotation, as any norm is."""
        if gqa.qk_norm:
            rounding = numerics.norm if gqa.norms_all_heads else numerics.rotation
            self.q_norm, self.k_norm = (
                RMSNorm(size, eps=spec.rms_norm_eps, weight_dtype=weight_dtype, rounding=rounding)
                for name, size in gqa.vectors().items()
                if name.endswith("norm.weight")
            )

    def forward(
        self,
        x_TH: Tensor,
        rope: tuple[Tensor, Tensor],
        sequences: PackedSequences,
        kept: KeptAttention | None = None,
    ) -> Tensor:
        """[T, H] -> [T, N * V], what o_proj takes. With `kept`, a second call for the same inputs does not compute the
        attention again."""
        q_TO, k_TO, v_TO = apply_together([self.q_proj, self.k_proj, self.v_proj], x_TH)
        norms = (self.q_norm, self.k_norm)
        if self.norms_all_heads and self.q_norm is not None and self.k_norm is not None:
            q_TO, k_TO, norms = self.q_norm(q_TO), self.k_norm(k_TO), (None, None)
        q_TND, k_TGD, v_TGD = (x.unflatten(1, h) for x, h in zip((q_TO, k_TO, v_TO), self.heads, strict=True))
        q_weight, k_weight = (None if norm is None else norm.weight for norm in norms)
        q_TND, k_TGD = norm_rotate(q_TND, k_TGD, q_weight, k_weight, self.eps, *rope, once=self.rotates_once)
        out_TND = attend(
            q_TND, k_TGD, v_TGD, sequences, self.backend, self.scale,
            window=self.window, sinks_N=self.sinks, kept=kept, engine=self.engine,
        )  # fmt: skip
        return out_TND.flatten(1)


class LatentAttention(nn.Module):
    """Multi-head latent attention, unabsorbed: keys and values are expanded from their latent for every head.

    Training uses each key in one forward pass only, so the absorbed form, which engines decode with, would cost more.
    """

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
        self.engine: EngineKernel | None = None
        """As GroupedQueryAttention.engine."""
        for name, linear in linears.items():
            self.add_module(name, linear)
        if mla.q_lora_rank is not None:
            self.q_a_layernorm = RMSNorm(
                mla.q_lora_rank, eps=mla.norm_eps, weight_dtype=weight_dtype, rounding=numerics.norm
            )
        self.kv_a_layernorm = RMSNorm(
            mla.kv_lora_rank, eps=mla.norm_eps, weight_dtype=weight_dtype, rounding=numerics.norm
        )

    def forward(
        self,
        x_TH: Tensor,
        rope: tuple[Tensor, Tensor],
        sequences: PackedSequences,
        kept: KeptAttention | None = None,
    ) -> Tensor:
        """[T, H] -> [T, N * V], what o_proj takes. With `kept`, a second call for the same inputs does not compute the
        attention again."""
        mla = self.mla
        first = self.get_submodule("q_proj" if mla.q_lora_rank is None else "q_a_proj")
        assert isinstance(first, Linear)
        q_TO, latents = apply_together([first, self.kv_a_proj_with_mqa], x_TH)
        if mla.q_lora_rank is not None:
            q_TO = self.get_submodule("q_b_proj")(self.q_a_layernorm(q_TO))
        q_TND = q_TO.unflatten(1, (mla.num_heads, mla.qk_head_dim))
        latent, turning_TR = latents.split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        kv_TNE = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(1, (mla.num_heads, -1))
        q_TND, k_TND, v_TNV = latent_heads(q_TND, kv_TNE, turning_TR, *rope, interleaved=self.interleaved)
        out_TNV = attend(q_TND, k_TND, v_TNV, sequences, self.backend, mla.softmax_scale, kept=kept, engine=self.engine)
        return out_TNV.flatten(1)
