"""The mixture-of-experts feed-forward: route tokens, send rows to their experts, add the shared experts.

Owns the order, and the cut between the part that a checkpointed layer recomputes (`start`) and the part that it does
not (`finish`). The arithmetic of the routed experts is in routed.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn

from trainer.moe.dispatch import plan_dispatch
from trainer.moe.experts import Experts
from trainer.moe.replay import LayerRoutes
from trainer.moe.router import Router
from trainer.recompute import recomputation


class MoeBlock(nn.Module):
    """Parameters: gate.* (the router), experts.* (this rank's experts), shared_experts.* where the family has them."""

    def __init__(
        self,
        gate: Router,
        experts: Experts,
        *,
        num_experts: int,
        ep_group: dist.ProcessGroup | None,
        shares: Sequence[int] | None = None,
        shared_experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.num_experts = num_experts
        self.ep_group = ep_group
        self.shares = shares
        self.shared_experts = shared_experts

    @property
    def owners_of_start(self) -> list[nn.Module]:
        """Modules whose parameters `start` reads."""
        return [self.gate] if self.shared_experts is None else [self.gate, self.shared_experts]

    def forward(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        x_TH, weights_TK, experts_TK, shared_TH, _ = self.start(x_TH)
        return self.combined(self.finish(x_TH, weights_TK, experts_TK), shared_TH)

    def start(
        self, x_TH: Tensor, recorded: LayerRoutes | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """The part that a layer may recompute: tokens, their weights and experts, the shared experts' output; and with
        recorded routes, how many of them the router would not have chosen."""
        routing = self.gate(x_TH, recorded)
        shared_TH = None if self.shared_experts is None else self.shared_experts(x_TH)
        return x_TH, routing.weights_TK, routing.experts_TK, shared_TH, routing.num_flipped

    def finish(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Run the routed experts, which keep little for backward."""
        plan = plan_dispatch(experts_TK, self.num_experts, self.ep_group, self.shares)
        return self.experts(x_TH, weights_TK, plan, recomputation(x_TH))

    def combined(self, routed_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
        """What the block adds to the residual stream, every step rounded."""
        scale = self.gate.factor_of_output
        routed_TH = routed_TH if scale == 1.0 else routed_TH * scale
        return routed_TH if shared_TH is None else routed_TH + shared_TH
