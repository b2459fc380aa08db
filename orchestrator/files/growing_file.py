"""Whole lines of a file that grows, each read once.

Owns: what is a new line, a half-written one, and another file of the same name. Does not own: what lines say.
Invariant: a line is given once it ends; when the file has become shorter or another one (a resumed run writes its files
anew), all of its lines are given again, and `GrowingFile.news` says so.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slipstream.conf.json_files import JsonObject
from slipstream.orchestrator.files.row_files import figures_of, reader_of, say_left_out

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lines:
    """What has come since the last call."""

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
