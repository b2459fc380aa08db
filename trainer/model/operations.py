"""The decoder as a list of operations with named inputs and outputs, to compare it with an engine one by one.

    token_ids -> [ operation -> ... ] -> norm            chained: each one takes what the ones before it returned
    recorded activations -> operation -> its output      isolated: each one takes what an engine computed

Owns: the names, which are those of `rollout/in_vllm/activations.py`, and which parts of the model each operation calls.
Does not own: any arithmetic. Operations call what the decoder's own forward calls, in its order.
Invariant: the chained list returns the bits of `Decoder.forward` (without gradients, on one rank).

Shapes: T packed tokens; every activation is [T, width].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.kernels.latent import latent_heads
from trainer.kernels.residual import residual_sum
from trainer.kernels.rms_norm import norm_rotate
from trainer.lora import Linear, apply_together
from trainer.model.attend import attend
from trainer.model.attention import GroupedQueryAttention, LatentAttention
from trainer.model.decoder import Decoder, DecoderLayer
from trainer.model.norm import RMSNorm
from trainer.model.packed_sequences import PackedSequences
from trainer.moe.block import MoeBlock


@dataclass(frozen=True, slots=True)
class Operation:
    """Example: Operation("layers.3.input_layernorm", ("layers.3.stream",), ("layers.3.input_layernorm",), run)."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[..., tuple[Tensor, ...]]
    """Takes the inputs in order, returns the outputs in order."""


@dataclass(frozen=True, slots=True)
class Place:
    """What all operations of one forward have in common."""

    rope: tuple[Tensor, Tensor]
    sequences: PackedSequences


def decoder_operations(decoder: Decoder, positions_T: Tensor, cu_seqlens: Tensor) -> list[Operation]:
    """All operations between `token_ids` and `norm`, in the order in which the decoder computes them.

    Args:
        decoder: on one rank.
        positions_T, cu_seqlens: as Decoder.forward takes them.
    """
    sequences = PackedSequences.from_cu_seqlens(cu_seqlens, positions_T.shape[0], positions_T.device)
    place = Place(decoder.rotary(positions_T, decoder.dtype), sequences)
    trunk = decoder.model
    operations = [
        Operation(
            "embed_tokens", ("token_ids",), ("layers.0.stream",), lambda ids: (trunk.embed_tokens(F.embedding, ids),)
        )
    ]
    for number, layer in enumerate(trunk.layers):
        assert isinstance(layer, DecoderLayer)
        operations += _layer(number, layer, place)
    return [*operations, _norm("norm", len(trunk.layers), trunk.norm)]


@torch.no_grad()
def run_isolated(operations: list[Operation], given: Mapping[str, Tensor]) -> Iterator[tuple[Operation, list[Tensor]]]:
    """Run each operation whose inputs are all given, on those. Yields its outputs."""
    for operation in operations:
        if all(name in given for name in operation.inputs):
            yield operation, list(operation.run(*(given[name] for name in operation.inputs)))


@torch.no_grad()
def run_chained(
    operations: list[Operation], given: Mapping[str, Tensor], replaced: Collection[str] = ()
) -> dict[str, Tensor]:
    """Run all operations, each on what the others returned.

    Args:
        given: `token_ids`, and the tensors that are taken from elsewhere.
        replaced: outputs that are taken from `given` instead of what the operation returned.

    Returns:
        Every tensor by name.
    """
    known = {"token_ids": given["token_ids"]}
    for operation in operations:
        outputs = operation.run(*(known[name] for name in operation.inputs))
        for name, value in zip(operation.outputs, outputs, strict=True):
            known[name] = given[name] if name in replaced else value
    return known


def _norm(name: str, number: int, norm: RMSNorm) -> Operation:
    """The norm of the stream that enters layer `number`; with norm=once, of the sum before it was rounded."""
    addends = _addends(number - 1) if norm.once and number else ()

    def run(x_TH: Tensor, *addends: Tensor) -> tuple[Tensor, ...]:
        return (norm(x_TH, _unrounded_sum(*addends)[1] if addends else None),)

    return Operation(name, (f"layers.{number}.stream", *addends), (name,), run)


def _addends(number: int) -> tuple[str, ...]:
    """What a layer's last sum adds with norm=once: what entered it, and what its halves add."""
    return tuple(f"layers.{number}.{name}" for name in ("stream", "self_attn.o_proj", "mlp"))


def _unrounded_sum(x_TH: Tensor, attended_TH: Tensor, fed_TH: Tensor) -> tuple[Tensor, Tensor]:
    return residual_sum(x_TH, attended_TH, x_TH, fed_TH)


def _layer(number: int, layer: DecoderLayer, place: Place) -> Iterator[Operation]:
    prefix, following = f"layers.{number}.", f"layers.{number + 1}.stream"
    stream, normed, middle = f"{prefix}stream", f"{prefix}input_layernorm", f"{prefix}stream_mid"
    attention, after = f"{prefix}self_attn.", f"{prefix}post_attention_layernorm"
    yield _norm(normed, number, layer.input_layernorm)
    if isinstance(layer.self_attn, GroupedQueryAttention):
        yield from _grouped_query(attention, normed, layer.self_attn, place)
    else:
        assert isinstance(layer.self_attn, LatentAttention)
        yield from _latent(attention, normed, layer.self_attn, place)
    o_proj = layer.self_attn.get_submodule("o_proj")
    yield Operation(f"{attention}o_proj", (f"{attention}attn",), (f"{attention}o_proj",), lambda x: (o_proj(x),))
    add = layer.post_attention_layernorm.after_sum
    yield Operation(after, (stream, f"{attention}o_proj"), (middle, after), add)
    yield from _feed_forward(prefix, after, layer)
    last = f"{prefix}residual"
    if layer.post_attention_layernorm.once:
        yield Operation(last, _addends(number), (following,), lambda *addends: _unrounded_sum(*addends)[:1])
    else:
        yield Operation(last, (middle, f"{prefix}mlp"), (following,), lambda x, fed: (x + fed,))


def _grouped_query(prefix: str, normed: str, own: GroupedQueryAttention, place: Place) -> Iterator[Operation]:
    q, k, v = (f"{prefix}{name}_proj" for name in "qkv")
    yield Operation(
        f"{prefix}qkv_proj", (normed,), (q, k, v), lambda x: apply_together([own.q_proj, own.k_proj, own.v_proj], x)
    )
    heads = dict(zip("qkv", own.heads, strict=True))
    rounds_norm = own.norms_all_heads or not own.rotates_once
    """Whether the rotation sees the norm rounded."""

    def normed_heads(q_TO: Tensor, k_TO: Tensor) -> tuple[Tensor, ...]:
        assert own.q_norm is not None and own.k_norm is not None
        if own.norms_all_heads:
            return own.q_norm(q_TO), own.k_norm(k_TO)
        still = torch.ones_like(place.rope[0]), torch.zeros_like(place.rope[1])
        both = (q_TO.unflatten(1, heads["q"]), k_TO.unflatten(1, heads["k"]))
        return tuple(
            x.flatten(1)
            for x in norm_rotate(*both, own.q_norm.weight, own.k_norm.weight, own.eps, *still, own.rotates_once)
        )

    if own.q_norm is not None:
        names = f"{prefix}q_norm", f"{prefix}k_norm"
        yield Operation(f"{prefix}qk_norm", (q, k), names, normed_heads)
        q, k = names if rounds_norm else (q, k)

    def rotated(q_TO: Tensor, k_TO: Tensor) -> tuple[Tensor, ...]:
        both = (q_TO.unflatten(1, heads["q"]), k_TO.unflatten(1, heads["k"]))
        norms = (None, None) if rounds_norm else (own.q_norm, own.k_norm)
        q_weight, k_weight = (None if norm is None else norm.weight for norm in norms)
        turned = norm_rotate(*both, q_weight, k_weight, own.eps, *place.rope, own.rotates_once)
        return tuple(x.flatten(1) for x in turned)

    names = f"{prefix}q_rotary", f"{prefix}k_rotary"
    yield Operation(f"{prefix}rotary_emb", (q, k), names, rotated)

    def attended(*qkv: Tensor) -> tuple[Tensor, ...]:
        q_TND, k_TGD, v_TGD = (x.unflatten(1, heads[name]) for name, x in zip("qkv", qkv, strict=True))
        out_TND = attend(
            q_TND, k_TGD, v_TGD, place.sequences, own.backend, own.scale,
            window=own.window, sinks_N=own.sinks, engine=own.engine,
        )  # fmt: skip
        return (out_TND.flatten(1),)

    yield Operation(f"{prefix}attn", (*names, v), (f"{prefix}attn",), attended)


def _latent(prefix: str, normed: str, own: LatentAttention, place: Place) -> Iterator[Operation]:
    mla = own.mla
    first, kv_a = f"{prefix}{'q_proj' if mla.q_lora_rank is None else 'q_a_proj'}", f"{prefix}kv_a_proj_with_mqa"
    projection = own.get_submodule(first.rpartition(".")[2])
    assert isinstance(projection, Linear)
    yield Operation(
        f"{prefix}fused_qkv_a_proj",
        (normed,),
        (first, kv_a),
        lambda x: apply_together([projection, own.kv_a_proj_with_mqa], x),
    )
    query = first
    if mla.q_lora_rank is not None:
        q_norm, query = f"{prefix}q_a_layernorm", f"{prefix}q_b_proj"
        q_b_proj = own.get_submodule("q_b_proj")
        yield Operation(q_norm, (first,), (q_norm,), lambda x: (own.q_a_layernorm(x),))
        yield Operation(query, (q_norm,), (query,), lambda x: (q_b_proj(x),))
    kv_norm, kv_b = f"{prefix}kv_a_layernorm", f"{prefix}kv_b_proj"
    rank = mla.kv_lora_rank
    yield Operation(kv_norm, (kv_a,), (kv_norm,), lambda x: (own.kv_a_layernorm(x.split(rank, dim=-1)[0]),))
    yield Operation(kv_b, (kv_norm,), (kv_b,), lambda x: (own.kv_b_proj(x),))

    def attended(q_TO: Tensor, latents: Tensor, kv_TO: Tensor) -> tuple[Tensor, ...]:
        q_TND, kv_TNE = q_TO.unflatten(1, (mla.num_heads, mla.qk_head_dim)), kv_TO.unflatten(1, (mla.num_heads, -1))
        turning_TR = latents.split((rank, mla.qk_rope_head_dim), dim=-1)[1]
        qkv = latent_heads(q_TND, kv_TNE, turning_TR, *place.rope, interleaved=own.interleaved)
        return (attend(*qkv, place.sequences, own.backend, mla.softmax_scale, engine=own.engine).flatten(1),)

    yield Operation(f"{prefix}attn", (query, kv_a, kv_b), (f"{prefix}attn",), attended)


def _feed_forward(prefix: str, normed: str, layer: DecoderLayer) -> Iterator[Operation]:
    block, out, is_rounded = layer.mlp, f"{prefix}mlp", not layer.post_attention_layernorm.once
    if not isinstance(block, MoeBlock):
        yield Operation(out, (normed,), (out,), lambda x: (block(x),))
        return
    weights, ids, routed = (f"{out}.{name}" for name in ("topk_weights", "topk_ids", "experts"))

    def choose(x_TH: Tensor) -> tuple[Tensor, ...]:
        routing = block.gate(x_TH)
        return routing.weights_TK / block.gate.factor_of_weights, routing.experts_TK

    def compute(x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> tuple[Tensor, ...]:
        own_dtype = block.gate(x_TH[:1]).weights_TK.dtype
        weights_TK = weights_TK.to(own_dtype) * block.gate.factor_of_weights
        routed_TH = block.finish(x_TH, weights_TK, ids_TK)
        if is_rounded or block.gate.factor_of_output == 1.0:
            return (block.combined(routed_TH, None),)
        return (routed_TH.float() * block.gate.factor_of_output,)

    yield Operation(f"{out}.gate", (normed,), (weights, ids), choose)
    yield Operation(routed, (normed, weights, ids), (routed,), compute)
    if not block.has_shared:
        yield Operation(out, (routed,), (out,), lambda x: (x,))
        return
    name = f"{out}.shared_experts"
    yield Operation(name, (normed,), (name,), lambda x: (block.shared(x),))
    yield Operation(out, (routed, name), (out,), lambda x, y: (x + y if is_rounded else x.float() + y.float(),))
