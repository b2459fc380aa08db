"""What `slipstream plan` found. Plain data; estimate.py fills it in, estimate_report.py says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.offline.hardware import Hardware
from slipstream.orchestrator.offline.modes import ModeChoice
from slipstream.weight_sync.plan.budget import Staging
from slipstream.weight_sync.plan.transfer_plan import PlanSummary
from slipstream.weight_sync.prediction.links import Placement
from slipstream.weight_sync.prediction.predict import Prediction

if TYPE_CHECKING:
    from slipstream.trainer.delivery.planned_layouts import TrainerMemory


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
    """Bytes of the whole checkpoint: four-bit experts as they are stored, all else in model.dtype."""


@dataclass(frozen=True, slots=True)
class RolloutMemory:
    """Bytes on the fullest engine rank."""

    weights: int
    """All parameters of its layout; in adapter mode, where that is not recorded, an even share of the checkpoint."""
    slots: int
    """Bytes of adapter slots; 0 where adapters are merged."""
    num_slots: int
    """RunConfig.num_adapter_slots in adapter mode."""

    @property
    def formula(self) -> str:
        """How the bytes are estimated."""
        if not self.num_slots:
            return "weights: bytes of all parameters in the recorded layout; a publish stages nothing here"
        return (
            "weights: checkpoint / tp_size; what ranks hold alike comes on top; "
            f"slots: {self.num_slots}, algorithm.max_staleness_steps + 2 (+ 1 with run.eval_beside); a publish stages "
            "nothing here"
        )


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes, beside those of the processes themselves."""

    trainer_states: int
    """For one trainer rank, all copies: what is trained, and its moments. 0 with trainer.max_restarts=0."""
    num_copies: int
    responses: int
    """At one rollout worker, of training; 0 where workers end with their controller."""
    most_responses: int
    """The most that evaluations make of it."""


@dataclass(frozen=True, slots=True)
class RelayChoice:
    """The same publish with weight_sync.relay=node."""

    num_written: int
    """Replicas that the trainer writes to; the others read from one of these, on their node."""
    num_bytes: int
    written_s: float
    """Until those replicas have committed."""
    read_s: float
    """From then until all replicas have committed."""

    @property
    def total_s(self) -> float:
        return self.written_s + self.read_s


@dataclass(frozen=True, slots=True)
class DeltaChoice:
    """The same publish with weight_sync.delta_bytes, to engines that hold the version before."""

    changed: float
    """Share of the elements that changed: assumed."""
    num_bytes: int
    """Bytes that the trainer sends: what changed, and whole what finds no room in the fullest engine rank's zone, or
    changed too much to be sent by element."""
    total_s: float
    """With the second merge or, in full training and for FP8, the comparison with what is kept on the host."""
    kept_bytes: int
    """On the fullest trainer rank, beside the rest: the adapters as published last; 0 where host_bytes are kept."""
    host_bytes: int
    """In full training and for FP8, in host memory for the fullest trainer rank: what it published last."""
    zone_bytes: int
    """On every engine rank, beside the rest: weight_sync.delta_bytes."""


@dataclass(frozen=True, slots=True)
class RemoteMergeChoice:
    """The same publish with weight_sync.remote_merge."""

    num_bytes: int
    """Bytes of A and B that the trainer sends, to all engines."""
    total_s: float
    """With the engines' merges, and with the trainer's, which it hashes."""
    base_bytes: int
    """On the fullest engine rank, beside the rest: what is merged into."""
    is_on_host: bool
    """Whether they lie in host memory, or else on the GPU."""


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
    host: HostMemory
    prediction: Prediction
    total_s_by_nic: Mapping[float, float]
    """The same publish over NICs of other rates, bytes/s -> seconds."""
    modes: ModeChoice
    relay: RelayChoice | None
    """None with weight_sync.relay=none. All else in the report is of a publish that writes to every replica."""
    delta: DeltaChoice | None
    """None with weight_sync.delta_bytes=0. All else in the report is of a publish that sends every byte."""
    remote_merge: RemoteMergeChoice | None
    """None with weight_sync.remote_merge=none. Likewise."""
