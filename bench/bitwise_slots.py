"""Adapter slots of an engine in this process, filled with what a publish writes there, without a link.

Owns recording a slot's layout (as the product's worker does), writing one version's factors along it, and what a
request must say to be served by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.rollout.types import Adapter
from slipstream.weight_sync.layout import DestLayout, TensorMeta

if TYPE_CHECKING:
    from slipstream.trainer.delivery.adapter_source import AdapterSource

NUM_SLOTS = 2
"""One serves while the other is written."""


class SlotsHere:
    """See the module's docstring.

    Args:
        llm: vLLM's LLM, with LoRA, whose workers live in this process.
        tensors: Every factor of the adapter, at the slots' rank.
    """

    def __init__(self, llm: Any, tensors: Sequence[TensorMeta]) -> None:
        from slipstream.rollout.in_vllm.adapter_slots import record_slot, slot_buffers, with_shared_a

        self._llm = llm
        self._version = -1

        def record(worker: Any) -> tuple[dict[str, Any], DestLayout]:
            manager = worker.model_runner.lora_manager
            buffers = slot_buffers(manager._adapter_manager.modules, NUM_SLOTS)
            return buffers, with_shared_a(record_slot(manager, buffers, tensors, 0))

        ((self._buffers, self._layout),) = llm.collective_rpc(record)

    def load_base(self, write: Callable[[Any], None]) -> None:
        """Call `write` on the model without its adapters' wrappers."""
        from slipstream.rollout.in_vllm.adapter_slots import without_adapters

        def load(worker: Any) -> None:
            with without_adapters(worker):
                write(worker.get_model())

        self._llm.collective_rpc(load)

    def publish(self, source: AdapterSource) -> None:
        """Write the next version into the slot that the newest does not have."""
        import torch

        from slipstream.rollout.in_vllm.adapter_slots import copy_shared_a

        self._version += 1
        params = {name: stacked[self.adapter.slot] for name, stacked in self._buffers.items()}
        source.begin(self._version)
        for load in self._layout.loads:
            param = params[load.param]
            part = torch.empty(load.region.shape, dtype=param.dtype, device=param.device)
            source.read(load.tensor, load.region, part)
            part = part.permute(load.axes)
            param.as_strided(part.shape, load.stride, param.storage_offset() + load.offset).copy_(part)
        source.end()
        copy_shared_a(params, self._layout)

    @property
    def adapter(self) -> Adapter:
        return Adapter(self._version % NUM_SLOTS, self._version)

    def request(self) -> Any:
        """What names the newest version's slot; it is loaded already: vLLM never reads the path."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.adapter.name, self.adapter.lora_id, "slot")
