"""What an engine's processes write while it starts: what it is doing, and why it did not come up.

An engine fails in a process of its own, which writes the reason and ends. The process that waits for it gets only the
error "See root cause above".
Owns: reading what was written where stdout and stderr are files, the lines of vLLM's log that begin a phase (0.25.1 and
0.32 write them at their default level; where the log is silent the phase stays `CONFIG`), and the line that gives the
reason. Does not own these files (they are Ray's, or a served engine's log).
"""

import os
import re
import stat
from collections.abc import Sequence

from slipstream.rollout.crash_reports import how_it_ended

MAX_BYTES = 1 << 18
"""The most bytes that are read of one file, from its end."""
REFERRAL = "root cause"
"""Words in vLLM errors that only refer to another error."""
_EXIT_BY_SIGNAL = re.compile(r"proc\(s\): .*': (-\d+)")
"""What else they say. Example: "Failed core proc(s): {'EngineCore': -9}"."""
IMPORTING = "importing vLLM"
"""Before the engine is started."""
CONFIG = "reading the model's config"
"""Before vLLM's first line: the model's class is imported, too."""
_BEGINS_WITH = (
    ("Resolved architecture", "starting the engine's process"),
    ("Initializing a V1 LLM engine", "preparing the device"),
    ("Starting to load model", "building the model"),
    ("Model loading took", "compiling, and measuring memory"),
    ("Available KV cache memory", "warming up kernels and capturing CUDA graphs"),
    ("init engine (profile", "answering"),
)
"""(words of a line, the phase that begins with it), in the order in which a start comes to them."""


def cause_in(log: str) -> str:
    """The line of a log that gives the reason: its last error, or else its last line."""
    return last_error_in(log) or (log.strip().splitlines() or ["it said nothing"])[-1]


def last_error_in(log: str) -> str:
    """The last error of a log that does not refer to another one; "" if there is none. A validation error of pydantic
    has its text in the next line, so that line is added."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [at for at, line in enumerate(lines) if re.search(r"\w(Error|Exception)\b", line)]
    causes = [at for at in errors if REFERRAL not in lines[at]]
    if not errors:
        return ""
    at = (causes or errors)[-1]
    return " ".join(lines[at : at + 2]) if "validation error" in lines[at] else lines[at]


def why_it_failed(error: Exception, log: str) -> str:
    """An engine's error; if it refers to the log, with the reason from the log. A signal that ended the process is a
    reason, and what was logged before it none."""
    told = f"{type(error).__name__}: {error}"
    if REFERRAL not in told:
        return told
    if killed := _EXIT_BY_SIGNAL.search(told):
        return f"its process {how_it_ended(int(killed[1]))}"
    return f"{told}; the engine's process said: {cause_in(log)}" if log.strip() else told


def phase_in(log: str) -> str:
    """The latest phase of which the first line is there."""
    return next((phase for words, phase in reversed(_BEGINS_WITH) if words in log), CONFIG)


class OutputSince:
    """Reads what this process and its children write from now on, if they write to files. (stdout comes first: the last
    error counts, and if both have it, stderr says it more plainly.)"""

    def __init__(self, descriptors: Sequence[int] = (1, 2)) -> None:
        self._starts: dict[int, int] = {}
        """Descriptor -> size of its file at the start. If both descriptors are of one file, only one is here."""
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
        """What was written since; "" if it cannot be read."""
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
