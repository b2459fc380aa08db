"""What a reward counts while it judges one sample: the tokens that a judge read, the requests that it took.

    process: with counted() as counts: await reward(...)       reward: count("requests")

Owns which sample a count belongs to, also while many coroutines judge at the same time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

COUNTED = ("requests", "retries", "cached", "prompt_tokens", "completion_tokens")
"""Everything that a reward may count; metrics are named after it (orchestrator.metrics.catalogue)."""
_COUNTS: ContextVar[dict[str, float]] = ContextVar("counts")


def count(name: str, number: float = 1) -> None:
    """Add to the counts of the sample that is being judged; without effect outside of a reward process."""
    counts = _COUNTS.get({})
    counts[name] = counts.get(name, 0) + number


@contextmanager
def counted() -> Iterator[dict[str, float]]:
    """What is counted within the block, by this task alone."""
    counts: dict[str, float] = {}
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)
