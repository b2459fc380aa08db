"""`slipstream plan`: what a publish of this run would move, hold and take, before anything is started.

    RunConfig --planned_layouts--> source layouts --+
        |                                           +--> build_plan --> predict --> PlanReport --> estimate_report
        +--offline_layout----------> engine layouts-+        link rates, placement, slow ranks: flags of the command

Owns: joining the two sides' layouts for a cluster that need not exist, and the estimates of memory. Does not own: the
plan, the time model (weight_sync), words and pictures (estimate_report.py).

Invariant: starts no trainer, engine or Ray, touches no GPU; needs no part of the cluster that it plans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.conf.architecture.families import read_config
from slipstream.conf.architecture.model_spec import ModelSpec
from slipstream.conf.checks.model import check_architecture, packing_of
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import HfConfig
from slipstream.conf.schema import Device, Objective, Relay, RemoteMerge, RunConfig, SyncMode, TrainMode
from slipstream.orchestrator.inputs.model_folder import engine_checkpoint, resolve_hf_config, routing_shape
from slipstream.orchestrator.offline.hardware import CHANGED, CHANGED_FP8, Hardware
from slipstream.orchestrator.offline.modes import adapter_slot, compare_modes
from slipstream.orchestrator.offline.plan_report import (
    DeltaChoice,
    HostMemory,
    ModelFacts,
    PlanReport,
    RelayChoice,
    RemoteMergeChoice,
    RolloutMemory,
)
from slipstream.rollout.errors import EngineError
from slipstream.rollout.kept_groups import bytes_kept
from slipstream.rollout.layouts.offline_layout import LayoutRequest, offline_layouts
from slipstream.rollout.types import RoutingShape
from slipstream.trainer.checkpoint.keeper import num_copies
from slipstream.trainer.weights.quantization import BlockFp8
from slipstream.weight_sync.errors import PlanError, WatermarkError
from slipstream.weight_sync.layout import DTYPE_BYTES, DestLayout, SourceLayout
from slipstream.weight_sync.plan.budget import Staging, reserved_bytes
from slipstream.weight_sync.plan.plan import build_plan
from slipstream.weight_sync.plan.transfer_plan import PlanSummary, TransferPlan
from slipstream.weight_sync.prediction.links import LinkRates, Placement, place
from slipstream.weight_sync.prediction.predict import (
    BUS_BYTES_S,
    MARK_PASSES,
    PACK_PASSES,
    Prediction,
    apply_passes,
    neighbours,
    predict,
    relay_s,
    written_alone,
)

if TYPE_CHECKING:
    from slipstream.trainer.delivery.planned_layouts import PlannedTrainer, TrainerMemory

logger = logging.getLogger(__name__)

MANY_GPUS = 64
"""From here on the phases of a plan take seconds each, and are said."""
SEEN_NIC_BYTES_S = 44e9
"""What others report of a 400 Gb/s NIC in one-sided writes; 50e9 is its line rate."""


def plan_run(config: RunConfig, hardware: Hardware, say: Callable[[str], None] = logger.info) -> PlanReport:
    """Plan one publish of a run, and predict its time. cluster.device=auto is planned as cuda: the cluster is another
    machine than this one.

    Raises:
        ConfigError: an option does not fit the model or the hardware, or the engine's layout cannot be recorded here.
    """
    if config.algorithm.objective is not Objective.policy:
        raise ConfigError(
            f"algorithm={config.algorithm.objective} publishes nothing, so there is nothing to plan; choose a run "
            "with engines"
        )
    if hardware.changed is not None and config.weight_sync.delta_bytes == 0:
        raise ConfigError("--changed has no effect with weight_sync.delta_bytes=0: every byte is sent; remove it")
    if config.cluster.device is Device.auto:
        config = replace(config, cluster=replace(config.cluster, device=Device.cuda))
    hf_config = resolve_hf_config(config.model)
    check_architecture(config, hf_config)
    model = _Model.of(hf_config, config)
    if config.weight_sync.mode is SyncMode.adapter:
        hardware = replace(hardware, rates=hardware.rates.without_pause())
    try:
        publish = _planned_publish(config, model, hardware, say)
        prediction, summary = publish.predicted(), publish.plan.summary()
        ranks = publish.planned if model.packing is None else model.trainer(model.stored)
        trainer = ranks.memory(needs_reference=config.algorithm.needs_reference)
        return PlanReport(
            config=config,
            hardware=hardware,
            model=model.facts(),
            summary=summary,
            placement=publish.placement,
            staging=publish.staging,
            trainer=trainer,
            rollout=_engine_memory(config, model.num_bytes, publish.engine),
            host=_host_memory(config, routing_shape(config, hf_config), trainer, publish.placement.num_trainer_nodes),
            prediction=prediction,
            total_s_by_nic=publish.total_s_by_nic(prediction),
            modes=compare_modes(config, hf_config, model.spec, hardware, prediction, summary),
            relay=publish.relayed() if config.weight_sync.relay is Relay.node else None,
            delta=publish.delta(summary) if config.weight_sync.delta_bytes else None,
            remote_merge=(
                None if config.weight_sync.remote_merge is RemoteMerge.none else publish.remote_merge(summary)
            ),
        )
    except (EngineError, PlanError, WatermarkError) as error:
        raise ConfigError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Model:
    """The policy as its checkpoint stores it, and as the trainer holds it."""

    hf_config: HfConfig
    config: RunConfig
    stored: ModelSpec
    """Four-bit experts as they are; all else in model.dtype, whatever engines quantize it to."""
    packing: str | None
    """How four-bit experts are packed; None: the checkpoint has none."""

    @classmethod
    def of(cls, hf_config: HfConfig, config: RunConfig) -> _Model:
        packing = packing_of(hf_config)
        read = dict(hf_config)
        if packing is None:
            read.pop("quantization_config", None)
        return cls(hf_config, config, read_config(read), packing)

    @property
    def spec(self) -> ModelSpec:
        """With every expert in model.dtype, as a publish sends it."""
        return self.stored.unpacked()

    @property
    def num_bytes(self) -> int:
        tensors = self.stored.checkpoint_tensors(self.config.model.dtype.value)
        return sum(prod(meta.shape) * DTYPE_BYTES[meta.dtype] for meta in tensors)

    def trainer(self, spec: ModelSpec) -> PlannedTrainer:
        from slipstream.trainer.delivery.planned_layouts import PlannedTrainer  # here: --help needs no torch

        return PlannedTrainer(spec, self.config.model.dtype.value, self.config.trainer)

    def facts(self) -> ModelFacts:
        spec, dtype = self.spec, self.config.model.dtype.value
        return ModelFacts(
            family=spec.family,
            num_layers=spec.num_layers,
            num_experts=spec.moe.num_experts if spec.moe is not None else 0,
            top_k=spec.moe.top_k if spec.moe is not None else 0,
            num_parameters=sum(prod(meta.shape) for meta in spec.checkpoint_tensors(dtype)),
            dtype=dtype if self.packing is None else f"{dtype}, experts {self.packing}",
            num_bytes=self.num_bytes,
        )


def _engine_memory(config: RunConfig, num_bytes: int, engine: Sequence[DestLayout]) -> RolloutMemory:
    fullest = max(sum(param.num_bytes for param in layout.params) for layout in engine)
    if config.weight_sync.mode is not SyncMode.adapter:
        return RolloutMemory(fullest, 0, 0)
    num_slots = config.num_adapter_slots
    return RolloutMemory(num_bytes // config.rollout.tp_size, num_slots * fullest, num_slots)


def _host_memory(
    config: RunConfig, routing: RoutingShape | None, trainer: TrainerMemory, num_trainer_nodes: int
) -> HostMemory:
    """What a run keeps in the memory of hosts in case a process dies. `trainer`: of the fullest rank."""
    copies = num_copies(num_trainer_nodes) if config.trainer.max_restarts else 0
    num_tokens = config.max_response_tokens + (0 if routing is None else config.max_prompt_tokens)
    num_responses = config.algorithm.groups_per_step * config.algorithm.group_size
    share = -(-num_responses * num_tokens // config.rollout.least_workers)
    return HostMemory(copies * trainer.state, copies, *bytes_kept(config.num_versions_kept, share, routing))


@dataclass(frozen=True, slots=True)
class _Publish:
    """A planned publish on that cluster: what every figure of time is made from."""

    config: RunConfig
    hardware: Hardware
    planned: PlannedTrainer
    staging: Staging
    sources: Sequence[SourceLayout]
    engine: Sequence[DestLayout]
    """What the ranks of one engine need; all engines are alike."""
    plan: TransferPlan
    placement: Placement

    def predicted(self, rates: LinkRates | None = None, **changes: float) -> Prediction:
        """At the given rates, or those of the hardware. `changes`: what predict() takes of a publish of less."""
        return predict(
            self.plan,
            self.placement,
            rates or self.hardware.rates,
            self.staging,
            slow_ranks=self.hardware.slow_ranks,
            verify_hashes=self.config.weight_sync.verify_hashes,
            **changes,
        )

    def total_s_by_nic(self, found: Prediction) -> dict[float, float]:
        """Bytes a second of a NIC -> seconds of the publish, as found, and at the rate that NICs were seen to have."""
        nic = self.hardware.rates.nic_bytes_s
        totals = {nic: found.total_s}
        if self.placement.num_nodes > 1 and nic > SEEN_NIC_BYTES_S:
            slower = replace(self.hardware.rates, nic_bytes_s=SEEN_NIC_BYTES_S)
            totals[SEEN_NIC_BYTES_S] = self.predicted(slower).total_s
        return totals

    def relayed(self) -> RelayChoice:
        """A plan for the replicas that are written, on the GPUs that they have anyway, and then the others' reads."""
        verify_hashes, rates = self.config.weight_sync.verify_hashes, self.hardware.rates
        readers = neighbours(self.placement)
        plan = build_plan(self.sources, [self.engine] * len(readers), max_task_bytes=self.staging.max_task_bytes)
        few = replace(self, plan=plan, placement=written_alone(self.placement, list(readers)))
        read_s = relay_s(readers, self.engine, rates, verify_hashes=verify_hashes)
        return RelayChoice(len(readers), plan.summary().num_bytes, few.predicted().total_s, read_s)

    def delta(self, summary: PlanSummary) -> DeltaChoice:
        """Only what changed, as far as an engine rank's zone has room for it; the rest whole."""
        from slipstream.weight_sync import changes  # with torch, which --help does not need

        zone, rates = self.config.weight_sync.delta_bytes, self.hardware.rates
        is_fp8 = any(meta.dtype == "float8_e4m3fn" for meta in self.sources[0].tensors)
        values = self.hardware.changed
        if values is None:
            values = CHANGED_FP8 if is_fp8 else CHANGED
        changed = 1 - (1 - values) ** (2 if is_fp8 else 1)  # of elements of two bytes
        stream = (changes.RECORD_BYTES * changed + changes.TILE_BYTES / changes.TILE) / changes.ELEMENT_BYTES
        by_element = 1 - self._bytes_of_others(changes.DTYPES) / summary.num_bytes
        room = min(1.0, zone / (stream * by_element * max(summary.received_bytes.values())))
        fits = by_element * (room if stream <= 1 / changes.STREAM_SHARE else 0.0)
        share = fits * stream + 1 - fits
        is_kept = is_fp8 or self.config.trainer.mode is TrainMode.full
        found = self.predicted(
            sent_share=share,
            mark_passes=2 * rates.hbm_bytes_s / BUS_BYTES_S if is_kept else MARK_PASSES,
            apply_passes=apply_passes(changed),
        )
        num_bytes = round(share * summary.num_bytes)
        host = max(int(table.num_bytes.sum()) for table in self.plan.tasks.values()) if is_kept else 0
        kept_bytes = 0 if is_kept else self.planned.kept_bytes()
        return DeltaChoice(values, num_bytes, found.total_s, kept_bytes, host, zone)

    def _bytes_of_others(self, dtypes: Collection[str]) -> int:
        """What is sent of parameters in other formats, as scales of FP8, to all engines."""
        others = {(one.rank, param.name) for one in self.engine for param in one.params if param.dtype not in dtypes}
        return self.config.rollout.most_workers * sum(
            size
            for (replica, rank), written in self.plan.expected.items()
            for name, size in written.items()
            if replica == 0 and (rank, name) in others
        )

    def remote_merge(self, summary: PlanSummary) -> RemoteMergeChoice:
        """A and B alone. Each engine rank copies its base to where it merges, over the bus or in its own memory."""
        from slipstream.weight_sync.merging.factors import runs_of
        from slipstream.weight_sync.replica.own_merge import written_again  # with torch

        merges = {merge.tensor: merge for merge in self.planned.merges()}
        runs = [runs_of(layout, merges) for layout in self.engine]
        factors = sum(param.num_bytes for of_rank in runs for run in of_rank for param in run.params())
        again = [written_again(layout, of_rank) for layout, of_rank in zip(self.engine, runs, strict=True)]
        bases = [
            sum(p.num_bytes for p in layout.params if p.name in of_rank)
            for layout, of_rank in zip(self.engine, again, strict=True)
        ]
        num_bytes, received = factors * self.config.rollout.most_workers, max(summary.received_bytes.values())
        is_on_host, rates = self.config.weight_sync.remote_merge is RemoteMerge.host, self.hardware.rates
        copies = rates.hbm_bytes_s / BUS_BYTES_S if is_on_host else 2.0
        passes = (copies + PACK_PASSES) * max(bases) / received
        found = self.predicted(sent_share=num_bytes / summary.num_bytes, apply_passes=passes)
        return RemoteMergeChoice(num_bytes, found.total_s, max(bases), is_on_host)


def _planned_publish(config: RunConfig, model: _Model, hardware: Hardware, say: Callable[[str], None]) -> _Publish:
    trainer, rollout, planned = config.trainer, config.rollout, model.trainer(model.spec)
    if config.weight_sync.mode is SyncMode.adapter:
        staging, sources, engine = _adapter_sides(config, model.hf_config, planned)
    else:
        staging, sources, engine = _merged_sides(config, model.hf_config, planned, hardware.layout_cache, say)
    num_gpus = trainer.num_ranks + rollout.num_gpus
    if num_gpus >= MANY_GPUS:
        say(f"planning {num_gpus} GPUs, and proving the plan: some 10 s for Kimi-K2 on 384")
    plan = build_plan(sources, [engine] * rollout.most_workers, max_task_bytes=staging.max_task_bytes)
    placement = place(list(plan.tasks), list(plan.expected), hardware.ranks_per_node, rollout.workers_per_gpu)
    if unknown := sorted(set(hardware.slow_ranks) - set(plan.tasks)):
        raise PlanError(f"--slow-rank names trainer rank {unknown[0]}; there are {len(plan.tasks)}")
    return _Publish(config, hardware, planned, staging, sources, engine, plan, placement)


_Sides = tuple[Staging, Sequence[SourceLayout], Sequence[DestLayout]]
"""What the watermark leaves, what the trainer's ranks hold, and what the ranks of one engine need."""


def _merged_sides(
    config: RunConfig,
    hf_config: HfConfig,
    planned: PlannedTrainer,
    layout_cache: Path | None,
    say: Callable[[str], None],
) -> _Sides:
    """Every weight, in the form that engines keep it in."""
    from slipstream.weight_sync.disk.kept_source import kept_scratch_bytes  # with torch, which --help does not need

    rollout, device, dtype = config.rollout, config.cluster.device, config.model.dtype
    quantization = BlockFp8.from_hf_config(hf_config)
    temporary = planned.temporary_bytes(device, quantization)
    if config.weight_sync.delta_bytes and (config.trainer.mode is TrainMode.full or quantization is not None):
        temporary += kept_scratch_bytes(device.value, config.weight_sync.watermark_bytes)  # to compare with the host's
    staging = _staging(config, temporary)
    request = LayoutRequest(
        hf_config=hf_config,
        tensors=engine_checkpoint(hf_config, dtype),
        tp_size=rollout.tp_size,
        enable_expert_parallel=rollout.enable_expert_parallel,
        dtype=dtype,
        device=device,
    )
    return staging, planned.layouts(quantization), offline_layouts(request, layout_cache, say)


def _adapter_sides(config: RunConfig, hf_config: HfConfig, planned: PlannedTrainer) -> _Sides:
    """The factors alone, into one slot; engines keep the base in whatever form they like."""
    sources = planned.adapter_layouts()
    ranks = range(config.rollout.tp_size)
    slots = tuple(adapter_slot(sources[0].tensors, config.rollout, hf_config, rank) for rank in ranks)
    return _staging(config, 0), sources, slots


def _staging(config: RunConfig, source_bytes: int) -> Staging:
    """What the watermark leaves on a trainer rank, as the rank's own pipeline reckons."""
    sync, device, has_changes = config.weight_sync, config.cluster.device.value, config.weight_sync.delta_bytes > 0
    reserved = reserved_bytes(
        device, sync.watermark_bytes, source_bytes, verify_hashes=sync.verify_hashes, has_changes=has_changes
    )
    return Staging(watermark_bytes=sync.watermark_bytes, reserved_bytes=reserved, has_changes=has_changes)
