"""A process that ends when another one does, however that one ends.

Owns one watcher thread. A child that is busy with its own work never notices that its parent was killed; the kernel
does, and a pidfd becomes readable. Callers: reward processes and engine processes, first thing.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Sequence

OWNER_VARIABLE = "SLIPSTREAM_OWNER_PID"
"""Environment variable through which an engine's processes learn whom to live with; not an option."""


def end_with(owner_pid: int, also_kill: Sequence[int] = ()) -> None:
    """End this process by SIGKILL as soon as process `owner_pid` is gone.

    Args:
        owner_pid: The process to live with.
        also_kill: Processes to kill first: an intermediate parent that does not watch for itself.
    """
    try:
        owner_fd = os.pidfd_open(owner_pid)
    except ProcessLookupError:  # it died before this process was up
        _kill(also_kill)
        return
    threading.Thread(target=_wait_and_kill, args=(owner_fd, also_kill), name="lifeline", daemon=True).start()


def _wait_and_kill(owner_fd: int, also_kill: Sequence[int]) -> None:
    poller = select.poll()
    poller.register(owner_fd, select.POLLIN)
    poller.poll()
    _kill(also_kill)


def _kill(also_kill: Sequence[int]) -> None:
    for pid in (*also_kill, os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
