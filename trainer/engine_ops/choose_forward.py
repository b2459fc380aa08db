"""Which forward a decoder takes its values from."""

import torch

from slipstream.conf.architecture.attention_spec import GqaSpec, MlaSpec
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.schema import AttentionValues, Match, SyncMode, TrainerConfig, TrainMode
from slipstream.trainer.engine_ops.engine_forward import EngineForward, SlotForward
from slipstream.trainer.engine_ops.merged_forward import MergedForward
from slipstream.trainer.engine_ops.published_adapters import PublishedAdapters
from slipstream.trainer.engine_ops.vllm_adapters import VllmAdapters
from slipstream.trainer.engine_ops.vllm_attention import VllmAttention, refusal_of_engine_attention
from slipstream.trainer.engine_ops.vllm_operations import VllmOperations
from slipstream.trainer.errors import TrainerError
from slipstream.trainer.model.attention.engine_attention import EngineKernel
from slipstream.trainer.model.forward import Forward


def choose_forward(
    spec: ModelSpec,
    dtype: torch.dtype,
    trainer: TrainerConfig,
    device: torch.device,
    engines: SyncMode = SyncMode.merged,
    engine_ranks: int = 1,
) -> Forward:
    """What trainer.numerics asks for.

    Args:
        spec, dtype: Of the decoder that it will compute.
        engines: What engines hold (weight_sync.mode): merged weights, or the base and adapters.
        engine_ranks: rollout.tp_size.

    Raises:
        TrainerError: the engine's kernels were asked for, and this node cannot run them: vLLM is missing, or the GPU,
            the dtype or the heads do not fit.
    """
    if trainer.numerics.match is Match.bitwise:
        operations = VllmOperations(spec, dtype, device)
        if engines is SyncMode.adapter:
            rank = trainer.lora.slot_rank
            slots = PublishedAdapters(rank)
            return SlotForward(operations=operations, adapters=VllmAdapters(rank, device), slots=slots)
        return EngineForward(operations=operations, engine_ranks=engine_ranks)
    is_merged = trainer.numerics.match is Match.merged and trainer.mode is TrainMode.lora
    kernel, told = None, f"the trainer's own (trainer.cp_size={trainer.cp_size})"
    if trainer.cp_size == 1:
        kernel, told = _choose_attention(spec, dtype, trainer.numerics.places.attention, device)
    kind = MergedForward if is_merged else Forward
    return kind(rounds_base_first=engines is SyncMode.adapter, attention=kernel, attention_values=told)


def _choose_attention(
    spec: ModelSpec, dtype: torch.dtype, values: AttentionValues, device: torch.device
) -> tuple[EngineKernel | None, str]:
    """The kernel that computes the attention's values, None for the trainer's own; and whose it is, for the log."""
    if values is AttentionValues.own:
        return None, "the trainer's own"
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    with_softmax = [one for one in spec.kinds_of_attention if isinstance(one, GqaSpec | MlaSpec)]
    refusals = [refusal_of_engine_attention(capability, dtype, one) for one in with_softmax]
    refusal = next((one for one in refusals if one is not None), None)
    if refusal is None:
        return VllmAttention(), "vLLM's FlashAttention 3"
    if values is AttentionValues.engine:
        raise TrainerError(f"attention's values by the engine's kernel cannot be had: {refusal}")
    return None, f"the trainer's own ({refusal})"
