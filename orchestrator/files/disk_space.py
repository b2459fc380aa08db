"""A full disk, in words: which path could not be written, and how much is free there; and one that is gone.

Owns: how such an error is recognized and what it says. Does not own: what a run saves or removes then (loop/, run.py).
"""

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from slipstream.orchestrator.errors import DiskFull, DiskLost

NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a full disk, an exhausted quota and a file size limit set errno to."""
LOST = (errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT)
"""What a failing disk sets it to, and a file server that does not answer."""
_SENTENCES = tuple(os.strerror(number) for number in NUMBERS)


@contextmanager
def naming_a_full_disk(path: Path) -> Generator[None]:
    """Turn the error of a full disk, an exhausted quota or a file size limit into DiskFull, and that of a disk which is
    gone into DiskLost; both name a path.

    Args:
        path: what is being written, where the error itself does not say so.
    """
    try:
        yield
    except (DiskFull, DiskLost):
        raise
    except Exception as error:
        sentence = _full(error)
        if isinstance(error, OSError) and error.errno in LOST and isinstance(error.filename, str):
            raise DiskLost(f"{error.filename} is out of reach or read-only: {os.strerror(error.errno)}") from error
        if sentence is None:
            raise
        place = Path(str(getattr(error, "filename", None) or path))
        raise DiskFull(f"{place} cannot be written: {sentence} ({_free(place)})") from error


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
