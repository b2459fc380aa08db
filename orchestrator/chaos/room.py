"""Room that a run needs on disk and in /dev/shm, taken away for a while.

    shm     /dev/shm of the run's processes
    disk    the file system of the run's folder
    store   the folder of run.checkpoint_dir=file:///...

Owns: which folders can be filled, whether that would harm others, and the file that fills one. Does not own: when and
for how long (harm.py). Invariant: nothing is filled that anybody else uses, as far as this user can see: no file system
of the whole machine, none in which a process that is not the run's has a file open to write or mapped to share, and no
memory that would be short afterwards. The file has no name, so that the kernel removes it however this process ends.
"""

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

import psutil

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.chaos.victims import Kind, pids_of
from slipstream.orchestrator.files.run_folder import RunFolder, saved_options

_PAGE_BYTES = 4096
_FILE = "file://"


def folder_of(room: Kind, folder: RunFolder) -> Path:
    """Where it is. Raises ConfigError where the run has none."""
    if room is Kind.shm:  # in a container it is another one than this process's
        return Path(f"/proc/{min(pids_of(folder), default='self')}/root/dev/shm")
    if room is Kind.disk:
        return folder.root
    url = str(saved_options(folder.root).get("run", {}).get("checkpoint_dir"))
    place = Path(url.removeprefix(_FILE))
    if not url.startswith(_FILE) or not place.is_dir():
        raise ConfigError(f"the run has no store that is a folder here (run.checkpoint_dir={url}); it has shm and disk")
    return place


def is_there(room: Kind, folder: RunFolder) -> bool:
    with suppress(ConfigError):
        return folder_of(room, folder).is_dir()
    return False


def check_can_be_filled(room: Kind, folder: RunFolder, rest_bytes: int) -> None:
    """Raises ConfigError where somebody else would be harmed."""
    place, ours = folder_of(room, folder), {os.getpid(), *pids_of(folder)}
    device = place.stat().st_dev
    if device == Path("/").stat().st_dev:
        raise ConfigError(
            f"--what fill: {room} ({place}) is on the disk of the whole machine, which others need;"
            " mount a file system of its own there, e.g. a tmpfs"
        )
    for process in psutil.process_iter():
        if process.pid not in ours and _uses(process, device):
            raise ConfigError(
                f"--what fill: {room} ({place}) is on a file system that process {process.pid} ({process.name()}),"
                " which is not the run's, uses, too"
            )
    wanted, memory = _free_bytes(place) - rest_bytes, psutil.virtual_memory().available
    if (room is Kind.shm or _is_memory(device)) and wanted > memory / 2:
        raise ConfigError(
            f"--what fill: {room} ({place}) is memory, and its {wanted / 1e9:.1f} GB are more than half of the"
            f" {memory / 1e9:.1f} GB that the machine has left; mount a smaller tmpfs"
        )


def _uses(process: psutil.Process, device: int) -> bool:
    """Whether it has a file there open to write, or mapped to share; of another user's process nothing is known."""
    with suppress(psutil.Error, OSError):
        if any(file.mode != "r" and os.stat(file.path).st_dev == device for file in process.open_files()):
            return True
        mapped = f"{os.major(device):02x}:{os.minor(device):02x}"
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            _, rights, _, where, *_ = line.split(maxsplit=4)
            if where == mapped and rights[-1] == "s":
                return True
    return False


def _is_memory(device: int) -> bool:
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return any(words[2] == number and words[words.index("-") + 1] == "tmpfs" for words in mounts)


def _free_bytes(place: Path) -> int:
    """Root may also take what a file system keeps back for root."""
    disk = os.statvfs(place)
    return disk.f_frsize * (disk.f_bavail if os.geteuid() else disk.f_bfree)


@contextmanager
def filled(place: Path, rest_bytes: int) -> Generator[None]:
    """All but so many bytes of the file system are taken."""
    with TemporaryFile(dir=place, buffering=0) as file:
        at, end = 0, max(0, _free_bytes(place) - rest_bytes)
        piece = end
        while at < end and piece >= _PAGE_BYTES:
            try:
                os.posix_fallocate(file.fileno(), at, min(piece, end - at))
                at += min(piece, end - at)
            except OSError as error:
                if error.errno != errno.ENOSPC:  # the run took some meanwhile
                    raise
                piece //= 2
        yield
