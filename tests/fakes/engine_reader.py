"""The product's worker extension, with what tests ask of a rank: hashes of its bytes, zeros in place of them, and slow
steps. vLLM imports this module in each engine process (worker_extension_cls). It is the product's class itself that
gets the methods: engines of both names may follow each other in one process, and vLLM mixes but one class in.
"""

import hashlib
import time
from typing import Any

import torch
from torch import Tensor

from fakes.readable_weights import readable
from slipstream.rollout.in_vllm.adapter_slots import slot_buffers
from slipstream.rollout.in_vllm.engine_process import WeightReceiver

__all__ = ["WeightReceiver"]


class _Reader(WeightReceiver):
    """Answers as WeightReceiver does: (error class name, text, result)."""

    def read_params(self) -> tuple[str, str, dict[str, str]]:
        """sha256 of every weight's bytes as the kernels read them."""
        return "", "", {name: _sha256(tensor) for name, tensor in readable(self.get_model()).items()}

    def read_slots(self) -> tuple[str, str, list[dict[str, str]]]:
        """sha256 of every adapter buffer, by slot."""
        manager = self.model_runner.lora_manager
        num_slots = manager.lora_config.max_loras
        buffers = slot_buffers(manager._adapter_manager.modules, num_slots)
        slots = [{name: _sha256(stacked[slot]) for name, stacked in buffers.items()} for slot in range(num_slots)]
        return "", "", slots

    def zero_params(self) -> tuple[str, str, None]:
        """Set every weight to zero, to show that a publish replaces all of them."""
        with torch.no_grad():
            for tensor in readable(self.get_model()).values():
                tensor.zero_()
        return "", "", None

    def wait_before_steps(self, seconds: float) -> tuple[str, str, None]:
        """Sleep before each step of the model, so that what is sampled is under way for as long as a test needs."""
        execute = type(self.model_runner).execute_model

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return execute(self.model_runner, *args, **kwargs)

        self.model_runner.execute_model = slowly
        return "", "", None


def _sha256(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


for _method in (_Reader.read_params, _Reader.read_slots, _Reader.zero_params, _Reader.wait_before_steps):
    setattr(WeightReceiver, _method.__name__, _method)
