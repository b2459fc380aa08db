"""Where each row of samples.jsonl is, and what it is filtered and sorted by: read from the rows, and kept in memory.

Owns: what is kept of a row (`ENTRY`). Does not own: what a row says (files/samples.py). Invariant: every whole row is
listed once, in order; a last line that is half-written is not there yet, and a line that is no row is left out.
"""

from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from slipstream.orchestrator.files.row_files import of_rows_alone

_WHOLE = ("offset", "length", "step", "kind", "flags", "num_turns", "num_tokens", "staleness", "prompt_id")
_FIGURES = ("reward", "advantage", "k3", "k3_max")
ENTRY = np.dtype([*((name, np.int64) for name in _WHOLE), *((name, np.float64) for name in _FIGURES)])
"""One row: its bytes (with the newline), its step, a number of KINDS, TRUNCATED and FAILED, and its figures, NaN where
there is none."""
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
    """The entries, and those of the rows behind them; all anew if the file is another one by now.

    Args:
        entries: From an earlier call, or empty.
    """
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
