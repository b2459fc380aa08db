"""samples.index: where each row of samples.jsonl is, and what it is filtered and sorted by.

    samples.jsonl   {...}\n{...}\n{...}\n{..          the last line may be half-written
    samples.index   [48 bytes][48 bytes]             may lack the newest rows, or be missing

Owns: the form of an entry (`ENTRY`), and reading both files in agreement. Does not own: what a row says (samples.py).
Invariant: `read_index` lists every whole row of samples.jsonl once, in order, whatever state the index is in. Entries
that do not fit the file are not believed; the rows behind the last one that does are read instead.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from slipstream.conf.json_files import JsonMapping, is_list, is_object

ENTRY = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u4"),
        ("step", "<u4"),
        ("kind", "u1"),
        ("flags", "u1"),
        ("num_turns", "<u2"),
        ("num_tokens", "<u4"),
        ("staleness", "<u4"),
        ("prompt_id", "<i4"),
        ("reward", "<f4"),
        ("advantage", "<f4"),
        ("k3", "<f4"),
        ("k3_max", "<f4"),
    ]
)
"""One row: its bytes (with the newline), its step, a number of KINDS, TRUNCATED and FAILED, and its figures, NaN where
there is none."""
Entries: TypeAlias = np.ndarray[Any, Any]
"""Of ENTRY."""
KINDS = ("training", "held-out")
TRUNCATED = 1
"""The response ended by length."""
FAILED = 2
"""There is no reward: it raised, timed out, or the episode failed."""
_READ_BYTES = 1 << 20


def entry_of(row: JsonMapping, offset: int, length: int) -> Entries:
    """The entry of one row of samples.jsonl. What a row lacks is NaN or 0; rows of other versions are read, too."""
    reward = row.get("reward")
    kind = row.get("kind")
    flags = TRUNCATED * (row.get("finish_reason") == "length") + FAILED * (reward is None)
    values = (
        offset,
        length,
        _whole(row.get("step"), 32),
        KINDS.index(kind) if kind in KINDS else 0,
        flags,
        min(len(turns) if is_list(turns := row.get("turns")) else 0, (1 << 16) - 1),
        _whole(row.get("num_tokens"), 32),
        _whole(row.get("staleness"), 32),
        _whole(row.get("prompt_id"), 31),
        _number(reward),
        _number(row.get("mean_advantage")),
        _number(row.get("k3")),
        _number(row.get("k3_max")),
    )
    return np.array([values], ENTRY)


def read_index(samples: Path, index: Path) -> Entries:
    """Entries of all whole rows. Never writes."""
    return extended(samples, _stored(index))


def extended(samples: Path, entries: Entries) -> Entries:
    """The entries that fit the file, and those of the whole rows behind them."""
    try:
        with samples.open("rb") as file:
            known = _believed(entries, samples.stat().st_size, file)
            end = int(known["offset"][-1] + known["length"][-1]) if len(known) else 0
            return np.concatenate([known, *scan(file, end)])
    except FileNotFoundError:
        return np.zeros(0, ENTRY)


def scan(file: BinaryIO, start: int) -> Iterator[Entries]:
    """Entries of the whole rows from byte `start` on. A line that is no row is left out."""
    file.seek(start)
    while line := file.readline():
        if not line.endswith(b"\n"):
            return
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if is_object(row) and isinstance(row.get("step"), int):
            yield entry_of(row, start, len(line))
        start += len(line)


def _stored(index: Path) -> Entries:
    try:
        content = index.read_bytes()
    except OSError:
        return np.zeros(0, ENTRY)
    return np.frombuffer(content[: len(content) // ENTRY.itemsize * ENTRY.itemsize], ENTRY)


def _believed(entries: Entries, size: int, file: BinaryIO) -> Entries:
    """The first entries, as far as they lie behind each other within the file and its rows end where the last says."""
    ends = entries["offset"] + entries["length"]
    starts = np.concatenate([np.zeros(1, np.uint64), ends[:-1]]) if len(entries) else ends
    wrong = np.flatnonzero((entries["offset"] < starts) | (entries["length"] == 0) | (ends > size))
    known = entries[: wrong[0]] if len(wrong) else entries
    for row in known[[0, -1]] if len(known) else ():
        file.seek(int(row["offset"]))
        line = file.read(int(row["length"]))
        try:
            step = json.loads(line)["step"] if line.endswith(b"\n") else None
        except (ValueError, TypeError, KeyError):
            step = None
        if step != row["step"]:
            return entries[:0]
    return known


def _whole(value: object, bits: int) -> int:
    return min(max(value, 0), (1 << bits) - 1) if isinstance(value, int) else 0


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
