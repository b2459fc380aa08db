"""A layer's feed-forward: its modules, and the list of their operations.

    normed stream --> dense                                                  mlp
    normed stream --> router --> experts        beside shared ones           mlp: gate, experts, shared_experts
    normed stream --> dense --> norm;  stream --> router, norm --> experts --> norm         mlp and moe (Gemma 4)

Owns which of its operations come before the routed experts, and are recomputed with the norm before them. Does not own
arithmetic (forward.py, trainer/moe).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from slipstream.conf.architecture.moe_spec import BESIDE_DENSE, NORMS_BESIDE_DENSE, MoeSpec
from slipstream.conf.schema import Rounding
from slipstream.trainer.lora import Linear
from slipstream.trainer.model.build import Build
from slipstream.trainer.model.operations import KEEP_GATE_UP, ROUTES, Operation, norm_of
from slipstream.trainer.moe.block import MoeBlock, expert_shares
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.moe.router import Router

WEIGHTS, IDS, FLIPPED = "mlp.topk_weights", "mlp.topk_ids", "mlp.num_flipped"
ROUTED, SHARED, FED = "mlp.experts", "mlp.shared_experts", "mlp"


class DenseMlp(nn.Module):
    """A SwiGLU (arXiv:2002.05202) or GELU for all tokens, [T, H] -> [T, H]."""

    def __init__(self, build: Build, width: int) -> None:
        super().__init__()
        hidden, given = build.spec.hidden_size, build.lora

        def linear(name: str, in_features: int, out_features: int) -> Linear:
            lora = given.for_mlp if given is not None and given.adapts_mlp(name) else None
            return Linear(in_features, out_features, weight_dtype=build.weight_dtype, lora=lora)

        self.gate_proj = linear("gate_proj", hidden, width)
        self.up_proj = linear("up_proj", hidden, width)
        self.down_proj = linear("down_proj", width, hidden)
        self.activates_once, self.has_gelu = build.numerics.dense_activation is Rounding.once, build.spec.has_gelu


@dataclass(frozen=True, slots=True)
class FeedForward:
    first: Sequence[Operation]
    """Those that are recomputed."""
    owners: Sequence[nn.Module]
    """Modules whose parameters they read."""
    last: Sequence[Operation]
    """The routed experts, and what needs their result."""
    fed: Sequence[str]
    """What the stream adds, by name."""
    block: MoeBlock | None = None


def make_feed_forward(layer: nn.Module, build: Build, number: int, normed: str, stream: str) -> FeedForward:
    """Give `layer` the modules that the spec asks for.

    Args:
        normed, stream: Names of the stream after attention, with and without its norm.
    """
    moe, mlp = build.spec.moe, None
    if moe is None or not moe.layers[number] or moe.is_beside_dense:
        mlp = DenseMlp(build, build.spec.intermediate_size)
        layer.add_module("mlp", mlp)
    if moe is None or not moe.layers[number]:
        assert mlp is not None
        return _dense(mlp, normed)
    block = _moe_block(build, moe, number)
    if mlp is None:
        layer.add_module("mlp", block)
        return _routed(block, normed, normed)
    layer.add_module(BESIDE_DENSE, block)
    norms = {name: build.norm() for name in NORMS_BESIDE_DENSE}
    for name, norm in norms.items():
        layer.add_module(name, norm)
    before, after_dense, after_experts = NORMS_BESIDE_DENSE
    dense, routed = _dense(mlp, normed), _routed(block, before, stream)
    inner = [norm_of(after_dense, norms[after_dense], FED), norm_of(before, norms[before], stream)]
    return FeedForward(
        first=[*dense.first, *routed.first, *inner],
        owners=[*dense.owners, *routed.owners, norms[after_dense], norms[before]],
        last=[*routed.last, norm_of(after_experts, norms[after_experts], ROUTED)],
        fed=[after_dense, after_experts],
        block=block,
    )


def _dense(mlp: DenseMlp, normed: str) -> FeedForward:
    feed = Operation(FED, (normed,), (FED,), lambda at, x: (at.by.feed_forward(mlp, x),))
    return FeedForward([feed], [mlp], [], [FED])


def _routed(block: MoeBlock, normed: str, routed_by: str) -> FeedForward:
    """Args: names of what experts read, and of what the router reads."""
    chosen, reads = (WEIGHTS, IDS, FLIPPED), (normed, WEIGHTS, IDS, KEEP_GATE_UP)
    owners = [block.gate, *block.shared]
    first = [Operation("mlp.gate", (routed_by, ROUTES), chosen, lambda at, *x: at.by.route(block, *x))]
    last = [Operation(ROUTED, reads, (ROUTED,), lambda at, *x: (at.by.experts(block, *x, at),))]
    if not block.shared:
        return FeedForward(first, owners, last, [ROUTED], block)
    first.append(Operation(SHARED, (normed,), (SHARED,), lambda at, x: (at.by.shared_experts(block, x),)))
    return FeedForward(first, owners, last, [ROUTED, SHARED], block)


def _moe_block(build: Build, moe: MoeSpec, number: int) -> MoeBlock:
    hidden_size, layout = build.spec.hidden_size, build.layout
    shares = expert_shares(moe.num_experts, layout.ep_size, number)
    own = shares[layout.ep_rank]
    experts = Experts(
        hidden_size=hidden_size,
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
    eps = build.spec.rms_norm_eps
    router = Router(moe, hidden_size, weight_dtype=build.weight_dtype, numerics=build.numerics, norm_eps=eps)
    return MoeBlock(
        router,
        experts,
        ep_group=layout.ep_group,
        shares=[len(share) for share in shares],
        shared=DenseMlp(build, moe.shared_intermediate_size) if moe.shared_intermediate_size else None,
        shared_gate=build.linear(hidden_size, 1) if moe.has_shared_gate else None,
        shared_name=moe.names.shared,
    )
