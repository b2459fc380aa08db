"""Which files processes have mapped."""

from pathlib import Path

import psutil


def maps_of(process: psutil.Process) -> str:
    """What a process has mapped; nothing where it has ended, or is another user's."""
    try:
        return Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return ""
