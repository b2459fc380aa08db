"""Routes for the trainer's tests: what a decoder chose by itself, and others, drawn at random."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.moe.replay import RecordedRoutes
from slipstream.trainer.moe.router import Router, Routing


@contextmanager
def own_routes(decoder: Decoder) -> Iterator[list[Tensor]]:
    """A list that gets the experts of each layer's first forward inside the block, [T, K] each."""
    routers = [module for module in decoder.modules() if isinstance(module, Router)]
    chosen: dict[int, Tensor] = {}
    found: list[Tensor] = []

    def note(index: int, routing: Routing) -> None:
        chosen.setdefault(index, routing.experts_TK)

    hooks = [
        router.register_forward_hook(lambda _, __, routing, index=index: note(index, routing))
        for index, router in enumerate(routers)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        found += [chosen[index] for index in range(len(routers))]


def recorded(layers: list[Tensor], is_recorded_T: Tensor | None = None) -> RecordedRoutes:
    """As a microbatch carries them; of all tokens, unless said."""
    experts_TLK = torch.stack(layers, dim=1).to(torch.uint8)
    everyone = torch.ones(len(experts_TLK), dtype=torch.bool, device=experts_TLK.device)
    return RecordedRoutes(experts_TLK, everyone if is_recorded_T is None else is_recorded_T)


def drawn_routes(spec: ModelSpec, num_tokens: int, seed: int = 0) -> list[Tensor]:
    """For each layer with experts, K different ones of every token."""
    assert spec.moe is not None
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, spec.moe.num_experts)
    return [torch.rand(shape, generator=generator).argsort()[:, : spec.moe.top_k] for _ in range(sum(spec.moe.layers))]
