"""A decoder's values by the engine's kernels and with the weights that the engine holds.

    EngineForward    weights with adapters in them, as a publish would write them now (weight_sync.mode=merged)
    SlotForward      base weights, and adapters as a publish would write them into a slot now (mode=adapter)

The layers' own lists of operations are walked, whose order is that of vLLM's Qwen3 and Qwen3-MoE models; values are the
engine's bit by bit (docs/parity.md). Gradients are those of the trainer's own kernels. Models with latent attention,
sinks, windows or shared experts are refused before (conf.checks.model).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.trainer.engine_ops.published_adapters import PublishedAdapters
from slipstream.trainer.engine_ops.published_weights import (
    base_experts,
    base_linears,
    published_experts,
    published_linears,
)
from slipstream.trainer.engine_ops.vllm_adapters import VllmAdapters
from slipstream.trainer.engine_ops.vllm_operations import VllmOperations
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.attention.grouped_queries import GroupedQueryAttention
from slipstream.trainer.model.feed_forward import DenseMlp
from slipstream.trainer.model.forward import Forward, KeepGateUp, Place
from slipstream.trainer.model.logprobs import Head
from slipstream.trainer.model.norm import RMSNorm
from slipstream.trainer.moe.block import MoeBlock
from slipstream.trainer.moe.replay import LayerRoutes
from slipstream.trainer.recompute import Recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineForward(Forward):
    fuses: ClassVar[bool] = False
    operations: VllmOperations
    engine_ranks: int = 1
    """An engine's tensor-parallel ranks, 1 or 2. Two products are added in one way only; of more, the order would be
    the all-reduce's."""

    @property
    def gradients_by(self) -> Forward | None:
        return Forward(self.adapted)

    @property
    def head(self) -> Head | None:
        return self.operations

    def norm(self, norm: RMSNorm, x: Tensor, wide: Tensor | None = None) -> Tensor:
        """The decoder's last one, outside of layers, has the trainer's gradients, too."""

        def values() -> tuple[Tensor, tuple[()]]:
            return self.operations.norm(x, norm.weight.to(x.dtype), norm.eps), ()

        return Recomputed([norm])(norm, x, first=values) if torch.is_grad_enabled() else values()[0]

    def add_norm(self, norm: RMSNorm, x_TH: Tensor, delta_TH: Tensor) -> tuple[Tensor, Tensor]:
        sum_TH = x_TH + delta_TH
        return sum_TH, self.norm(norm, sum_TH)

    def linears(self, linears: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
        return self.side_by_side(linears, x).split([linear.weight.shape[0] for linear in linears], 1)

    def side_by_side(self, linears: Sequence[Linear], x: Tensor) -> Tensor:
        """Outputs of linears of one input, in one tensor."""
        return self.operations.linear(x, *published_linears(linears, x.dtype, adapted=self.adapted))

    def output(self, linear: Linear, x_TO: Tensor) -> Tensor:
        """Each engine rank multiplies its columns and rounds, the first one adds the bias, and an all-reduce adds the
        products (vLLM 0.25.1, `RowParallelLinear.forward`)."""
        weight, bias = published_linears([linear], x_TO.dtype, adapted=self.adapted)
        columns = zip(x_TO.chunk(self.engine_ranks, 1), weight.chunk(self.engine_ranks, 1), strict=True)
        first, *others = (
            self.operations.linear(part.contiguous(), weight_part.contiguous(), None if rank else bias)
            for rank, (part, weight_part) in enumerate(columns)
        )
        return first + others[0] if others else first

    def rotate(self, own: GroupedQueryAttention, q_TO: Tensor, k_TO: Tensor, at: Place) -> tuple[Tensor, Tensor]:
        q, k = own.split_heads(q_TO, k_TO)
        if own.q_norm is not None and own.k_norm is not None:
            q, k = self.norm(own.q_norm, q), self.norm(own.k_norm, k)
        return self.operations.rotate(q, k, at.sequences)

    def attend(self, own: GroupedQueryAttention, q_TND: Tensor, k_TGD: Tensor, v_TO: Tensor, at: Place) -> Tensor:
        v_TGD = v_TO.unflatten(1, own.heads[2])
        return self.operations.attend(q_TND, k_TGD, v_TGD, at.sequences, own.scale).flatten(1)

    def feed_forward(self, mlp: DenseMlp, x_TH: Tensor) -> Tensor:
        gate_up = self.side_by_side([mlp.gate_proj, mlp.up_proj], x_TH)
        return self.output(mlp.down_proj, self.operations.silu_and_mul(gate_up))

    def route(self, block: MoeBlock, x_TH: Tensor, routes: LayerRoutes | None) -> tuple[Tensor, Tensor, Tensor | None]:
        router = block.gate
        logits_TE = self.operations.linear(x_TH, router.weight.to(x_TH.dtype))
        return *self.operations.route(x_TH, logits_TE, router.moe.top_k, router.moe.norm_topk_prob), None

    def experts(
        self, block: MoeBlock, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, keep: KeepGateUp, at: Place
    ) -> Tensor:
        merged = published_experts(block.experts, x_TH.dtype, adapted=self.adapted)
        return self.operations.experts(x_TH, *merged, weights_TK, ids_TK)

    def add(
        self, summed: MoeBlock | None, x: Tensor, delta: Tensor, middle: Tensor, *fed: Tensor, once: bool
    ) -> tuple[Tensor, Tensor | None]:
        return middle + fed[0], None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotForward(EngineForward):
    """See the module's docstring. Such an engine has one rank (conf.checks.sections)."""

    adapters: VllmAdapters
    slots: PublishedAdapters

    def side_by_side(self, linears: Sequence[Linear], x: Tensor) -> Tensor:
        out = self.operations.linear(x, *base_linears(linears, x.dtype))
        if not self.adapted or all(linear.lora is None for linear in linears):
            return out
        return self.adapters.add(out, x, self.slots.linears(linears, x.dtype))

    def output(self, linear: Linear, x_TO: Tensor) -> Tensor:
        return self.side_by_side([linear], x_TO)

    def experts(
        self, block: MoeBlock, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, keep: KeepGateUp, at: Place
    ) -> Tensor:
        base = base_experts(block.experts, x_TH.dtype)
        if not self.adapted or block.experts.lora is None:
            return self.operations.experts(x_TH, *base, weights_TK, ids_TK)
        return self.adapters.experts(x_TH, base, self.slots.experts(block.experts, x_TH.dtype), weights_TK, ids_TK)
