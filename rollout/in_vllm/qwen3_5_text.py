"""Qwen3.5's language model alone, for vLLM 0.25.1, which builds it inside of the wrapper with a vision tower only.

Later releases know these architectures, and `process_imports.know_text_models` names ours where vLLM has none. Owns:
what that release's class of the language model lacks to be a model by itself: the shapes of its linear attention's
state, which are the wrapper's, and positions of texts where a published config asks for those of pictures. Everything
else is vLLM's class. Importing this module imports vLLM's file, which imports torchvision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models import qwen3_5

_WRAPPER = qwen3_5.Qwen3_5ForConditionalGeneration


class _Alone:
    """What vLLM's IsHybrid and SupportsMRoPE ask for. They are protocols, whose __init__ would hide the model's."""

    is_hybrid = True
    supports_mrope = True

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return _WRAPPER.get_mamba_state_dtype_from_config(vllm_config)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        return _WRAPPER.get_mamba_state_shape_from_config(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Callable[..., Any], ...]:
        return _WRAPPER.get_mamba_state_copy_func()

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        """A token of a text has one position, on each of the three axes."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0


class Qwen3_5ForCausalLM(_Alone, qwen3_5.Qwen3_5ForCausalLM):
    """vLLM's, as a model by itself."""


class Qwen3_5MoeForCausalLM(_Alone, qwen3_5.Qwen3_5MoeForCausalLM):
    """The same, with experts."""
