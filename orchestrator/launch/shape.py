"""How many machines a run needs. Pure.

Owns: the arithmetic. Does not own: which process gets which machine at the start, which Ray decides
(orchestrator/cluster): it finds a place for every process on machines of this number and size.
"""

from dataclasses import dataclass

from slipstream.conf.errors import ConfigError
from slipstream.conf.schema import Device, Objective, RunConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """Machines of a run, all alike. Example: Shape(nodes=6, gpus=8)."""

    nodes: int
    gpus: int
    """GPUs of each machine; 0: a run on CPUs."""
    processes: int
    """Trainer ranks and rollout workers together."""


def shape_of(config: RunConfig, gpus_per_node: int) -> Shape:
    """The fewest machines with `gpus_per_node` GPUs each that hold the run; of one machine only what the run uses.

    An engine stays on one machine, and a trainer rank takes one GPU anywhere: with t GPUs per engine, a machine of g
    GPUs holds floor(g / t) engines, or workers_per_gpu times as many, and ranks take what engines leave. So the
    machines must have places for all engines, and GPUs for everything.

    Raises:
        ConfigError: an engine does not fit a machine, or CPUs would have to be shared by machines.
    """
    cluster, rollout = config.cluster, config.rollout
    num_workers = rollout.least_workers if config.algorithm.objective is Objective.policy else 0
    processes = config.trainer.num_ranks + num_workers
    if cluster.device is Device.cpu:
        return Shape(1, 0, processes)
    if cluster.share_gpu:
        return Shape(1, 1, processes)
    if num_workers and rollout.tp_size > gpus_per_node:
        raise ConfigError(
            f"rollout.tp_size={rollout.tp_size} does not fit a machine of {gpus_per_node} GPUs, and an engine runs on "
            "one machine; lower rollout.tp_size, or give --gpus-per-node"
        )
    num_engine_gpus = rollout.num_gpus if num_workers else 0
    num_gpus = config.trainer.num_ranks + num_engine_gpus
    if num_gpus <= gpus_per_node:
        return Shape(1, num_gpus, processes)
    num_places = num_engine_gpus // rollout.tp_size
    nodes_for_engines = -(-num_places // (gpus_per_node // rollout.tp_size))
    return Shape(max(nodes_for_engines, -(-num_gpus // gpus_per_node)), gpus_per_node, processes)
