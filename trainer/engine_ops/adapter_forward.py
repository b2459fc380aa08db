"""Linears and experts in the engine's operations, for engines that add adapters to the base (weight_sync.mode=adapter).

Beside it: MergedModules of engine_forward.py, for engines whose weights have the adapters in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from trainer.engine_ops.published_adapters import PublishedAdapters
from trainer.engine_ops.published_weights import base_experts, base_linears, is_adapted
from trainer.lora import Linear
from trainer.moe.experts import Experts

if TYPE_CHECKING:
    from trainer.engine_ops.vllm_adapters import VllmAdapters
    from trainer.engine_ops.vllm_operations import VllmOperations


class AdapterModules:
    """Base weights, and adapters as a publish would write them into a slot now.

    Args:
        operations: Of the base.
        adapters: What adds adapters.
        slot_rank: Rank of the engine's slots.
    """

    def __init__(self, operations: VllmOperations, adapters: VllmAdapters, slot_rank: int) -> None:
        self._ops, self._adapters = operations, adapters
        self._published = PublishedAdapters(slot_rank)

    def linears(self, linears: Sequence[Linear], x: Tensor, *, adapted: bool) -> Tensor:
        """Outputs of linears of one input, side by side."""
        out = self._ops.linear(x, *base_linears(linears, x.dtype))
        if not adapted or not any(is_adapted(linear) for linear in linears):
            return out
        return self._adapters.add(out, x, self._published.linears(linears, x.dtype))

    def row_parallel(self, linear: Linear, x: Tensor, *, adapted: bool) -> Tensor:
        """As any linear: such an engine has one rank (conf.checks)."""
        return self.linears([linear], x, adapted=adapted)

    def experts(self, bank: Experts, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, adapted: bool) -> Tensor:
        """The weighted sum of each token's experts."""
        weights = base_experts(bank, x_TH.dtype)
        if not adapted or not is_adapted(bank):
            return self._ops.experts(x_TH, *weights, weights_TK, experts_TK)
        adapters = self._published.experts(bank, x_TH.dtype)
        return self._adapters.experts(x_TH, weights, adapters, weights_TK, experts_TK)
