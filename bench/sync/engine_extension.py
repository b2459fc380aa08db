"""The vLLM worker extension of bench/weight_sync.py: the product's, with counted memory and a peer's hooks."""

from typing import Any

import torch

from slipstream.rollout.in_vllm.engine_process import WeightReceiver

try:
    from checkpoint_engine.worker import VllmColocateWorkerExtension as _Peer

    PeerHooks: Any = _Peer
except ImportError:  # only the peer needs it
    PeerHooks = object


class MeasuredReceiver(WeightReceiver, PeerHooks):
    """The product's worker extension, which also notes how much memory torch allocates between begin and commit."""

    _allocated: list[int]

    def start_measuring(self) -> None:
        self._allocated = []

    def slipstream_begin(self, given: bytes) -> Any:
        """As the product's; also resets the allocator's peak."""
        product: Any = super()
        reply = product.slipstream_begin(given)
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        return reply

    def slipstream_commit(self, given: bytes) -> Any:
        """As the product's; also notes by how much the peak since begin exceeds what is still allocated."""
        product: Any = super()
        reply = product.slipstream_commit(given)
        if torch.cuda.is_initialized():
            self._allocated.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
        return reply

    def allocated(self) -> list[int]:
        """Bytes that torch allocated during each publish since the last call, new from the device or reused."""
        found, self._allocated = self._allocated, []
        return found
