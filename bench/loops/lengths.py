"""How long the responses of a benchmark's job are: all the same, or most a tenth of the longest."""

import random
from collections.abc import Iterator

FIXED, LONG_TAILED = "fixed", "long-tailed"
SHORT_SHARE, LONG_EVERY = 0.1, 8
"""long-tailed: a response has this share of the longest one's tokens; one of this many has them all."""


def lengths(kind: str, longest: int, seed: int = 0) -> Iterator[int]:
    """Tokens of one response after the other, without an end."""
    draw = random.Random(seed)
    while True:
        is_long = kind == FIXED or draw.randrange(LONG_EVERY) == 0
        yield longest if is_long else max(1, round(SHORT_SHARE * longest))


def mean_length(kind: str, longest: int) -> float:
    """Expected tokens of a response."""
    short = max(1, round(SHORT_SHARE * longest))
    return float(longest) if kind == FIXED else short + (longest - short) / LONG_EVERY
