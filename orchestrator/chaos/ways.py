"""How somebody is harmed, and how that is undone.

    kill, term   a signal
    stop         SIGSTOP, then SIGCONT
    slow         the same over and over: the victim runs a tenth of the time
    cut          rules of nft in the network namespace that the victim's process is in, which drop whatever comes and
                 goes but on loopback; addresses and routes stay, as where a cable is pulled further on
    fill         a file without a name, which takes what is free in the file system of a room:
                   shm     /dev/shm of the run's processes
                   disk    of the run's folder
                   store   of the folder of run.checkpoint_dir=file:///...

Owns: these ways, and whether one of them can harm a process or a room. Does not own: whom, when and for how long
(harm.py).
Invariants: what lasts is undone at the end of its block, however that ends. A cut ends in time and a file is gone also
where this command is killed: the kernel sees to both. So does who was stopped go on: a shell that outlives this command
waits for the end of its input. A slow victim is not given to a cgroup with a quota: that needs root, and would take it
out of the group in which a container or a batch system counts it. Nothing is filled that anybody else uses, as far as
this user can see: no file system of the whole machine, none in which a process that is not the run's has a file open to
write or mapped to share, and no memory that would be short afterwards.
"""

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryFile

import psutil

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.chaos.victims import Kind, pids_of
from slipstream.orchestrator.files.run_folder import RunFolder, saved_options

SLOW_SHARE, _PERIOD_S = 0.1, 0.2
_TABLE = "inet slipstream_chaos"
_RULES = """\
table {table}
delete table {table}
table {table} {{
  set cut {{ type nf_proto; flags timeout; elements = {{ ipv4 timeout {ms}ms, ipv6 timeout {ms}ms }}; }}
  chain arriving {{ type filter hook prerouting priority raw; iifname != "lo" meta nfproto @cut drop; }}
  chain leaving {{ type filter hook postrouting priority raw; oifname != "lo" meta nfproto @cut drop; }}
}}
"""
_NFT_TIMEOUT_S = 10.0


class What(StrEnum):
    kill = "kill"
    stop = "stop"
    term = "term"
    slow = "slow"
    cut = "cut"
    fill = "fill"


LASTING = (What.stop, What.slow, What.cut, What.fill)
"""They last some seconds, and are undone."""


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.Error):  # psutil refuses where another process has the number by now
            process.send_signal(number)


@contextmanager
def _going_on_afterwards(processes: Sequence[psutil.Process]) -> Generator[None]:
    words = ["sh", "-c", 'read _; kill -CONT "$@"', "sh", *(str(process.pid) for process in processes)]
    shell = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        shell.communicate()


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Generator[None]:
    with _going_on_afterwards(processes):
        send(processes, signal.SIGSTOP)
        yield


@contextmanager
def slowed(processes: Sequence[psutil.Process]) -> Generator[None]:
    over = threading.Event()

    def brake() -> None:
        while not over.is_set():
            send(processes, signal.SIGSTOP)
            over.wait(_PERIOD_S * (1 - SLOW_SHARE))
            send(processes, signal.SIGCONT)
            over.wait(_PERIOD_S * SLOW_SHARE)

    thread = threading.Thread(target=brake, name="slows the victim")
    with _going_on_afterwards(processes):
        try:
            thread.start()
            yield
        finally:
            over.set()
            thread.join()


@contextmanager
def cut_off(name: str, process: psutil.Process, lasts_s: float) -> Generator[None]:
    """The node in which the process is: nobody in it reaches anybody outside."""
    namespace = _own_network(name, process)
    try:
        _nft(namespace, _RULES.format(table=_TABLE, ms=round(lasts_s * 1e3)))
        yield
    finally:
        _nft(namespace, f"table {_TABLE}\ndelete table {_TABLE}\n")
        os.close(namespace)


def check_can_be_cut(name: str, process: psutil.Process) -> None:
    """Raises ConfigError where the process has no network of its own, or this user may not cut it."""
    namespace = _own_network(name, process)
    try:
        _nft(namespace, "list tables")
    finally:
        os.close(namespace)


def _own_network(name: str, process: psutil.Process) -> int:
    """A descriptor of its network namespace, which is there even when its last process has ended."""
    try:
        namespace = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"--what cut: process {process.pid} ({name}) has ended, or is out of reach") from error
    if os.path.samestat(os.fstat(namespace), os.stat("/proc/self/ns/net")):
        os.close(namespace)
        raise ConfigError(
            f"--what cut: {name} (process {process.pid}) uses the same network as this command, and so do others;"
            " it can cut off a node that is a network namespace (ip netns) or a container, called from outside of it"
        )
    return namespace


def _nft(namespace: int, rules: str) -> None:
    words = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace}", "nft", "-f", "-"]
    try:
        done = subprocess.run(words, input=rules, capture_output=True, text=True, timeout=_NFT_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise ConfigError("--what cut needs nsenter (package util-linux) and nft (package nftables)") from error
    if done.returncode:
        raise ConfigError(f"--what cut needs nft (package nftables), and root; {done.stderr.strip().splitlines()[0]}")


_PAGE_BYTES = 4096
_FILE = "file://"


def folder_of(room: Kind, folder: RunFolder) -> Path:
    """The folder in which a room is filled. Raises ConfigError if the run has no such room."""
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
    """Whether the process has a file of the device open to write, or mapped to share; False if that cannot be read."""
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
    """Fill the file system up to its last `rest_bytes` while the block runs."""
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
