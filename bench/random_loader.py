"""A vLLM worker extension whose engine draws random weights by name, the trainer's, instead of reading files.

vLLM imports this module in each engine process before it loads the model (worker_extension_cls); load_format=drawn then
draws every checkpoint tensor where the model is, from the seed and the standard deviation in `drawn.json` of the
model's folder. 61 GB take seconds, and no disk has to hold them.
"""

import json
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from bench.parity_shapes import FACTS, LOAD_FORMAT
from slipstream.conf.architecture.families import read_config
from slipstream.rollout.in_vllm.engine_process import WeightReceiver
from slipstream.trainer.weights.loading import RandomReader
from slipstream.weight_sync.layout import Region

__all__ = ["WeightReceiver"]


@register_model_loader(LOAD_FORMAT)
class DrawnLoader(BaseModelLoader):
    def download_model(self, model_config: Any) -> None:
        """Nothing to download."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Give vLLM's own loader every tensor of the checkpoint."""
        folder = Path(model_config.model)
        facts = json.loads((folder / FACTS).read_text())
        spec = read_config(json.loads((folder / "config.json").read_text()))
        device = next(model.parameters()).device
        reader = RandomReader(spec, seed=facts["seed"], std=facts["std"], device=device)
        dtype: torch.dtype = model_config.dtype

        def drawn() -> Any:
            for meta in spec.checkpoint_tensors("float32"):
                yield meta.name, reader.read(meta.name, Region((0,) * len(meta.shape), meta.shape)).to(dtype)

        model.load_weights(drawn())
