"""DecoderLayer: a layer's modules, the list of its operations, and how one call walks it.

    x -> norm -> attention -> o_proj (-> norm) -> + -> norm -> feed-forward (-> norm) -> + -> x
                                                          router, shared experts -> experts

Owns the order of operations, what of it is recomputed and what waits in host memory. Does not own arithmetic
(forward.py), nor the order inside of attentions (attention.py).

Shapes: T packed tokens, H hidden, K experts of a token.
"""

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from slipstream.conf.architecture.attention_spec import GqaSpec
from slipstream.conf.architecture.model_spec import BESIDE_DENSE, NORMS_BESIDE_DENSE, ModelSpec
from slipstream.conf.schema import LoraConfig, Rounding, Roundings
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.attend import AttentionBackend
from slipstream.trainer.model.attention import GroupedQueryAttention, LatentAttention, make_attention
from slipstream.trainer.model.delta_net import GatedDeltaNet
from slipstream.trainer.model.dense_mlp import DenseMlp
from slipstream.trainer.model.flash_attention import KeptAttention
from slipstream.trainer.model.forward import Forward, Place
from slipstream.trainer.model.host_activations import HostLayer, HostPass, HostPool
from slipstream.trainer.model.norm import RMSNorm
from slipstream.trainer.model.operations import KEEP_GATE_UP, ROUTES, SUM, Operation, Part
from slipstream.trainer.model.packed_sequences import PackedSequences
from slipstream.trainer.moe.bank import UnpackBuffers
from slipstream.trainer.moe.block import MoeBlock
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.moe.replay import LayerRoutes, RecordedRoutes
from slipstream.trainer.moe.router import Router
from slipstream.trainer.parallel import ParallelLayout
from slipstream.trainer.recompute import Recomputed

STREAM, MIDDLE, NEXT_STREAM, NEXT_SUM = "stream", "stream_mid", "next_stream", "next_sum"
"""The residual stream before attention, after it, and at the layer's end; and that before it was rounded."""
NORMED, DELTA, AFTER = "input_layernorm", "self_attn.o_proj", "post_attention_layernorm"
BEFORE_FED, AFTER_FED = "pre_feedforward_layernorm", "post_feedforward_layernorm"
"""What layers have that norm their halves, in which AFTER norms what attention gives."""
BEFORE_EXPERTS, AFTER_DENSE, AFTER_EXPERTS = NORMS_BESIDE_DENSE
WEIGHTS, IDS, FLIPPED = "mlp.topk_weights", "mlp.topk_ids", "mlp.num_flipped"
ROUTED, SHARED, FED = "mlp.experts", "mlp.shared_experts", "mlp"


@dataclass(frozen=True, slots=True)
class Build:
    """What every layer's constructor needs to know."""

    spec: ModelSpec
    compute_dtype: torch.dtype
    weight_dtype: torch.dtype
    lora: LoraConfig | None
    attention_backends: Sequence[AttentionBackend]
    """One per layer."""
    checkpointing: bool
    gate_up_kept: float
    """Share of the expert layers that keep the product of gate and up although they are recomputed."""
    numerics: Roundings
    layout: ParallelLayout
    unpacked: UnpackBuffers
    """Buffers into which all layers unpack their packed experts."""
    by: Forward
    """What computes the decoder."""
    host: HostPool | None
    """Where layers keep what their backward needs."""

    def dense_mlp(self, width: int) -> DenseMlp:
        """A feed-forward for all tokens."""
        return DenseMlp(
            self.spec.hidden_size,
            width,
            weight_dtype=self.weight_dtype,
            lora=None if self.lora is None else self.lora.for_mlp,
            activates_once=self.numerics.dense_activation is Rounding.once,
            has_gelu=self.spec.has_gelu,
        )

    def norm(self) -> RMSNorm:
        """A norm of the residual stream."""
        return RMSNorm(
            self.spec.hidden_size,
            eps=self.spec.rms_norm_eps,
            weight_dtype=self.weight_dtype,
            rounding=self.numerics.norm,
            adds_one=self.spec.norms_add_one,
            sums_alone=self.spec.scales_layers,
        )


@dataclass(slots=True)
class Pass:
    """One forward pass over a microbatch: what all layers share, and what one hands on to the next."""

    by: Forward
    ropes: Sequence[tuple[Tensor, Tensor]]
    """Decoder.ropes, as cos and sin."""
    sequences: PackedSequences
    routes: RecordedRoutes | None = None
    host: HostPass | None = None
    """None: layers keep what their backward needs on the device."""
    sum_TH: Tensor | None = None
    """The stream before it was rounded, from the end of a layer to the norm that reads it next."""

    def take_sum(self) -> Tensor | None:
        """sum_TH, which the pass then forgets: it is as large as two streams."""
        sum_TH, self.sum_TH = self.sum_TH, None
        return sum_TH


class DecoderLayer(nn.Module):
    """One residual block: a list of operations, in four parts.

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
    some numbers per token; norms behind the experts (Gemma 4) keep what they read, too. The first three, and gate and
    up, may wait in host memory (host_activations.py).

    A forward without gradients of its own (Forward.gradients_by) walks the whole list for the layer's values; the layer
    keeps its input alone, and in backward the trainer's kernels walk the list again, with the experts chosen there.
    """

    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        spec = build.spec
        self.checkpointing = build.checkpointing
        self.input_layernorm = build.norm()
        self._attention_name = spec.attention_name(layer)
        attention = make_attention(
            spec,
            layer,
            weight_dtype=build.weight_dtype,
            lora=None if build.lora is None else build.lora.for_attention,
            backend=build.attention_backends[layer],
            numerics=build.numerics,
        )
        self.add_module(self._attention_name, attention)
        self.post_attention_layernorm = build.norm()
        self.adds = (AFTER, AFTER_FED) if spec.norms_halves else (DELTA, FED)
        """What the stream adds, by name."""
        if spec.norms_halves:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = build.norm(), build.norm()
        windows = spec.attention.windows if isinstance(spec.attention, GqaSpec) else ()
        self.rope = int(spec.local_rope is not None and windows[layer] is not None)
        """Which of Decoder.ropes turns its heads."""
        block = _moe_block(build, layer) if spec.is_moe_layer(layer) else None
        self.is_beside = block is not None and block.gate.moe.is_beside_dense
        """Whether the layer has both, a dense feed-forward and experts."""
        self.mlp = build.dense_mlp(spec.intermediate_size) if block is None or self.is_beside else block
        if self.is_beside:
            self.add_module(BESIDE_DENSE, block)
            for name in NORMS_BESIDE_DENSE:
                self.add_module(name, build.norm())
        self.layer_scalar = nn.Parameter(torch.empty(1, dtype=build.weight_dtype)) if spec.scales_layers else None
        self.moe_index = sum(map(spec.is_moe_layer, range(layer)))
        self.keeps_gate_up = is_in_share(self.moe_index, build.gate_up_kept)
        self.parts = self._parts()
        self._whole = Recomputed(list(self.children()))

    def _parts(self) -> list[Part]:
        """The layer's operations, in their order."""
        norm, after, o_proj = self.input_layernorm, self.middle_norm, self.attention.o_proj
        delta, fed_name = self.adds
        first = self.attention.operations(NORMED, "self_attn.")
        heads = f"self_attn.{self.attention.gives}"
        attention = [Operation(NORMED, (STREAM, SUM), (NORMED,), lambda at, *x: (at.by.norm(norm, *x),)), *first]
        projection = [Operation(DELTA, (heads,), (DELTA,), lambda at, x: (at.by.output(o_proj, x),))]
        rest, gives, normed = [], [MIDDLE], AFTER
        owners: list[nn.Module] = [after]
        if delta != DELTA:
            rest, normed = [self._norms(delta, DELTA)], BEFORE_FED
            gives.append(delta)
            owners += [self.post_attention_layernorm, self.post_feedforward_layernorm]
        rest.append(Operation(normed, (STREAM, delta), (MIDDLE, normed), lambda at, *x: at.by.add_norm(after, *x)))
        last, fed, mlp = [], [fed_name], self.mlp
        if isinstance(mlp, DenseMlp):
            rest.append(Operation(FED, (normed,), (FED,), lambda at, x: (at.by.feed_forward(mlp, x),)))
            owners.append(mlp)
        if (block := self.block) is not None:
            last, fed = self._with_experts(block, rest, gives, owners)
        else:
            rest += [] if fed_name == FED else [self._norms(fed_name, FED)]
            gives.append(fed_name)
        ends, outs = (STREAM, delta, MIDDLE, *fed), (NEXT_STREAM, NEXT_SUM)
        layer = weakref.proxy(self)  # held by its own operations, a forgotten layer would wait for the collector
        last.append(Operation("residual", ends, outs, lambda at, *x: layer.add(at.by, *x)))
        return [
            Part(attention, [heads], [norm, self.attention], waits=True),
            Part(projection, [DELTA], waits=True),
            Part(rest, gives, owners, waits=False),
            Part(last, outs, waits=False),
        ]

    def _with_experts(
        self, block: MoeBlock, rest: list[Operation], gives: list[str], owners: list[nn.Module]
    ) -> tuple[list[Operation], list[str]]:
        """Add the choice of experts to `rest`, and what it gives and whose parameters it reads; the operations of the
        experts, and what of them the stream adds."""
        reads, routed_by = (BEFORE_EXPERTS, MIDDLE) if self.is_beside else (AFTER, AFTER)
        chosen, fed = (WEIGHTS, IDS, FLIPPED), [ROUTED]
        gives += [reads, *chosen]
        owners += block.owners_of_routing
        rest.append(Operation("mlp.gate", (routed_by, ROUTES), chosen, lambda at, *x: at.by.route(block, *x)))
        routed = (reads, WEIGHTS, IDS, KEEP_GATE_UP)
        last = [Operation(ROUTED, routed, (ROUTED,), lambda at, *x: (at.by.experts(block, *x, at),))]
        if block.shared:
            rest.append(Operation(SHARED, (AFTER,), (SHARED,), lambda at, x: (at.by.shared_experts(block, x),)))
            gives.append(SHARED)
            fed = [ROUTED, SHARED]
        if self.is_beside:
            rest += [self._norms(AFTER_DENSE, FED), self._norms(BEFORE_EXPERTS, MIDDLE)]
            gives.append(AFTER_DENSE)
            owners += [self.get_submodule(name) for name in (AFTER_DENSE, BEFORE_EXPERTS)]
            last += [self._norms(AFTER_EXPERTS, ROUTED), self._norms(AFTER_FED, AFTER_DENSE, AFTER_EXPERTS)]
            fed = [AFTER_FED]
        return last, fed

    def _norms(self, name: str, *addends: str) -> Operation:
        """The norm of this name, of one value or of the sum of two."""
        norm = cast("RMSNorm", self.get_submodule(name))
        return Operation(name, addends, (name,), lambda at, x, *more: (at.by.norm(norm, x + more[0] if more else x),))

    def add(self, by: Forward, *addends: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stream at the layer's end; and before it was rounded, if the next norm reads that."""
        out_TH, sum_TH = by.add(self.mlp, *addends, once=self.middle_norm.fuses_sum)
        return self.scaled(out_TH), sum_TH

    def scaled(self, x_TH: Tensor) -> Tensor:
        """What the layer gives, by its factor."""
        return x_TH if self.layer_scalar is None else x_TH * self.layer_scalar.to(x_TH.dtype)

    @property
    def attention(self) -> GroupedQueryAttention | LatentAttention | GatedDeltaNet:
        """Under its name in the checkpoint, which says its kind."""
        return cast("GroupedQueryAttention | LatentAttention | GatedDeltaNet", self.get_submodule(self._attention_name))

    @property
    def block(self) -> MoeBlock | None:
        """The experts and their router, if the layer has any."""
        block = self.get_submodule(BESIDE_DENSE) if self.is_beside else self.mlp
        return block if isinstance(block, MoeBlock) else None

    @property
    def middle_norm(self) -> RMSNorm:
        """Norms the stream after attention."""
        return self.post_attention_layernorm if self.adds[0] == DELTA else self.pre_feedforward_layernorm

    @property
    def operations(self) -> list[Operation]:
        """All of them, in their order."""
        return [operation for part in self.parts for operation in part.operations]

    def forward(self, x_TH: Tensor, run: Pass) -> Tensor:
        """[T, H] -> [T, H], as the pass says."""
        is_recomputed = self.checkpointing and torch.is_grad_enabled()
        on_host = None if run.host is None else run.host.next_layer()
        known: dict[str, Any] = {STREAM: x_TH, SUM: run.take_sum(), ROUTES: None, KEEP_GATE_UP: None}
        if run.by.gradients_by is not None:
            out_TH, sum_TH = self._values_from(run, run.by.gradients_by, known)
            run.sum_TH = None if sum_TH is None else sum_TH.detach()
            return out_TH
        routes = None if self.block is None else run.routes
        if routes is not None:
            known[ROUTES] = routes.of_layer(self.moe_index)
        if is_recomputed and self.keeps_gate_up:
            known[KEEP_GATE_UP] = _stays_on_device if on_host is None else on_host.move
        at = Place(run.by, run.ropes[self.rope], run.sequences, KeptAttention() if is_recomputed else None)
        with nullcontext() if on_host is None else on_host:
            self._walk(at, known, is_recomputed=is_recomputed, on_host=on_host)
        if routes is not None:
            routes.flipped.append(known[FLIPPED])
        run.sum_TH = known[NEXT_SUM]
        return known[NEXT_STREAM]

    def _walk(
        self, at: Place, known: dict[str, Any], *, is_recomputed: bool = False, on_host: HostLayer | None = None
    ) -> None:
        """Add to `known` what the parts give. With `on_host` its tensors wait there, where they can."""
        if on_host is not None:
            on_host.move(known[STREAM])
        for part in self.parts:
            given = [known.pop(name) if name == SUM else known[name] for name in part.takes]
            outs = part.recomputed(at, *given) if is_recomputed else part(at, *given)
            known.update(zip(part.gives, outs, strict=True))
            if on_host is not None and part.waits:
                for out in outs:
                    on_host.move(out)
                if at.kept is not None:
                    at.kept.move(on_host)

    def _values_from(self, run: Pass, own: Forward, known: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The layer's result by the pass's forward, whose gradients are those of `own`."""

        def values() -> tuple[tuple[Tensor, Tensor | None], tuple[LayerRoutes | None]]:
            with torch.no_grad():
                self._walk(Place(run.by, run.ropes[self.rope], run.sequences), known)
            ids_TK, routes = known.get(IDS), None
            if ids_TK is not None:
                routes = LayerRoutes(ids_TK, torch.ones_like(ids_TK[:, 0], dtype=torch.bool))
            return (known[NEXT_STREAM], known[NEXT_SUM]), (routes,)

        place = Place(own, run.ropes[self.rope], run.sequences)
        return self._whole(self._all_parts, place, known[STREAM], first=values)

    def _all_parts(self, at: Place, x_TH: Tensor, routes: LayerRoutes | None) -> tuple[Tensor, Tensor | None]:
        known: dict[str, Any] = {STREAM: x_TH, SUM: None, ROUTES: routes, KEEP_GATE_UP: None}
        self._walk(at, known)
        return known[NEXT_STREAM], known[NEXT_SUM]


def is_in_share(index: int, share: float) -> bool:
    """Whether one of many is among a share of them that is spread evenly."""
    return int((index + 1) * share) > int(index * share)


def _stays_on_device(_: Tensor) -> None:
    """Instead of HostLayer.move."""


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
    router = Router(
        moe, spec.hidden_size, weight_dtype=build.weight_dtype, numerics=build.numerics, norm_eps=spec.rms_norm_eps
    )
    shared = build.dense_mlp(moe.shared_intermediate_size) if moe.shared_intermediate_size else None
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
