"""The mixture-of-experts feed-forward: a router, routed experts, and what every token passes beside them.

Owns the modules, and how rows reach their experts. Does not own the order (trainer.model.layer's list of operations)
nor the arithmetic of the routed experts (experts.py).
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from slipstream.conf.architecture.moe_spec import SHARED_GATE
from slipstream.trainer.moe.dispatch import gathers, plan_dispatch, plan_gathered
from slipstream.trainer.moe.experts import Experts
from slipstream.trainer.moe.router import Router
from slipstream.trainer.recompute import recomputation


class MoeBlock(nn.Module):
    """Parameters: gate.* (the router), experts.* (this rank's experts), and where the family has them shared_experts.*
    (or shared_expert.*) and shared_expert_gate.*."""

    def __init__(
        self,
        gate: Router,
        experts: Experts,
        *,
        ep_group: dist.ProcessGroup | None,
        shares: list[int],
        shared: nn.Module | None,
        shared_gate: nn.Module | None,
        shared_name: str,
    ) -> None:
        """Args: `shares` are the experts of each ep_rank, `shared` is what every token passes, named `shared_name`, and
        `shared_gate` its gate; None: none."""
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.ep_group = ep_group
        self.shares = shares
        present = {name: one for name, one in ((shared_name, shared), (SHARED_GATE, shared_gate)) if one is not None}
        self._shared_names = list(present)
        for name, module in present.items():
            self.add_module(name, module)

    @property
    def shared(self) -> list[Any]:
        """The feed-forward that every token passes, and its gate; none of the two, or the first alone."""
        return [self.get_submodule(name) for name in self._shared_names]

    def run_experts(
        self,
        x_TH: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        keep_gate_up: Callable[[Tensor], object] | None = None,
        *,
        most_tokens: int | None = None,
        adapted: bool = True,
        merged: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run the routed experts, which keep little for backward if a recomputed part gave x_TH: the product of gate
        and up only with `keep_gate_up`, which is called with it. The other arguments are those of Experts.

        Args:
            most_tokens: The largest T of the ep_ranks; None: they did not tell each other, so that rows travel.
        """
        group, top_k, receive_x = self.ep_group, experts_TK.shape[1], None
        if group is not None and most_tokens is not None and gathers(group.size(), top_k, self.experts.combine_mode):
            plan, receive_x = plan_gathered(x_TH, experts_TK, weights_TK, group, self.shares, most_tokens)
        else:
            plan = plan_dispatch(experts_TK, sum(self.shares), group, self.shares)
        again = recomputation(x_TH)
        return self.experts(
            x_TH, weights_TK, plan, again, keep_gate_up, adapted=adapted, merged=merged, receive_x=receive_x
        )

    def combined(self, routed_TH: Tensor, shared_TH: Tensor | None = None) -> Tensor:
        """What the block adds to the residual stream, every step rounded."""
        scale = self.gate.factor_of_output
        routed_TH = routed_TH if scale == 1.0 else routed_TH * scale
        return routed_TH if shared_TH is None else routed_TH + shared_TH


def expert_shares(num_experts: int, ep_size: int, layer: int) -> list[range]:
    """Which experts of a layer each ep_rank holds: ranges in order of ep_rank, which tile the experts.

        384 experts over 256 ep_ranks     layer 0, 2, ...: 1 2 1 2 ...     layer 1, 3, ...: 2 1 2 1 ...

    If ep_size does not divide the number of experts, shares differ by one, and the larger ones move from layer to
    layer: over ep_size / gcd(num_experts, ep_size) layers every ep_rank holds the same number. Plans without real ranks
    use it, too.

    Example: expert_shares(3, 2, layer=0) == [range(0, 1), range(1, 3)].
    """
    turn = layer * (num_experts % ep_size) % ep_size
    edges = [(ep_rank * num_experts + turn) // ep_size for ep_rank in range(ep_size + 1)]
    return [range(first, stop) for first, stop in pairwise(edges)]
