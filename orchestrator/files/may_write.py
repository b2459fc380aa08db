"""Why this process may not, or cannot, write into a run's folder: another one goes on with the run, or the disk is
full or gone.

Whose a run is says a word in control/alive, which whoever goes on with the run writes anew, as beside its checkpoints
in an object store (checkpoints/object_store.py). The lock of that file keeps a second process out as long as the file
system gives it to one. A file system that several machines mount takes it from one that is out of reach, and in a copy
of the folder it is another one. A process that comes back then must not write: it asks before each row, checkpoint and
journal whether the run is its own still.

Owns: the word, that question, how the error of a disk is recognized and what it says. Does not own: the lock
(control/control_folder.py), what a run saves or removes then (loop/, run.py). Invariant: a folder that cannot be read,
or has no word, is nobody else's.
"""

import errno
import os
import secrets
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from slipstream.orchestrator.errors import DiskFull, DiskLost, RunTakenOver
from slipstream.orchestrator.files.run_folder import RunFolder

THIS_PROCESS = f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(8)})"


def is_own(folder: RunFolder) -> bool:
    try:
        check_own(folder)
    except RunTakenOver:
        return False
    return True


def check_own(folder: RunFolder) -> None:
    """Raises RunTakenOver if somebody else goes on with the run."""
    try:
        check_word(folder.alive.read_text(), str(folder.root))
    except OSError:  # it was moved, or is out of reach
        return


def check_word(word: str, where: str) -> None:
    """Raises RunTakenOver if it is another process's."""
    if word not in ("", THIS_PROCESS):
        raise RunTakenOver(
            f"{word} goes on with the run in {where}: this process was given up, and writes nothing there any more"
        )


NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a full disk, an exhausted quota and a file size limit set errno to."""
LOST = (errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT)
"""What a failing disk sets it to, and a file server that does not answer."""
_SENTENCES = tuple(os.strerror(number) for number in NUMBERS)


@contextmanager
def naming_a_full_disk(path: Path) -> Generator[None]:
    """Turn the error of a full disk, an exhausted quota or a file size limit into DiskFull, and that of a disk or a
    folder which is gone into DiskLost; both name a path. `path`: what is being written, where the error itself does not
    say so; of a folder, others speak to terminals and sockets meanwhile."""
    try:
        yield
    except (DiskFull, DiskLost):
        raise
    except Exception as error:
        if isinstance(error, OSError) and (lost := _lost(error, path)) is not None:
            raise DiskLost(lost) from error
        sentence = _full(error)
        if sentence is None:
            raise
        place = Path(str(getattr(error, "filename", None) or path))
        raise DiskFull(f"{place} cannot be written: {sentence} ({_free(place)})") from error


def _lost(error: OSError, path: Path) -> str | None:
    """What is gone, if that is why. An error of an open file has no name, as that of a socket has none."""
    name = error.filename if isinstance(error.filename, str) else None if os.path.isdir(path) else path
    if error.errno in LOST and name is not None:
        return f"{name} is out of reach or read-only: {error.strerror}"
    if error.errno == errno.ENOENT and name is not None and Path(name).is_relative_to(path) and not path.exists():
        return f"{path} is gone: somebody has removed or moved it while the run went on"
    return None


def _full(error: BaseException) -> str | None:
    """What the operating system said, if that is why: a trainer rank's error and safetensors' keep its text alone."""
    if isinstance(error, OSError) and error.errno in NUMBERS:
        return os.strerror(error.errno)
    return next((sentence for sentence in _SENTENCES if sentence in str(error)), None)


def _free(path: Path) -> str:
    there = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    try:
        found = os.statvfs(there)
    except OSError:
        return f"the file system of {there} does not say how much is free"
    if found.f_files and not found.f_favail:
        return f"it has {found.f_files} files, and room for no other one"
    return f"{found.f_bavail * found.f_frsize / 1e6:.1f} of {found.f_blocks * found.f_frsize / 1e6:.0f} MB are free"
