"""How large Ray's object store has to be. Batches pass through it, weights never do; what it has no room for becomes
files.

Recorded routes are what is large of a batch. They pass twice: to the buffer, which holds the batches that may be
waiting, and to the trainer.
"""

from dataclasses import dataclass
from pathlib import Path

from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.inputs.model_folder import resolve_hf_config
from slipstream.orchestrator.machine import Machine

LEAST_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class RouteBytes:
    """What routes take."""

    per_token: int
    at_a_time: int
    """At most, of all batches that are on their way."""


def route_bytes(config: RunConfig) -> RouteBytes | None:
    """What the routes of a run take; None where none are recorded."""
    folder = config.model.path
    if not config.parity.replay_routing or (folder is not None and not Path(folder).is_dir()):
        return None  # check_model reports a folder that is missing
    moe = read_config(resolve_hf_config(config.model)).moe
    if moe is None:
        return None  # ... and a model without experts
    per_token = sum(moe.layers) * moe.top_k * (1 if moe.num_experts <= 256 else 2) + 1
    algorithm = config.algorithm
    longest = config.max_prompt_tokens + config.rollout.sampling.max_tokens
    num_tokens = algorithm.groups_per_step * algorithm.group_size * longest
    return RouteBytes(per_token, num_tokens * per_token * (algorithm.max_staleness_steps + 2))


def object_store_bytes(config: RunConfig, machine: Machine) -> int:
    """Room for all routes, as far as /dev/shm has it; at least LEAST_BYTES. Of a store that the run starts itself."""
    routes = route_bytes(config)
    if routes is None or routes.at_a_time <= LEAST_BYTES:
        return LEAST_BYTES
    return max(LEAST_BYTES, min(routes.at_a_time, machine.free_bytes(Path("/dev/shm")) // 2))
