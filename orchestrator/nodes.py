"""The nodes of a run: which machine holds which process, how processes meet, and how those of any machine are ended.

    one node       every socket binds to loopback, NVLink is open
    several nodes  every process binds to the address that Ray knows its node by; weights go over RDMA or TCP

Owns: Ray's view of nodes, the checks that only a node itself can answer, ending processes there. Does not own: which
processes there are (placement.py), what a link is (weight_sync.transport).
Invariant: nothing here waits longer than NODE_TIMEOUT_S for a node; one that is lost costs a line in the log.
Callers: placement.py; actors.py for what a process says of itself; handles.py to end a worker's processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from conf.errors import ConfigError

logger = logging.getLogger(__name__)

NODE_TIMEOUT_S = 60.0
"""Longest wait for a task on a node: Ray starts a Python there first."""
LOOPBACK = "127.0.0.1"
_SAME_START_S = 2.0
"""Two looks at one process may find its start so far apart, when the clock is set in between."""
_SAME_VERSIONS = ("torch", "vllm", "ray", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of some node, told apart from a later one with the same pid."""

    pid: int
    created: float
    """Seconds since the epoch, as psutil has it."""


def own_tree() -> list[ProcessId]:
    """This process and all that descends from it."""
    mine = psutil.Process()
    return [ProcessId(process.pid, process.create_time()) for process in [mine, *mine.children(recursive=True)]]


def bundles_by_node(group: PlacementGroup) -> list[tuple[int, str]]:
    """(bundle, node id) of a placement group that is ready, `node_after_node`."""
    return node_after_node(placement_group_table(group)["bundles_to_node_id"])


def node_after_node(nodes: Mapping[int, str]) -> list[tuple[int, str]]:
    """(bundle, node) such that a node's bundles follow each other. Pure.

    Ranks are given in this order, so that neighbours, such as an expert-parallel group, share a node where Ray's
    placement lets them.
    """
    first = {node: bundle for bundle, node in sorted(nodes.items(), reverse=True)}
    return sorted(nodes.items(), key=lambda item: (first[item[1]], item[0]))


def describe_nodes(held: Mapping[str, Sequence[str]]) -> str:
    """Who is where, for the log: "10.0.0.5: 4 x trainer, 1 x rollout; 10.0.0.6: 1 x rollout".

    Args:
        held: Of each placement group, by name: the node of each bundle.
    """
    return "; ".join(
        f"{_name(node)}: " + ", ".join(f"{on.count(node)} x {name}" for name, on in held.items() if node in on)
        for node in dict.fromkeys(node for on in held.values() for node in on)
    )


def address_of_this_node(*, is_only: bool) -> str:
    """Where the run's other processes reach one of this node. Loopback when no other node takes part."""
    return LOOPBACK if is_only else ray.util.get_node_ip_address()


def meet_over(address: str) -> None:
    """Let gloo and NCCL use the network card of this address. A choice in the environment wins.

    Gloo would take the one that the host's name resolves to, often loopback; NCCL the first that it finds.
    """
    card = _card_of(address)
    if card is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", card)
    if address != LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", card)


def check_nodes(nodes: Iterable[str], folder: Path, needed: Sequence[Path]) -> None:
    """Every node sees the run's files, and runs the code that this one runs.

    Args:
        nodes: Ray's ids of those that hold processes of the run.
        folder: The run folder; its config.yaml is compared.
        needed: Other paths that processes read.

    Raises:
        ConfigError: Naming every node that does not, and what to do.
    """
    expected = _seen(folder, needed)
    problems: list[str] = []
    for node in dict.fromkeys(nodes):
        name = f"node {_name(node)}"
        try:
            found = _on_node(node, _seen, folder, needed)
        except RayError as error:
            problems.append(
                f"{name}: cannot run Slipstream's code there ({_reason(error)}); install it at the same path as here, "
                f"{Path(__file__).parents[1]}"
            )
            continue
        for what, here in expected.items():
            if found.get(what) == here:
                continue
            if what.startswith("/"):
                problems.append(f"{name}: {what} is not what it is here; put it where every node mounts it")
            else:
                problems.append(f"{name}: {what} is {found.get(what) or 'absent'}, here it is {here or 'absent'}")
    if problems:
        raise ConfigError("nodes of the Ray cluster do not fit the run: " + "; ".join(problems))


def end_trees(node: str, processes: Sequence[ProcessId]) -> None:
    """SIGKILL processes of a node and whatever descends from them, and see them gone. Never raises."""
    try:
        left = _on_node(node, _end_trees, processes)
    except RayError as error:
        logger.warning("node %s is lost, and its processes with it (%s)", _name(node), type(error).__name__)
        return
    if left:
        logger.warning("processes %s of node %s do not end", left, _name(node))


def _on_node(node: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Run a function there: here when it is this node, else in a task that goes nowhere else."""
    if node == ray.get_runtime_context().get_node_id():
        return function(*arguments)
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote(*arguments)
    try:
        return ray.get(task, timeout=NODE_TIMEOUT_S)
    except GetTimeoutError:
        ray.cancel(task, force=True)
        raise


def _seen(folder: Path, needed: Sequence[Path]) -> dict[str, str]:
    """What a node finds: by path, whether it is there; by package, its version."""
    config = folder / "config.yaml"
    found = {str(config): hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else ""}
    found |= {str(path.resolve()): "present" if path.exists() else "" for path in needed}
    for package in _SAME_VERSIONS:
        with contextlib.suppress(ModuleNotFoundError):
            found[package] = version(package)
    return found


def _end_trees(processes: Sequence[ProcessId]) -> list[int]:
    """Pids of those that are still there after STOP_TIMEOUT_S."""
    victims: set[psutil.Process] = set()
    for identity in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(identity.pid)
            if abs(process.create_time() - identity.created) < _SAME_START_S:
                victims |= {process, *process.children(recursive=True)}
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    _, alive = psutil.wait_procs(victims, timeout=NODE_TIMEOUT_S / 3)
    return sorted(process.pid for process in alive)


def _name(node: str) -> str:
    """A node's address, also of one that is lost."""
    return next((one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node), node[:8])


def _card_of(address: str) -> str | None:
    """The network card that an address belongs to; "lo" for all of 127.0.0.0/8."""
    for card, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return card
    return "lo" if ipaddress.ip_address(address).is_loopback else None


def _reason(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
