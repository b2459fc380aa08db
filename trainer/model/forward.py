"""What computes those operations of a layer's list that an engine may compute otherwise: one method per kind.

    Forward                              the trainer's kernels; gradients come through them
    trainer.engine_ops.engine_forward    with weights as a publish would write them, or the engine's kernels: values
                                         alone

A decoder has one (build_decoder), and a call may name another: the reference policy is `without_adapters`.
Does not own the order of operations (layer.py, attention/) nor what of a layer is recomputed (operations.py).

Shapes: T packed tokens, H hidden, O width of projections, N query heads, G key/value heads, D head_dim, K experts of a
token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from slipstream.trainer.kernels.elementwise import gelu_product, residual_sum, silu_product
from slipstream.trainer.kernels.rms_norm import norm_rotate
from slipstream.trainer.lora import Linear, apply_together
from slipstream.trainer.model.attention.attend import attend
from slipstream.trainer.model.attention.flash_attention import AttentionCall, EngineKernel, KeptAttention
from slipstream.trainer.model.attention.grouped_queries import GroupedQueryAttention
from slipstream.trainer.model.build import RMSNorm
from slipstream.trainer.model.feed_forward import DenseMlp
from slipstream.trainer.model.logprobs import Head
from slipstream.trainer.model.packed_sequences import PackedSequences
from slipstream.trainer.moe.block import MoeBlock
from slipstream.trainer.moe.replay import LayerRoutes

KeepGateUp = Callable[[Tensor], object] | None
"""Is called with the product of gate and up, if that is kept for backward."""


@dataclass(slots=True)
class Place:
    """What all operations of one call of a layer have in common."""

    by: Forward
    rope: tuple[Tensor, Tensor]
    sequences: PackedSequences
    kept: KeptAttention | None = None
    """What a layer that is recomputed keeps."""


@dataclass(frozen=True, slots=True)
class Forward:
    fuses: ClassVar[bool] = True
    """Whether one kernel norms and rotates heads, and one adds at a layer's end (Roundings=once)."""

    adapted: bool = True
    """With adapters; without, it is the base policy."""
    rounds_base_first: bool = False
    attention: EngineKernel | None = None
    """An engine's kernel for the attention's values."""
    attention_values: str | None = None

    @property
    def gradients_by(self) -> Forward | None:
        """Computes a layer again for its gradients, with the experts that were chosen here; None: gradients come
        through the operations themselves."""
        return None

    @property
    def head(self) -> Head | None:
        """Computes logits and log-probabilities; None: the operations of logprobs.py."""
        return None

    def without_adapters(self) -> Forward:
        return replace(self, adapted=False)

    def norm(self, norm: RMSNorm, x: Tensor, wide: Tensor | None = None) -> Tensor:
        """The norm of x. If `wide` is given, x is `wide` rounded. It has gradients in any forward."""
        return norm(x, wide)

    def add_norm(self, norm: RMSNorm, x_TH: Tensor, delta_TH: Tensor) -> tuple[Tensor, Tensor]:
        return norm.after_sum(x_TH, delta_TH)

    def linears(self, linears: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
        return apply_together(linears, x, adapted=self.adapted, rounds_base_first=self.rounds_base_first)

    def output(self, linear: Linear, x_TO: Tensor) -> Tensor:
        """The projection of the heads, which an engine may spread over its ranks."""
        return self.linears([linear], x_TO)[0]

    def rotate(self, own: GroupedQueryAttention, q_TO: Tensor, k_TO: Tensor, at: Place) -> tuple[Tensor, Tensor]:
        """Heads of q and k after their norms and the rotation: [T, N, D] and [T, G, D]."""
        norms = (own.q_norm, own.k_norm)
        if own.norms_alone:
            (q_TO, k_TO), norms = own.normed(q_TO, k_TO), (None, None)
        q_weight, k_weight = (None if norm is None else norm.weight for norm in norms)
        q_TND, k_TGD = own.split_heads(q_TO, k_TO)
        return norm_rotate(q_TND, k_TGD, q_weight, k_weight, own.eps, *at.rope, once=own.rotates_once)

    def attend(self, own: GroupedQueryAttention, q_TND: Tensor, k_TGD: Tensor, v_TO: Tensor, at: Place) -> Tensor:
        """[T, N * D]."""
        assert own.backend is not None
        call = AttentionCall(at.sequences, own.scale, own.window, own.sinks, at.kept)
        return attend(q_TND, k_TGD, v_TO.unflatten(1, own.heads[2]), call, own.backend, self.attention).flatten(1)

    def feed_forward(self, mlp: DenseMlp, x_TH: Tensor) -> Tensor:
        gate, up = self.linears([mlp.gate_proj, mlp.up_proj], x_TH)
        product = (gelu_product if mlp.has_gelu else silu_product)(gate, up, mlp.activates_once)
        return self.linears([mlp.down_proj], product)[0]

    def route(self, block: MoeBlock, x_TH: Tensor, routes: LayerRoutes | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Weights and ids of each token's experts; and of recorded ones, how many the router would not have chosen."""
        return block.gate(x_TH, routes)

    def shared_experts(self, block: MoeBlock, x_TH: Tensor) -> Tensor:
        """What every token passes beside its experts."""
        mlp, *gates = block.shared
        fed_TH = self.feed_forward(mlp, x_TH)
        return self.linears(gates, x_TH)[0].sigmoid() * fed_TH if gates else fed_TH

    def experts(
        self, block: MoeBlock, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, keep: KeepGateUp, at: Place
    ) -> Tensor:
        most = at.sequences.most_tokens
        return block.run_experts(x_TH, weights_TK, ids_TK, keep, most_tokens=most, adapted=self.adapted)

    def add(
        self, summed: MoeBlock | None, x: Tensor, delta: Tensor, middle: Tensor, *fed: Tensor, once: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The stream at the layer's end; and before it was rounded, where it is rounded `once`. `summed`: the experts
        that gave `fed`."""
        if once:
            scale = 1.0 if summed is None else summed.gate.factor_of_output
            return residual_sum(x, delta, middle, fed[0], fed[1] if fed[1:] else None, scale)
        return middle + (fed[0] if summed is None else summed.combined(*fed)), None
