"""Merged weights or the adapter alone: what a publish of either costs, and from when on which of them wins.

Owns: that comparison. Does not own: the predicted publish, or how an engine keeps adapters (rollout/layouts).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.checks.model import check_architecture
from slipstream.conf.checks.sections import why_no_adapter
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import HfConfig
from slipstream.conf.schema import RolloutConfig, RunConfig, SyncMode
from slipstream.conf.schema.rules import refuse_first
from slipstream.orchestrator.offline.hardware import Hardware
from slipstream.rollout.layouts.offline_slots import offline_slot
from slipstream.trainer.weights.adapter_names import adapter_tensors
from slipstream.weight_sync.layout import DestLayout, TensorMeta
from slipstream.weight_sync.plan.transfer_plan import PlanSummary
from slipstream.weight_sync.prediction.predict import Prediction


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """What a publish of merged weights costs, and what one of the adapter alone would."""

    merged_s: float | None
    """None: the run publishes adapters, and its engines' layout of whole weights is not recorded."""
    merged_bytes: int
    adapter_s: float | None
    """None: nothing but merged weights can be published; `no_adapter` says why."""
    adapter_bytes: int
    slot_bytes: int
    """Memory of one adapter on a rollout GPU; an engine holds algorithm.max_staleness_steps + 2 of them."""
    decode_loss: float
    no_adapter: str | None = None
    """With which words a run that publishes adapters would be refused."""

    @property
    def break_even_s(self) -> float | None:
        """Seconds of generation between two publishes above which merged weights win; infinite: adapters always do."""
        if self.merged_s is None:
            return None
        saved_s = self.merged_s - (self.adapter_s if self.adapter_s is not None else self.merged_s)
        if saved_s <= 0:
            return 0.0
        return saved_s / self.decode_loss if self.decode_loss else float("inf")


def adapter_slot(
    factors: Sequence[TensorMeta], rollout: RolloutConfig, hf_config: HfConfig, rank: int = 0
) -> DestLayout:
    """The layout of one adapter slot of an engine's rank. Where experts do not divide, rank 0 has the most. Raises
    EngineError: engines have no slot for one of the adapters."""
    return offline_slot(
        factors,
        rank,
        tp_size=rollout.tp_size,
        enable_expert_parallel=rollout.enable_expert_parallel,
        num_kv_heads=int(hf_config.get("num_key_value_heads") or 0),
    )


def compare_modes(
    config: RunConfig,
    hf_config: HfConfig,
    spec: ModelSpec,
    hardware: Hardware,
    prediction: Prediction,
    summary: PlanSummary,
) -> ModeChoice:
    """Merged weights as predicted, against the adapter alone, whose seconds are those of the slowest port. Where the
    run publishes adapters, the adapter's figures are what was predicted."""
    trainer, rollout, rates = config.trainer, config.rollout, hardware.rates.without_pause()
    as_adapter = replace(config, weight_sync=replace(config.weight_sync, mode=SyncMode.adapter, delta_bytes=0))
    try:
        refuse_first(why_no_adapter(as_adapter))
        check_architecture(as_adapter, hf_config)
    except ConfigError as refused:
        return ModeChoice(prediction.total_s, summary.num_bytes, None, 0, 0, 0.0, str(refused))
    factors = adapter_tensors(spec.checkpoint_tensors(config.model.dtype.value), trainer.lora)
    slot = adapter_slot(factors, rollout, hf_config)
    slot_bytes = sum(param.num_bytes for param in slot.params)
    loss = hardware.adapter_decode_loss if trainer.lora.experts and spec.moe is not None else 0.0
    if config.weight_sync.mode is SyncMode.adapter:
        return ModeChoice(None, 0, prediction.total_s, summary.num_bytes, slot_bytes, loss)
    sent = sum(slot.written_bytes().values())
    num_bytes = sent * rollout.tp_size * rollout.most_workers
    gpus = trainer.num_ranks + rollout.num_gpus
    rate = rates.nvlink_bytes_s if gpus <= hardware.ranks_per_node else rates.nic_bytes_s
    busiest = max(sent, num_bytes / trainer.num_ranks)
    # The engine goes on meanwhile, so nothing pauses; messages, threads and the slot's hash take their time.
    fixed_s = max(rates.begin_s, rates.source_begin_s) + rates.replay_s + rates.barrier_s + rates.commit_s
    fixed_s += 2 * rates.write_latency_s + sent / rates.hbm_bytes_s
    return ModeChoice(prediction.total_s, summary.num_bytes, busiest / rate + fixed_s, num_bytes, slot_bytes, loss)
