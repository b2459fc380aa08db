"""The mixture-of-experts feed-forward: route, dispatch, experts, back, combine.

Owns the order; each step is a module of its own.

Invariant: a token's output depends on its experts' weights alone, not on which rank holds them or on who else is in
the batch (up to the kernels' own choice by row count).
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from trainer.moe.combine import combine
from trainer.moe.dispatch import dispatch, plan_dispatch, undispatch
from trainer.moe.experts import Experts
from trainer.moe.routing import Router


class MoeBlock(nn.Module):
    """Parameters: gate.* (the router), experts.* (this rank's experts), shared_experts.* where the family has them."""

    def __init__(
        self,
        gate: Router,
        experts: Experts,
        *,
        num_experts: int,
        ep_group: dist.ProcessGroup | None,
        shared_experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.num_experts = num_experts
        self.ep_group = ep_group
        self.shared_experts = shared_experts

    def forward(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        routing = self.gate(x_TH)
        plan = plan_dispatch(routing.experts_TK, self.num_experts, self.ep_group)
        rows_RH = self.experts(dispatch(x_TH, plan), plan.counts_e)
        out_TH = combine(undispatch(rows_RH, plan), routing.weights_TK, plan.row_of_slot_TK)
        return out_TH if self.shared_experts is None else out_TH + self.shared_experts(x_TH)
