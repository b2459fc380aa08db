"""One program in a cell: `python -S -P -m slipstream.rollout.sandbox.cell < order`. Writes what became of it, as JSON.

    caller --order--> warden --fork--> mason --fork--> init (pid 1) --fork--> program --> whatever it starts
                      |  ids of the    |  makes the     |  builds the file system, counts memory and CPU time
                      |  namespace,    |  namespaces,   |  of all processes, ends when the program does
                      |  output, time  '- ends after    '- its end is the end of all others, by the kernel
                      '- kills init       init

Owns: namespaces (user, mount, pid, network, IPC, host name), the file system that the program sees, its limits and its
end. Does not own who may run what, nor what the output means (`sandbox.py`).
Invariants: when the warden ends, also because its caller did, no process of the cell is left. The program sees system
libraries and this Python, read-only, a /tmp of its own of a bounded size, its own processes and nothing else of the
machine. Neither environment nor descriptors are inherited. Nothing here needs rights beyond those of a user who may
make user namespaces.
Uses only the standard library.
"""

import base64
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.rollout.sandbox import syscalls

Order: TypeAlias = dict[str, Any]
Outcome: TypeAlias = dict[str, Any]
INSIDE_ID = 1000
"""User and group of the program, as it sees them."""
OUTSIDE_ID = 65534
"""What they are outside if root makes the cell: nobody. Otherwise they are those of the user who makes it."""
TICK_S = 0.02
"""How often init counts memory and CPU time."""
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
OLD = "machine"
"""Where the machine's file system is while the program's is built."""
DEVICES = ("null", "zero", "full", "random", "urandom")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip

CLONE_FLAGS = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""CLONE_NEWUSER, NEWNS, NEWPID, NEWNET, NEWIPC, NEWUTS."""
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
NUM_CAPABILITIES = 64

libc = ctypes.CDLL(None, use_errno=True)


class CannotBuild(Exception):
    """A step that this machine refuses: its name and the reason."""


def main() -> None:
    _die_with_parent()
    order = json.load(sys.stdin)
    try:
        ended = run(order)
    except CannotBuild as e:
        ended = {"cannot": str(e)}
    json.dump(ended, sys.stdout)


def run(order: Order) -> Outcome:
    """The warden: starts the mason, writes the ids of its namespace, reads output, and ends all at the deadline.
    Raises: CannotBuild."""
    asked, to_ask = os.pipe()  # mason -> warden: "unshared", then the number of init's process
    granted, to_grant = os.pipe()  # warden -> mason
    told, to_tell = os.pipe()  # everyone inside -> warden: one JSON object per line
    output, their_output = os.pipe()
    errors, their_errors = os.pipe()
    deadline = time.monotonic() + order["wall_s"]
    mason = os.fork()
    if mason == 0:
        for fd in (asked, to_grant, told, output, errors):
            os.close(fd)
        _or_tell(to_tell, lambda: _build(order, to_ask, granted, to_tell, their_output, their_errors))
    for fd in (to_ask, granted, to_tell, their_output, their_errors):
        os.close(fd)
    init = -1
    try:
        if os.read(asked, 1):
            _write_ids(mason)
            os.write(to_grant, b".")
            if number := os.read(asked, 16):
                init = os.pidfd_open(int(number))
                os.write(to_grant, b".")
        return _watch(order, deadline, init, told, output, errors)
    finally:
        _end(init, mason)


def _watch(order: Order, deadline: float, init: int, told: int, output: int, errors: int) -> Outcome:
    """Collect what the cell writes until init has ended, its time is up, or it wrote too much. (A daemon may hold the
    output open for longer than the program lives.)"""
    kept: dict[int, bytearray] = {told: bytearray(), output: bytearray(), errors: bytearray()}
    poller = select.poll()
    for fd in kept:
        poller.register(fd, select.POLLIN)
    is_over, limit = False, ""
    while not is_over and not limit:
        left_s = deadline - time.monotonic()
        for fd, _ in poller.poll(max(0.0, left_s) * 1000):
            data = os.read(fd, 1 << 16)
            kept[fd] += data
            if not data:
                poller.unregister(fd)
                is_over |= fd == told
        if len(kept[output]) > order["output_bytes"] or len(kept[errors]) > order["output_bytes"]:
            limit = "output"
        elif time.monotonic() >= deadline:
            limit = "time"
    for fd in (output, errors):
        _drain(fd, kept[fd], order["output_bytes"])
    said = json.loads(bytes(kept[told]).partition(b"\n")[0] or b"{}")  # the first to speak knows the reason
    if "cannot" in said:
        raise CannotBuild(said["cannot"])
    if init == -1 and not limit:
        raise CannotBuild("the process that builds the cell ended")
    return {
        "status": said.get("status"),
        "limit": said.get("limit") or limit,
        "stdout": base64.b64encode(kept[output][: order["output_bytes"]]).decode(),
        "stderr": base64.b64encode(kept[errors][: order["output_bytes"]]).decode(),
    }


def _drain(fd: int, kept: bytearray, most: int) -> None:
    os.set_blocking(fd, False)
    with contextlib.suppress(BlockingIOError):
        while len(kept) <= most and (data := os.read(fd, 1 << 16)):
            kept += data


def _end(init: int, mason: int) -> None:
    """Kill init, and with it all processes of the cell; the mason ends after the last of them."""
    if init >= 0:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(init, signal.SIGKILL)
    else:
        os.kill(mason, signal.SIGKILL)
    os.waitpid(mason, 0)


def _write_ids(mason: int) -> None:
    """Name the users of the mason's namespace. Root adds a user without any right for the program; the process limit
    does not hold for root itself."""
    process, is_root = Path(f"/proc/{mason}"), os.geteuid() == 0
    with _step("name the users of a user namespace"):
        if not is_root:
            (process / "setgroups").write_text("deny")
        for kind, own in (("gid", os.getegid()), ("uid", os.geteuid())):
            ids = f"0 0 1\n{INSIDE_ID} {OUTSIDE_ID} 1" if is_root else f"{INSIDE_ID} {own} 1"
            (process / f"{kind}_map").write_text(ids)


def _build(order: Order, to_ask: int, granted: int, to_tell: int, output: int, errors: int) -> None:
    """The mason: makes the namespaces, starts init in them, and ends after it."""
    Path("/proc/self/oom_score_adj").write_text("1000")  # where memory is short, the cell goes before all else
    if os.geteuid() == 0:
        os.setgroups([])
    _call("unshare", CLONE_FLAGS)
    _die_with_parent()  # a change of rights may have cleared it
    os.write(to_ask, b"u")
    if not os.read(granted, 1):
        return
    init = os.fork()
    if init == 0:
        os.close(to_ask)
        if os.read(granted, 1):
            os.close(granted)
            _or_tell(to_tell, lambda: _be_init(order, to_tell, output, errors))
        os._exit(1)
    for fd in (to_tell, output, errors):
        os.close(fd)
    os.write(to_ask, str(init).encode())
    os.waitpid(init, 0)


def _make_root(order: Order) -> None:
    """Mount the file system that the program is to see, in place of the machine's."""
    python = {folder: os.path.realpath(folder) for folder in order["python"]}
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=4096,mode=755")
    os.chdir("/tmp")  # any folder will do: what is mounted on it is seen in this namespace alone
    for folder in (OLD, "dev", "etc", "proc", "tmp"):
        os.mkdir(folder)
    _call("pivot_root", b".", OLD.encode())
    os.chdir("/")
    own = f"size={order['disk_bytes']},nr_inodes={order['max_files']},mode=777"
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, own)
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(f"/{OLD}{folder}"):
            os.symlink(os.readlink(f"/{OLD}{folder}"), folder)
        else:
            _show(folder, folder)
    for folder, real in python.items():
        _show(real, folder)
    for file in (*(f"/dev/{name}" for name in DEVICES), "/etc/ld.so.cache"):
        if os.path.exists(f"/{OLD}{file}"):
            Path(file).touch()
            _mount(f"/{OLD}{file}", file, None, MS_BIND)
    os.symlink("/proc/self/fd", "/dev/fd")
    os.symlink("/tmp", "/dev/shm")
    Path("/etc/passwd").write_text(f"program:x:{INSIDE_ID}:{INSIDE_ID}::/tmp:/bin/sh\n")
    for name, text in order["files"].items():
        Path("/tmp", name).write_text(text, encoding="utf-8", errors="replace")
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)  # only while the machine's is in sight
    _call("umount2", f"/{OLD}".encode(), MNT_DETACH)
    os.rmdir(f"/{OLD}")
    _set_attributes("/", MOUNT_ATTR_RDONLY, recursive=False)
    os.chdir("/tmp")


def _show(real: str, folder: str) -> None:
    """Let the program read one folder of the machine, unless it is part of another one that it reads."""
    if os.path.isdir(f"/{OLD}{real}") and not os.path.isdir(folder):
        os.makedirs(folder)
        _mount(f"/{OLD}{real}", folder, None, MS_BIND | MS_REC)
        _set_attributes(folder, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)


def _be_init(order: Order, to_tell: int, output: int, errors: int) -> None:
    """Process 1: starts the program, reaps what it leaves, counts what all of them use, and says how it ended."""
    _die_with_parent()
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program can read nothing of this process
    _make_root(order)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    stdin = os.memfd_create("stdin")
    os.write(stdin, order["stdin"].encode(errors="replace"))
    os.lseek(stdin, 0, os.SEEK_SET)
    program = os.fork()
    if program == 0:
        _or_tell(to_tell, lambda: _be_program(order, (stdin, output, errors), to_tell))
    for fd in (stdin, output, errors):
        os.close(fd)
    said: Outcome = {}
    while not said:
        signal.sigtimedwait({signal.SIGCHLD}, TICK_S)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == program:
                    said = {"status": os.waitstatus_to_exitcode(ended[1])}
        if limit := _exceeded(order):
            said = {"limit": limit}
    os.write(to_tell, json.dumps(said).encode() + b"\n")
    os._exit(0)


def _exceeded(order: Order) -> str:
    """Which limit all processes of the cell exceed together: "memory", "cpu" or ""."""
    disk = os.statvfs("/tmp")
    num_bytes = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = reaped.ru_utime + reaped.ru_stime
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError, ValueError, IndexError):  # it ended meanwhile
                status = Path("/proc", name, "status").read_text()
                num_bytes += sum(
                    int(line.split()[1]) << 10
                    for line in status.splitlines()
                    if line.startswith(("RssAnon", "RssShmem", "VmPTE"))
                )
                times = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[11:15]
                cpu_s += sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    if num_bytes > order["memory_bytes"] + order["disk_bytes"]:
        return "memory"
    return "cpu" if cpu_s > order["cpu_s"] else ""


def _be_program(order: Order, streams: tuple[int, int, int], to_tell: int) -> None:
    """The program's own process: streams, limits, no rights, the filter; then the program."""
    os.setsid()
    for target, fd in enumerate(streams):
        os.dup2(fd, target)
    os.closerange(3, to_tell)
    os.closerange(to_tell + 1, 1 << 16)  # to_tell closes when the program is executed
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name, value in (
        (resource.RLIMIT_DATA, order["memory_bytes"]),
        (resource.RLIMIT_NPROC, order["max_processes"] + 2),  # the mason and init count where they are the same user
        (resource.RLIMIT_FSIZE, order["disk_bytes"]),
        (resource.RLIMIT_CPU, int(order["cpu_s"]) + 1),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, 8 << 20),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 256),
    ):
        resource.setrlimit(name, (value, value))
    os.nice(5)  # init, which counts, comes first
    filter_program = syscalls.program()
    for number in range(NUM_CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    syscalls.install(libc, filter_program)
    os.execve(order["argv"][0], order["argv"], ENVIRONMENT)


def _or_tell(to_tell: int, work: Callable[[], None]) -> None:
    """Run a child's part; a failure goes to the warden. Never returns."""
    try:
        work()
    except (CannotBuild, OSError, ValueError) as e:
        with contextlib.suppress(OSError):
            os.write(to_tell, json.dumps({"cannot": str(e)}).encode() + b"\n")
        os._exit(1)
    os._exit(0)


def _die_with_parent() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise CannotBuild(f"{name}: {e.strerror}") from e


def _call(name: str, *arguments: Any) -> None:
    """One call of libc that returns 0. Raises CannotBuild: it does not."""
    if getattr(libc, name)(*arguments):
        raise CannotBuild(f"{name}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    if libc.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None):
        raise CannotBuild(f"mount {kind or source or 'nothing'} on {target}: {os.strerror(ctypes.get_errno())}")


def _set_attributes(target: str, attributes: int, *, recursive: bool = True) -> None:
    """mount_setattr(2), kernel 5.12: flags of a mount and of all below it."""
    asked = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    if libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, asked, ctypes.sizeof(asked)):
        raise CannotBuild(f"mount {target} read-only: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
