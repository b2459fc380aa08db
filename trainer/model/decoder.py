"""Decoder: one decoder-only transformer for every supported architecture, over packed variable-length sequences.

    token ids -> embed_tokens -> layers x [ norm, attention, +, norm, feed-forward, + ] -> norm -> hidden
                                                                     dense | experts             |
                                                                               the caller <- apply_head

Owns the residual stream and the parameter names, which are the checkpoint's (experts are stacked, see
trainer.moe.experts). Does not own log-probabilities: the head hands its weight to a function of the caller
(`apply_head`), so that the logits of a whole microbatch never exist.

Shapes: T packed tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.architecture.model_spec import ModelSpec
from conf.schema import LoraConfig, Rounding, Roundings
from trainer.kernels.dense_activation import silu_product
from trainer.kernels.experts.gather import gather_rows
from trainer.kernels.residual import residual_sum
from trainer.lora import Linear, apply_together
from trainer.model.attend import AttentionBackend
from trainer.model.attention import GroupedQueryAttention, LatentAttention, make_attention
from trainer.model.engine_attention import EngineKernel
from trainer.model.flash_attention import KeptAttention
from trainer.model.host_activations import HostLayer, HostPass, HostPool
from trainer.model.logprobs import Head
from trainer.model.norm import RMSNorm
from trainer.model.packed_sequences import PackedSequences
from trainer.model.rope import RotaryEmbedding
from trainer.moe.bank import UnpackBuffers
from trainer.moe.block import MoeBlock
from trainer.moe.experts import Experts
from trainer.moe.replay import LayerRoutes, RecordedRoutes
from trainer.moe.router import Router
from trainer.parallel import ParallelLayout
from trainer.recompute import Recomputed

Out = TypeVar("Out")


@dataclass(frozen=True, slots=True)
class Build:
    """What every layer's constructor needs to know."""

    spec: ModelSpec
    compute_dtype: torch.dtype
    weight_dtype: torch.dtype
    lora: LoraConfig | None
    attention_backend: AttentionBackend
    checkpointing: bool
    gate_up_kept: float
    """Share of the expert layers that keep the product of gate and up although they are recomputed."""
    numerics: Roundings
    layout: ParallelLayout
    unpacked: UnpackBuffers
    """Buffers into which all layers unpack their packed experts."""

    def norm(self) -> RMSNorm:
        """A norm of the residual stream."""
        return RMSNorm(
            self.spec.hidden_size,
            eps=self.spec.rms_norm_eps,
            weight_dtype=self.weight_dtype,
            rounding=self.numerics.norm,
        )


class VocabTable(nn.Module):
    """A (V, H) weight. FSDP2 gathers it for forward, and again for the backward of what forward returns; it is whole
    only then.

    Embedding and head are two uses of this one class, so that tied embeddings are one parameter of one FSDP2 unit.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        shape = (build.spec.vocab_size, build.spec.hidden_size)
        self.compute_dtype = build.compute_dtype
        self.weight = nn.Parameter(torch.empty(shape, dtype=build.weight_dtype))

    def forward(self, use: Callable[[Tensor, Tensor], Out], x: Tensor) -> Out:
        """use(x, weight_VH) with the weight in the compute dtype."""
        return use(x, self.weight.to(self.compute_dtype))


class LastSum:
    """The sum at the end of the last layer before it was rounded, for the norm that reads it next.

    An engine's compiled norm sees it so (Roundings.norm=once), and the next layer gets it rounded. It is taken
    once: a recomputation norms the rounded sum, as every backward does.
    """

    def __init__(self) -> None:
        self._wide_TH: Tensor | None = None

    def keep(self, wide_TH: Tensor) -> None:
        """Keep it, float32."""
        self._wide_TH = wide_TH

    def take(self) -> Tensor | None:
        """The sum; None before the first one, and when it has been taken."""
        wide_TH, self._wide_TH = self._wide_TH, None
        return wide_TH


class DenseMlp(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, build: Build, width: int) -> None:
        super().__init__()
        hidden = build.spec.hidden_size
        lora = None if build.lora is None else build.lora.for_mlp
        self.gate_proj = Linear(hidden, width, weight_dtype=build.weight_dtype, lora=lora)
        self.up_proj = Linear(hidden, width, weight_dtype=build.weight_dtype, lora=lora)
        self.down_proj = Linear(width, hidden, weight_dtype=build.weight_dtype, lora=lora)
        self.activates_once = build.numerics.dense_activation is Rounding.once

    def forward(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        gate, up = apply_together([self.gate_proj, self.up_proj], x_TH)
        return self.down_proj(silu_product(gate, up, self.activates_once))


class DecoderLayer(nn.Module):
    """One residual block.

    With checkpointing, everything but attention itself, its output projection and the routed experts is recomputed in
    the backward pass (inside FSDP2's hooks, which gather once):

        x -> [ norm, q, k, v ] attention -> o_proj -> [ x + . = residual -> norm -> router, shared experts ] -> experts
             [ recomputed    ]                        [ recomputed                                         ]

    Attention keeps its output, because at long sequences nothing costs more to compute again; the projection after it
    needs nothing else. Experts keep only the routing and r numbers per row, and recompute the rest themselves, from
    tokens that the part before them computes again. Recomputed with that part, they would repeat their down projections
    and their exchanges without need. Without checkpointing they keep gate and up of each row, too, and with it in a
    share of the layers (trainer.gate_up_kept).

    What a checkpointed layer keeps is thus x, attention's output, delta (what o_proj adds), perhaps gate and up, and
    some numbers per token. All but the last may wait in host memory (host_activations.py).
    """

    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        spec = build.spec
        self.checkpointing = build.checkpointing
        self.input_layernorm = build.norm()
        self.self_attn = make_attention(
            spec,
            layer,
            weight_dtype=build.weight_dtype,
            lora=None if build.lora is None else build.lora.for_attention,
            backend=build.attention_backend,
            numerics=build.numerics,
        )
        self.post_attention_layernorm = build.norm()
        self.mlp = _moe_block(build, layer) if spec.is_moe_layer(layer) else DenseMlp(build, spec.intermediate_size)
        self.moe_index = sum(map(spec.is_moe_layer, range(layer)))
        self.keeps_gate_up = is_in_share(self.moe_index, build.gate_up_kept)
        rest: Callable[..., Any] = DecoderLayer._feed_forward
        owners = [self.post_attention_layernorm, self.mlp]
        if isinstance(self.mlp, MoeBlock):
            rest, owners[1:] = DecoderLayer._until_experts, self.mlp.owners_of_start
        self.in_place: Recomputed | None = None
        """Takes values from elsewhere, and gradients alone from `own`; set by trainer.engine_ops."""
        self._parts = (DecoderLayer._attend, rest)
        self._recomputed_parts = (
            Recomputed(DecoderLayer._attend, [self.input_layernorm, self.self_attn]),
            Recomputed(rest, owners),
        )

    def forward(
        self,
        x_TH: Tensor,
        rope: tuple[Tensor, Tensor],
        sequences: PackedSequences,
        routes: RecordedRoutes | None = None,
        last_sum: LastSum | None = None,
        on_host: HostLayer | None = None,
    ) -> Tensor:
        """[T, H] -> [T, H]; `last_sum` has x_TH before it was rounded, and then the result. `on_host` takes what is
        kept for the backward, except of a layer whose values come from elsewhere.
        """
        last_sum = LastSum() if last_sum is None else last_sum
        if self.in_place is not None and x_TH.shape[0]:
            return self.in_place(self, x_TH, rope, sequences, [], last_sum)
        is_recomputed = self.checkpointing and torch.is_grad_enabled()
        with nullcontext() if on_host is None else on_host:
            return self.own(x_TH, rope, sequences, routes, last_sum, is_recomputed=is_recomputed, on_host=on_host)

    def own(
        self,
        x_TH: Tensor,
        rope: tuple[Tensor, Tensor],
        sequences: PackedSequences,
        routes: RecordedRoutes | None,
        last_sum: LastSum,
        *,
        is_recomputed: bool,
        chosen: list[Tensor] | None = None,
        on_host: HostLayer | None = None,
    ) -> Tensor:
        """The same, by the trainer's own kernels. Appends the experts of each token to `chosen`."""
        kept = KeptAttention() if is_recomputed else None
        attend, rest = self._recomputed_parts if is_recomputed else self._parts
        if on_host is not None:
            on_host.move(x_TH)
        heads_TO = attend(self, x_TH, rope, sequences, kept, last_sum)
        if on_host is not None and kept is not None:
            on_host.move(heads_TO)
            kept.move(on_host)
        delta_TH = self.self_attn.get_submodule("o_proj")(heads_TO)
        if on_host is not None:
            on_host.move(delta_TH)
        if not isinstance(self.mlp, MoeBlock):
            middle_TH, fed_TH = rest(self, x_TH, delta_TH)
            return self._end(last_sum, x_TH, delta_TH, middle_TH, fed_TH)
        recorded = None if routes is None else routes.of_layer(self.moe_index)
        middle_TH, *started, shared_TH, num_flipped = rest(self, x_TH, delta_TH, recorded)
        if routes is not None:
            routes.flipped.append(num_flipped)
        if chosen is not None:
            chosen.append(started[2])
        keep_gate_up = None
        if is_recomputed and self.keeps_gate_up:
            keep_gate_up = _stays_on_device if on_host is None else on_host.move
        fed_TH = self.mlp.finish(*started, keep_gate_up=keep_gate_up)
        return self._end(last_sum, x_TH, delta_TH, middle_TH, fed_TH, shared_TH)

    def _end(
        self,
        last_sum: LastSum,
        x_TH: Tensor,
        delta_TH: Tensor,
        middle_TH: Tensor,
        fed_TH: Tensor,
        shared_TH: Tensor | None = None,
    ) -> Tensor:
        """The sum of x, attention's delta and the feed-forward's, with norm=once not rounded in between."""
        block = self.mlp if isinstance(self.mlp, MoeBlock) else None
        if not self.post_attention_layernorm.once:
            return middle_TH + (fed_TH if block is None else block.combined(fed_TH, shared_TH))
        scale = 1.0 if block is None else block.gate.factor_of_output
        y_TH, wide_TH = residual_sum(x_TH, delta_TH, middle_TH, fed_TH, shared_TH, scale)
        last_sum.keep(wide_TH)
        return y_TH

    def _attend(
        self,
        x_TH: Tensor,
        rope: tuple[Tensor, Tensor],
        sequences: PackedSequences,
        kept: KeptAttention | None,
        last_sum: LastSum,
    ) -> Tensor:
        return self.self_attn(self.input_layernorm(x_TH, last_sum.take()), rope, sequences, kept)

    def _feed_forward(self, x_TH: Tensor, delta_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, and what is added to it."""
        middle_TH, y_TH = self.post_attention_layernorm.after_sum(x_TH, delta_TH)
        return middle_TH, self.mlp(y_TH)

    def _until_experts(
        self, x_TH: Tensor, delta_TH: Tensor, recorded: LayerRoutes | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """The residual stream after attention, and what `MoeBlock.start` returns."""
        assert isinstance(self.mlp, MoeBlock)
        middle_TH, y_TH = self.post_attention_layernorm.after_sum(x_TH, delta_TH)
        return (middle_TH, *self.mlp.start(y_TH, recorded))


class Trunk(nn.Module):
    """Everything but the head. A module of its own, because the checkpoint's names begin with `model.`."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        spec = build.spec
        self.embed_tokens = VocabTable(build)
        self.layers = nn.ModuleList(DecoderLayer(build, layer) for layer in range(spec.num_layers))
        self.norm = build.norm()


class Decoder(nn.Module):
    """Token ids -> hidden states after the final norm. Built by `build_decoder`."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.spec = build.spec
        self.dtype = build.compute_dtype
        """Compute dtype (model.dtype): the format of activations, frozen weights and exports."""
        self.lora = build.lora
        """None in full training."""
        self.layout = build.layout
        self.attention_backend = build.attention_backend
        self.model = Trunk(build)
        self.lm_head = None if build.spec.tie_embeddings else VocabTable(build)
        self.rotary = RotaryEmbedding(build.spec.rope, build.numerics.rotation)
        self.last_norm_in_place: Recomputed | None = None
        """As DecoderLayer.in_place."""
        self.attention_values: str | None = None
        """Whose kernel computes the attention's values, for the run's log; None: nobody chose."""
        self.head: Head | None = None
        """Where the head's values come from, if not from the trainer's own operations."""
        self.host: HostPool | None = None
        """Where layers keep what their backward needs; None: on the device."""

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, cu_seqlens: Tensor, routes: RecordedRoutes | None = None
    ) -> Tensor:
        """Run the decoder over one microbatch.

        Args:
            token_ids_T: int64 [T], sequences one after the other. T = 0 is a dummy microbatch: every collective still
                runs, and every trainable parameter gets a gradient of zeros.
            positions_T: int64 [T], position of each token in its own sequence.
            cu_seqlens: int [num_sequences + 1], start of each sequence and T at the end; [0] when T = 0. Pass it on the
                CPU if you can: it decides shapes, and the host waits to read it from a GPU.
            routes: experts to use instead of the routers' own choice. Each layer appends to its `flipped`.

        Returns:
            hidden_TH in the compute dtype.
        """
        sequences = PackedSequences.from_cu_seqlens(cu_seqlens, token_ids_T.shape[0], token_ids_T.device)
        host = self.host if torch.is_grad_enabled() else None
        return self.hidden_states(token_ids_T, positions_T, sequences, routes, host)

    def hidden_states(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        sequences: PackedSequences,
        routes: RecordedRoutes | None = None,
        host: HostPool | None = None,
    ) -> Tensor:
        """The same, of sequences that the caller has laid out. Layers keep what their backward needs in `host`; None:
        on the device."""
        rope = self.rotary(positions_T, self.dtype)
        is_on_host = self.model.embed_tokens.weight.device != token_ids_T.device
        x_TH = self.model.embed_tokens(_rows_of_host if is_on_host else F.embedding, token_ids_T)
        last_sum = LastSum()
        host_pass = None if host is None else HostPass(host, len(self.model.layers))
        for layer in self.model.layers:
            on_host = None if host_pass is None else host_pass.next_layer()
            x_TH = layer(x_TH, rope, sequences, routes, last_sum, on_host)
        if self.last_norm_in_place is not None:
            return self.last_norm_in_place(x_TH)
        return self.model.norm(x_TH, last_sum.take())

    def apply_head(self, use: Callable[[Tensor, Tensor], Out], hidden_TH: Tensor) -> Out:
        """Call use(hidden_TH, weight_VH). The whole head weight exists during this call, and again in its backward.

        `use` returns a tensor, or a tuple or dict of tensors, that depend on hidden_TH: FSDP2 attaches its backward
        hooks to them. A custom autograd.Function may save weight_VH with ctx.save_for_backward; nothing else may keep
        it. The weight is in the compute dtype, requires grad in full training, and is the embedding's when tied. Call
        this after `forward`.

        Example:
            logprobs_TV = decoder.apply_head(lambda hidden, weight: F.linear(hidden, weight).log_softmax(-1), hidden_TH)
        """
        table = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return table(use, hidden_TH)

    def use_attention_of(self, engine: EngineKernel) -> None:
        """Let an engine's kernel compute the attention's values from now on."""
        for module in self.modules():
            if isinstance(module, GroupedQueryAttention | LatentAttention):
                module.engine = engine

    @property
    def backends(self) -> dict[str, str]:
        """Kernels chosen at construction, for the run's log.

        Example: {"attention": "varlen", "experts": "triton"}
        """
        chosen = {"attention": str(self.attention_backend)}
        if self.attention_values is not None:
            chosen["attention values"] = self.attention_values
        for module in self.modules():
            if isinstance(module, Experts):
                chosen["experts"] = str(module.backend)
        return chosen


def is_in_share(index: int, share: float) -> bool:
    """Whether one of many is among a share of them that is spread evenly."""
    return int((index + 1) * share) > int(index * share)


def _stays_on_device(_: Tensor) -> None:
    """Instead of HostLayer.move."""


def _rows_of_host(token_ids_T: Tensor, table_VH: Tensor) -> Tensor:
    return gather_rows(table_VH, token_ids_T)


def _moe_block(build: Build, layer: int) -> MoeBlock:
    spec, moe, layout = build.spec, build.spec.moe, build.layout
    assert moe is not None
    shares = layout.expert_shares(moe.num_experts, layer)
    own = shares[layout.ep_rank]
    experts = Experts(
        hidden_size=spec.hidden_size,
        intermediate_size=moe.intermediate_size,
        first_expert=own.start,
        num_local_experts=len(own),
        compute_dtype=build.compute_dtype,
        weight_dtype=build.weight_dtype,
        lora=None if build.lora is None else build.lora.for_experts,
        device=layout.device,
        activation=replace(moe.activation, rounds_each=build.numerics.expert_activation is Rounding.each),
        has_bias=moe.is_fused,
        combine_mode=build.numerics.combine,
        expert_format=moe.expert_format,
        unpacked=build.unpacked,
    )
    router = Router(moe, spec.hidden_size, weight_dtype=build.weight_dtype, numerics=build.numerics)
    shared = DenseMlp(build, moe.shared_intermediate_size) if moe.shared_intermediate_size else None
    gate = Linear(spec.hidden_size, 1, weight_dtype=build.weight_dtype, lora=None) if moe.has_shared_gate else None
    return MoeBlock(
        router,
        experts,
        num_experts=moe.num_experts,
        ep_group=layout.ep_group,
        shares=[len(share) for share in shares],
        shared=shared,
        shared_gate=gate,
        shared_name=moe.names.shared,
    )
