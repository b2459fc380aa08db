"""Runs a process of user code and ends everything that it starts: `python -I -S keeper.py FD MAX_LOG_BYTES COMMAND...`.

    owner --stdin: closed when the process must end--> keeper --> process --> whatever it starts
                                                          ^  output of all of them     |
                                                          +----------------------------+

Owns: the process's descendants, also those that left its session or whose parents have ended, and the size of the log.
(The kernel hands orphans to the nearest ancestor that called itself a subreaper, as this process does; that needs no
privilege.) Does not own what the process does, nor the connection FD over which it answers, which is passed on.
Invariant: this process ends only when no process that its child started is left, except those of another user.
Uses only the standard library and does not import the package, because every process of user code has a keeper.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REAP_S = 1
"""How often ended orphans are reaped while the process runs."""
MAX_ROUNDS = 100
"""Rounds of stopping; in each one fewer processes are left that could start others."""
RETRY_S = 0.01
"""Time between two rounds of killing: a killed process takes a moment to hand on its children."""


def keep(fd: int, max_log_bytes: int, command: list[str]) -> int:
    """Run the command until it ends or stdin closes, then end all that it left. Returns its exit status, 128 + N after
    signal N. What it prints goes to stdout, a file, until that has `max_log_bytes` bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    output, theirs = os.pipe()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        pass_fds=(fd,),
        start_new_session=True,  # a signal that it sends to its own group does not reach this process
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    os.close(theirs)
    os.close(fd)
    os.set_blocking(output, False)
    poller = select.poll()
    for watched in (0, os.pidfd_open(process.pid), output):
        poller.register(watched, select.POLLIN)
    while process.returncode is None:
        ready = {fd for fd, _ in poller.poll(REAP_S * 1000)}
        if output in ready and not copy(output, 1, max_log_bytes):
            poller.unregister(output)
        _reap(process)
        if 0 in ready:
            break
    end_children(process)
    while copy(output, 1, max_log_bytes):
        pass
    status = process.returncode or 0
    return status if status >= 0 else 128 - status


def end_children(process: subprocess.Popen[bytes]) -> None:
    """Stop all descendants, then SIGKILL every child, take over their children, and so on, until only processes of
    another user are left.

    They are stopped first because a stopped process starts no other: of processes that fork as fast as they can, some
    are always younger than the list of those to kill. Only own children are killed: their pids cannot be reused before
    _reap() has waited for them.
    """
    seen: set[int] = set()
    for _ in range(MAX_ROUNDS):
        parents = _parents()
        new = _below(os.getpid(), parents) - seen
        for pid in new:
            _stop(pid, parents[pid])
        seen |= new
        if not new:
            break
    while _reap(process):
        can_end = False
        for child in [pid for pid, parent in _parents().items() if parent == os.getpid()]:
            with contextlib.suppress(PermissionError):  # it runs as another user, as under sudo
                os.kill(child, signal.SIGKILL)
                can_end = True
        if not can_end:
            return
        time.sleep(RETRY_S)


def _reap(process: subprocess.Popen[bytes]) -> bool:
    """Wait for all children that have ended. False: no child is left."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == process.pid:
                process.returncode = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        return False
    return True


def _stop(pid: int, parent: int) -> None:
    """SIGSTOP to a process that still has this parent. The descriptor keeps its pid from being another process's."""
    with contextlib.suppress(OSError):  # it ended, or runs as another user
        process = os.pidfd_open(pid)
        try:
            if _parent_of(pid) == parent:
                signal.pidfd_send_signal(process, signal.SIGSTOP)
        finally:
            os.close(process)


def _below(root: int, parents: dict[int, int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, todo = set[int](), [root]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found


def _parents() -> dict[int, int]:
    """The parent of every process of the machine, zombies included."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                parents[int(name)] = _parent_of(int(name))
    return parents


def _parent_of(pid: int) -> int:
    # "pid (name) state ppid ..."; a name may hold spaces and parentheses
    return int((Path("/proc") / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])


def copy(source: int, log: int, max_bytes: int) -> bool:
    """Append what one read of `source` gives to a file that several keepers append to, and drop what exceeds its size.
    False: there was nothing to read."""
    try:
        data = os.read(source, 1 << 16)
    except BlockingIOError:
        return False
    room = max_bytes - os.fstat(log).st_size
    if data and room > 0:
        if len(data) > room:
            data = data[:room] + b"\n[cut here: this file has reached its %d bytes]\n" % max_bytes
        with contextlib.suppress(OSError):  # on a full disk the output is lost, but the process goes on
            os.write(log, data)
    return bool(data)


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
