"""A decoder's values as engines compute them, and which forward a decoder takes its values from.

    MergedForward    the trainer's own kernels, with weights as a publish would write them now
    EngineForward    the engine's kernels, with such weights (weight_sync.mode=merged)
    SlotForward      the engine's kernels, with base weights, and adapters as a publish would write them into a slot now
                     (mode=adapter)

An engine of weight_sync.mode=merged computes with W + scale B A rounded to its format, and the trainer with W, A and B:
after a few steps this is most of what their log-probabilities differ by (docs/parity.md). The engine's kernels walk the
layers' own lists of operations, whose order is that of vLLM's Qwen3 and Qwen3-MoE models; values are the engine's bit
by bit. Models with latent attention, sinks, windows or shared experts are refused before (conf.checks.model). Gradients
are those of the trainer's own kernels, from W, A and B, of the same input of a layer and with the same experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.conf.architecture.attention_spec import GqaSpec, MlaSpec
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.schema import AttentionValues, Match, SyncMode, TrainerConfig, TrainMode
from slipstream.trainer.engine_ops.published import (
    PublishedAdapters,
    published_experts,
    published_linears,
)
from slipstream.trainer.engine_ops.vllm_adapters import VllmAdapters
from slipstream.trainer.engine_ops.vllm_operations import VllmAttention, VllmOperations, refusal_of_engine_attention
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.attention.flash_attention import EngineKernel
from slipstream.trainer.model.attention.grouped_queries import GroupedQueryAttention
from slipstream.trainer.model.build import RMSNorm
from slipstream.trainer.model.feed_forward import DenseMlp
from slipstream.trainer.model.forward import Forward, KeepGateUp, Place
from slipstream.trainer.model.logprobs import Head
from slipstream.trainer.moe.block import MoeBlock
from slipstream.trainer.moe.replay import LayerRoutes
from slipstream.trainer.recompute import Recomputed


def choose_forward(
    spec: ModelSpec,
    dtype: torch.dtype,
    trainer: TrainerConfig,
    device: torch.device,
    engines: SyncMode = SyncMode.merged,
    engine_ranks: int = 1,
) -> Forward:
    """What trainer.numerics asks for.

    Args:
        spec, dtype: Of the decoder that it will compute.
        engines: What engines hold (weight_sync.mode): merged weights, or the base and adapters.
        engine_ranks: rollout.tp_size.

    Raises:
        TrainerError: the engine's kernels were asked for, and this node cannot run them: vLLM is missing, or the GPU,
            the dtype or the heads do not fit.
    """
    if trainer.numerics.match is Match.bitwise:
        operations = VllmOperations(spec, dtype, device)
        if engines is SyncMode.adapter:
            rank = trainer.lora.slot_rank
            slots = PublishedAdapters(rank)
            return SlotForward(operations=operations, adapters=VllmAdapters(rank, device), slots=slots)
        return EngineForward(operations=operations, engine_ranks=engine_ranks)
    is_merged = trainer.numerics.match is Match.merged and trainer.mode is TrainMode.lora
    kernel, told = None, f"the trainer's own (trainer.cp_size={trainer.cp_size})"
    if trainer.cp_size == 1:
        kernel, told = _choose_attention(spec, dtype, trainer.numerics.places.attention, device)
    kind = MergedForward if is_merged else Forward
    return kind(rounds_base_first=engines is SyncMode.adapter, attention=kernel, attention_values=told)


def _choose_attention(
    spec: ModelSpec, dtype: torch.dtype, values: AttentionValues, device: torch.device
) -> tuple[EngineKernel | None, str]:
    """The kernel that computes the attention's values, None for the trainer's own; and whose it is, for the log."""
    if values is AttentionValues.own:
        return None, "the trainer's own"
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    with_softmax = [one for one in spec.kinds_of_attention if isinstance(one, GqaSpec | MlaSpec)]
    refusals = [refusal_of_engine_attention(capability, dtype, one) for one in with_softmax]
    refusal = next((one for one in refusals if one is not None), None)
    if refusal is None:
        return VllmAttention(), "vLLM's FlashAttention 3"
    if values is AttentionValues.engine:
        raise TrainerError(f"attention's values by the engine's kernel cannot be had: {refusal}")
    return None, f"the trainer's own ({refusal})"


@dataclass(frozen=True, slots=True)
class MergedForward(Forward):
    @property
    def gradients_by(self) -> Forward | None:
        return Forward(self.adapted, self.rounds_base_first, self.attention)

    def linears(self, linears: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, *published_linears([one], x.dtype, adapted=self.adapted)) for one in linears)

    def experts(
        self, block: MoeBlock, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, keep: KeepGateUp, at: Place
    ) -> Tensor:
        is_merged = self.adapted and block.experts.lora is not None
        merged = published_experts(block.experts, x_TH.dtype) if is_merged else None
        most = at.sequences.most_tokens
        return block.run_experts(x_TH, weights_TK, ids_TK, keep, most_tokens=most, adapted=False, merged=merged)


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
        """The engine's norm. Outside of layers, where the decoder's last one is, it has the trainer's gradients."""

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
        out = self.operations.linear(x, *published_linears(linears, x.dtype, adapted=False))
        if not self.adapted or all(linear.lora is None for linear in linears):
            return out
        return self.adapters.add(out, x, self.slots.linears(linears, x.dtype))

    def output(self, linear: Linear, x_TO: Tensor) -> Tensor:
        return self.side_by_side([linear], x_TO)

    def experts(
        self, block: MoeBlock, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, keep: KeepGateUp, at: Place
    ) -> Tensor:
        base = published_experts(block.experts, x_TH.dtype, adapted=False)
        if not self.adapted or block.experts.lora is None:
            return self.operations.experts(x_TH, *base, weights_TK, ids_TK)
        return self.adapters.experts(x_TH, base, self.slots.experts(block.experts, x_TH.dtype), weights_TK, ids_TK)
