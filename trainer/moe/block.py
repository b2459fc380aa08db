"""The mixture-of-experts feed-forward: route tokens, send rows to their experts, add the shared experts.

Owns the order, and the cut between the part that a checkpointed layer recomputes (`start`) and the part that it does
not (`finish`). The arithmetic of the routed experts is in routed.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from conf.architecture.model_spec import SHARED_GATE
from trainer.moe.dispatch import plan_dispatch
from trainer.moe.experts import Experts
from trainer.moe.replay import LayerRoutes
from trainer.moe.router import Router
from trainer.recompute import recomputation


class MoeBlock(nn.Module):
    """Parameters: gate.* (the router), experts.* (this rank's experts), and where the family has them shared_experts.*
    (or shared_expert.*) and shared_expert_gate.*."""

    def __init__(
        self,
        gate: Router,
        experts: Experts,
        *,
        num_experts: int,
        ep_group: dist.ProcessGroup | None,
        shares: Sequence[int] | None = None,
        shared: nn.Module | None = None,
        shared_gate: nn.Module | None = None,
        shared_name: str = "shared_experts",
    ) -> None:
        """Args: `shared` is what every token passes, named `shared_name`, and `shared_gate` its gate; None: none."""
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.num_experts = num_experts
        self.ep_group = ep_group
        self.shares = shares
        present = {name: one for name, one in ((shared_name, shared), (SHARED_GATE, shared_gate)) if one is not None}
        self._shared_names = list(present)
        for name, module in present.items():
            self.add_module(name, module)

    @property
    def owners_of_start(self) -> list[nn.Module]:
        """Modules whose parameters `start` reads."""
        return [self.gate, *map(self.get_submodule, self._shared_names)]

    @property
    def has_shared(self) -> bool:
        """Whether every token passes some experts."""
        return bool(self._shared_names)

    def shared(self, x_TH: Tensor) -> Tensor:
        """What the shared experts give, every step rounded."""
        fed_TH, *factors = (self.get_submodule(name)(x_TH) for name in self._shared_names)
        return factors[0].sigmoid() * fed_TH if factors else fed_TH

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
        shared_TH = self.shared(x_TH) if self.has_shared else None
        return x_TH, routing.weights_TK, routing.experts_TK, shared_TH, routing.num_flipped

    def finish(
        self,
        x_TH: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        keep_gate_up: Callable[[Tensor], object] | None = None,
    ) -> Tensor:
        """Run the routed experts, which keep little for backward if `start` is recomputed: the product of gate and up
        only with `keep_gate_up`, which is called with it."""
        plan = plan_dispatch(experts_TK, self.num_experts, self.ep_group, self.shares)
        return self.experts(x_TH, weights_TK, plan, recomputation(x_TH), keep_gate_up)

    def combined(self, routed_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
        """What the block adds to the residual stream, every step rounded."""
        scale = self.gate.factor_of_output
        routed_TH = routed_TH if scale == 1.0 else routed_TH * scale
        return routed_TH if shared_TH is None else routed_TH + shared_TH
