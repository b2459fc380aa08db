"""The KV cache of an engine that shares its GPU with other engines (rollout.workers_per_gpu).

vLLM gives a cache what it finds free after a trial run, and would count what its neighbours take meanwhile as its own.
So the size is reckoned here: an equal part of what all may take, without weights and what else an engine needs.

Owns: that arithmetic. Does not own: an engine's other arguments (engine_options.py).
"""

import math
from collections.abc import Iterable

from slipstream.conf.schema import RolloutConfig
from slipstream.rollout.errors import EngineError
from slipstream.rollout.types import AdapterSlotsSpec
from slipstream.weight_sync.layout import DTYPE_BYTES, TensorMeta

OTHER_BYTES = 3 << 30
"""CUDA's context, CUDA graphs, and activations of a small model: what an engine takes besides weights and cache."""


def cache_bytes(
    config: RolloutConfig, tensors: Iterable[TensorMeta], adapters: AdapterSlotsSpec | None, gpu_bytes: int
) -> int:
    """Bytes of one engine's KV cache.

    Args:
        config: How many engines share the GPU, and how much of it they may take.

    Raises:
        EngineError: Nothing is left for it.
    """
    part = int(gpu_bytes * config.gpu_memory_utilization / config.workers_per_gpu)
    weights = _bytes(tensors) + (0 if adapters is None else adapters.num_slots * _bytes(adapters.tensors))
    if part <= weights + OTHER_BYTES:
        raise EngineError(
            f"rollout.workers_per_gpu={config.workers_per_gpu} leaves no engine a KV cache: of {gpu_bytes / 1e9:.1f} GB"
            f" and rollout.gpu_memory_utilization={config.gpu_memory_utilization:g}, each gets {part / 1e9:.1f} GB, and"
            f" weights take {weights / 1e9:.1f} and the rest of an engine {OTHER_BYTES / 1e9:.1f}; lower "
            "rollout.workers_per_gpu, or set rollout.kv_cache_bytes"
        )
    return part - weights - OTHER_BYTES


def _bytes(tensors: Iterable[TensorMeta]) -> int:
    return sum(math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in tensors)
