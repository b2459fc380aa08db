"""Rules between a run's options and the config.json of its model: one function per rule, each raises one ConfigError.

Pure: config.json is passed in. `sections.check_all` calls `check_architecture` for a model whose config is among the
options; orchestrator/inputs/preflight.py calls it for a model on disk, once the device is known.
"""

from slipstream.conf.architecture.families import FAMILIES, check_engine_constants, family_of, kind_of, read_config
from slipstream.conf.checks.publish import check_changes_can_be_sent, check_engines_can_merge
from slipstream.conf.checks.tensor_parallel import (
    check_tp_size_fits_model,
    fp8_skipped,
    has_dense_layers,
    has_shared_experts,
    head_dim_of,
    num_experts_of,
    one_of,
)
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import HfConfig, JsonMapping
from slipstream.conf.schema import (
    LORA_TARGETS,
    MAX_EXPERT_RANK,
    MLP_MODULES,
    Device,
    DType,
    EngineFormat,
    Init,
    Objective,
    RunConfig,
    SyncMode,
    TrainMode,
)
from slipstream.conf.schema.rules import divisors

CPU_ENGINE_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes that vLLM's CPU attention has kernels for (vLLM 0.32, `cpu_attn.py`)."""
MAX_EXPERT_SLOT_RANK = 128
"""Rank of the largest slots whose experts vLLM has a kernel for (0.25.1, `fused_moe_lora_op.py`, an assertion)."""
CPU_ENGINE_LATENT = (512, 64)
"""kv_lora_rank and qk_rope_head_dim of vLLM's CPU kernel of latent attention (vLLM 0.32, `mla_decode.cpp`)."""


def check_architecture(config: RunConfig, hf_config: HfConfig) -> None:
    """Check every rule between the run and the model's config.json."""
    check_ep_size_fits_experts(config, hf_config)
    if config.trainer.cp_size > 1:
        read_config(hf_config).check_cp_size(config.trainer.cp_size)
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
        check_engine_constants(hf_config)
        check_head_dim_on_cpu(config, hf_config)
        check_cpu_engine_has_kernels(config, hf_config)
        check_fp8_engine_has_gpus(config, hf_config)
        check_fp8_engine_computes_in_two_bytes(config, hf_config)
        check_changes_can_be_sent(config, hf_config)
        check_engines_can_merge(config, hf_config)
        check_adapters_beside_experts_have_gpu_engines(config, hf_config)
        check_slots_of_experts_have_kernels(config, hf_config)
        check_slots_have_names(config, hf_config)
        check_engine_forward_knows_the_model(config, hf_config)
        check_engine_records_routes(config, hf_config)


def check_adapters_beside_experts_have_gpu_engines(config: RunConfig, hf_config: HfConfig) -> None:
    """In adapter mode a model with experts needs GPU engines: with adapters enabled, vLLM computes every expert,
    adapted or not, with Triton kernels, which need a GPU."""
    is_adapter = config.weight_sync.mode is SyncMode.adapter
    if is_adapter and config.cluster.device is Device.cpu and num_experts_of(hf_config):
        raise ConfigError(
            "weight_sync.mode=adapter: the CPU engine serves no adapters in a model with experts, whose kernels are a "
            "GPU's; set weight_sync.mode=merged, choose a dense model (model=tiny_qwen3), or cluster.device=cuda"
        )


BITWISE_HEAD_DIMS = (128, 192, 256)
"""At others, vLLM 0.25.1's FlashAttention 3 reads keys in blocks of other sizes when it decodes than when it prefills
(64), or from pages than from rows (80, 96)."""


def check_slots_of_experts_have_kernels(config: RunConfig, hf_config: HfConfig) -> None:
    """An engine's slots are of one rank for all modules, and those of experts are limited."""
    lora = config.trainer.lora
    if config.weight_sync.mode is not SyncMode.adapter or not lora.experts or not num_experts_of(hf_config):
        return
    if lora.slot_rank > MAX_EXPERT_SLOT_RANK:
        raise ConfigError(
            f"weight_sync.mode=adapter: engines serve adapters of experts up to rank {MAX_EXPERT_SLOT_RANK}, and the "
            f"slots of all modules have the largest rank, which is {lora.slot_rank} here; set trainer.lora.rank, "
            f"attention_rank and expert_rank to {MAX_EXPERT_SLOT_RANK} at most, trainer.lora.targets without experts, "
            "or weight_sync.mode=merged"
        )


def check_slots_have_names(config: RunConfig, hf_config: HfConfig) -> None:
    """Adapters whose matrices have other names in adapter files than in the checkpoint, or no slot in an engine:
    experts whose projections are w1, w2 and w3, and projections of latent and of linear attention."""
    if config.weight_sync.mode is not SyncMode.adapter:
        return
    family, kind, lora = family_of(hf_config), kind_of(hf_config), config.trainer.lora
    if lora.experts and not family.names_slots and num_experts_of(hf_config):
        raise ConfigError(
            f"weight_sync.mode=adapter: the slots of {kind}'s experts have no names that adapters have; "
            "set trainer.lora.targets without experts, or weight_sync.mode=merged"
        )
    for together in (("q_proj", "k_proj", "v_proj"), MLP_MODULES[:2]):
        adapts = lora.adapts_mlp if together[0] == "gate_proj" else lora.adapts_attention
        if len({adapts(name) for name in together}) > 1:
            raise ConfigError(
                f"weight_sync.mode=adapter: engines have one slot for {', '.join(together)}; name all or none of "
                "them in trainer.lora.targets, or set weight_sync.mode=merged"
            )
    if lora.attention and not family.fills_slots:
        raise ConfigError(
            f"weight_sync.mode=adapter: engines give values of {kind} the weights of keys, and no adapter; set "
            "trainer.lora.targets without attention, or weight_sync.mode=merged"
        )
    if lora.attention and family.other_attention is not None:
        raise ConfigError(
            f"weight_sync.mode=adapter: the {family.other_attention.kind} attention of model_type={kind} has no slots "
            "for adapters in an engine; set trainer.lora.targets without attention, or weight_sync.mode=merged"
        )


def check_engine_forward_knows_the_model(config: RunConfig, hf_config: HfConfig) -> None:
    """The engine's forward is written down for some families, in 16 bits and without scaled positions."""
    if not config.is_bitwise:
        return
    rope: JsonMapping = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    reason = None
    if not family_of(hf_config).has_engine_forward:
        known = [kind for kind, family in FAMILIES.items() if family.has_engine_forward]
        reason = f"model_type={kind_of(hf_config)}, which is not one of {', '.join(known)}"
    elif config.rollout.tp_size > 1 and num_experts_of(hf_config):
        reason = f"rollout.tp_size={config.rollout.tp_size} for models with experts, where it has to be 1"
    elif scaling != "default":
        reason = f"positions scaled by {scaling} (rope_scaling in config.json)"
    elif hf_config.get("quantization_config"):
        reason = "quantized engines (quantization_config in config.json)"
    elif (head_dim := hf_config.get("head_dim", BITWISE_HEAD_DIMS[0])) not in BITWISE_HEAD_DIMS:
        reason = (
            f"head_dim={head_dim}: only at {', '.join(map(str, BITWISE_HEAD_DIMS))} does FlashAttention 3 read keys in "
            "equal blocks when it decodes, prefills and trains"
        )
    if reason is not None:
        raise ConfigError(
            f"parity=bitwise (trainer.numerics.match) does not know {reason}; choose parity=standard, or another model"
        )


def check_engine_records_routes(config: RunConfig, hf_config: HfConfig) -> None:
    """Routing replay needs experts, and an engine that records which of them it chose: vLLM 0.25.1 and 0.32 on GPUs.
    On a CPU, 0.32 has no model runner that does (`VllmConfig._verify_aux_output_compatibility`)."""
    if not config.parity.replay_routing:
        return
    if not num_experts_of(hf_config):
        raise ConfigError(
            f"parity.replay_routing=true needs a mixture of experts, and model_type={kind_of(hf_config)} has "
            "none; set parity.replay_routing=false"
        )
    if config.cluster.device is Device.cpu:
        raise ConfigError(
            "parity.replay_routing=true contradicts cluster.device=cpu: the CPU engine does not record which experts "
            "it chose; set parity.replay_routing=false, or cluster.device=cuda"
        )


def check_expert_parallel_engine_has_experts(config: RunConfig, hf_config: HfConfig) -> None:
    if config.rollout.enable_expert_parallel and not num_experts_of(hf_config):
        raise ConfigError(
            f"rollout.enable_expert_parallel=true needs a mixture of experts, and model_type="
            f"{kind_of(hf_config)} has none; set rollout.enable_expert_parallel=false"
        )


def check_ep_size_fits_experts(config: RunConfig, hf_config: HfConfig) -> None:
    ep_size, num_experts = config.trainer.ep_size, num_experts_of(hf_config)
    if ep_size > 1 and num_experts == 0:
        raise ConfigError(
            f"trainer.ep_size={ep_size} needs a mixture of experts, and model_type={kind_of(hf_config)} has "
            "none; set trainer.ep_size=1"
        )
    if ep_size > max(num_experts, 1):
        allowed = [size for size in divisors(config.trainer.num_ranks) if size <= num_experts]
        raise ConfigError(
            f"trainer.ep_size={ep_size} is more than the model's {num_experts} experts; with trainer.num_ranks="
            f"{config.trainer.num_ranks} it can be {one_of(allowed)}"
        )


def check_sequence_fits_model(config: RunConfig, hf_config: HfConfig) -> None:
    """The longest sequence is at most the model's max_position_embeddings."""
    is_given = config.algorithm.objective is not Objective.policy
    option = "data.max_sequence_tokens" if is_given else "rollout.max_model_len"
    longest = config.data.max_sequence_tokens if is_given else config.rollout.max_model_len
    limit = hf_config.get("max_position_embeddings")
    if isinstance(limit, int) and longest is not None and longest > limit:
        raise ConfigError(
            f"{option}={longest} is more than the model's max_position_embeddings={limit}; set {option} to at most "
            f"{limit}"
        )


def check_head_dim_on_cpu(config: RunConfig, hf_config: HfConfig) -> None:
    """The CPU engine has attention kernels only for some head sizes."""
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


def check_cpu_engine_has_kernels(config: RunConfig, hf_config: HfConfig) -> None:
    """The CPU engine lacks parts of some families, and does some attentions in one format and width of heads only."""
    if config.cluster.device is not Device.cpu:
        return
    if (lack := family_of(hf_config).lacks_on_cpu) is not None:
        raise ConfigError(
            f"the CPU engine does not serve model_type={kind_of(hf_config)}: {lack}; choose another model, or "
            "cluster.device=cuda"
        )
    attention = family_of(hf_config).other_attention
    if attention is None:
        return
    if attention.cpu_dtype not in (config.model.dtype, None):
        raise ConfigError(
            f"model.dtype={config.model.dtype}: the CPU engine's {attention.kind} attention computes in "
            f"{attention.cpu_dtype} alone; set model.dtype={attention.cpu_dtype}, or cluster.device=cuda"
        )
    for key, only in attention.cpu_widths:
        if (width := hf_config.get(key, only)) != only:
            raise ConfigError(
                f"the CPU engine's {attention.kind} attention is made for heads of {only}, and {key} is {width}; "
                "choose another model, or cluster.device=cuda"
            )


def packing_of(hf_config: HfConfig) -> str | None:
    """The format of four-bit weights that config.json asks for: "INT4", "MXFP4" or None."""
    quantization: JsonMapping = hf_config.get("quantization_config") or {}
    if quantization.get("quant_method") == "mxfp4":
        return "MXFP4"
    groups: JsonMapping = quantization.get("config_groups") or {}
    for group in groups.values():
        weights: JsonMapping = group.get("weights") or {}
        if weights.get("num_bits") == 4 and weights.get("type", "int") == "int":
            return "INT4"
    return None


def check_packed_experts_stay_frozen(config: RunConfig, hf_config: HfConfig) -> None:
    """Four-bit weights stay frozen: their values are too far apart for the steps of an optimizer."""
    packing = packing_of(hf_config)
    if packing is not None and config.trainer.mode is TrainMode.full:
        raise ConfigError(
            f"trainer.mode=full cannot train {packing} weights (model.hf_config.quantization_config); set "
            "trainer.mode=lora, or give a float checkpoint"
        )


def check_engine_takes_merged_weights(config: RunConfig, hf_config: HfConfig) -> None:
    """Engines with four-bit weights need adapter mode: merged weights would have to be quantized to their packed words
    and scales at every publish."""
    packing = packing_of(hf_config)
    if packing is not None and config.weight_sync.mode is SyncMode.merged:
        raise ConfigError(
            f"model.hf_config.quantization_config asks for {packing} engine weights: {packing} engines accept "
            "adapter mode only, because merged weights would have to be quantized anew at every publish; "
            + ("set weight_sync.mode=adapter, " if packing == "INT4" else "learn on them with algorithm=sft, ")
            + "or give a config.json without quantization_config (bfloat16) or with block-FP8"
        )


def check_packed_base_reaches_engines(config: RunConfig, hf_config: HfConfig) -> None:
    """Engines load four-bit weights from disk themselves, because no publish writes them."""
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


def check_int4_kernels_add_adapters(config: RunConfig, hf_config: HfConfig) -> None:
    """INT4 experts need a shape for which vLLM's kernels add adapters: for other shapes, its kernels ignore adapters,
    or it pads the experts but not the adapters."""
    hidden, width = int(hf_config["hidden_size"]), int(hf_config["moe_intermediate_size"])
    parts = 1 if config.rollout.enable_expert_parallel else config.rollout.tp_size
    if hidden % 128 or width % (64 * parts):
        raise ConfigError(
            "weight_sync.mode=adapter on INT4 weights needs hidden_size in multiples of 128 and an engine rank's part "
            f"of moe_intermediate_size in multiples of 64 (vLLM's Marlin kernels), got {hidden} and {width} / {parts}; "
            "lower rollout.tp_size, set rollout.enable_expert_parallel=true, which cuts no expert, or train on this "
            "model with algorithm=sft"
        )


def check_fp8_engine_has_gpus(config: RunConfig, hf_config: HfConfig) -> None:
    """Engines with FP8 weights need GPUs: vLLM has no CPU kernels for them, or ones that repack the weights."""
    if config.cluster.device is not Device.cpu:
        return
    if config.model.engine_format is EngineFormat.block_fp8 or hf_config.get("quantization_config"):
        asked = "model.engine_format=block_fp8" if not hf_config.get("quantization_config") else "quantization_config"
        raise ConfigError(
            f"{asked} (config.json) asks for quantized engines, which need GPUs, and cluster.device=cpu; choose "
            "cluster.device=cuda, or model.engine_format=checkpoint and a model without quantization_config"
        )


def check_fp8_engine_computes_in_two_bytes(config: RunConfig, hf_config: HfConfig) -> None:
    """Block-FP8 engines need activations of two bytes (vLLM's `Fp8Config.get_supported_act_dtypes`)."""
    is_fp8 = config.model.engine_format is EngineFormat.block_fp8 or fp8_skipped(hf_config) is not None
    if is_fp8 and config.model.dtype is DType.float32:
        raise ConfigError(
            "model.dtype=float32 contradicts block-FP8 engines, which compute in two bytes; set model.dtype=bfloat16, "
            "or give a model without FP8 (model.engine_format=checkpoint)"
        )


def check_lora_adapts_something(config: RunConfig, hf_config: HfConfig) -> None:
    lora, is_moe = config.trainer.lora, num_experts_of(hf_config) > 0
    has_mlp = has_dense_layers(hf_config) or has_shared_experts(hf_config)
    if config.trainer.mode is TrainMode.full:
        return
    if modules := [name for name in lora.targets if name not in LORA_TARGETS]:
        spec = read_config(hf_config)
        shapes = [shape for attention in spec.attentions for shape in attention.linears(spec.hidden_size)]
        own = [*dict.fromkeys(shape.name for shape in shapes), *(MLP_MODULES if has_mlp else ())]
        if absent := [name for name in modules if name not in own]:
            raise ConfigError(
                f"trainer.lora.targets: this model has no {', '.join(absent)}; it has {', '.join(own)}"
                + ", and routed experts, whose matrices are adapted together: experts" * is_moe
            )
    if lora.attention:
        return
    if not (lora.experts and is_moe) and not (lora.mlp and has_mlp):
        raise ConfigError(
            "trainer.lora.targets without attention leaves nothing to adapt: this model has "
            f"{'experts' if is_moe else 'a dense feed-forward'} only; set "
            f"trainer.lora.targets=[{'experts' if is_moe else 'mlp'}]"
        )


def check_expert_rank_has_kernels(config: RunConfig, hf_config: HfConfig) -> None:
    """Adapters of routed experts have a bounded rank: the trainer's kernels hold all of it in one tile."""
    lora = config.trainer.lora.for_experts
    if config.trainer.mode is TrainMode.full or lora is None or lora.rank <= MAX_EXPERT_RANK:
        return
    if num_experts_of(hf_config):
        raise ConfigError(
            f"routed experts take adapters of rank {MAX_EXPERT_RANK} at most, got {lora.rank}; set "
            f"trainer.lora.expert_rank={MAX_EXPERT_RANK} or lower, or trainer.lora.targets without experts"
        )
