"""The predicted cluster: link rates, which GPU is on which node. Pure data for predict.py.

Invariant: every rate is > 0 and every duration >= 0.

    trainer ranks and engine ranks are GPUs, numbered through the cluster; ranks_per_node of them share a node
    same node:      NVLink of the sender -> NVLink of the receiver
    other node:     NIC of the sender    -> NIC of the receiver          (a GPU whose NIC is lost shares a neighbour's)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from slipstream.weight_sync.errors import PlanError
from slipstream.weight_sync.layout import Destination

IDLE_BEGIN_S, IDLE_COMMIT_S = 2.7e-3, 2.3e-3
"""Time to begin and to commit if there are no requests to stop: measured as LinkRates says, with `--engine plain`."""

Port = tuple[str, int]
"""One direction of one device: ("nic", 12) or ("nvlink", 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Rates of the hardware, and times of the host's part of a publish. Rates: one GPU, one direction, bytes/s.

    Defaults: an H200 node with one 400 Gb/s NIC per GPU. The NIC's rate is its line rate. The rest was derived from
    publishes over NVLink on such a node (bench/results/weight_sync-gpu-*.json), with four watermarks and so 61 to 1,945
    loads: the time of all writes is bytes / nvlink + loads x write_latency, and the pipeline's time besides its writes
    is source_begin + replay + loads x hand_over. If sources begin while engines pause (in all but -plain and -vllm),
    the first two are part of the wait for the engines.
    tests/unit/orchestrator/offline/test_prediction_measured.py compares predictions with these measurements.
    """

    nic_bytes_s: float = 50e9
    """One NIC per GPU."""
    nvlink_bytes_s: float = 396e9
    """One-sided writes to another GPU of the node."""
    hbm_bytes_s: float = 3.87e12
    """Device memory traffic of the kernels that pack, merge and hash: hashing 61 GB takes 15.8 ms."""
    write_latency_s: float = 45e-6
    """Per batched write to one session, in addition to its bytes."""
    op_s: float = 1e-6
    """Per entry of a batched write, in addition to its bytes."""
    load_launch_s: float = 0.15e-3
    """Host time to launch what fills and hashes one slot: one constant per load, although a load takes a launch per
    stack and destination that it has bytes for."""
    hand_over_s: float = 20e-6
    """From the end of a link's write to the start of its next one."""
    source_begin_s: float = 7.5e-3
    """A rank's work once per publish before it packs: gathering adapters. Engines pause meanwhile."""
    replay_s: float = 4.5e-3
    """A rank's work once engines have paused: learning where to write, starting lanes, adding up hashes."""
    begin_s: float = 50e-3
    """Pausing the engines, with 256 requests in decode."""
    commit_s: float = 7e-3
    """Adopting the version and resuming."""
    barrier_s: float = 6e-3
    """Collecting what every rank wrote, and telling the replicas what to expect, for a few hundred parameters."""
    entry_s: float = 20e-9
    """Added to the barrier per further parameter of an engine rank, which rank 0 writes and reads on one core
    (bench/results/plan-tp16.json)."""

    def without_pause(self) -> LinkRates:
        """The rates of a publish into free slots of engines that go on: `begin` and `commit` are only messages."""
        return replace(self, begin_s=min(self.begin_s, IDLE_BEGIN_S), commit_s=min(self.commit_s, IDLE_COMMIT_S))

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            is_rate = one.name.endswith("_bytes_s")
            if not (value > 0 if is_rate else value >= 0) or value == float("inf"):
                raise PlanError(f"{one.name} must be {'> 0' if is_rate else '>= 0'} and finite, got {value}")


@dataclass(frozen=True, slots=True)
class Placement:
    """Which GPU each rank is. GPU g is on node g // ranks_per_node."""

    ranks_per_node: int
    trainer_gpus: Mapping[int, int]
    """Trainer rank -> GPU."""
    engine_gpus: Mapping[Destination, int]
    """(replica, rank) -> GPU."""

    def __post_init__(self) -> None:
        of_trainer = set(self.trainer_gpus.values())
        of_replicas = {(replica, gpu) for (replica, _), gpu in self.engine_gpus.items()}
        is_each_alone = len(of_trainer) == len(self.trainer_gpus) and len(of_replicas) == len(self.engine_gpus)
        if self.ranks_per_node < 1 or not is_each_alone or not of_trainer.isdisjoint(self.engine_gpus.values()):
            raise PlanError(
                "ranks_per_node must be >= 1, every trainer rank has its own GPU, and no two ranks of a replica share "
                f"one, got {self}"
            )

    def node_of(self, gpu: int) -> int:
        return gpu // self.ranks_per_node

    @property
    def num_nodes(self) -> int:
        return len({self.node_of(gpu) for gpu in (*self.trainer_gpus.values(), *self.engine_gpus.values())})

    @property
    def num_trainer_nodes(self) -> int:
        return len({self.node_of(gpu) for gpu in self.trainer_gpus.values()})


def place(
    trainer_ranks: Sequence[int], engine_ranks: Sequence[Destination], ranks_per_node: int, replicas_per_gpu: int = 1
) -> Placement:
    """Place trainer ranks first, then engine ranks, on consecutive GPUs.

    A replica that does not fit the rest of a node starts on the next node, so that it spans as few nodes as possible.
    `replicas_per_gpu` of one rank each share a GPU, and its links.
    """
    if ranks_per_node < 1:
        raise PlanError(f"ranks_per_node must be >= 1, got {ranks_per_node}")
    trainer_gpus = {rank: gpu for gpu, rank in enumerate(trainer_ranks)}
    gpu = len(trainer_gpus)
    sizes: dict[int, int] = {}
    for replica, _ in engine_ranks:
        sizes[replica] = sizes.get(replica, 0) + 1
    engine_gpus: dict[Destination, int] = {}
    placed: set[int] = set()
    for where in engine_ranks:
        size, left = sizes[where[0]], ranks_per_node - gpu % ranks_per_node
        if where[0] not in placed and left < size and left < ranks_per_node:
            gpu += left
        placed.add(where[0])
        engine_gpus[where] = gpu
        gpu += len(engine_gpus) % replicas_per_gpu == 0
    return Placement(ranks_per_node, trainer_gpus, engine_gpus)


def ports(gpu: int, to: int, placement: Placement, rates: LinkRates) -> tuple[Port, Port, float]:
    """The port out of one GPU, the port into the other, and the rate of what passes both."""
    if placement.node_of(gpu) == placement.node_of(to):
        return ("nvlink", gpu), ("nvlink", to), rates.nvlink_bytes_s
    return ("nic", gpu), ("nic", to), rates.nic_bytes_s
