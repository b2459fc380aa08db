"""Checks of ways to publish less than all weights, against the model and the other sections.

Owns: those of weight_sync.delta_bytes and weight_sync.remote_merge. Called by model.py; `check_base_is_on_disk`
by orchestrator/inputs/preflight.py, because a plan needs no weights.
"""

from slipstream.conf.architecture.families import kind_of, read_config
from slipstream.conf.checks.tensor_parallel import fp8_skipped
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import HfConfig
from slipstream.conf.schema import Device, DType, EngineFormat, Init, RemoteMerge, RunConfig, SyncMode, TrainMode


def check_changes_can_be_sent(config: RunConfig, hf_config: HfConfig) -> None:
    """Changes are those of values of one or two bytes."""
    if config.weight_sync.delta_bytes and config.model.dtype is not DType.bfloat16:
        raise ConfigError(
            f"weight_sync.delta_bytes={config.weight_sync.delta_bytes} sends changes of bfloat16 or block-FP8 weights, "
            f"which contradicts model.dtype={config.model.dtype}; set weight_sync.delta_bytes=0 to send every byte"
        )


def check_engines_can_merge(config: RunConfig, hf_config: HfConfig) -> None:
    """Engines that merge for themselves need adapters, a base on disk, a format in which a base can be kept, and
    matrices that lie row by row."""
    if config.weight_sync.remote_merge is RemoteMerge.none:
        return
    moe, has_adapted_experts = read_config(hf_config).moe, config.trainer.lora.experts
    is_fp8 = config.model.engine_format is EngineFormat.block_fp8 or fp8_skipped(hf_config) is not None
    wrong = {
        "weight_sync.mode=adapter, where nothing is merged": config.weight_sync.mode is SyncMode.adapter,
        "trainer.mode=full, which has no adapter": config.trainer.mode is TrainMode.full,
        "block-FP8 engines (model.engine_format, config.json)": is_fp8,
        "cluster.device=cpu, where host memory alone can keep it (remote_merge=host)": (
            config.weight_sync.remote_merge is RemoteMerge.gpu and config.cluster.device is Device.cpu
        ),
        f"trainer.lora.targets with experts for {kind_of(hf_config)}, whose experts lie in turns and not row by row": (
            moe is not None and moe.is_fused and has_adapted_experts
        ),
    }
    for reason, is_so in wrong.items():
        if is_so:
            raise ConfigError(
                f"weight_sync.remote_merge={config.weight_sync.remote_merge} has engines merge adapters into a base "
                f"that they read from model.path, which contradicts {reason}; set weight_sync.remote_merge=none"
            )


def check_base_is_on_disk(config: RunConfig) -> None:
    """Engines that merge for themselves read the base from a checkpoint."""
    if config.weight_sync.remote_merge is not RemoteMerge.none and config.model.init is not Init.checkpoint:
        raise ConfigError(
            f"weight_sync.remote_merge={config.weight_sync.remote_merge} needs model.path and model.init=checkpoint, "
            f"got model.init={config.model.init}: engines read the base from there; set weight_sync.remote_merge=none"
        )
