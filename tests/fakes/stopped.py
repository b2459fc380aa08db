"""A process that is stopped, and not only told to stop.

SIGSTOP is on its way for milliseconds where cores are busy, in which the threads of a link still take bytes.
"""

import os
import signal
import time
from pathlib import Path

LIMIT_S = 20.0


def stop_process(pid: int) -> None:
    """Send SIGSTOP, and return when no thread of the process runs any more."""
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    while any(_state(thread) != "T" for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() - began < LIMIT_S, f"process {pid} did not stop"
        time.sleep(0.001)


def _state(thread: Path) -> str:
    """One letter, as in proc_pid_stat(5); a name in brackets, which may hold spaces, comes before it. T: stopped."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return "T"
