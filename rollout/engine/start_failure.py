"""What the processes of an engine that did not come up wrote before they ended.

Owns: finding it where stdout and stderr are files, and the line of it that says why. Does not own whose files these are
(Ray's of a worker, a server's own). An engine fails in a process of its own, which writes the reason and ends; whoever
waits for it learns no more than "See root cause above".
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence

MAX_BYTES = 1 << 18
"""Most that is read of one file, from its end."""
REFERRAL = "root cause"
"""In vLLM's errors that say no more than where another one was written."""


def cause_in(log: str) -> str:
    """The line of a log that says why: of its last error, or of the one that this refers to.

    An engine that does not come up says so in a process of its own; what waits for it then ends with "See root cause
    above". A validation error of pydantic has its text in the line after.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [at for at, line in enumerate(lines) if re.search(r"\w(Error|Exception)\b", line)]
    causes = [at for at in errors if REFERRAL not in lines[at]]
    if not errors:
        return lines[-1] if lines else "it said nothing"
    at = (causes or errors)[-1]
    return " ".join(lines[at : at + 2]) if "validation error" in lines[at] else lines[at]


def why_it_failed(error: Exception, log: str) -> str:
    """An engine's error; where it refers to the log, also what that says."""
    told = f"{type(error).__name__}: {error}"
    return f"{told}; the engine's process said: {cause_in(log)}" if REFERRAL in told and log.strip() else told


class OutputSince:
    """What this process and those that it starts write from now on, where that goes to files.

    Args:
        descriptors: Of stdout, then stderr: the plainer of two reports of one error is in stderr.
    """

    def __init__(self, descriptors: Sequence[int] = (1, 2)) -> None:
        self._starts: dict[int, int] = {}
        """Descriptor -> size of its file now. One of two descriptors of the same file."""
        files: set[tuple[int, int]] = set()
        for descriptor in descriptors:
            try:
                found = os.fstat(descriptor)
            except OSError:  # closed
                continue
            if stat.S_ISREG(found.st_mode) and (found.st_dev, found.st_ino) not in files:
                files.add((found.st_dev, found.st_ino))
                self._starts[descriptor] = found.st_size

    def read(self) -> str:
        """It; empty where nothing of it can be read."""
        parts: list[str] = []
        for descriptor, start in self._starts.items():
            try:
                with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # a place of its own in the file
                    size = os.fstat(file.fileno()).st_size
                    file.seek(max(start, size - MAX_BYTES) if size >= start else 0)
                    parts.append(file.read(MAX_BYTES).decode(errors="replace"))
            except OSError:  # closed, or of another user
                continue
        return "\n".join(parts)
