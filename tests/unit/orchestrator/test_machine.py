"""Readers of the machine, on recorded output of its tools."""

import os
import socket
from pathlib import Path

import pytest

from slipstream.orchestrator import machine
from slipstream.orchestrator.machine import (
    HERE,
    Gpu,
    count_gpus,
    is_port_free,
    list_rdma_nics,
    memory_bytes,
    nearest_existing,
    parse_gpu_list,
    parse_topology,
)

# The layout of `nvidia-smi topo -m`, its underlined header included.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\tSYS\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tPXB\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\t X \tSYS
NIC1\tSYS\tPXB\tSYS\t X

Legend:

  X    = Self
  PIX  = Connection traversing at most a single PCIe bridge

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_3
"""


def test_topology_says_what_joins_gpus_and_which_nic_serves_which_and_the_list_their_memory() -> None:
    topology = parse_topology(TOPOLOGY)
    assert topology is not None
    assert topology.gpu_links[0, 1] == "NV18"
    assert topology.gpu_links[1, 1] == "X"
    assert topology.nic_links[1, "mlx5_3"] == "PXB"
    assert (topology.nearest_nic(0), topology.nearest_nic(1)) == ("mlx5_0", "mlx5_3")
    without_nics = parse_topology("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\t0\n")
    assert without_nics is not None and without_nics.nearest_nic(0) is None
    assert parse_topology("NVIDIA-SMI has failed") is None
    text = "0, NVIDIA H200, 143771, 580.82.07\n1, NVIDIA H200, [N/A], 580.82.07\n"
    assert parse_gpu_list(text) == [
        Gpu(0, "NVIDIA H200", 143771 << 20, "580.82.07"),
        Gpu(1, "NVIDIA H200", 0, "580.82.07"),
    ]


@pytest.mark.parametrize(
    ("groups", "limits"),
    [
        ("0::/", {"memory.max": "3000"}),  # a container
        ("0::/job_7/step_0/task", {"job_7/step_0/memory.max": "max", "job_7/memory.max": "3000"}),  # Slurm
        ("5:cpu:/x\n4:memory:/job_7", {"memory/job_7/memory.limit_in_bytes": "3000", "x/memory.max": "1"}),
        ("4:memory:/docker/a1\n0::/", {"memory/memory.limit_in_bytes": "3000"}),
        ("0::/", {"memory.max": "9000"}),
        ("", {}),
    ],
)
def test_memory_is_what_a_control_group_or_one_around_it_leaves(
    tmp_path: Path, groups: str, limits: dict[str, str]
) -> None:
    files = {
        "proc/meminfo": "MemTotal: 4 kB\nMemAvailable: 2 kB\n",
        "proc/self/cgroup": f"{groups}\n" if groups else "",
    }
    for name, text in (files | {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_bytes(tmp_path) == ((3000, 2048) if "3000" in limits.values() else (4096, 2048))


def test_rdma_nics_are_read_from_sysfs(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "link_layer").write_text("InfiniBand\n")
    (nic,) = list_rdma_nics(tmp_path)
    assert (nic.name, nic.state, nic.rate, nic.link_layer) == ("mlx5_0", "ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand")
    assert list_rdma_nics(tmp_path / "absent") == []


def test_cuda_visible_devices_hides_every_gpu() -> None:
    assert count_gpus({**os.environ, "CUDA_VISIBLE_DEVICES": ""}) == 0


def test_the_driver_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(machine, "_output", lambda command, environment: asked.append(environment["GPUS"]) or "8\n")
    assert [count_gpus({"GPUS": which}) for which in ("a", "a", "b")] == [8, 8, 8]
    assert asked == ["a", "b"]


def test_ports() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not is_port_free(port)
        free = HERE.free_port(port)
    assert free is not None
    assert free > port


def test_nearest_existing_folder(tmp_path: Path) -> None:
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path
    assert nearest_existing(tmp_path) == tmp_path
