"""Which experts of a layer each ep_rank holds. Pure arithmetic: real ranks use it, and plans without real ranks.

    384 experts over 256 ep_ranks     layer 0, 2, ...: 1 2 1 2 ...     layer 1, 3, ...: 2 1 2 1 ...

If ep_size does not divide the number of experts, shares differ by one, and the larger ones move from layer to layer:
over ep_size / gcd(num_experts, ep_size) layers every ep_rank holds the same number.

Invariant: shares are ranges in order of ep_rank; they tile the experts.
"""

from itertools import pairwise


def expert_shares(num_experts: int, ep_size: int, layer: int) -> list[range]:
    """The experts of every ep_rank. Example: expert_shares(3, 2, layer=0) == [range(0, 1), range(1, 3)]."""
    turn = layer * (num_experts % ep_size) % ep_size
    edges = [(ep_rank * num_experts + turn) // ep_size for ep_rank in range(ep_size + 1)]
    return [range(first, stop) for first, stop in pairwise(edges)]
