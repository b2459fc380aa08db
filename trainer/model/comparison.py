"""The decoder's operations one by one, to compare each with what an engine computed.

    token_ids -> [ step -> ... ] -> norm                 chained: each one takes what the ones before it returned
    recorded activations -> step -> its output           isolated: each one takes what an engine computed

A step is an operation of a layer's list that takes its inputs alone, with the layer's number in its names. An operation
that computes at once what an engine returns in pieces is taken apart: norms of heads from their rotation, a router's
factor from its weights, the experts' sum from the stream's.

Owns the names, which are those of `rollout/in_vllm/activations.py`. Does not own the order, nor what computes a step
(operations.py, forward.py). Invariant: the chained list returns the bits of `Decoder.forward` (without gradients, on
one rank).

Shapes: T packed tokens; every activation is [T, width].
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.trainer.kernels.elementwise import residual_sum
from slipstream.trainer.kernels.rms_norm import norm_rotate
from slipstream.trainer.model.attention.grouped_queries import TURNED, GroupedQueryAttention
from slipstream.trainer.model.build import RMSNorm
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.model.feed_forward import ROUTED
from slipstream.trainer.model.forward import Forward, Place
from slipstream.trainer.model.layer import DecoderLayer
from slipstream.trainer.model.operations import Operation
from slipstream.trainer.model.packed_sequences import PackedSequences
from slipstream.trainer.moe.block import MoeBlock


def decoder_steps(
    decoder: Decoder, positions_T: Tensor, cu_seqlens: Tensor, by: Forward | None = None
) -> list[Operation]:
    """All steps between `token_ids` and `norm`, in the order in which the decoder computes them.

    Args:
        decoder: on one rank.
        by: what computes them, instead of the decoder's own.
    """
    sequences = PackedSequences.from_cu_seqlens(cu_seqlens, positions_T.shape[0], positions_T.device)
    ropes, trunk = decoder.ropes(positions_T), decoder.model
    places = [Place(by or decoder.by, rope, sequences) for rope in ropes]
    steps, adds = [], ("", "")
    steps.append(Operation("embed_tokens", ("token_ids",), ("layers.0.stream",), lambda ids: (trunk.embed(ids),)))
    for number, layer in enumerate(trunk.layers):
        assert isinstance(layer, DecoderLayer)
        steps += _layer(number, layer, places[layer.rope], adds)
        adds = layer.adds
    return [*steps, _norm("norm", len(trunk.layers), trunk.norm, places[0], adds)]


@torch.no_grad()
def run_isolated(steps: list[Operation], given: Mapping[str, Tensor]) -> Iterator[tuple[Operation, list[Tensor]]]:
    """Run each step whose inputs are all given, on those. Yields its outputs."""
    known = dict(given)
    for step in steps:
        if all(name in known for name in step.inputs):
            outs = list(step.run(*(known[name] for name in step.inputs)))
            if step.is_view:
                known.update(zip(step.outputs, outs, strict=True))
            else:
                yield step, outs


@torch.no_grad()
def run_chained(
    steps: list[Operation], given: Mapping[str, Tensor], replaced: Collection[str] = ()
) -> dict[str, Tensor]:
    """Run all steps, each on what the others returned. Returns every tensor by name.

    Args:
        given: `token_ids`, and the tensors that are taken from elsewhere.
        replaced: outputs that are taken from `given` instead of what the step returned.
    """
    known = {"token_ids": given["token_ids"]}
    for step in steps:
        for name, value in zip(step.outputs, step.run(*(known[name] for name in step.inputs)), strict=True):
            known[name] = given[name] if name in replaced else value
    return known


def _layer(number: int, layer: DecoderLayer, at: Place, adds: tuple[str, str]) -> Iterator[Operation]:
    """A layer's operations, whole or taken apart; `adds` names what the layer before adds to the stream."""
    prefix, attention, block = f"layers.{number}.", layer.attention, layer.block
    is_rounded = _is_rounded(layer.middle_norm, at)
    of_experts = {} if block is None else _experts(prefix, block, layer.operations, at, is_rounded=is_rounded)
    for operation in layer.operations:
        if operation.name in of_experts:
            yield of_experts[operation.name]
        if operation.name == "input_layernorm":
            yield _norm(prefix + operation.name, number, layer.input_layernorm, at, adds)
        elif operation.name == "self_attn.rotary_emb" and at.by.fuses:
            assert isinstance(attention, GroupedQueryAttention)
            inputs = tuple(prefix + name for name in operation.inputs)
            yield from _rotary(f"{prefix}self_attn.", attention, at, inputs)
        elif operation.name == "residual":
            yield _residual(number, layer, is_rounded=is_rounded)
        elif operation.name not in of_experts:
            yield _whole(operation, prefix, attention, at)


def _whole(operation: Operation, prefix: str, attention: nn.Module, at: Place) -> Operation:
    def run(*given: Tensor) -> list[Tensor]:
        values: list[Any] = list(given)
        if operation.name == "self_attn.attn" and isinstance(attention, GroupedQueryAttention):
            values[:2] = attention.split_heads(*given[:2])
        return [out.flatten(1) for out in operation.run(at, *values)]

    inputs, outputs = (tuple(prefix + name for name in side) for side in (operation.inputs, operation.outputs))
    return Operation(prefix + operation.name, inputs, outputs, run, operation.is_view)


def _is_rounded(norm: RMSNorm, at: Place) -> bool:
    return not (norm.fuses_sum and at.by.fuses)


def _norm(name: str, number: int, norm: RMSNorm, at: Place, adds: tuple[str, str]) -> Operation:
    """The norm of the stream that enters layer `number`; with norm=once, of the sum before it was rounded."""
    addends = () if _is_rounded(norm, at) or not number else _addends(number - 1, adds)

    def run(x_TH: Tensor, *addends: Tensor) -> tuple[Tensor, ...]:
        return (at.by.norm(norm, x_TH, _unrounded_sum(*addends)[1] if addends else None),)

    return Operation(name, (f"layers.{number}.stream", *addends), (name,), run)


def _addends(number: int, adds: tuple[str, str]) -> tuple[str, ...]:
    """What a layer's last sum adds with norm=once: what entered it, and what its halves add."""
    return tuple(f"layers.{number}.{name}" for name in ("stream", *adds))


def _unrounded_sum(x_TH: Tensor, attended_TH: Tensor, fed_TH: Tensor) -> tuple[Tensor, Tensor]:
    return residual_sum(x_TH, attended_TH, x_TH, fed_TH)


def _residual(number: int, layer: DecoderLayer, *, is_rounded: bool) -> Operation:
    adds = layer.adds
    prefix, following = f"layers.{number}.", (f"layers.{number + 1}.stream",)
    if is_rounded:
        middle = f"{prefix}stream_mid"
        return Operation(
            f"{prefix}residual", (middle, prefix + adds[1]), following, lambda x, fed: (layer.scaled(x + fed),)
        )
    return Operation(
        f"{prefix}residual", _addends(number, adds), following, lambda *addends: _unrounded_sum(*addends)[:1]
    )


def _rotary(prefix: str, own: GroupedQueryAttention, at: Place, inputs: tuple[str, ...]) -> Iterator[Operation]:
    (q, k), turned = inputs, (f"{prefix}{name}" for name in TURNED)
    rounds_norm = own.norms_alone or not own.rotates_once

    def turned_by(
        rope: tuple[Tensor, Tensor], norms: Sequence[RMSNorm | None], q_TO: Tensor, k_TO: Tensor
    ) -> list[Tensor]:
        q_weight, k_weight = (None if norm is None else norm.weight for norm in norms)
        heads = norm_rotate(*own.split_heads(q_TO, k_TO), q_weight, k_weight, own.eps, *rope, own.rotates_once)
        return [x.flatten(1) for x in heads]

    def normed(q_TO: Tensor, k_TO: Tensor) -> Sequence[Tensor]:
        if own.norms_alone:
            return own.normed(q_TO, k_TO)
        still = torch.ones_like(at.rope[0]), torch.zeros_like(at.rope[1])
        return turned_by(still, (own.q_norm, own.k_norm), q_TO, k_TO)

    if own.q_norm is not None:
        names = f"{prefix}q_norm", f"{prefix}k_norm"
        yield Operation(f"{prefix}qk_norm", (q, k), names, normed)
        q, k = names if rounds_norm else (q, k)
    norms = (None, None) if rounds_norm else (own.q_norm, own.k_norm)
    yield Operation(f"{prefix}rotary_emb", (q, k), tuple(turned), lambda q, k: turned_by(at.rope, norms, q, k))


def _experts(
    prefix: str, block: MoeBlock, operations: Sequence[Operation], at: Place, *, is_rounded: bool
) -> dict[str, Operation]:
    """The steps of a mixture of experts, by the operation whose place they take."""
    takes, out = {one.name: one.inputs for one in operations}, f"{prefix}mlp"
    routed_by, read = (prefix + takes[name][0] for name in ("mlp.gate", "mlp.experts"))
    weights, ids, routed, shared = (
        f"{out}.{name}" for name in ("topk_weights", "topk_ids", "experts", "shared_experts")
    )

    def choose(x_TH: Tensor) -> tuple[Tensor, ...]:
        weights_TK, ids_TK, _ = at.by.route(block, x_TH, None)
        return weights_TK / block.gate.factor_of_weights, ids_TK

    def compute(x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> tuple[Tensor, ...]:
        own_dtype = at.by.route(block, x_TH[:1], None)[0].dtype
        weights_TK = weights_TK.to(own_dtype) * block.gate.factor_of_weights
        routed_TH = at.by.experts(block, x_TH, weights_TK, ids_TK, None, at)
        if is_rounded or block.gate.factor_of_output == 1.0:
            return (block.combined(routed_TH, None),)
        return (routed_TH.float() * block.gate.factor_of_output,)

    def add(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return (x if not others else x + others[0] if is_rounded else x.float() + others[0].float(),)

    steps = {
        "mlp.gate": Operation(f"{out}.gate", (routed_by,), (weights, ids), choose),
        "mlp.experts": Operation(routed, (read, weights, ids), (routed,), compute),
    }
    if ROUTED in takes["residual"]:  # else the layer adds a norm of it
        steps["residual"] = Operation(out, (routed, shared) if block.shared else (routed,), (out,), add)
    return steps
