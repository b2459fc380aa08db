"""Fixed bins in which ranks count the mismatch of tokens, so that counts of ranks and microbatches add up.

Owns: the edges, and how a quantile is read from counts. Does not own the counting (mismatch.py). Needs no torch: the
controller's process reads the counts.
"""

from collections.abc import Sequence

LOWEST_K3_EXPONENT = -16
"""A float32 log-probability is rounded to about 1e-7 of itself, which is a k3 of 1e-14: below 1e-16 is 0."""
HIGHEST_K3_EXPONENT = 9
"""k3 of the largest log-ratio that is told apart (corrections.LOG_RATIO_BOUND) is 4.9e8."""
BINS_PER_DECADE = 16
NUM_K3_BINS = (HIGHEST_K3_EXPONENT - LOWEST_K3_EXPONENT) * BINS_PER_DECADE
POSITION_STARTS = (0, 16, 64, 256, 1024, 4096, 16384)
"""First position of each range of positions in a response, in tokens; the last range is open."""


def upper_edge(index: int) -> float:
    """The k3 below which the tokens of a bin and of all bins before it lie."""
    return 10.0 ** (LOWEST_K3_EXPONENT + (index + 1) / BINS_PER_DECADE)


def quantile(counts: Sequence[float], share: float) -> float | None:
    """A bound on the `share`-quantile: at least that share of the counted tokens has a k3 below it. It is the upper
    edge of the quantile's bin, so at most 10 ** (1 / BINS_PER_DECADE) = 1.155 times the quantile itself. None when
    nothing was counted."""
    wanted = share * sum(counts)
    if wanted <= 0:
        return None
    reached = 0.0
    for index, count in enumerate(counts):
        reached += count
        if reached >= wanted:
            return upper_edge(index)
    return upper_edge(len(counts) - 1)
