"""Ends processes of a run for certain, and removes the shared memory that they had.

Owns: SIGKILL of process trees, the names in /dev/shm that processes leave there when they are killed, and the ends of
adopted orphans. Does not own: which processes a run has (nodes.py, ray_host.py), nor ending them politely
(rollout.worker, trainer.rank).
Invariant: of shared memory only what a killed process had mapped is removed, so another run keeps its own.

Python's shared memory (vLLM makes some for every engine of several ranks) is removed by a process that Python starts
beside it, the resource tracker, as soon as nobody is left who uses it. It is therefore killed last, after a grace.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
_TRACKER_GRACE_S = 2.0
_MAPPED_NAME = re.compile(
    r"/dev/shm/((?:psm_|sem\.mp-|torch_|nccl-|vllm_dist_)[^/\n]*?)(?: \(deleted\))?$", re.MULTILINE
)
"""Names that Python, torch, NCCL and vLLM make up. A file with another name may be the user's, such as a model."""


def end_processes(find: Callable[[], Iterable[psutil.Process]], *, timeout_s: float) -> list[int]:
    """SIGKILL what `find` finds until it finds nothing more, then remove the shared memory of those processes.

    Args:
        find: called again and again: a process that is being killed may have just started another one.

    Returns:
        Pids of processes that are there still after `timeout_s`.
    """
    started = time.monotonic()
    names: set[str] = set()
    while alive := [process for process in find() if _is_alive(process)]:
        names |= shared_memory_of(alive)
        waited_s = time.monotonic() - started
        if waited_s > timeout_s:
            break
        others = [process for process in alive if not _is_tracker(process)]
        for process in others or (alive if waited_s > _TRACKER_GRACE_S else []):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=0.1)
    remove_shared_memory(names)
    return sorted(process.pid for process in alive)


def reap_orphans(own: Collection[int]) -> None:
    """Ask for the ends of children that this process has adopted, as a subreaper does, so that the dead ones go.

    Args:
        own: children that it has started: whoever started one asks for its end, and would learn nothing any more.
    """
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):  # another thread has asked
            if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[str]:
    """Names in /dev/shm that these processes have mapped."""
    names: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            names.update(_MAPPED_NAME.findall(Path(f"/proc/{process.pid}/maps").read_text(errors="replace")))
    return names


def remove_shared_memory(names: Iterable[str]) -> None:
    """Remove those of these names that exist and belong to this user."""
    for name in names:
        with contextlib.suppress(OSError):  # its owner, or Python's tracker, was faster
            file = SHARED_MEMORY / name
            if file.lstat().st_uid == os.geteuid():
                file.unlink()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False
