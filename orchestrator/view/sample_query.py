"""Which samples a page shows, and in which order: from the index alone. Pure.

Owns: filters and orders by name. Does not own: the index (sample_index.py), the rows (run_reader.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.view.sample_index import FAILED, KINDS, TRUNCATED

ORDERS: dict[str, tuple[str, bool]] = {
    "newest": ("step", True),
    "oldest": ("step", False),
    "worst k3": ("k3", True),
    "worst token k3": ("k3_max", True),
    "highest reward": ("reward", True),
    "lowest reward": ("reward", False),
    "highest advantage": ("advantage", True),
    "lowest advantage": ("advantage", False),
    "longest": ("num_tokens", True),
    "shortest": ("num_tokens", False),
    "stalest": ("staleness", True),
}
"""Order -> (field of the index, whether the largest comes first). Samples without that figure come last."""
FLAGS = {"truncated": TRUNCATED, "failed": FAILED}
PAGE = 50


@dataclass(frozen=True, slots=True)
class SampleQuery:
    """What is asked for. Example: SampleQuery(order="worst k3", first_step=100, flags=TRUNCATED)."""

    order: str = "newest"
    kind: str = ""
    """One of KINDS; "": all."""
    flags: int = 0
    """All of these flags are set."""
    has_turns: bool = False
    """Only episodes of agents."""
    first_step: int = 0
    last_step: int | None = None
    prompt_id: int | None = None
    page: int = 0


def parse_query(words: Mapping[str, str]) -> SampleQuery:
    """From the parameters of a URL.

    Raises:
        ConfigError: one of them has a value that it cannot have.
    """
    order, kind = words.get("order", "newest"), words.get("kind", "")
    if order not in ORDERS:
        raise ConfigError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    if kind and kind not in KINDS:
        raise ConfigError(f"kind must be one of {', '.join(KINDS)} or nothing, got {kind!r}")
    return SampleQuery(
        order=order,
        kind=kind,
        flags=sum(flag for name, flag in FLAGS.items() if words.get(name) == "1"),
        has_turns=words.get("turns") == "1",
        first_step=whole(words, "first_step") or 0,
        last_step=whole(words, "last_step"),
        prompt_id=whole(words, "prompt_id"),
        page=whole(words, "page") or 0,
    )


def whole(words: Mapping[str, str], name: str) -> int | None:
    """A parameter that is a whole number; None where it is not given.

    Raises:
        ConfigError: it is something else.
    """
    word = words.get(name, "")
    if not word:
        return None
    if not (word.isascii() and word.isdigit()) or len(word) > 10:
        raise ConfigError(f"{name} must be a whole number, got {word!r}")
    return int(word)


def chosen(index: npt.NDArray[np.void], query: SampleQuery) -> npt.NDArray[np.intp]:
    """Numbers of all samples that are asked for, in order; equal ones newest first."""
    mask = index["step"] >= query.first_step
    if query.last_step is not None:
        mask &= index["step"] <= query.last_step
    if query.kind:
        mask &= index["kind"] == KINDS.index(query.kind)
    if query.flags:
        mask &= (index["flags"] & query.flags) == query.flags
    if query.has_turns:
        mask &= index["num_turns"] > 0
    if query.prompt_id is not None:
        mask &= index["prompt_id"] == query.prompt_id
    numbers = np.flatnonzero(mask)[::-1]
    name, is_descending = ORDERS[query.order]
    values = index[name][numbers].astype(np.float64)
    keys = np.where(np.isnan(values), np.inf, -values if is_descending else values)
    return numbers[np.argsort(keys, kind="stable")]
