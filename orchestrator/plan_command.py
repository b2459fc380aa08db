"""`slipstream plan`: what a publish of this run would move, hold and take, before anything is started.

    RunConfig --trainer.offline--> source layouts --+
        |                                           +--> build_plan --> simulate --> PlanReport --> plan_report
        +--rollout.offline_layout--> engine layouts-+        link rates, placement, faults: flags of the command

Owns: joining the two sides' layouts for a cluster that need not exist, and the estimates of memory. Does not own: the
plan, the time model (weight_sync), words and pictures (plan_report.py).

Invariant: starts no trainer, engine or Ray, touches no GPU; needs no part of the cluster that it plans.
Callers: `orchestrator.cli`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import ClassVar

from conf.checks import check_architecture
from conf.errors import ConfigError
from conf.schema import Device, RunConfig
from orchestrator.prepare import resolve_hf_config
from rollout.errors import EngineError
from rollout.offline_layout import offline_layouts
from trainer.model.spec import ModelSpec
from trainer.offline import TrainerMemory, source_layouts, temporary_bytes, trainer_memory
from weight_sync.errors import PlanError, WatermarkError
from weight_sync.layout import DTYPE_BYTES, DestLayout
from weight_sync.links import Faults, LinkRates, Placement, place
from weight_sync.plan import PlanSummary, TransferPlan, build_plan
from weight_sync.simulate import Simulation, Staging, reserved_bytes, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The cluster that is planned for; flags of `slipstream plan`."""

    rates: LinkRates = field(default_factory=LinkRates)
    ranks_per_node: int = 8
    faults: Faults = field(default_factory=Faults)
    layout_cache: Path | None = None
    """Folder of recorded engine layouts; None: the user's cache."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the policy is."""

    family: str
    num_layers: int
    num_experts: int
    top_k: int
    num_parameters: int
    dtype: str
    num_bytes: int
    """Of the whole checkpoint in model.dtype."""


@dataclass(frozen=True, slots=True)
class RolloutMemory:
    """Bytes on the fullest engine rank."""

    weights: int
    """All parameters of its layout."""
    FORMULA: ClassVar[str] = "weights: bytes of all parameters in the recorded layout; a publish stages nothing here"


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything that the command prints, draws and writes."""

    config: RunConfig
    hardware: Hardware
    model: ModelFacts
    summary: PlanSummary
    placement: Placement
    staging: Staging
    trainer: TrainerMemory
    rollout: RolloutMemory
    simulation: Simulation


def plan_run(config: RunConfig, hardware: Hardware) -> PlanReport:
    """Plan and simulate one publish of a run.

    cluster.device=auto is planned as cuda: the cluster is another machine than this one.

    Raises:
        ConfigError: an option does not fit the model or the hardware, or the engine's layout cannot be recorded here.
    """
    if config.cluster.device is Device.auto:
        config = replace(config, cluster=replace(config.cluster, device=Device.cuda))
    hf_config = resolve_hf_config(config.model)
    spec = ModelSpec.from_hf_config(hf_config)
    check_architecture(config, hf_config)
    trainer, rollout, device, dtype = config.trainer, config.rollout, config.cluster.device, config.model.dtype
    tensors = spec.checkpoint_tensors(dtype.value)
    try:
        staging = _staging(config, spec)
        engine = offline_layouts(
            hf_config,
            tensors,
            tp_size=rollout.tp_size,
            enable_expert_parallel=rollout.enable_expert_parallel,
            dtype=dtype,
            device=device,
            cache=hardware.layout_cache,
        )
        plan = build_plan(
            source_layouts(spec, dtype.value, trainer),
            [engine] * rollout.num_workers,
            max_task_bytes=staging.max_task_bytes,
        )
        placement = place(list(plan.tasks), list(plan.expected), hardware.ranks_per_node)
        _check_faults(hardware.faults, plan, placement)
        simulation = simulate(
            plan,
            placement,
            hardware.rates,
            staging,
            faults=hardware.faults,
            verify_hashes=config.weight_sync.verify_hashes,
        )
    except (EngineError, PlanError, WatermarkError) as error:
        raise ConfigError(str(error)) from error
    num_parameters = sum(prod(meta.shape) for meta in tensors)
    return PlanReport(
        config=config,
        hardware=hardware,
        model=ModelFacts(
            spec.family,
            spec.num_layers,
            spec.moe.num_experts if spec.moe is not None else 0,
            spec.moe.top_k if spec.moe is not None else 0,
            num_parameters,
            dtype.value,
            num_parameters * DTYPE_BYTES[dtype.value],
        ),
        summary=plan.summary(),
        placement=placement,
        staging=staging,
        trainer=trainer_memory(spec, dtype.value, trainer),
        rollout=RolloutMemory(max(_weight_bytes(layout) for layout in engine)),
        simulation=simulation,
    )


def link_rates(*, nic_gb_s: float | None, nvlink_gb_s: float | None, hbm_gb_s: float | None) -> LinkRates:
    """The default rates, with those that the command line gives, in 10^9 bytes/s.

    Raises:
        ConfigError: a rate is not > 0.
    """
    given = {"nic": nic_gb_s, "nvlink": nvlink_gb_s, "hbm": hbm_gb_s}
    for name, rate in given.items():
        if rate is not None and not 0 < rate < float("inf"):
            raise ConfigError(f"--{name}-gb-s must be > 0 and finite, got {rate}")
    changes = {f"{name}_bytes_s": rate * 1e9 for name, rate in given.items() if rate is not None}
    return replace(LinkRates(), **changes)


def parse_faults(slow_ranks: Sequence[str], lost_nics: Sequence[int]) -> Faults:
    """Faults from the words of the command line. Example: parse_faults(["3=2.5"], [9]).

    Raises:
        ConfigError: a word is not RANK=FACTOR.
    """
    slow: dict[int, float] = {}
    for word in slow_ranks:
        rank, _, factor = word.partition("=")
        try:
            slow[int(rank)] = float(factor)
        except ValueError as error:
            raise ConfigError(f"--slow-rank takes RANK=FACTOR, for example 3=2.5, got {word!r}") from error
    try:
        return Faults(slow_ranks=slow, lost_nics=frozenset(lost_nics))
    except PlanError as error:
        raise ConfigError(f"--slow-rank: {error}") from error


def _staging(config: RunConfig, spec: ModelSpec) -> Staging:
    """What the watermark leaves on a trainer rank, as the rank's own pipeline reckons."""
    sync, device = config.weight_sync, config.cluster.device
    source = temporary_bytes(spec, config.trainer, device)
    reserved = reserved_bytes(device.value, sync.watermark_bytes, source, verify_hashes=sync.verify_hashes)
    return Staging(watermark_bytes=sync.watermark_bytes, reserved_bytes=reserved)


def _check_faults(faults: Faults, plan: TransferPlan, placement: Placement) -> None:
    """A fault that names nothing would be ignored."""
    unknown = sorted(set(faults.slow_ranks) - set(plan.tasks))
    if unknown:
        raise PlanError(f"--slow-rank names trainer rank {unknown[0]}; there are {len(plan.tasks)}")
    gpus = {*placement.trainer_gpus.values(), *placement.engine_gpus.values()}
    unknown = sorted(faults.lost_nics - gpus)
    if unknown:
        raise PlanError(f"--lost-nic names GPU {unknown[0]}, which holds no rank; the last one is GPU {max(gpus)}")


def _weight_bytes(layout: DestLayout) -> int:
    return sum(param.num_bytes for param in layout.params)
