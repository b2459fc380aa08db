"""How large Ray's object store has to be. Batches pass through it, weights never do; what it has no room for becomes
files.

Recorded routes are what is large of a batch. They pass twice: to the buffer, which holds the batches that may be
waiting, and to the trainer.
"""

from pathlib import Path

import numpy as np

from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.inputs.model_folder import resolve_hf_config, routing_shape
from slipstream.orchestrator.machine import Machine

LEAST_BYTES = 512 << 20
SHM = Path("/dev/shm")


def route_bytes(config: RunConfig) -> tuple[int, int]:
    """What the routes of a token take, and at most those of all batches on their way; 0 where none are recorded."""
    folder = config.model.path
    if not config.parity.replay_routing or (folder is not None and not Path(folder).is_dir()):
        return 0, 0  # check_model reports a folder that is missing
    shape = routing_shape(config, resolve_hf_config(config.model))
    if shape is None:
        return 0, 0  # ... and a model without experts
    per_token = len(shape.layers) * shape.top_k * np.dtype(shape.dtype).itemsize + 1
    algorithm = config.algorithm
    longest = config.max_prompt_tokens + config.rollout.sampling.max_tokens
    num_tokens = algorithm.groups_per_step * algorithm.group_size * longest
    return per_token, num_tokens * per_token * (algorithm.max_staleness_steps + 2)


def object_store_bytes(config: RunConfig, machine: Machine) -> int:
    """Room for all routes, as far as /dev/shm has it; at least LEAST_BYTES. Of a store that the run starts itself."""
    return max(LEAST_BYTES, min(route_bytes(config)[1], machine.free_bytes(SHM) // 2))
