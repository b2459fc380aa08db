"""The decoder's forward in the engine's operations and with the weights that the engine holds.

    layer(x):    norm -> q, k, v -> norms, RoPE -> attention -> o, + -> norm -> router, experts | feed-forward, +
    hidden:      norm                                                logprobs: head -> log-softmax at the targets

Owns the order of operations, which is that of vLLM's Qwen3 and Qwen3-MoE models, and thereby values that are the
engine's bit by bit (docs/parity.md). Gradients are those of the trainer's own kernels: a layer keeps its input alone,
and its backward runs the layer again by itself, with the experts that were chosen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from trainer.engine_ops.merged_forward import own_layer
from trainer.engine_ops.published_weights import published_experts, published_linears
from trainer.lora import Linear
from trainer.model.attention import GroupedQueryAttention
from trainer.model.decoder import Decoder, DecoderLayer, DenseMlp, LastSum
from trainer.model.norm import RMSNorm
from trainer.model.packed_sequences import PackedSequences
from trainer.moe.block import MoeBlock
from trainer.moe.experts import Experts
from trainer.recompute import Recomputed

if TYPE_CHECKING:
    from trainer.engine_ops.vllm_operations import VllmOperations


class AdaptedModules(Protocol):
    """How an engine computes modules that may have adapters."""

    def linears(self, linears: Sequence[Linear], x: Tensor) -> Tensor:
        """Outputs of linears of one input, side by side."""
        ...

    def row_parallel(self, linear: Linear, x: Tensor) -> Tensor:
        """The output of a linear whose inputs an engine spreads over its tensor-parallel ranks."""
        ...

    def experts(self, bank: Experts, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
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

    def linears(self, linears: Sequence[Linear], x: Tensor) -> Tensor:
        """Outputs of linears of one input, side by side."""
        return self._ops.linear(x, *published_linears(linears, x.dtype))

    def row_parallel(self, linear: Linear, x: Tensor) -> Tensor:
        """Each engine rank multiplies its columns and rounds, the first one adds the bias, and an all-reduce adds the
        products (vLLM 0.25.1, `RowParallelLinear.forward`)."""
        weight, bias = published_linears([linear], x.dtype)
        columns = zip(x.chunk(self._engine_ranks, 1), weight.chunk(self._engine_ranks, 1), strict=True)
        first, *others = (
            self._ops.linear(part.contiguous(), weight_part.contiguous(), None if rank else bias)
            for rank, (part, weight_part) in enumerate(columns)
        )
        return first + others[0] if others else first

    def experts(self, bank: Experts, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """The weighted sum of each token's experts."""
        return self._ops.experts(x_TH, *published_experts(bank, x_TH.dtype), weights_TK, experts_TK)


def compute_in_engine_operations(
    decoder: Decoder, operations: VllmOperations, modules: AdaptedModules | None = None
) -> None:
    """Let a decoder take its values from `operations` from now on; modules with adapters from `modules`, by default
    with the adapters merged."""
    forward = EngineForward(operations, modules or MergedModules(operations))
    for layer in decoder.model.layers:
        assert isinstance(layer, DecoderLayer)
        layer.in_place = Recomputed(own_layer, [layer], first=partial(_engine_layer, forward))
    norm = decoder.model.norm
    decoder.last_norm_in_place = Recomputed(norm, [norm], first=partial(forward.norm, norm))
    decoder.head = forward


def _engine_layer(
    forward: EngineForward,
    layer: DecoderLayer,
    x_TH: Tensor,
    rope: object,
    sequences: PackedSequences,
    chosen: list[Tensor],
    _: LastSum,
) -> Tensor:
    """The layer's values. Puts the experts of each token into `chosen`, where the layer has experts."""
    out_TH, experts_TK = forward.layer(layer, x_TH, sequences)
    chosen[:] = [] if experts_TK is None else [experts_TK]
    return out_TH


class EngineForward:
    """See the module's docstring."""

    def __init__(self, operations: VllmOperations, modules: AdaptedModules) -> None:
        self._ops, self._modules = operations, modules

    @torch.no_grad()
    def layer(self, layer: DecoderLayer, x_TH: Tensor, sequences: PackedSequences) -> tuple[Tensor, Tensor | None]:
        """The layer's output, and the experts of each token (None: the layer has none)."""
        attention = layer.self_attn
        assert isinstance(attention, GroupedQueryAttention)
        heads_TO = self._attention(attention, self.norm(layer.input_layernorm, x_TH), sequences)
        x_TH = x_TH + self._modules.row_parallel(attention.o_proj, heads_TO)
        y_TH = self.norm(layer.post_attention_layernorm, x_TH)
        if isinstance(layer.mlp, DenseMlp):
            return x_TH + self._feed_forward(layer.mlp, y_TH), None
        out_TH, experts_TK = self._experts(layer.mlp, y_TH)
        return x_TH + out_TH, experts_TK

    @torch.no_grad()
    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """The norm over the last dim."""
        return self._ops.norm(x, norm.weight.to(x.dtype), norm.eps)

    def logits(self, hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
        """What the head computes."""
        return self._ops.linear(hidden_TH, weight_VH)

    def token_logprobs(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        """What the sampler computes from them at temperature 1."""
        return self._ops.token_logprobs(logits_TV, targets_T)

    def _attention(self, attention: GroupedQueryAttention, y_TH: Tensor, sequences: PackedSequences) -> Tensor:
        """[T, N * D], what o_proj takes."""
        widths = [count * width for count, width in attention.heads]
        qkv_TO = self._modules.linears([attention.q_proj, attention.k_proj, attention.v_proj], y_TH)
        q, k, v = (x.unflatten(1, heads) for x, heads in zip(qkv_TO.split(widths, 1), attention.heads, strict=True))
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = self.norm(attention.q_norm, q), self.norm(attention.k_norm, k)
        q, k = self._ops.rotate(q, k, sequences)
        return self._ops.attend(q, k, v, sequences, attention.scale).flatten(1)

    def _feed_forward(self, mlp: DenseMlp, y_TH: Tensor) -> Tensor:
        gate_up = self._modules.linears([mlp.gate_proj, mlp.up_proj], y_TH)
        return self._modules.row_parallel(mlp.down_proj, self._ops.silu_and_mul(gate_up))

    def _experts(self, block: MoeBlock, y_TH: Tensor) -> tuple[Tensor, Tensor]:
        router = block.gate
        logits_TE = self._ops.linear(y_TH, router.weight.to(y_TH.dtype))
        weights_TK, experts_TK = self._ops.route(y_TH, logits_TE, router.moe.top_k, router.moe.norm_topk_prob)
        return self._modules.experts(block.experts, y_TH, weights_TK, experts_TK), experts_TK
