"""Which forward a decoder takes its values from."""

from __future__ import annotations

import torch

from conf.schema import AdapterValues, TrainerConfig, TrainMode
from trainer.engine_ops.engine_forward import compute_in_engine_operations
from trainer.engine_ops.merged_forward import compute_with_merged_adapters
from trainer.engine_ops.vllm_operations import VllmOperations
from trainer.model.decoder import Decoder


def choose_forward(decoder: Decoder, trainer: TrainerConfig, device: torch.device) -> None:
    """Do what trainer.engine_forward or trainer.numerics.adapters asks for; by default nothing.

    Raises:
        TrainerError: vLLM is missing on this node.
    """
    if trainer.engine_forward:
        compute_in_engine_operations(decoder, VllmOperations(decoder.spec, decoder.dtype, device))
    elif trainer.numerics.adapters is AdapterValues.merged and trainer.mode is TrainMode.lora:
        compute_with_merged_adapters(decoder)
