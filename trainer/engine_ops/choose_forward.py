"""Which forward a decoder takes its values from."""

from __future__ import annotations

import torch

from conf.schema import AdapterValues, AttentionValues, Match, SyncMode, TrainerConfig, TrainMode
from trainer.engine_ops.adapter_forward import AdapterModules
from trainer.engine_ops.engine_forward import MergedModules, compute_in_engine_operations
from trainer.engine_ops.merged_forward import compute_with_merged_adapters
from trainer.engine_ops.vllm_adapters import VllmAdapters
from trainer.engine_ops.vllm_attention import VllmAttention, refusal_of_engine_attention
from trainer.engine_ops.vllm_operations import VllmOperations
from trainer.errors import TrainerError
from trainer.lora import Linear
from trainer.model.decoder import Decoder


def choose_forward(
    decoder: Decoder,
    trainer: TrainerConfig,
    device: torch.device,
    engines: SyncMode = SyncMode.merged,
    engine_ranks: int = 1,
) -> None:
    """Do what trainer.numerics asks for.

    Args:
        engines: What engines hold (weight_sync.mode): merged weights, or the base and adapters.
        engine_ranks: rollout.tp_size.

    Raises:
        TrainerError: the engine's kernels were asked for, and this node cannot run them: vLLM is missing, or the GPU,
            the dtype or the heads do not fit.
    """
    if trainer.numerics.match is Match.bitwise:
        operations = VllmOperations(decoder.spec, decoder.dtype, device)
        if engines is SyncMode.adapter:
            rank = trainer.lora.slot_rank
            modules = AdapterModules(operations, VllmAdapters(rank, device), rank)
        else:
            modules = MergedModules(operations, engine_ranks)
        compute_in_engine_operations(decoder, operations, modules)
        return
    for module in decoder.modules():
        if isinstance(module, Linear):
            module.rounds_base_first = engines is SyncMode.adapter
    decoder.attention_values = _choose_attention(decoder, trainer.numerics.places.attention, device)
    if trainer.numerics.adapters is AdapterValues.merged and trainer.mode is TrainMode.lora:
        compute_with_merged_adapters(decoder)


def _choose_attention(decoder: Decoder, values: AttentionValues, device: torch.device) -> str:
    """Whose kernel computes the attention's values, for the run's log."""
    if values is AttentionValues.own:
        return "the trainer's own"
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    refusal = refusal_of_engine_attention(capability, decoder.dtype, decoder.spec.attention)
    if refusal is not None:
        if values is AttentionValues.engine:
            raise TrainerError(f"attention's values by the engine's kernel cannot be had: {refusal}")
        return f"the trainer's own ({refusal})"
    decoder.use_attention_of(VllmAttention())
    return "vLLM's FlashAttention 3"
