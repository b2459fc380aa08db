"""Sizes of CUDA graphs: what microbatches share that one graph serves, and how they are padded to it.

Owns the rules, which are the same on every rank. Does not own graphs (graphs.py).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.trainer.model.attention.flash_attention import padded_length
from slipstream.trainer.model.packed_sequences import LONG
from slipstream.trainer.types import Extent

FEWEST_SEQUENCES = 8
"""A padded microbatch has at least as many, empty ones included."""
SHORTEST = 128
"""The least bound in tokens on the sequences of a padded microbatch."""


@dataclass(frozen=True, slots=True)
class GraphSize:
    """What two microbatches share that one graph serves."""

    num_tokens: int
    num_sequences: int
    longest: int
    """Tokens of a sequence, at most."""
    starts: tuple[int, ...] | None
    """None: any lengths, by padding."""
    has_routes: bool


def graph_size(
    starts: tuple[int, ...], *, has_routes: bool, has_cudnn: bool, extents: Sequence[Extent] = ()
) -> GraphSize | None:
    """The size of the graph for a microbatch; None: it has none.

    Args:
        starts: First token of each sequence, and the number of tokens at the end.
        has_cudnn: Whether long sequences go through cuDNN.
        extents: Of every rank's microbatch, which one size serves; of one rank or empty: of this one's alone.

    Example: graph_size((0, 100, 180), has_routes=False, has_cudnn=True) is of 256 tokens in 8 sequences of at most 128.
    """
    num_tokens, num_sequences = starts[-1], len(starts) - 1
    longest = max((stop - start for start, stop in itertools.pairwise(starts)), default=0)
    several = extents if len(extents) > 1 else [Extent(num_tokens, num_sequences, longest, has_routes)]
    if has_cudnn and any(one.num_tokens >= LONG * one.num_sequences for one in several):
        return GraphSize(num_tokens, num_sequences, longest, starts, has_routes) if len(several) == 1 else None
    padded_tokens = padded_length(max(one.num_tokens for one in several))
    longest = _power_of_2(max(SHORTEST, *(one.longest for one in several)))
    num_sequences = max(one.num_sequences - (one.num_tokens - padded_tokens) // longest for one in several)
    num_sequences = _power_of_2(max(num_sequences, FEWEST_SEQUENCES))
    return GraphSize(padded_tokens, num_sequences, longest, None, any(one.has_routes for one in several))


def padded_starts(starts: tuple[int, ...], size: GraphSize) -> tuple[int, ...]:
    """Starts of a microbatch with the sequences that pad it to this size, and empty ones.

    Example: (0, 100, 180) of the size above gives (0, 100, 180, 256, 256, 256, 256, 256, 256).
    """
    more = [*range(starts[-1], size.num_tokens, size.longest)[1:], size.num_tokens]
    return (*starts, *more, *[size.num_tokens] * size.num_sequences)[: size.num_sequences + 1]


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()
