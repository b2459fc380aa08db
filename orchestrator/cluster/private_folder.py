"""The folder of a run, where socket_folder.py says: Ray's files, its token, and what processes put into TMPDIR.

    /tmp/slipstream-1a2b3c4d/   0700: Ray makes its own folders 0777, and this one is around them
      lock                      held (flock) by the processes that own the run; the kernel frees it when they are gone
      token                     Ray's authentication token, 0600
      shared_memory             names in /dev/shm that processes of the run have mapped
      ray/                      Ray's session: sockets and logs
      tmp/                      TMPDIR of everything that Ray starts
      controller                a socket: where another controller takes the run over (ray_host.py)
      fork_server.log           what the fork server of rollout workers printed

Owns: how that folder is made and removed, also that of a run whose processes were all killed; and the copy of the
logs. Does not own: processes (ray_host.py). Links are never followed.
Invariant: a folder is removed only by its owner, or where it belongs to this user and nobody holds its lock.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.orchestrator.cluster.processes import remove_shared_memory
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
        """Write down which names in /dev/shm go with this folder."""
        self._shared_memory.write_text("\n".join(sorted(names)))

    def keep_logs(self, target: Path) -> None:
        """Copy the logs, as far as there is room. Links are left out, and a copy is readable by the owner alone."""
        with contextlib.suppress(OSError):  # a full disk: why the run ends is what is to be reported
            target.mkdir(exist_ok=True)
            of_ray = self.ray.glob("session_2*/logs/*")  # session_latest is a link to the same
            for log in [*of_ray, self.fork_server_log]:
                _copy_regular_file(log, target / log.name)

    def remove(self) -> None:
        """Remove the folder and the shared memory that was noted in it."""
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
