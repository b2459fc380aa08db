"""Rules across sections: one function per rule, each raising one ConfigError. conf/schema/ has those of one section.

Everything here is pure: it sees a RunConfig and no machine, no file. What needs a machine or a file is checked by
`orchestrator.inputs.preflight`, which calls `check_architecture` again once it has read config.json and knows the
device. Options that contradict nothing and have no effect are a table of their own: `conf/ignored.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conf.errors import ConfigError
from conf.schema import (
    ENGINE_LORA_RANKS,
    MAX_EXPERT_RANK,
    Device,
    DType,
    EngineFormat,
    Init,
    Objective,
    Relay,
    RunConfig,
    SyncMode,
    TrainMode,
    TransportKind,
)
from conf.schema.rules import divisors
from conf.tensor_parallel import (
    check_tp_size_fits_model,
    fp8_skipped,
    has_dense_layers,
    head_dim_of,
    num_experts_of,
    one_of,
)

CPU_ENGINE_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes that vLLM's CPU attention has kernels for (vLLM 0.32, `cpu_attn.py`)."""
CPU_ENGINE_LATENT = (512, 64)
"""kv_lora_rank and qk_rope_head_dim of vLLM's CPU kernel of latent attention (vLLM 0.32, `mla_decode.cpp`)."""


def check_all(config: RunConfig) -> None:
    """Every rule that a RunConfig alone can break, the most basic first."""
    check_data_is_given(config)
    check_tokenizer_is_given(config)
    if config.algorithm.objective is Objective.policy:
        check_prompt_and_response_fit(config)
        check_some_responses_end_by_themselves(config)
        check_transport_fits_device(config)
        check_expert_parallel_engine_has_gpus(config)
        check_adapter_mode_has_an_adapter(config)
        check_relay_has_weights_to_pass_on(config)
    if config.model.init is Init.random and config.model.path is None:
        check_architecture(config, config.model.hf_config)


def check_architecture(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """Every rule between the run and the model's config.json."""
    check_ep_size_fits_experts(config, hf_config)
    check_sequence_fits_model(config, hf_config)
    check_lora_adapts_something(config, hf_config)
    check_expert_rank_has_kernels(config, hf_config)
    check_packed_experts_stay_frozen(config, hf_config)
    if config.algorithm.objective is Objective.policy:
        check_engine_takes_merged_weights(config, hf_config)
        check_expert_parallel_engine_has_experts(config, hf_config)
        check_tp_size_fits_model(
            "rollout.tp_size",
            config.rollout.tp_size,
            hf_config,
            is_expert_parallel=config.rollout.enable_expert_parallel,
            can_split_experts=config.cluster.device is not Device.cpu,
        )
        check_head_dim_on_cpu(config, hf_config)
        check_fp8_engine_has_gpus(config, hf_config)
        check_fp8_engine_computes_in_two_bytes(config, hf_config)
        check_adapters_beside_experts_have_gpu_engines(config, hf_config)


def check_data_is_given(config: RunConfig) -> None:
    """There is something to sample from, or to learn."""
    if config.data.path is None and config.algorithm.objective is Objective.sft:
        raise ConfigError(
            "data.path is required: give a .jsonl or .parquet file of conversations, one "
            '{"messages": [{"role": ..., "content": ...}, ...]} a row; to try it: experiment=sft_quickstart'
        )
    if config.data.path is None:
        raise ConfigError(
            "data.path is required: give a .jsonl or .parquet file of prompts, or choose data=letters, which ships "
            "with Slipstream"
        )


def check_tokenizer_is_given(config: RunConfig) -> None:
    """Random weights from a config alone come without a tokenizer."""
    if config.model.tokenizer is None and config.model.path is None:
        raise ConfigError(
            "model.tokenizer is required when model.path is null; give a folder, or model.tokenizer=characters"
        )


def check_prompt_and_response_fit(config: RunConfig) -> None:
    """The longest prompt and the longest response fit the engine together."""
    prompt, response = config.max_prompt_tokens, config.rollout.sampling.max_tokens
    limit = config.rollout.max_model_len
    if prompt + response > limit:
        raise ConfigError(
            f"data.max_prompt_tokens={prompt} plus rollout.sampling.max_tokens={response} is {prompt + response} "
            "tokens, more than "
            f"rollout.max_model_len={limit}; set rollout.max_model_len={prompt + response}, or shorten one of the "
            "two; data.max_prompt_tokens=null is what is left"
        )


def check_some_responses_end_by_themselves(config: RunConfig) -> None:
    """Something is left to train on."""
    if config.algorithm.mask_truncated and not config.rollout.sampling.stop_at_eos:
        raise ConfigError(
            "algorithm.mask_truncated=true contradicts rollout.sampling.stop_at_eos=false, with which every response "
            "ends by length; set algorithm.mask_truncated=false, or rollout.sampling.stop_at_eos=true"
        )


def check_transport_fits_device(config: RunConfig) -> None:
    """NVLink joins GPUs."""
    if config.weight_sync.transport is TransportKind.nvlink and config.cluster.device is Device.cpu:
        raise ConfigError(
            "weight_sync.transport=nvlink contradicts cluster.device=cpu: NVLink joins GPUs; "
            "set weight_sync.transport=auto (or tcp), or cluster.device=cuda"
        )


def check_expert_parallel_engine_has_gpus(config: RunConfig) -> None:
    """The CPU engine cannot split experts over its ranks."""
    if config.rollout.enable_expert_parallel and config.cluster.device is Device.cpu:
        raise ConfigError(
            "rollout.enable_expert_parallel=true contradicts cluster.device=cpu: the engine splits experts over GPUs "
            "only; "
            "set rollout.enable_expert_parallel=false (trainer.ep_size works on a CPU)"
        )


def check_adapter_mode_has_an_adapter(config: RunConfig) -> None:
    """Engine slots hold adapters of a bounded rank, and nothing else."""
    if config.weight_sync.mode is not SyncMode.adapter:
        return
    if config.trainer.mode is TrainMode.full:
        raise ConfigError(
            "weight_sync.mode=adapter contradicts trainer.mode=full, which trains no adapter; set "
            "weight_sync.mode=merged, or trainer.mode=lora"
        )
    if config.trainer.lora.slot_rank == 0:
        raise ConfigError(
            f"weight_sync.mode=adapter: engines serve adapters of rank {ENGINE_LORA_RANKS[-1]} at most, got "
            f"trainer.lora.rank={config.trainer.lora.rank}; set weight_sync.mode=merged, or a lower rank"
        )


def check_relay_has_weights_to_pass_on(config: RunConfig) -> None:
    """A slot's few bytes are not worth a second transfer after the first."""
    if config.weight_sync.relay is Relay.node and config.weight_sync.mode is SyncMode.adapter:
        raise ConfigError(
            "weight_sync.relay=node contradicts weight_sync.mode=adapter, whose publishes are too small to gain by a "
            "second transfer; set weight_sync.relay=none, or weight_sync.mode=merged"
        )


def check_adapters_beside_experts_have_gpu_engines(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """With adapters enabled vLLM computes every expert in Triton kernels, adapted or not; a CPU has none."""
    is_adapter = config.weight_sync.mode is SyncMode.adapter
    if is_adapter and config.cluster.device is Device.cpu and num_experts_of(hf_config):
        raise ConfigError(
            "weight_sync.mode=adapter: the CPU engine serves no adapters in a model with experts, whose kernels are a "
            "GPU's; set weight_sync.mode=merged, choose a dense model (model=tiny_qwen3), or cluster.device=cuda"
        )


def check_expert_parallel_engine_has_experts(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """Only experts can be split so."""
    if config.rollout.enable_expert_parallel and not num_experts_of(hf_config):
        raise ConfigError(
            f"rollout.enable_expert_parallel=true needs a mixture of experts, and model_type="
            f"{hf_config.get('model_type')} has none; set rollout.enable_expert_parallel=false"
        )


def check_ep_size_fits_experts(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """Every ep_rank of the trainer holds at least one expert."""
    ep_size, num_experts = config.trainer.ep_size, num_experts_of(hf_config)
    if ep_size > 1 and num_experts == 0:
        raise ConfigError(
            f"trainer.ep_size={ep_size} needs a mixture of experts, and model_type={hf_config.get('model_type')} has "
            "none; set trainer.ep_size=1"
        )
    if ep_size > max(num_experts, 1):
        allowed = [size for size in divisors(config.trainer.num_ranks) if size <= num_experts]
        raise ConfigError(
            f"trainer.ep_size={ep_size} is more than the model's {num_experts} experts; with trainer.num_ranks="
            f"{config.trainer.num_ranks} it can be {one_of(allowed)}"
        )


def check_sequence_fits_model(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """No position is asked for that the model does not have."""
    is_sft = config.algorithm.objective is Objective.sft
    option = "data.max_sequence_tokens" if is_sft else "rollout.max_model_len"
    longest = config.data.max_sequence_tokens if is_sft else config.rollout.max_model_len
    limit = hf_config.get("max_position_embeddings")
    if isinstance(limit, int) and longest is not None and longest > limit:
        raise ConfigError(
            f"{option}={longest} is more than the model's max_position_embeddings={limit}; set {option} to at most "
            f"{limit}"
        )


def check_head_dim_on_cpu(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """The CPU engine has attention kernels for some head sizes only."""
    if config.cluster.device is not Device.cpu:
        return
    latent, turning = hf_config.get("kv_lora_rank"), hf_config.get("qk_rope_head_dim")
    if latent is not None:
        if (latent, turning) != CPU_ENGINE_LATENT:
            raise ConfigError(
                f"the CPU engine's latent attention is made for kv_lora_rank={CPU_ENGINE_LATENT[0]} and "
                f"qk_rope_head_dim={CPU_ENGINE_LATENT[1]}, this model has {latent} and {turning}; "
                "choose another model, or cluster.device=cuda"
            )
        return
    head_dim = head_dim_of(hf_config)
    if head_dim is not None and head_dim not in CPU_ENGINE_HEAD_DIMS:
        raise ConfigError(
            f"the model's head_dim={head_dim} has no attention kernel in the CPU engine, which has "
            f"{one_of(CPU_ENGINE_HEAD_DIMS)}; "
            "choose another model, or cluster.device=cuda"
        )


def packing_of(hf_config: Mapping[str, Any]) -> str | None:
    """Format of four-bit weights that config.json asks for: "INT4", "MXFP4" or None."""
    quantization: Mapping[str, Any] = hf_config.get("quantization_config") or {}
    if quantization.get("quant_method") == "mxfp4":
        return "MXFP4"
    groups: Mapping[str, Any] = quantization.get("config_groups") or {}
    for group in groups.values():
        weights: Mapping[str, Any] = group.get("weights") or {}
        if weights.get("num_bits") == 4 and weights.get("type", "int") == "int":
            return "INT4"
    return None


def check_packed_experts_stay_frozen(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """A four-bit weight has no gradient step small enough to take."""
    packing = packing_of(hf_config)
    if packing is not None and config.trainer.mode is TrainMode.full:
        raise ConfigError(
            f"trainer.mode=full cannot train {packing} weights (model.hf_config.quantization_config); set "
            "trainer.mode=lora, or give a float checkpoint"
        )


def check_engine_takes_merged_weights(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """An engine with four-bit weights packs them in words, in groups with a scale: merged weights do not go there."""
    packing = packing_of(hf_config)
    if packing is not None and config.weight_sync.mode is SyncMode.merged:
        raise ConfigError(
            f"model.hf_config.quantization_config asks for {packing} engine weights: {packing} engines accept "
            "adapter mode only, because merged weights would have to be quantized anew at every publish; "
            + ("set weight_sync.mode=adapter, " if packing == "INT4" else "learn on them with algorithm=sft, ")
            + "or give a config.json without quantization_config (bfloat16) or with block-FP8"
        )


def check_packed_base_reaches_engines(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """No publish writes four-bit weights: engines in adapter mode load them from disk."""
    packing = packing_of(hf_config)
    if packing is None or config.weight_sync.mode is not SyncMode.adapter:
        return
    if packing != "INT4":
        raise ConfigError(
            f"weight_sync.mode=adapter on {packing} weights (model.hf_config.quantization_config) is not supported: "
            "engines would have to load them themselves, which is tested for INT4 alone; train on them with "
            "algorithm=sft, or give a float checkpoint"
        )
    if config.model.init is not Init.checkpoint:
        raise ConfigError(
            "weight_sync.mode=adapter on INT4 weights needs model.path and model.init=checkpoint: engines load such "
            "weights from there themselves, because no publish can write them"
        )
    check_int4_kernels_add_adapters(config, hf_config)


def check_int4_kernels_add_adapters(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """vLLM gives experts of other shapes to kernels that ignore adapters, or pads them beside adapters that it does not
    pad.
    """
    hidden, width = int(hf_config["hidden_size"]), int(hf_config["moe_intermediate_size"])
    parts = 1 if config.rollout.enable_expert_parallel else config.rollout.tp_size
    if hidden % 128 or width % (64 * parts):
        raise ConfigError(
            "weight_sync.mode=adapter on INT4 weights needs hidden_size in multiples of 128 and an engine rank's part "
            f"of moe_intermediate_size in multiples of 64 (vLLM's Marlin kernels), got {hidden} and {width} / {parts}; "
            "lower rollout.tp_size, set rollout.enable_expert_parallel=true, which cuts no expert, or train on this "
            "model with algorithm=sft"
        )


def check_fp8_engine_has_gpus(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """vLLM's CPU kernels for FP8 repack weights, where they exist at all."""
    if config.cluster.device is not Device.cpu:
        return
    if config.model.engine_format is EngineFormat.block_fp8 or hf_config.get("quantization_config"):
        asked = "model.engine_format=block_fp8" if not hf_config.get("quantization_config") else "quantization_config"
        raise ConfigError(
            f"{asked} (config.json) asks for quantized engines, which need GPUs, and cluster.device=cpu; choose "
            "cluster.device=cuda, or model.engine_format=checkpoint and a model without quantization_config"
        )


def check_fp8_engine_computes_in_two_bytes(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """vLLM's FP8 layers take activations of two bytes (`Fp8Config.get_supported_act_dtypes`)."""
    is_fp8 = config.model.engine_format is EngineFormat.block_fp8 or fp8_skipped(hf_config) is not None
    if is_fp8 and config.model.dtype is DType.float32:
        raise ConfigError(
            "model.dtype=float32 contradicts block-FP8 engines, which compute in two bytes; set model.dtype=bfloat16, "
            "or give a model without FP8 (model.engine_format=checkpoint)"
        )


def check_lora_adapts_something(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """The parts that adapters are asked for exist in this model."""
    lora, is_moe = config.trainer.lora, num_experts_of(hf_config) > 0
    if config.trainer.mode is TrainMode.full or lora.attention:
        return
    has_mlp = has_dense_layers(hf_config) or hf_config.get("n_shared_experts")
    if not (lora.experts and is_moe) and not (lora.mlp and has_mlp):
        raise ConfigError(
            "trainer.lora.attention=false leaves nothing to adapt: this model has "
            f"{'experts' if is_moe else 'a dense feed-forward'} only; set "
            f"trainer.lora.{'experts' if is_moe else 'mlp'}=true"
        )


def check_expert_rank_has_kernels(config: RunConfig, hf_config: Mapping[str, Any]) -> None:
    """The kernels beside grouped products hold a whole row of the rank."""
    lora = config.trainer.lora.for_experts
    if config.trainer.mode is TrainMode.full or lora is None or lora.rank <= MAX_EXPERT_RANK:
        return
    if num_experts_of(hf_config):
        raise ConfigError(
            f"routed experts take adapters of rank {MAX_EXPERT_RANK} at most, got {lora.rank}; set "
            f"trainer.lora.expert_rank={MAX_EXPERT_RANK} or lower, or trainer.lora.experts=false"
        )
