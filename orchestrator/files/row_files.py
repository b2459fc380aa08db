"""Files of JSON lines, however long they are: metrics.jsonl, timeline.jsonl, evaluations.jsonl, and others of a run.

    all rows, but a few names of each   read_rows(path, names)   one pass; what is not asked for is never built
    the same of figures by step         read_figures(path, names)
    the newest rows, whole              last_rows(path, most)    from the end
    rows of work that is redone         cut_rows(path, ...), end_of_rows(file, ...)      from the end
    what has been added since           GrowingFile(path).news()   each whole line once

Owns: reading and cutting. Does not own: what rows say, who writes them (telemetry.py). Invariants: a last line that a
crash cut short, and a line that is no row (a disk that lost power leaves zeros), count as not there; so do a row
without a step where rows are of steps, and a figure that is no number (a hand has written it). When a file that grows
has become shorter or another one (a resumed run writes its files anew), all of its lines are given again.
"""

import logging
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypedDict, TypeVar

import msgspec

from slipstream.conf.json_files import JsonObject
from slipstream.conf.plural import counted

logger = logging.getLogger(__name__)

ReadRow: TypeAlias = Callable[[bytes], JsonObject | None]
T = TypeVar("T")
_BLOCK_BYTES = 1 << 20
_COPY_BYTES = 16 << 20
_HALF_A_PAIR = re.compile(rb"(\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|\\u[dD][89a-fA-F]..")
"""The first alternative stays as it is: an escaped backslash, or a whole pair."""


def read_rows(path: Path, names: Collection[str] | None = None) -> list[JsonObject]:
    """All rows, or what they have of these names."""
    return rows_read_by(path, reader_of(names))


def rows_read_by(path: Path, read: Callable[[bytes], T | None]) -> list[T]:
    """What `read` makes of each whole line, without the lines of which it makes None."""
    try:
        with path.open("rb") as file:
            found = [read(line) for line in file if line.endswith(b"\n")]
    except FileNotFoundError:
        return []
    rows = [row for row in found if row is not None]
    say_left_out(path, len(found) - len(rows))
    return rows


def say_left_out(path: Path, num_lines: int) -> None:
    """Warn of lines that could not be read, so that nobody takes figures without them for whole ones."""
    if num_lines:
        logger.warning("%s: left out %s, damaged by a crash or a hand", path, counted(num_lines, "line"))


def read_figures(path: Path, names: Collection[str] | None = None) -> list[JsonObject]:
    """All rows of metrics.jsonl or evaluations.jsonl, or what they have of these names and their steps."""
    rows = read_rows(path, None if names is None else {"step", *names})
    return [figures for row in rows if (figures := figures_of(row)) is not None]


def figures_of(row: JsonObject) -> JsonObject | None:
    """The row with None for what is no number; None of a row that says no step."""
    if not isinstance(row.get("step"), int):
        return None
    return {name: value if isinstance(value, int | float) else None for name, value in row.items()}


def last_rows(path: Path, most: int) -> list[JsonObject]:
    """The newest ones of metrics.jsonl or evaluations.jsonl, in step order."""
    read = reader_of(None)
    try:
        with path.open("rb") as file:
            return [row for _, row in islice(_rows_backwards(file, read), most)][::-1]
    except FileNotFoundError:
        return []


def cut_rows(path: Path, *, after_step: int, names: Collection[str] = ()) -> list[JsonObject]:
    """Remove rows of later steps from a file in step order, atomically: a step is there once, however often a run
    resumed. Returns what the removed ones had of these names."""
    read = reader_of({"step", *names})
    removed: deque[JsonObject] = deque()
    try:
        with path.open("rb") as file:
            kept_bytes = 0
            for end, row in _rows_backwards(file, read):
                if row["step"] <= after_step:
                    kept_bytes = end
                    break
                removed.appendleft(row)
            if kept_bytes < file.seek(0, os.SEEK_END):
                _keep_first(path, file, kept_bytes)
    except FileNotFoundError:
        return []
    return list(removed)


def end_of_rows(file: BinaryIO, after_step: int) -> int:
    """Bytes of a file in step order up to the rows of later steps."""
    read = reader_of({"step"})
    return next((end for end, row in _rows_backwards(file, read) if row["step"] <= after_step), 0)


def _rows_backwards(file: BinaryIO, read: ReadRow) -> Iterator[tuple[int, JsonObject]]:
    """(where it ends, figures) of each line that is a row of a step, the last one first."""
    rows = ((end, row) for end, line in _backwards(file) if (row := read(line)) is not None)
    return ((end, figures) for end, row in rows if (figures := figures_of(row)) is not None)


def _keep_first(path: Path, file: BinaryIO, num_bytes: int) -> None:
    """Another file takes its place: whoever reads what is added (GrowingFile) sees that it is another one."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as kept:
        file.seek(0)
        shutil.copyfileobj(file, kept, _COPY_BYTES)
        kept.truncate(num_bytes)
    partial.replace(path)


def reader_of(names: Collection[str] | None) -> ReadRow:
    """Reads a line: a row, or these names of it; None of what is no row."""
    made: Any = TypedDict  # its fields are known now, and to no type checker
    kind = dict[str, Any] if names is None else made("Part", dict.fromkeys(names, Any), total=False)
    return of_rows_alone(msgspec.json.Decoder(kind).decode)


def of_rows_alone(decode: Callable[[bytes], T]) -> Callable[[bytes], T | None]:
    """Decodes a line, or returns None if it is no row. Half of a surrogate pair, which a user's text may hold and
    msgspec refuses, is read as U+FFFD."""

    def read(line: bytes) -> T | None:
        for text in (line, _HALF_A_PAIR.sub(lambda found: found[1] or rb"\ufffd", line)):
            with suppress(msgspec.DecodeError):
                return decode(text)
        return None

    return read


def _backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(where it ends, line) of each whole line, the last one first."""
    begin, rest = file.seek(0, os.SEEK_END), b""
    while begin > 0:
        size = min(begin, _BLOCK_BYTES)
        begin = file.seek(begin - size)
        block = file.read(size) + rest
        # What stands before the first line's end has begun in an earlier block.
        num_rest = (block.find(b"\n") + 1 or len(block)) if begin > 0 else 0
        end = begin + len(block)
        for line in reversed(block[num_rest:].splitlines(keepends=True)):
            if line.endswith(b"\n"):
                yield end, line
            end -= len(line)
        rest = block[:num_rest]


@dataclass(frozen=True, slots=True)
class Lines:
    path: Path
    is_another_file: bool
    """Whether the lines given before are void."""
    lines: list[tuple[int, bytes]]
    """(offset, line)."""


class GrowingFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None
        self._end = 0

    def news(self) -> Lines:
        """Whole lines since the last call; none of a file that is not there."""
        try:
            with self.path.open("rb") as file:
                stat = self.path.stat()
                identity = (stat.st_dev, stat.st_ino)
                is_another = self._identity is not None and (identity != self._identity or stat.st_size < self._end)
                self._identity = identity
                if is_another:
                    self._end = 0
                file.seek(self._end)
                lines: list[tuple[int, bytes]] = []
                for line in file:
                    if line.endswith(b"\n"):
                        lines.append((self._end, line))
                        self._end += len(line)
        except OSError:
            was_there, self._identity, self._end = self._identity is not None, None, 0
            return Lines(self.path, was_there, [])
        return Lines(self.path, is_another, lines)


def objects(lines: Lines, names: Collection[str] | None = None) -> Iterator[tuple[int, JsonObject]]:
    """(offset, object, or what it has of these names) of each line that is a JSON object; others are left out."""
    return rows_by(lines, reader_of(names))


def rows_by(lines: Lines, read: Callable[[bytes], T | None]) -> Iterator[tuple[int, T]]:
    """(offset, what `read` makes of it) of each line; those of which it makes None are left out, which the log says."""
    found = [(offset, read(line)) for offset, line in lines.lines]
    rows = [(offset, row) for offset, row in found if row is not None]
    say_left_out(lines.path, len(found) - len(rows))
    return iter(rows)


def figures(lines: Lines, names: Collection[str] | None = None) -> Iterator[JsonObject]:
    """The rows of steps among them, as row_files.figures_of() gives them."""
    return (found for _, row in objects(lines, names) if (found := figures_of(row)) is not None)
