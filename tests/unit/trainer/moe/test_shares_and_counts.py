"""Promises of small parts of trainer/moe: uneven shares of experts even out over layers, and tokens without a recorded
route are in no count."""

from math import gcd

import pytest
import torch

from slipstream.trainer.moe.block import expert_shares
from slipstream.trainer.moe.replay import RecordedRoutes


@pytest.mark.parametrize(("num_experts", "ep_size"), [(3, 2), (6, 4), (10, 4), (12, 8), (384, 256)])
def test_every_ep_rank_holds_the_same_number_over_the_layers_of_a_turn(num_experts: int, ep_size: int) -> None:
    num_layers = ep_size // gcd(num_experts, ep_size)
    layers = [expert_shares(num_experts, ep_size, layer) for layer in range(num_layers)]
    for shares in layers:
        assert [expert for share in shares for expert in share] == list(range(num_experts))
    held = {sum(len(shares[rank]) for shares in layers) for rank in range(ep_size)}
    assert held == {num_experts * num_layers // ep_size}


@pytest.mark.parametrize("recorded", [[True, False, True], [True] * 3, [False] * 3])
def test_routings_are_counted_of_recorded_tokens_alone(recorded: list[bool]) -> None:
    routes = RecordedRoutes(torch.zeros(3, 2, 4, dtype=torch.uint8), torch.tensor(recorded))
    assert int(routes.num_routings) == sum(recorded) * 2 * 4
