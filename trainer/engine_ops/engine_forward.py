"""A decoder's values by the engine's kernels and with the weights that the engine holds.

The layers' own lists of operations are walked, whose order is that of vLLM's Qwen3 and Qwen3-MoE models; values are the
engine's bit by bit (docs/parity.md). Gradients are those of the trainer's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from trainer.engine_ops.published_weights import published_experts, published_linears
from trainer.lora import Linear
from trainer.model.attention import GroupedQueryAttention
from trainer.model.dense_mlp import DenseMlp
from trainer.model.forward import Forward, Place
from trainer.model.logprobs import Head
from trainer.model.norm import RMSNorm
from trainer.moe.block import MoeBlock
from trainer.moe.experts import Experts
from trainer.moe.replay import LayerRoutes
from trainer.recompute import Recomputed

if TYPE_CHECKING:
    from trainer.engine_ops.vllm_operations import VllmOperations


class AdaptedModules(Protocol):
    """How an engine computes modules that may have adapters; without `adapted` they compute as if they had none."""

    def linears(self, linears: Sequence[Linear], x: Tensor, *, adapted: bool) -> Tensor:
        """Outputs of linears of one input, side by side."""
        ...

    def row_parallel(self, linear: Linear, x: Tensor, *, adapted: bool) -> Tensor:
        """The output of a linear whose inputs an engine spreads over its tensor-parallel ranks."""
        ...

    def experts(self, bank: Experts, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, adapted: bool) -> Tensor:
        """The weighted sum of each token's experts."""
        ...


class MergedModules:
    """Weights with adapters in them, as a publish would write them now.

    Args:
        operations: what computes with them.
        engine_ranks: an engine's tensor-parallel ranks, 1 or 2. Two products are added in one way only; of more, the
            order would be the all-reduce's.
    """

    def __init__(self, operations: VllmOperations, engine_ranks: int = 1) -> None:
        self._ops, self._engine_ranks = operations, engine_ranks

    def linears(self, linears: Sequence[Linear], x: Tensor, *, adapted: bool) -> Tensor:
        """Outputs of linears of one input, side by side."""
        return self._ops.linear(x, *published_linears(linears, x.dtype, adapted=adapted))

    def row_parallel(self, linear: Linear, x: Tensor, *, adapted: bool) -> Tensor:
        """Each engine rank multiplies its columns and rounds, the first one adds the bias, and an all-reduce adds the
        products (vLLM 0.25.1, `RowParallelLinear.forward`)."""
        weight, bias = published_linears([linear], x.dtype, adapted=adapted)
        columns = zip(x.chunk(self._engine_ranks, 1), weight.chunk(self._engine_ranks, 1), strict=True)
        first, *others = (
            self._ops.linear(part.contiguous(), weight_part.contiguous(), None if rank else bias)
            for rank, (part, weight_part) in enumerate(columns)
        )
        return first + others[0] if others else first

    def experts(self, bank: Experts, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, adapted: bool) -> Tensor:
        """The weighted sum of each token's experts."""
        weights = published_experts(bank, x_TH.dtype, adapted=adapted)
        return self._ops.experts(x_TH, *weights, weights_TK, experts_TK)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineForward(Forward):
    """See the module's docstring. Models with latent attention, sinks, windows or shared experts are refused before
    (conf.model_checks)."""

    fuses: ClassVar[bool] = False
    operations: VllmOperations
    modules: AdaptedModules

    @property
    def gradients_by(self) -> Forward | None:
        return Forward(self.adapted)

    @property
    def head(self) -> Head | None:
        return self

    def norm(self, norm: RMSNorm, x: Tensor, wide: Tensor | None = None) -> Tensor:
        """The decoder's last one, outside of layers, has the trainer's gradients, too."""

        def values() -> tuple[Tensor, tuple[()]]:
            return self.operations.norm(x, norm.weight.to(x.dtype), norm.eps), ()

        return Recomputed(norm, [norm])(x, first=values) if torch.is_grad_enabled() else values()[0]

    def add_norm(self, norm: RMSNorm, x_TH: Tensor, delta_TH: Tensor) -> tuple[Tensor, Tensor]:
        sum_TH = x_TH + delta_TH
        return sum_TH, self.norm(norm, sum_TH)

    def linears(self, linears: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
        widths = [linear.weight.shape[0] for linear in linears]
        return self.modules.linears(linears, x, adapted=self.adapted).split(widths, 1)

    def output(self, linear: Linear, x_TO: Tensor) -> Tensor:
        return self.modules.row_parallel(linear, x_TO, adapted=self.adapted)

    def rotate(self, own: GroupedQueryAttention, q_TO: Tensor, k_TO: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        q, k = own.split_heads(q_TO, k_TO)
        if own.q_norm is not None and own.k_norm is not None:
            q, k = self.norm(own.q_norm, q), self.norm(own.k_norm, k)
        return self.operations.rotate(q, k, place.sequences)

    def attend(self, own: GroupedQueryAttention, q_TND: Tensor, k_TGD: Tensor, v_TO: Tensor, place: Place) -> Tensor:
        v_TGD = v_TO.unflatten(1, own.heads[2])
        return self.operations.attend(q_TND, k_TGD, v_TGD, place.sequences, own.scale).flatten(1)

    def feed_forward(self, mlp: DenseMlp, x_TH: Tensor) -> Tensor:
        gate_up = self.modules.linears([mlp.gate_proj, mlp.up_proj], x_TH, adapted=self.adapted)
        return self.output(mlp.down_proj, self.operations.silu_and_mul(gate_up))

    def route(self, block: MoeBlock, x_TH: Tensor, routes: LayerRoutes | None) -> tuple[Tensor, Tensor, Tensor | None]:
        router = block.gate
        logits_TE = self.operations.linear(x_TH, router.weight.to(x_TH.dtype))
        return *self.operations.route(x_TH, logits_TE, router.moe.top_k, router.moe.norm_topk_prob), None

    def experts(
        self,
        block: MoeBlock,
        x_TH: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        keep_gate_up: Callable[[Tensor], object] | None,
    ) -> Tensor:
        return self.modules.experts(block.experts, x_TH, weights_TK, ids_TK, adapted=self.adapted)

    def add(
        self,
        mlp: DenseMlp | MoeBlock,
        x_TH: Tensor,
        delta_TH: Tensor,
        middle_TH: Tensor,
        fed_TH: Tensor,
        shared_TH: Tensor | None = None,
        *,
        once: bool,
    ) -> tuple[Tensor, Tensor | None]:
        return middle_TH + fed_TH, None

    def logits(self, hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
        """What the head computes."""
        return self.operations.linear(hidden_TH, weight_VH)

    def token_logprobs(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        """What the sampler computes from them at temperature 1."""
        return self.operations.token_logprobs(logits_TV, targets_T)
