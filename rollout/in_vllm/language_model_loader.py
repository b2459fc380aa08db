"""A load format of vLLM: the language model of a checkpoint that has a vision tower, too.

Engines read a base from disk if no publish can write it (INT4). They get the language model's config alone, whose class
knows its own names, and has slots for adapters, which that of the wrapper may lack (Kimi-K2.5). Owns: which tensors are
handed on, and by what names. Everything else is vLLM's own loader.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from slipstream.rollout.types import LANGUAGE_MODEL
from slipstream.weight_sync.disk.language_model import name_without_wrapper


class LanguageModelLoader(DefaultModelLoader):
    """Reads `folder` of model_loader_extra_config; the model's own folder has config.json alone."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra: Any = load_config.model_loader_extra_config
        self._source = DefaultModelLoader.Source(extra["folder"], None)
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config={}))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        """The language model's tensors; those of towers and of projectors are not among them."""
        for stored, tensor in self._get_weights_iterator(self._source):
            name = name_without_wrapper(stored)
            if name != stored or name.startswith("lm_head."):
                yield name, tensor


def register_language_model_loader() -> None:
    """Make the format known to vLLM in this process."""
    register_model_loader(LANGUAGE_MODEL)(LanguageModelLoader)
