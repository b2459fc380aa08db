"""A run that the machine cannot hold is refused with the options that would fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conf.errors import ConfigError
from conf.load import load_run_config
from conf.schema import Device, RunConfig
from orchestrator.environment import resolve_device
from orchestrator.inputs.facts import Fact
from orchestrator.inputs.machine_checks import (
    check_devices,
    check_link,
    check_memory,
    check_ray_cluster,
    check_shared_memory,
)
from orchestrator.machine import Machine

Check = Callable[[RunConfig, Machine], Fact | None]


def refused(check: Check, machine: Machine, *words: str) -> str:
    """What a check says about a quick start on a machine."""
    with pytest.raises(ConfigError) as caught:
        check(load_run_config(["experiment=quickstart", "cluster.device=cpu", *words]), machine)
    return str(caught.value)


def test_more_gpus_than_exist() -> None:
    two = Machine(count_gpus=lambda: 2)
    message = refused(check_devices, two, "cluster.device=cuda", "rollout.num_workers=3")
    assert "more GPUs than exist" in message
    assert "need 5, and this machine has 2" in message
    for option in ("trainer.num_ranks=2", "rollout.num_workers=3", "rollout.tp_size=1"):
        assert option in message


def test_trainer_and_engine_may_share_the_one_gpu() -> None:
    config = load_run_config(["experiment=quickstart_one_gpu"])
    assert check_devices(config, Machine(count_gpus=lambda: 1)).finding.startswith("1 of 1 GPUs")


def test_engines_of_a_gpu_are_counted_together() -> None:
    words = ["experiment=quickstart_gpu", "rollout.num_workers=6", "rollout.workers_per_gpu=3"]
    three = Machine(count_gpus=lambda: 3)
    finding = check_devices(load_run_config(words), three).finding
    assert finding == "3 of 3 GPUs: 1 trainer rank, 6 engines, 3 on a GPU"
    message = refused(check_devices, three, "cluster.device=cuda", *words[1:])
    assert (
        "trainer.num_ranks=2 + rollout.num_workers=6 * rollout.tp_size=1 / rollout.workers_per_gpu=3 need 4" in message
    )


def test_no_gpu_at_all() -> None:
    none = Machine(count_gpus=lambda: 0)
    message = refused(check_devices, none, "cluster.device=cuda")
    assert "no usable CUDA GPU" in message
    assert "cluster.device=cpu" in message
    message = refused(check_devices, none, "cluster.device=cuda", "weight_sync.transport=nvlink")
    assert "set cluster.device=cpu weight_sync.transport=auto" in message, "all that the next try needs"


def test_packages_for_gpus_on_a_host_without_one() -> None:
    login = Machine(count_gpus=lambda: 0, is_set_up_for_gpus=lambda: True)
    assert resolve_device(Device.auto, login) == "cuda", "auto trains nothing on a login node's CPU"
    for device in ("cuda", "cpu"):
        message = refused(check_devices, login, f"cluster.device={device}")
        assert "this machine has no usable CUDA GPU" in message
        assert "start the run where GPUs are" in message
        assert "SLIPSTREAM_TARGET=cpu make setup" in message
    two = Machine(count_gpus=lambda: 2, is_set_up_for_gpus=lambda: True)
    assert refused(check_devices, two, "cluster.device=cpu").startswith("cluster.device=cpu, but the installed vLLM")


def test_rdma_without_a_device() -> None:
    message = refused(check_link, Machine(list_rdma_nics=list), "weight_sync.transport=rdma")
    assert "no RDMA device" in message


def test_more_workers_than_memory() -> None:
    small = Machine(memory_bytes=lambda: (24 << 30, 20 << 30))
    message = refused(check_memory, small, "rollout.num_workers=500")
    assert "trainer.num_ranks=2 and rollout.num_workers=500 * rollout.tp_size=1 need at least" in message
    assert "and 21.5 GB are free; lower them, or rollout.kv_cache_bytes" in message


def test_shared_memory_without_room_for_engines_of_several_ranks() -> None:
    small = Machine(free_bytes=lambda folder: {Path("/dev/shm"): 16 << 20}[folder])
    message = refused(check_shared_memory, small, "rollout.tp_size=2", "rollout.num_workers=1")
    assert "/dev/shm has 16 MiB free, and rollout.num_workers=1 engines of rollout.tp_size=2 take 160 MiB" in message
    message = refused(check_shared_memory, small, "cluster.object_store_bytes=20000000000")
    assert "cluster.object_store_bytes=20000000000 does not fit" in message


def test_no_ray_cluster_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    message = refused(check_ray_cluster, Machine(running_ray_cluster=lambda: None), "cluster.ray_address=auto")
    assert "cluster.ray_address=auto" in message
    assert "cluster=local" in message
