"""Rules between a run's options and the config.json of its model: functions that say, one by one, what breaks a rule.

Pure: config.json is passed in. `sections.check_all` calls `check_architecture` for a model whose config is among the
options; orchestrator/inputs/preflight.py calls it for a model on disk, once the device is known.
"""

from collections.abc import Iterator

from slipstream.conf.architecture.families import FAMILIES, check_engine_constants, family_of, kind_of, read_config
from slipstream.conf.checks.tensor_parallel import (
    check_tp_size_fits_model,
    fp8_skipped,
    has_dense_layers,
    has_shared_experts,
    head_dim_of,
    num_experts_of,
    one_of,
)
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
    RemoteMerge,
    RunConfig,
    SyncMode,
    TrainMode,
)
from slipstream.conf.schema.rules import divisors, refuse_first

CPU_ENGINE_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes that vLLM's CPU attention has kernels for (vLLM 0.32, `cpu_attn.py`)."""
CPU_ENGINE_LATENT = (512, 64)
"""kv_lora_rank and qk_rope_head_dim of vLLM's CPU kernel of latent attention (vLLM 0.32, `mla_decode.cpp`)."""
MAX_EXPERT_SLOT_RANK = 128
"""Rank of the largest slots whose experts vLLM has a kernel for (0.25.1, `fused_moe_lora_op.py`, an assertion)."""
BITWISE_HEAD_DIMS = (128, 192, 256)
"""At others, vLLM 0.25.1's FlashAttention 3 reads keys in blocks of other sizes when it decodes than when it prefills
(64), or from pages than from rows (80, 96)."""
ON_GPUS = "choose another model, or cluster.device=cuda"


def check_architecture(config: RunConfig, hf_config: HfConfig) -> None:
    is_policy = config.algorithm.objective is Objective.policy
    rules = (of_trainer, *((of_layouts, of_cpu_engines, of_formats, of_slots, of_exactness) if is_policy else ()))
    refuse_first(problem for rule in rules for problem in rule(config, hf_config))


def of_trainer(config: RunConfig, hf_config: HfConfig) -> Iterator[str]:
    """Its ranks, its embedding, its sequences, its adapters."""
    trainer, num_experts = config.trainer, num_experts_of(hf_config)
    if trainer.ep_size > 1 and num_experts == 0:
        yield (
            f"trainer.ep_size={trainer.ep_size} needs a mixture of experts, and model_type={kind_of(hf_config)} has "
            "none; set trainer.ep_size=1"
        )
    if trainer.ep_size > max(num_experts, 1):
        allowed = [size for size in divisors(trainer.num_ranks) if size <= num_experts]
        yield (
            f"trainer.ep_size={trainer.ep_size} is more than the model's {num_experts} experts; with "
            f"trainer.num_ranks={trainer.num_ranks} it can be {one_of(allowed)}"
        )
    if trainer.embedding_on_host and read_config(hf_config).tie_embeddings:
        yield (
            "trainer.embedding_on_host=true needs a head of its own, and this model's is its embedding table "
            "(tie_word_embeddings); set trainer.embedding_on_host=false"
        )
    if trainer.cp_size > 1:
        read_config(hf_config).check_cp_size(trainer.cp_size)
    is_given = config.algorithm.objective is not Objective.policy
    option = "data.max_sequence_tokens" if is_given else "rollout.max_model_len"
    longest = config.data.max_sequence_tokens if is_given else config.rollout.max_model_len
    limit = hf_config.get("max_position_embeddings")
    if isinstance(limit, int) and longest is not None and longest > limit:
        yield (
            f"{option}={longest} is more than the model's max_position_embeddings={limit}; set {option} to at most "
            f"{limit}"
        )
    packing = packing_of(hf_config)
    if trainer.mode is TrainMode.lora:
        yield from _of_targets(config, hf_config)
        experts = trainer.lora.for_experts
        if experts is not None and experts.rank > MAX_EXPERT_RANK and num_experts:
            yield (  # the trainer's kernels hold all of it in one tile
                f"routed experts take adapters of rank {MAX_EXPERT_RANK} at most, got {experts.rank}; set "
                f"trainer.lora.expert_rank={MAX_EXPERT_RANK} or lower, or trainer.lora.targets without experts"
            )
    elif packing is not None:  # their values are too far apart for the steps of an optimizer
        yield (
            f"trainer.mode=full cannot train {packing} weights (model.hf_config.quantization_config); set "
            "trainer.mode=lora, or give a float checkpoint"
        )


def _of_targets(config: RunConfig, hf_config: HfConfig) -> Iterator[str]:
    lora, is_moe = config.trainer.lora, num_experts_of(hf_config) > 0
    has_mlp = has_dense_layers(hf_config) or has_shared_experts(hf_config)
    if modules := [name for name in lora.targets if name not in LORA_TARGETS]:
        spec = read_config(hf_config)
        shapes = [shape for attention in spec.attentions for shape in attention.linears(spec.hidden_size)]
        own = [*dict.fromkeys(shape.name for shape in shapes), *(MLP_MODULES if has_mlp else ())]
        if absent := [name for name in modules if name not in own]:
            yield (
                f"trainer.lora.targets: this model has no {', '.join(absent)}; it has {', '.join(own)}"
                + ", and routed experts, whose matrices are adapted together: experts" * is_moe
            )
    if not lora.attention and not (lora.experts and is_moe) and not (lora.mlp and has_mlp):
        yield (
            "trainer.lora.targets without attention leaves nothing to adapt: this model has "
            f"{'experts' if is_moe else 'a dense feed-forward'} only; set "
            f"trainer.lora.targets=[{'experts' if is_moe else 'mlp'}]"
        )


def of_layouts(config: RunConfig, hf_config: HfConfig) -> Iterator[str]:
    """What engines can build."""
    packing = packing_of(hf_config)
    if packing is not None and config.weight_sync.mode is SyncMode.merged:
        yield (
            f"model.hf_config.quantization_config asks for {packing} engine weights: {packing} engines accept "
            "adapter mode only, because merged weights would have to be quantized anew at every publish; "
            + ("set weight_sync.mode=adapter, " if packing == "INT4" else "learn on them with algorithm=sft, ")
            + "or give a config.json without quantization_config (bfloat16) or with block-FP8"
        )
    if config.rollout.enable_expert_parallel and not num_experts_of(hf_config):
        yield (
            f"rollout.enable_expert_parallel=true needs a mixture of experts, and model_type="
            f"{kind_of(hf_config)} has none; set rollout.enable_expert_parallel=false"
        )
    check_tp_size_fits_model(
        "rollout.tp_size",
        config.rollout.tp_size,
        hf_config,
        is_expert_parallel=config.rollout.enable_expert_parallel,
        can_split_experts=config.cluster.device is not Device.cpu,
    )
    check_engine_constants(hf_config)


def of_cpu_engines(config: RunConfig, hf_config: HfConfig) -> Iterator[str]:
    """The CPU engine has kernels for some sizes and formats, lacks parts of some families, and FP8."""
    if config.cluster.device is not Device.cpu:
        return
    latent, head_dim = hf_config.get("kv_lora_rank"), head_dim_of(hf_config)
    if latent is None and head_dim is not None and head_dim not in CPU_ENGINE_HEAD_DIMS:
        yield (
            f"the model's head_dim={head_dim} has no attention kernel in the CPU engine, which has "
            f"{one_of(CPU_ENGINE_HEAD_DIMS)}; {ON_GPUS}"
        )
    turning = hf_config.get("qk_rope_head_dim")
    if latent is not None and (latent, turning) != CPU_ENGINE_LATENT:
        yield (
            f"the CPU engine's latent attention is made for kv_lora_rank={CPU_ENGINE_LATENT[0]} and "
            f"qk_rope_head_dim={CPU_ENGINE_LATENT[1]}, this model has {latent} and {turning}; {ON_GPUS}"
        )
    if (lack := family_of(hf_config).lacks_on_cpu) is not None:
        yield f"the CPU engine does not serve model_type={kind_of(hf_config)}: {lack}; {ON_GPUS}"
    if (attention := family_of(hf_config).other_attention) is not None:
        if attention.cpu_dtype not in (config.model.dtype, None):
            yield (
                f"model.dtype={config.model.dtype}: the CPU engine's {attention.kind} attention computes in "
                f"{attention.cpu_dtype} alone; set model.dtype={attention.cpu_dtype}, or cluster.device=cuda"
            )
        for key, only in attention.cpu_widths:
            if (width := hf_config.get(key, only)) != only:
                yield (
                    f"the CPU engine's {attention.kind} attention is made for heads of {only}, and {key} is {width}; "
                    f"{ON_GPUS}"
                )
    is_stored_so = bool(hf_config.get("quantization_config"))
    if is_stored_so or config.model.engine_format is EngineFormat.block_fp8:
        asked = "quantization_config" if is_stored_so else "model.engine_format=block_fp8"
        yield (
            f"{asked} (config.json) asks for quantized engines, which need GPUs, and cluster.device=cpu; choose "
            "cluster.device=cuda, or model.engine_format=checkpoint and a model without quantization_config"
        )


def of_formats(config: RunConfig, hf_config: HfConfig) -> Iterator[str]:
    """Formats in which engines compute, and in which less than all weights can be published."""
    sync, dtype, device = config.weight_sync, config.model.dtype, config.cluster.device
    is_fp8 = config.model.engine_format is EngineFormat.block_fp8 or fp8_skipped(hf_config) is not None
    if is_fp8 and dtype is DType.float32:  # vLLM's `Fp8Config.get_supported_act_dtypes`
        yield (
            "model.dtype=float32 contradicts block-FP8 engines, which compute in two bytes; set model.dtype=bfloat16, "
            "or give a model without FP8 (model.engine_format=checkpoint)"
        )
    if sync.delta_bytes and dtype is not DType.bfloat16:
        yield (
            f"weight_sync.delta_bytes={sync.delta_bytes} sends changes of bfloat16 or block-FP8 weights, "
            f"which contradicts model.dtype={dtype}; set weight_sync.delta_bytes=0 to send every byte"
        )
    if sync.remote_merge is RemoteMerge.none:
        return
    moe = read_config(hf_config).moe
    has_turns = moe is not None and moe.is_fused and config.trainer.lora.experts
    host_alone = sync.remote_merge is RemoteMerge.gpu and device is Device.cpu
    for reason, is_so in {
        "weight_sync.mode=adapter, where nothing is merged": sync.mode is SyncMode.adapter,
        "trainer.mode=full, which has no adapter": config.trainer.mode is TrainMode.full,
        "block-FP8 engines (model.engine_format, config.json)": is_fp8,
        "cluster.device=cpu, where host memory alone can keep it (remote_merge=host)": host_alone,
        f"trainer.lora.targets with experts for {kind_of(hf_config)}, whose experts lie in turns and not row by row": (
            has_turns
        ),
    }.items():
        if is_so:
            yield (
                f"weight_sync.remote_merge={sync.remote_merge} has engines merge adapters into a base "
                f"that they read from model.path, which contradicts {reason}; set weight_sync.remote_merge=none"
            )


def of_slots(config: RunConfig, hf_config: HfConfig) -> Iterator[str]:
    """Which adapters engines have kernels, room and names for. With adapters enabled, vLLM computes every expert,
    adapted or not, with Triton kernels, which need a GPU; its slots are of one rank for all modules."""
    if config.weight_sync.mode is not SyncMode.adapter:
        return
    family, kind, is_moe = family_of(hf_config), kind_of(hf_config), num_experts_of(hf_config) > 0
    lora = config.trainer.lora
    begin, no_attention = "weight_sync.mode=adapter:", "set trainer.lora.targets without attention"
    if is_moe and config.cluster.device is Device.cpu:
        yield (
            f"{begin} the CPU engine serves no adapters in a model with experts, whose kernels are a "
            "GPU's; set weight_sync.mode=merged, choose a dense model (model=tiny_qwen3), or cluster.device=cuda"
        )
    if is_moe and lora.experts and lora.slot_rank > MAX_EXPERT_SLOT_RANK:
        yield (
            f"{begin} engines serve adapters of experts up to rank {MAX_EXPERT_SLOT_RANK}, and the "
            f"slots of all modules have the largest rank, which is {lora.slot_rank} here; set trainer.lora.rank, "
            f"attention_rank and expert_rank to {MAX_EXPERT_SLOT_RANK} at most, trainer.lora.targets without experts, "
            "or weight_sync.mode=merged"
        )
    if is_moe and lora.experts and not family.names_slots:
        yield (
            f"{begin} the slots of {kind}'s experts have no names that adapters have; "
            "set trainer.lora.targets without experts, or weight_sync.mode=merged"
        )
    queries, gate_up = ("q_proj", "k_proj", "v_proj"), MLP_MODULES[:2]
    for together, adapts in ((queries, lora.adapts_attention), (gate_up, lora.adapts_mlp)):
        if len({adapts(name) for name in together}) > 1:
            yield (
                f"{begin} engines have one slot for {', '.join(together)}; name all or none of "
                "them in trainer.lora.targets, or set weight_sync.mode=merged"
            )
    if lora.attention and not family.fills_slots:
        yield (
            f"{begin} engines give values of {kind} the weights of keys, and no adapter; {no_attention}, or "
            "weight_sync.mode=merged"
        )
    if lora.attention and family.other_attention is not None:
        yield (
            f"{begin} the {family.other_attention.kind} attention of model_type={kind} has no slots "
            f"for adapters in an engine; {no_attention}, or weight_sync.mode=merged"
        )


def of_exactness(config: RunConfig, hf_config: HfConfig) -> Iterator[str]:
    """What parity=bitwise has written down of an engine's forward; and which engines record their routes: vLLM 0.25.1
    and 0.32 on GPUs. On a CPU, 0.32 has no model runner that does (`VllmConfig._verify_aux_output_compatibility`)."""
    if config.is_bitwise and (reason := _unknown_to_bitwise(config, hf_config)) is not None:
        yield (
            f"parity=bitwise (trainer.numerics.match) does not know {reason}; choose parity=standard, or another model"
        )
    if config.parity.replay_routing and not num_experts_of(hf_config):
        yield (
            f"parity.replay_routing=true needs a mixture of experts, and model_type={kind_of(hf_config)} has "
            "none; set parity.replay_routing=false"
        )
    if config.parity.replay_routing and config.cluster.device is Device.cpu:
        yield (
            "parity.replay_routing=true contradicts cluster.device=cpu: the CPU engine does not record which experts "
            "it chose; set parity.replay_routing=false, or cluster.device=cuda"
        )


def _unknown_to_bitwise(config: RunConfig, hf_config: HfConfig) -> str | None:
    """The engine's forward is written down for some families, in 16 bits and without scaled positions."""
    rope: JsonMapping = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    if not family_of(hf_config).has_engine_forward:
        known = [kind for kind, family in FAMILIES.items() if family.has_engine_forward]
        return f"model_type={kind_of(hf_config)}, which is not one of {', '.join(known)}"
    if config.rollout.tp_size > 1 and num_experts_of(hf_config):
        return f"rollout.tp_size={config.rollout.tp_size} for models with experts, where it has to be 1"
    if (scaling := rope.get("rope_type", rope.get("type", "default"))) != "default":
        return f"positions scaled by {scaling} (rope_scaling in config.json)"
    if hf_config.get("quantization_config"):
        return "quantized engines (quantization_config in config.json)"
    if (head_dim := hf_config.get("head_dim", BITWISE_HEAD_DIMS[0])) not in BITWISE_HEAD_DIMS:
        return (
            f"head_dim={head_dim}: only at {one_of(BITWISE_HEAD_DIMS)} does FlashAttention 3 read keys in "
            "equal blocks when it decodes, prefills and trains"
        )
    return None


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


def of_base(config: RunConfig, hf_config: HfConfig) -> Iterator[str]:
    """Engines load a base from disk themselves that they merge into, or whose four-bit weights no publish writes. A
    plan needs no weights, so preflight alone asks this."""
    packing, is_on_disk = packing_of(hf_config), config.model.init is Init.checkpoint
    if packing is not None and config.weight_sync.mode is SyncMode.adapter:
        if packing != "INT4":
            yield (
                f"weight_sync.mode=adapter on {packing} weights (model.hf_config.quantization_config) is not "
                "supported: engines would have to load them themselves, which is tested for INT4 alone; train on them "
                "with algorithm=sft, or give a float checkpoint"
            )
        if not is_on_disk:
            yield (
                "weight_sync.mode=adapter on INT4 weights needs model.path and model.init=checkpoint: engines load "
                "such weights from there themselves, because no publish can write them"
            )
        # For other shapes, vLLM's kernels ignore adapters, or it pads the experts but not the adapters.
        hidden, width = int(hf_config["hidden_size"]), int(hf_config["moe_intermediate_size"])
        parts = 1 if config.rollout.enable_expert_parallel else config.rollout.tp_size
        if hidden % 128 or width % (64 * parts):
            yield (
                "weight_sync.mode=adapter on INT4 weights needs hidden_size in multiples of 128 and an engine rank's "
                "part of moe_intermediate_size in multiples of 64 (vLLM's Marlin kernels), got "
                f"{hidden} and {width} / {parts}; lower rollout.tp_size, set rollout.enable_expert_parallel=true, "
                "which cuts no expert, or train on this model with algorithm=sft"
            )
    if config.weight_sync.remote_merge is not RemoteMerge.none and not is_on_disk:
        yield (
            f"weight_sync.remote_merge={config.weight_sync.remote_merge} needs model.path and model.init=checkpoint, "
            f"got model.init={config.model.init}: engines read the base from there; set weight_sync.remote_merge=none"
        )
