"""Section `cluster`: devices, Ray, and the sizes for which `slipstream plan` computes a run."""

from dataclasses import dataclass, field
from enum import StrEnum

from slipstream.conf.schema.rules import REMOVE_ONE, If, above, read_if


class Device(StrEnum):
    """Kind of device that trainer ranks and rollout workers run on. `auto`: GPUs if this machine has any."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


OWN_CLUSTER = If("cluster.ray_address=null", cure=": that cluster is not ours to configure")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Machines."""

    device: Device = Device.auto
    """Kind of device for trainer ranks and rollout workers."""
    share_gpu: bool = field(default=False, metadata=read_if(If("cluster.device!=cpu", cure=REMOVE_ONE)))
    """Put the trainer's only rank and all rollout workers on one GPU, for a host without a second one: to try a run, or
    to learn something small. They take turns at the GPU, so neither is fast. Needs rollout.kv_cache_bytes, because an
    engine cannot measure what is free while others take memory, and a rollout.gpu_memory_utilization that is free
    when it starts."""
    ray_address: str | None = None
    """Address of a running Ray cluster of one or more machines; `auto`: the cluster to which this machine belongs.
    null: start one on this machine, bound to loopback, and stop it at the end."""
    dashboard: bool = field(default=True, metadata=read_if(OWN_CLUSTER))
    """Start the Ray dashboard, if the run starts its own cluster: at port 8265, or the next free one, which the run and
    `slipstream status` say."""
    start_timeout_s: float = 900.0
    """Longest wait for trainer ranks and engines to come up."""

    def __post_init__(self) -> None:
        above(0, "cluster", self, "start_timeout_s")
