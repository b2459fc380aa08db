"""Ends this process when its owner ends, however the owner ends and whatever this process is doing then.

Owns one small process that watches both through pidfds. The simpler ways fail: a busy process does not notice that its
parent was killed; a thread in it does not run while native code holds the interpreter (a regular expression that
backtracks forever); PR_SET_PDEATHSIG fires when the *thread* that started the child ends, and that may be a pool's
thread.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

OWNER_VARIABLE = "SLIPSTREAM_OWNER_PID"
"""Environment variable that tells an engine's processes the pid of their owner; not an option."""
_watches: set[tuple[int, int]] = set()
"""Pairs (process, owner): the process ends with its owner. A forked process also has its parent's pairs."""


def end_with(owner_pid: int, also_kill: Sequence[int] = ()) -> None:
    """End this process by SIGKILL as soon as process `owner_pid` is gone, and before it those of `also_kill`: a parent
    in between that does not watch the owner itself. If the owner is this process, or was given before, nothing is
    done."""
    if owner_pid == os.getpid() or (os.getpid(), owner_pid) in _watches:
        return
    _watches.add((os.getpid(), owner_pid))
    with contextlib.ExitStack() as opened:
        watched = [fd for pid in (*also_kill, os.getpid()) if (fd := _open(pid, opened)) is not None]
        owner = _open(owner_pid, opened)
        if owner is None:  # it died before this process was up
            _kill(watched)
            return
        # In a session of its own, so that Ctrl-C, which goes to our group, does not end it. It ends with this process.
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(owner), *map(str, watched)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(owner, *watched),
            start_new_session=True,
        ).returncode = 0  # nobody waits for it, and without this Popen would warn


def _open(pid: int, opened: contextlib.ExitStack) -> int | None:
    """A pidfd (a pid alone may be reused for another process). None: the process is gone."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    opened.callback(os.close, fd)
    return fd


def _watch(owner: int, watched: Sequence[int]) -> None:
    """Runs in the watching process. Waits until the owner or the last process of `watched` is gone."""
    poller = select.poll()
    for fd in (owner, watched[-1]):
        poller.register(fd, select.POLLIN)
    if owner in {fd for fd, _ in poller.poll()}:
        _kill(watched)


def _kill(watched: Sequence[int]) -> None:
    for fd in watched:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), [int(word) for word in sys.argv[2:]])
