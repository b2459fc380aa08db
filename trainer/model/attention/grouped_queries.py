"""Grouped-query attention.

Does not own its arithmetic: forward.py, because an engine's kernels may compute it, and attend.py.

Shapes: T packed tokens, N query heads, G key/value heads, D query/key head_dim.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from slipstream.conf.architecture.attention_spec import GqaSpec
from slipstream.conf.schema import Rounding
from slipstream.trainer.model.attention.attend import choose_attention_backend
from slipstream.trainer.model.attention.part import Attention
from slipstream.trainer.model.build import Build, RMSNorm
from slipstream.trainer.model.operations import Operation
from slipstream.trainer.moe.router import unit_rows

TURNED = ("q_rotary", "k_rotary")


class GroupedQueryAttention(Attention):
    """q, k, v projections, q/k norms, RoPE, attention with a window and sinks, output projection. A family may lack
    norms, windows, sinks or v."""

    def __init__(self, own: GqaSpec, build: Build) -> None:
        super().__init__(own, build)
        numerics, self.own, self.eps = build.numerics, own, build.spec.rms_norm_eps
        self.backend = choose_attention_backend(build.layout.device, build.compute_dtype, own)
        self.heads = [(count, own.head_dim) for count in (own.num_heads, own.num_kv_heads, own.num_kv_heads)]
        self.sinks = nn.Parameter(torch.empty(own.num_heads, dtype=build.weight_dtype)) if own.sinks else None
        self.scale, self.window = own.softmax_scale, own.window
        self.q_norm, self.k_norm = None, None
        self.rotates_once = numerics.rotation is Rounding.once
        self.norms_alone = own.norms_all_heads or own.norms_add_one
        """Norms of whole queries and keys, or in operations of their own: rounded before the rotation, as any norm."""
        self.gives = "gated" if own.gated else "attn"
        if own.qk_norm:
            rounding = numerics.norm if own.norms_all_heads else numerics.rotation
            sizes = own.others(build.spec.hidden_size)
            self.q_norm, self.k_norm = (
                RMSNorm(
                    sizes[f"{name}_norm.weight"].shape[0],
                    eps=self.eps,
                    weight_dtype=build.weight_dtype,
                    rounding=rounding,
                    adds_one=own.norms_add_one,
                )
                for name in "qk"
            )

    def split_heads(self, q_TO: Tensor, k_TO: Tensor) -> tuple[Tensor, Tensor]:
        """Queries as [T, N, D], keys as [T, G, D]."""
        return q_TO.unflatten(1, self.heads[0]), k_TO.unflatten(1, self.heads[1])

    def normed(self, q_TO: Tensor, k_TO: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys after their norms, where the rotation does not apply these itself."""
        assert self.q_norm is not None and self.k_norm is not None
        if self.own.norms_all_heads:
            return self.q_norm(q_TO), self.k_norm(k_TO)
        q_TND, k_TGD = self.split_heads(q_TO, k_TO)
        return self.q_norm(q_TND).flatten(1), self.k_norm(k_TGD).flatten(1)

    def operations(self, x: str, prefix: str) -> Iterator[Operation]:
        q, k, v, out, *turned = (f"{prefix}{name}" for name in ("q_proj", "k_proj", "v_proj", "attn", *TURNED))
        projections = [self.linear("q_proj"), self.linear("k_proj")]
        both, gate, gated, given = q, f"{prefix}gate", f"{prefix}gated", (q, k, v)
        if "v_proj" in self._modules:
            projections.append(self.linear("v_proj"))
        else:
            v, given = k, (q, k)
        yield Operation(f"{prefix}qkv_proj", (x,), given, lambda at, x: at.by.linears(projections, x))
        if self.own.gated:  # a head's query and gate lie beside each other
            q, width = f"{prefix}query", (self.heads[0][0], 2, self.heads[0][1])
            yield Operation(
                f"{prefix}q_split",
                (both,),
                (q, gate),
                lambda at, x: [part.flatten(1) for part in x.unflatten(1, width).unbind(2)],
                is_view=True,
            )
        if self.own.norms_values:
            values, v = v, f"{prefix}v_norm"
            yield Operation(
                v, (values,), (v,), lambda at, x: (unit_rows(x.unflatten(1, self.heads[2]), self.eps).flatten(1),)
            )
        yield Operation(f"{prefix}rotary_emb", (q, k), (*turned,), lambda at, q, k: at.by.rotate(self, q, k, at))
        yield Operation(out, (*turned, v), (out,), lambda at, q, k, v: (at.by.attend(self, q, k, v, at),))
        if self.own.gated:
            yield Operation(gated, (out, gate), (gated,), lambda at, x, gate: (x * gate.sigmoid(),))
