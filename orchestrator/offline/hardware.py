"""The cluster that `slipstream plan` plans for, from the flags of the command.

Owns: their checks. Does not own: what rates mean (weight_sync/prediction/links.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.weight_sync.prediction.links import LinkRates

CHANGED, CHANGED_FP8 = 0.01, 0.001
"""Those of LoRA at lr 1e-5, in bfloat16 and in block-FP8 (docs/measurements.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The cluster that is planned for; flags of `slipstream plan`."""

    rates: LinkRates = field(default_factory=LinkRates)
    ranks_per_node: int = 8
    slow_ranks: Mapping[int, float] = field(default_factory=dict[int, float])
    """Trainer rank -> how many times slower its links and its memory are."""
    adapter_decode_loss: float = 0.19
    """Part of its decode speed that an engine loses by serving an adapter of all experts; vLLM 0.25.1 on one H200, r=32
    on 128 experts, 256 requests: 0.11, 0.19 and 0.27 in three runs (bench/results/adapter_sync-gpu*.json)."""
    changed: float | None = None
    """Share of the elements that a publish of changes sends; None: CHANGED, for block-FP8 engines CHANGED_FP8."""
    layout_cache: Path | None = None
    """Folder of recorded engine layouts; None: the user's cache."""

    def __post_init__(self) -> None:
        if self.changed is not None and not 0 <= self.changed <= 1:
            raise ConfigError(f"--changed is a share of all elements, in [0, 1], got {self.changed:g}")


def parse_slow_ranks(words: Sequence[str]) -> dict[int, float]:
    """Slow ranks from the words of the command line. Example: parse_slow_ranks(["3=2.5"])."""
    slow: dict[int, float] = {}
    for word in words:
        rank, _, factor = word.partition("=")
        try:
            slow[int(rank)] = float(factor)
        except ValueError as error:
            raise ConfigError(f"--slow-rank takes RANK=FACTOR, for example 3=2.5, got {word!r}") from error
        if not 1 <= slow[int(rank)] < float("inf"):
            raise ConfigError(f"--slow-rank: a slow rank is at least 1 times slower, got {word!r}")
    return slow
