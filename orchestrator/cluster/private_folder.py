"""The folder of a run, where socket_folder.py says: Ray's files, its token, and what processes put into TMPDIR. And how
processes are ended for certain, with the shared memory that they leave.

    /tmp/slipstream-1a2b3c4d/   0700: Ray makes its own folders 0777, and this one is around them
      lock                      held (flock) by the processes that own the run; the kernel frees it when they are gone
      token                     Ray's authentication token, 0600
      shared_memory             names in /dev/shm that processes of the run have mapped
      ray/                      Ray's session: sockets and logs
      tmp/                      TMPDIR of everything that Ray starts
      controller                a socket: where another controller takes the run over (ray_host.py)
      fork_server.log           what the fork server of rollout workers printed

Owns: how that folder is made and removed, also that of a run whose processes were all killed; the copy of the logs;
SIGKILL of process trees, names in /dev/shm, and the ends of adopted orphans. Does not own: which processes a run has
(nodes.py, ray_host.py), nor ending them politely. Links are never followed.
Invariants: a folder is removed only by its owner, or where it belongs to this user and nobody holds its lock. Of shared
memory only what a killed process had mapped is removed, so another run keeps its own.

Python's shared memory (vLLM makes some for every engine of several ranks) is removed by a process that Python starts
beside it, the resource tracker, as soon as nobody is left who uses it. It is therefore killed last, after a grace.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipstream.conf.whole_files import write_whole
from slipstream.orchestrator.files.run_folder import Inside
from slipstream.orchestrator.socket_folder import DOOR, socket_folder

_PREFIX = "slipstream-"
_UNLOCKED_AGE_S = 24 * 3600.0
"""Age at which a folder without a lock file is a dead process's: short-lived commands make such folders too."""


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """See the module's docstring. Example: PrivateFolder(Path("/tmp/slipstream-1a2b3c4d"))."""

    root: Path

    token = Inside("token")
    ray = Inside("ray")
    temporary = Inside("tmp")
    fork_server_log = Inside("fork_server.log")
    door = Inside(DOOR)
    _shared_memory = Inside("shared_memory")

    def note_shared_memory(self, names: set[str]) -> None:
        with contextlib.suppress(OSError):  # a full disk: what is noted stays, and whoever notes it holds the whole run
            write_whole(self._shared_memory, "\n".join(sorted(names)))

    def keep_logs(self, target: Path) -> None:
        """Copy the logs, as far as there is room. Links are left out, and a copy is readable by the owner alone."""
        with contextlib.suppress(OSError):  # a full disk: why the run ends is what is to be reported
            target.mkdir(exist_ok=True)
            of_ray = self.ray.glob("session_2*/logs/*")  # session_latest is a link to the same
            for log in [*of_ray, self.fork_server_log]:
                _copy_regular_file(log, target / log.name)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            remove_shared_memory(self._shared_memory.read_text().split())
        shutil.rmtree(self.root, ignore_errors=True)


def make_private_folder() -> tuple[PrivateFolder, int]:
    """A new folder with a new token. Returns it and the descriptor of its lock, which is held while that is open."""
    folder = PrivateFolder(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=socket_folder())))
    lock = os.open(folder.root / "locking", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(folder.root / "locking", folder.root / "lock")  # nobody ever sees a lock that is not held yet
    folder.ray.mkdir(mode=0o700)
    folder.temporary.mkdir(mode=0o700)
    with open(os.open(folder.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return folder, lock


def remove_folders_of_dead_runs() -> list[Path]:
    """Remove what runs left whose processes were all killed. Returns the folders that are gone now."""
    dead = [folder for folder, is_held in private_folders() if not is_held]
    for folder in dead:
        folder.remove()
    return [folder.root for folder in dead]


def private_folders() -> Iterator[tuple[PrivateFolder, bool]]:
    """Folders of this user's runs on this machine, and whether a process of the run is alive."""
    for root in sorted(socket_folder().glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):  # it is being removed
            facts = root.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
                continue
            try:
                lock = os.open(root / "lock", os.O_RDWR | os.O_NOFOLLOW)
            except FileNotFoundError:
                if time.time() - facts.st_mtime > _UNLOCKED_AGE_S:
                    yield PrivateFolder(root), False
                continue
            try:
                yield PrivateFolder(root), not _can_lock(lock)
            finally:
                os.close(lock)


def _can_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _copy_regular_file(source: Path, target: Path) -> None:
    """Copy a file that is neither a link nor empty; a target that is there already is replaced."""
    try:
        opened = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # a link, or a socket
        return
    facts = os.fstat(opened)
    if not stat.S_ISREG(facts.st_mode) or not facts.st_size:
        os.close(opened)
        return
    with open(opened, "rb") as file:
        target.unlink(missing_ok=True)
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
            shutil.copyfileobj(file, copy)


SHARED_MEMORY = Path("/dev/shm")
_TRACKER_GRACE_S = 2.0
_MAPPED_NAME = re.compile(
    r"/dev/shm/((?:psm_|sem\.mp-|torch_|nccl-|vllm_dist_)[^/\n]*?)(?: \(deleted\))?$", re.MULTILINE
)
"""Names that Python, torch, NCCL and vLLM make up. A file with another name may be the user's, such as a model."""


def end_processes(find: Callable[[], Iterable[psutil.Process]], *, timeout_s: float) -> list[int]:
    """SIGKILL what `find` finds until it finds nothing more, then remove the shared memory of those processes. `find`:
    called again and again: a process that is being killed may have just started another one. Returns pids of processes
    that are there still after `timeout_s`."""
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
    """Ask for the ends of children that this process has adopted, as a subreaper does, so that the dead ones go. `own`:
    children that it has started: whoever started one asks for its end, and would learn nothing any more."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):  # another thread has asked
            if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[str]:
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
