"""What the loop calls. In a run processes are behind it, in tests stand-ins with the same calls.

Owns: the protocol of the trainer, what each kind of loop gets (`LoopServices`, `TaughtServices`), and a stopwatch. Does
not own the protocol of a rollout worker (replicas.py).
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from slipstream.fleet.router import Router
from slipstream.fleet.supervisor import Supervisor
from slipstream.orchestrator.checkpoints.loop_state import RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore
from slipstream.orchestrator.data.streams import Stream
from slipstream.orchestrator.files.timeline import TRAINER, Activities
from slipstream.orchestrator.inputs.rows.conversations import Lesson
from slipstream.orchestrator.metrics.catalogue import Value
from slipstream.orchestrator.metrics.telemetry import Telemetry
from slipstream.rollout.agents.episode_runner import EpisodeRunner
from slipstream.rollout.rewards.runner import RewardRunner
from slipstream.rollout.teacher import Teacher
from slipstream.rollout.types import Prompt
from slipstream.trainer.types import Denominators, LossStats, OptimStats, Sample, Scores
from slipstream.weight_sync.publish.report import PublishReport

T = TypeVar("T")


class LoopTrainer(Protocol):
    """All trainer ranks as one (ray_handles.RayTrainerGroup; tests have a fake)."""

    num_ranks: int

    @property
    def down_s(self) -> Sequence[float]:
        """Per time that all ranks were started again because one had died: the seconds that it took."""
        ...

    @property
    def unkept_steps(self) -> int | None:
        """Finished steps that the death of a rank would at most make again; None: it ends the run."""
        ...

    async def forward_backward(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]: ...
    async def optimizer_step(self, *, ends_version: bool = True) -> OptimStats: ...
    async def begin_checkpoint(self, folder: Path, adapter: Path | None) -> None: ...
    async def has_written(self) -> bool: ...
    async def load_state(self, folder: Path) -> None: ...
    async def export(self, folder: Path) -> None: ...
    async def evaluate(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]: ...
    async def meanwhile(self, work: Awaitable[T]) -> T: ...
    async def score(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], policy_version: int
    ) -> list[list[list[Scores]]]: ...
    async def publish(
        self, timeout_s: float, exclude: Sequence[int] = (), trace: Path | None = None
    ) -> PublishReport: ...
    async def reconnect(self, replica: int, endpoint: str, timeout_s: float, base_endpoint: str = "") -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepServices:
    """What every run's loop calls. What is behind a name may live in other processes."""

    trainer: LoopTrainer
    telemetry: Telemetry
    checkpoints: CheckpointStore
    activities: Activities = field(default_factory=Activities)
    """Where whoever does something notes it, for the step's timeline."""
    hold: Callable[[RunState], Awaitable[None]] | None = None
    """Given the state after each step, from which another controller may go on once the step's row is written; None:
    there will be none."""
    on_clock: Callable[[int, int], None] = lambda step, policy_version: None
    """Told of every change of step and policy version; logs carry them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtServices(StepServices):
    """What the loop of fine-tuning calls."""

    lessons: Stream[Lesson]
    held_out: Mapping[str, Sequence[Lesson]]
    """By the name of their set, "" for data.eval_path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopServices(StepServices):
    """What the loop of reinforcement calls."""

    supervisor: Supervisor
    router: Router
    prompts: Stream[Prompt]
    eval_sets: Mapping[str, Sequence[Prompt]]
    """Held-out prompts by the name of their set, "" for data.eval_path."""
    rewards: RewardRunner
    traces: Path
    """Where the timelines of publishes are written."""
    episodes: EpisodeRunner | None = None
    """None: one response to each prompt (rollout.agent=null)."""
    teacher: Teacher | None = None
    """None: no distillation (algorithm.distill_coef=0)."""


_WORDS = {
    "rollout/wait_s": "wait for rollouts",
    "trainer/score_s": "log-probabilities",
    "trainer/forward_backward_s": "forward and backward",
    "trainer/optimizer_s": "optimizer",
    "eval/wait_s": "evaluation",
}
"""What a timeline calls the parts of a step."""


class Stopwatch:
    """Seconds of a step's parts, by metric name; `activities` gets them as what the trainer does."""

    def __init__(self, activities: Activities) -> None:
        self._started = self._last = time.monotonic()
        self.began_at = time.time()
        """The start, in seconds since 1970."""
        self._activities = activities
        self.laps: dict[str, Value] = {}

    def lap(self, name: str) -> None:
        """Add the seconds of the part that ends now."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self.laps[name] = (self.laps.get(name) or 0.0) + seconds
        self._activities.note(TRAINER, _WORDS[name], time.time() - seconds)

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._started
