"""Finds out why an engine did not come up, from what its processes wrote before they ended.

An engine fails in a process of its own, which writes the reason and ends; the process that waits for it only gets an
error "See root cause above".
Owns: reading what was written where stdout and stderr are files, and choosing the line that gives the reason. Does not
own these files (they are Ray's, or a served engine's log).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence

MAX_BYTES = 1 << 18
"""Most that is read of one file, from its end."""
REFERRAL = "root cause"
"""Words in those of vLLM's errors that only point at another one."""


def cause_in(log: str) -> str:
    """The line of a log that gives the reason: that of the last error which does not point at another one.

    A validation error of pydantic has its text in the next line, which is added.
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
    """Reads what this process and those that it starts write from now on, where that goes to files.

    Args:
        descriptors: Of stdout, then stderr. An error that is in both is plainer in stderr, and the last one counts.
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
        """What was written since; "" where it cannot be read."""
        parts: list[str] = []
        for descriptor, start in self._starts.items():
            try:
                with open(f"/proc/self/fd/{descriptor}", "rb") as file:  # a file position of our own
                    size = os.fstat(file.fileno()).st_size
                    file.seek(max(start, size - MAX_BYTES) if size >= start else 0)
                    parts.append(file.read(MAX_BYTES).decode(errors="replace"))
            except OSError:  # closed, or of another user
                continue
        return "\n".join(parts)
