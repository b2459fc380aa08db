"""Where each row of samples.jsonl is, and what it is filtered and sorted by: read from the rows, and kept in memory;
and which rows a page shows, in which order.

Owns: what is kept of a row (`ENTRY`), filters and orders by name. Does not own: what a row says (files/samples.py,
run_reader.py). Invariant: every whole row is listed once, in order; a last line that is half-written is not there yet,
and a line that is no row is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.files.row_files import of_rows_alone

_WHOLE = ("offset", "length", "step", "kind", "flags", "num_turns", "num_tokens", "staleness", "prompt_id")
_FIGURES = ("reward", "advantage", "k3", "k3_max")
ENTRY = np.dtype([*((name, np.int64) for name in _WHOLE), *((name, np.float64) for name in _FIGURES)])
"""One row: bytes (with newline), step, numbers of KINDS, TRUNCATED and FAILED, and figures, NaN where there is none."""
Entries: TypeAlias = np.ndarray[Any, Any]
"""Rows of ENTRY."""
KINDS = ("training", "held-out")
TRUNCATED = 1
"""The response ended by length."""
FAILED = 2
"""There is no reward: it raised, timed out, or the episode failed."""


class _Row(msgspec.Struct):
    """What is read of a row. Rows of other versions may lack all but the step."""

    step: int
    kind: str = KINDS[0]
    finish_reason: str = ""
    turns: list[msgspec.Raw] = []
    num_tokens: int = 0
    staleness: int = 0
    prompt_id: int = 0
    reward: float | None = None
    mean_advantage: float | None = None
    k3: float | None = None
    k3_max: float | None = None


_DECODE = of_rows_alone(msgspec.json.Decoder(_Row).decode)


def extended(samples: Path, entries: Entries) -> Entries:
    """The entries, and those of the rows behind them; all anew if the file is another one by now. `entries`: From an
    earlier call, or empty."""
    try:
        with samples.open("rb") as file:
            if len(entries):
                file.seek(int(entries["offset"][-1]))
                last = _read(file.read(int(entries["length"][-1])))
                if last is None or last.step != entries["step"][-1]:
                    entries = entries[:0]
            start = int(entries["offset"][-1] + entries["length"][-1]) if len(entries) else 0
            file.seek(start)
            found: list[tuple[float, ...]] = []
            for line in file:
                if (row := _read(line)) is not None:
                    found.append(_entry(row, start, len(line)))
                start += len(line)
            return np.concatenate([entries, np.array(found, ENTRY)])
    except FileNotFoundError:
        return np.zeros(0, ENTRY)


def _read(line: bytes) -> _Row | None:
    return _DECODE(line) if line.endswith(b"\n") else None


def _entry(row: _Row, offset: int, length: int) -> tuple[float, ...]:
    flags = TRUNCATED * (row.finish_reason == "length") + FAILED * (row.reward is None)
    kind = KINDS.index(row.kind) if row.kind in KINDS else 0
    figures = (row.reward, row.mean_advantage, row.k3, row.k3_max)
    whole = (offset, length, row.step, kind, flags, len(row.turns), row.num_tokens, row.staleness, row.prompt_id)
    return *whole, *(np.nan if value is None else value for value in figures)


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
    """From the parameters of a URL. Raises ConfigError: one of them has a value that it cannot have."""
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
    """A parameter that is a whole number; None where it is not given. Raises ConfigError: it is something else."""
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
