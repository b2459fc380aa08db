"""DecoderLayer: a layer's modules, the list of its operations, and how one call walks it.

    x -> norm -> attention -> o_proj (-> norm) -> + -> norm -> feed-forward (-> norm) -> + -> x
                                                          router, shared experts -> experts

Owns the order of operations, what of it is recomputed and what waits in host memory. Does not own arithmetic
(forward.py), nor the order inside of attentions (attention/) and feed-forwards (feed_forward.py).

Shapes: T packed tokens, H hidden, K experts of a token.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.conf.architecture.attention_spec import DeltaNetSpec, GqaSpec, MlaSpec
from slipstream.trainer.model.attention.delta_net import GatedDeltaNet
from slipstream.trainer.model.attention.flash_attention import KeptAttention
from slipstream.trainer.model.attention.grouped_queries import GroupedQueryAttention
from slipstream.trainer.model.attention.latent import LatentAttention
from slipstream.trainer.model.attention.part import Attention
from slipstream.trainer.model.build import Build, RMSNorm
from slipstream.trainer.model.feed_forward import FED, FLIPPED, IDS, ROUTED, FeedForward, make_feed_forward
from slipstream.trainer.model.forward import Forward, Place
from slipstream.trainer.model.host_activations import HostLayer, HostPass
from slipstream.trainer.model.operations import KEEP_GATE_UP, ROUTES, SUM, Operation, Part, norm_of
from slipstream.trainer.model.packed_sequences import PackedSequences
from slipstream.trainer.moe.block import MoeBlock
from slipstream.trainer.moe.replay import LayerRoutes, RecordedRoutes
from slipstream.trainer.recompute import Recomputed

STREAM, MIDDLE, NEXT_STREAM, NEXT_SUM = "stream", "stream_mid", "next_stream", "next_sum"
"""The residual stream before attention, after it, and at the layer's end; and that before it was rounded."""
NORMED, DELTA, AFTER = "input_layernorm", "self_attn.o_proj", "post_attention_layernorm"
BEFORE_FED, AFTER_FED = "pre_feedforward_layernorm", "post_feedforward_layernorm"
"""What layers have that norm their halves, in which AFTER norms what attention gives."""
KINDS: dict[type, Callable[[Any, Build], Attention]] = {
    DeltaNetSpec: GatedDeltaNet, GqaSpec: GroupedQueryAttention, MlaSpec: LatentAttention,
}  # fmt: skip


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
        own = spec.attentions[layer]
        self._attention_name = own.name
        self.add_module(own.name, KINDS[type(own)](own, build))
        self.post_attention_layernorm = build.norm()
        self.adds = (AFTER, AFTER_FED) if spec.norms_halves else (DELTA, FED)
        if spec.norms_halves:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = build.norm(), build.norm()
        self.rope = spec.ropes.index(own.rope)
        """Which of Decoder.ropes turns its heads."""
        normed = BEFORE_FED if spec.norms_halves else AFTER
        feed_forward = make_feed_forward(self, build, layer, normed, MIDDLE)
        self.layer_scalar: nn.Parameter | None = None
        if spec.scales_layers:  # transformers has it as a buffer
            self.layer_scalar = nn.Parameter(torch.empty(1, dtype=build.weight_dtype), requires_grad=False)
        self.has_experts = spec.is_moe_layer(layer)
        self.moe_index = sum(map(spec.is_moe_layer, range(layer)))
        self.keeps_gate_up = is_in_share(self.moe_index, build.gate_up_kept)
        self.parts = self._parts(normed, feed_forward)
        self._whole = Recomputed(list(self.children()))

    def _parts(self, normed: str, feed_forward: FeedForward) -> list[Part]:
        """The layer's operations, in their order. `normed` names the stream that the feed-forward reads."""
        norm, after, output = self.input_layernorm, self.middle_norm, self.attention.output
        heads = f"self_attn.{self.attention.gives}"
        attention = [Operation(NORMED, (STREAM, SUM), (NORMED,), lambda at, *x: (at.by.norm(norm, *x),))]
        attention += self.attention.operations(NORMED, "self_attn.")
        projection = [Operation(DELTA, (heads,), (DELTA,), lambda at, x: (at.by.output(output, x),))]
        rest, last, fed = [], [*feed_forward.last], feed_forward.fed
        owners: list[nn.Module] = [after, *feed_forward.owners]
        delta, fed_name = self.adds
        if delta != DELTA:
            rest.append(norm_of(delta, self.post_attention_layernorm, DELTA))
            owners.append(self.post_attention_layernorm)
        rest.append(Operation(normed, (STREAM, delta), (MIDDLE, normed), lambda at, *x: at.by.add_norm(after, *x)))
        rest += feed_forward.first
        if fed_name != FED:
            (last or rest).append(norm_of(fed_name, self.post_feedforward_layernorm, *fed))
            owners += [] if last else [self.post_feedforward_layernorm]
            fed = [fed_name]
        ends, outs = (STREAM, delta, MIDDLE, *fed), (NEXT_STREAM, NEXT_SUM)
        layer = weakref.proxy(self)  # held by its own operations, a forgotten layer would wait for the collector
        summed = feed_forward.block if ROUTED in fed else None
        last.append(Operation("residual", ends, outs, lambda at, *x: layer.add(at.by, summed, *x)))
        made, taken = ({name for one in rest for name in one.outputs}, [name for one in last for name in one.inputs])
        gives = [name for name in dict.fromkeys((*taken, FLIPPED)) if name in made]
        return [
            Part(attention, [heads], [norm, self.attention], waits=True),
            Part(projection, [DELTA], waits=True),
            Part(rest, gives, owners, waits=False),
            Part(last, outs, waits=False),
        ]

    def add(self, by: Forward, summed: MoeBlock | None, *addends: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stream at the layer's end; and before it was rounded, if the next norm reads that. `summed`: the experts
        whose sum is among the addends."""
        out_TH, sum_TH = by.add(summed, *addends, once=self.middle_norm.fuses_sum)
        return self.scaled(out_TH), sum_TH

    def scaled(self, x_TH: Tensor) -> Tensor:
        return x_TH if self.layer_scalar is None else x_TH * self.layer_scalar.to(x_TH.dtype)

    @property
    def attention(self) -> Attention:
        """Under its name in the checkpoint, which says its kind."""
        attention = self.get_submodule(self._attention_name)
        assert isinstance(attention, Attention)
        return attention

    @property
    def block(self) -> MoeBlock | None:
        return next((one for one in self.children() if isinstance(one, MoeBlock)), None)

    @property
    def middle_norm(self) -> RMSNorm:
        """Norms the stream after attention."""
        return self.post_attention_layernorm if self.adds[0] == DELTA else self.pre_feedforward_layernorm

    @property
    def operations(self) -> list[Operation]:
        return [operation for part in self.parts for operation in part.operations]

    def forward(self, x_TH: Tensor, run: Pass) -> Tensor:
        is_recomputed = self.checkpointing and torch.is_grad_enabled()
        on_host = None if run.host is None else run.host.next_layer()
        known: dict[str, Any] = {STREAM: x_TH, SUM: run.take_sum(), ROUTES: None, KEEP_GATE_UP: None}
        if run.by.gradients_by is not None:
            out_TH, sum_TH = self._values_from(run, run.by.gradients_by, known)
            run.sum_TH = None if sum_TH is None else sum_TH.detach()
            return out_TH
        routes = run.routes if self.has_experts else None
        if routes is not None:
            known[ROUTES] = routes.of_layer(self.moe_index)
        if is_recomputed and self.keeps_gate_up:
            known[KEEP_GATE_UP] = _stays_on_device if on_host is None else on_host.move
        at = Place(run.by, run.ropes[self.rope], run.sequences, KeptAttention() if is_recomputed else None)
        with nullcontext() if on_host is None else on_host.saving():
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
    """Leave a tensor where it is: what takes the place of HostLayer.move without a host pool."""
