"""The decoder's forward with the merged weights that engines hold, by the trainer's own kernels.

An engine of weight_sync.mode=merged computes with W + scale B A rounded to its format, and the trainer with W, A and B:
after a few steps this is most of what their log-probabilities differ by (docs/parity.md). Here a layer's values come
from merged weights, which end with the layer, and its gradients from W, A and B, of the same input and with the same
experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.engine_ops.published_weights import published_experts, published_linears
from trainer.lora import Linear
from trainer.model.decoder import Decoder, DecoderLayer, LastSum
from trainer.model.packed_sequences import PackedSequences
from trainer.moe.experts import Experts
from trainer.moe.replay import RecordedRoutes
from trainer.recompute import Recomputed


def compute_with_merged_adapters(decoder: Decoder) -> None:
    """Let a decoder take its values from merged weights from now on."""
    for layer in decoder.model.layers:
        assert isinstance(layer, DecoderLayer)
        layer.in_place = Recomputed(own_layer, [layer], first=_merged_layer)


def own_layer(
    layer: DecoderLayer,
    x_TH: Tensor,
    rope: tuple[Tensor, Tensor],
    sequences: PackedSequences,
    chosen: list[Tensor],
    _: LastSum,
) -> Tensor:
    """The layer by the trainer's own kernels, with those experts: its gradients."""
    routes = None
    if chosen:
        experts_TLK = chosen[0][:, None].expand(-1, layer.moe_index + 1, -1)
        routes = RecordedRoutes(experts_TLK, torch.ones_like(experts_TLK[:, 0, 0], dtype=torch.bool))
    return layer.own(x_TH, rope, sequences, routes, LastSum(), is_recomputed=False)


@torch.no_grad()
def _merged_layer(
    layer: DecoderLayer,
    x_TH: Tensor,
    rope: tuple[Tensor, Tensor],
    sequences: PackedSequences,
    chosen: list[Tensor],
    last_sum: LastSum,
) -> Tensor:
    """The layer's values. Puts the experts of each token into `chosen`, where the layer has experts."""
    chosen.clear()
    with _merged(layer, x_TH.dtype):
        return layer.own(x_TH, rope, sequences, None, last_sum, is_recomputed=False, chosen=chosen)


@contextmanager
def _merged(layer: DecoderLayer, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the layer's adapted modules compute with merged weights."""
    adapted = [
        module
        for module in layer.modules()
        if isinstance(module, Linear | Experts) and module.lora is not None and module.adapters_enabled
    ]
    try:
        for module in adapted:
            is_bank = isinstance(module, Experts)
            module.merged = published_experts(module, dtype) if is_bank else published_linears([module], dtype)[:1]
        yield
    finally:
        for module in adapted:
            module.merged = None
