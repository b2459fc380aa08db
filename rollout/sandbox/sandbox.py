"""Runs a program of unknown origin: within limits, without network, without this machine's files and processes.

Owns what may be asked of a cell and what is said of its end, and the reasons why a machine cannot have one. Does not
own how a cell is built (`cell.py`). Why namespaces and not a library: docs/decisions/0019-a-sandbox-of-namespaces.md.
"""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
"""Folder from which `slipstream` is imported."""
PYTHON = [sys.base_prefix, sys.prefix]
"""Folders of this Python and its packages, which a program sees."""
GRACE_S = 30.0
"""How much longer than the program's time the making and the end of a cell may take on a busy machine."""


class SandboxUnavailable(RuntimeError):
    """This machine does not let its users make namespaces, or a cell did not answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program and all that it starts may use together. Exceeding one is the end of all of them."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 1 << 30
    """Memory of its processes; files in /tmp count up to disk_bytes more."""
    max_processes: int = 32
    """Processes and threads at a time; a further one is refused."""
    disk_bytes: int = 64 << 20
    """Files in /tmp, the only folder that can be written to. They are kept in memory."""
    max_files: int = 4096
    output_bytes: int = 1 << 20
    """Bytes on standard output, and as many on standard error."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended. Example: Ended(0, "", b"42\\n", b"")."""

    status: int | None
    """Exit status, or minus the number of the signal that ended it; None if a limit did."""
    limit: str
    """Which limit ended it: "time", "cpu", "memory", "output", or ""."""
    stdout: bytes
    stderr: bytes


def run(
    argv: Sequence[str], *, files: Mapping[str, str] | None = None, stdin: str = "", limits: Limits | None = None
) -> Ended:
    """Run a program to its end, in /tmp with these files (name -> text). Its path may be sys.executable, this Python
    with its packages. Raises SandboxUnavailable: the machine cannot make a cell."""
    limits = limits or Limits()
    order = {"argv": list(argv), "files": dict(files or {}), "stdin": stdin, "python": PYTHON, **asdict(limits)}
    cell = subprocess.Popen(
        [sys.executable, "-S", "-P", "-m", "slipstream.rollout.sandbox.cell"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"},
    )
    try:
        answer, errors = cell.communicate(json.dumps(order).encode(), timeout=limits.wall_s + GRACE_S)
    except subprocess.TimeoutExpired as e:
        raise SandboxUnavailable(f"a cell did not end within {limits.wall_s + GRACE_S:g} s") from e
    finally:
        cell.kill()
        cell.wait()
    if cell.returncode:
        raise SandboxUnavailable(
            f"a cell ended with status {cell.returncode}: {errors.decode(errors='replace')[-500:]}"
        )
    ended = json.loads(answer)
    if "cannot" in ended:
        raise SandboxUnavailable(f"{ended['cannot']}{_cause()}")
    stdout, stderr = (base64.b64decode(ended[name]) for name in ("stdout", "stderr"))
    return Ended(ended["status"], ended["limit"], stdout, stderr)


def check_available() -> None:
    """Make one cell with this Python in it. Raises SandboxUnavailable: the machine cannot; the message says why, as far
    as the kernel tells."""
    ended = run([sys.executable, "-c", "import math; print(math.pi)"])
    if ended.status != 0 or not ended.stdout.startswith(b"3.14"):
        said = ended.stderr.decode(errors="replace")[-300:] or ended.limit
        raise SandboxUnavailable(f"{sys.executable} does not run inside a cell (status {ended.status}): {said}")


def _cause() -> str:
    for name, bad, cure in (
        ("kernel/unprivileged_userns_clone", "0", "set it to 1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "set it to 0, or give this Python an AppArmor profile"),
        ("user/max_user_namespaces", "0", "raise it"),
    ):
        file = Path("/proc/sys") / name
        if file.is_file() and file.read_text().strip() == bad and os.geteuid() != 0:
            return f"; sysctl {name.replace('/', '.')} is {bad}: {cure}"
    if "Seccomp:\t2" in Path("/proc/self/status").read_text():
        return (
            "; a seccomp filter is on, as in a container: start it with --security-opt seccomp=unconfined "
            "--security-opt systempaths=unconfined, or with a runtime that gives user namespaces"
        )
    return ""
