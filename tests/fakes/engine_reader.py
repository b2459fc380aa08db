"""The product's worker extension, with what tests ask of a rank: hashes of its bytes, and zeros in place of them. vLLM
imports this module in each engine process (worker_extension_cls)."""

import hashlib

import torch
from torch import Tensor, nn

from slipstream.rollout.in_vllm.adapter_slots import slot_buffers
from slipstream.rollout.in_vllm.engine_process import WeightReceiver
from slipstream.rollout.in_vllm.post_load import _MLA_DERIVED, _mla_layers, _named


class EngineReader(WeightReceiver):
    """Answers as WeightReceiver does: (error class name, text, result)."""

    def read_params(self) -> tuple[str, str, dict[str, str]]:
        """sha256 of every weight's bytes as the kernels read them."""
        return "", "", {name: _sha256(tensor) for name, tensor in _readable(self.get_model()).items()}

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
            for tensor in _readable(self.get_model()).values():
                tensor.zero_()
        return "", "", None


def _readable(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that kernels read and that depends on the checkpoint, by name: parameters and what MLA derives."""
    tensors: dict[str, Tensor] = dict(_named(model))
    for name, module in _mla_layers(model):
        tensors |= {f"{name}.{leaf}": getattr(module, leaf) for leaf in _MLA_DERIVED}
    return tensors


def _sha256(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
