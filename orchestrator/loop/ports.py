"""What the loop calls, as narrow interfaces. In a run a Ray cluster is behind them, in tests small fakes.

Owns: the protocols, what each kind of loop gets of them (`LoopServices`, `TaughtServices`), and a stopwatch. Does not
own the protocol of a rollout worker (replicas.py).
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from slipstream.conf.schema import SamplingConfig
from slipstream.fleet.router import Router
from slipstream.fleet.supervisor import Supervisor
from slipstream.orchestrator.checkpoints.loop_state import RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore
from slipstream.orchestrator.data.streams import Stream
from slipstream.orchestrator.files.metrics_catalogue import Value
from slipstream.orchestrator.files.telemetry import Telemetry
from slipstream.orchestrator.files.timeline import TRAINER, Activities
from slipstream.orchestrator.inputs.rows.conversations import Lesson
from slipstream.rollout.agents.episode_runner import FinishedEpisode
from slipstream.rollout.types import Judgement, Prompt, Rollout
from slipstream.trainer.types import Denominators, LossStats, OptimStats, Sample, Scores
from slipstream.weight_sync.publish.report import PublishReport

T = TypeVar("T")


class StepTrainer(Protocol):
    """All trainer ranks as one, as every loop calls them (ray_handles.RayTrainerGroup; tests have a fake)."""

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


class PublishingTrainer(StepTrainer, Protocol):
    """The same, as reinforcement calls them."""

    async def meanwhile(self, work: Awaitable[T]) -> T: ...
    async def score(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], policy_version: int
    ) -> list[list[list[Scores]]]: ...
    async def publish(
        self, timeout_s: float, exclude: Sequence[int] = (), trace: Path | None = None
    ) -> PublishReport: ...
    async def reconnect(self, replica: int, endpoint: str, timeout_s: float, base_endpoint: str = "") -> None: ...


class TaughtTrainer(StepTrainer, Protocol):
    """The same, as fine-tuning calls them."""

    async def evaluate(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]: ...


class Rewards(Protocol):
    """Judges responses, one judgement per rollout (rollout.rewards.runner.RewardRunner)."""

    async def score_group(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Judgement]: ...
    def take_counts(self) -> dict[str, float]: ...


class Teacher(Protocol):
    """Gives log-probabilities of sampled tokens (rollout.teacher.Teacher)."""

    async def group_logprobs(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[list[float] | None]: ...
    def take_counts(self) -> dict[str, float | None]: ...


class Episodes(Protocol):
    """Runs an agent's episodes (rollout.agents.episode_runner.EpisodeRunner)."""

    @property
    def first_report(self) -> str:
        """What the first episode that failed reported."""
        ...

    async def run_group(
        self, prompt: Prompt, n: int, sampling: SamplingConfig | None = None
    ) -> list[FinishedEpisode]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepServices:
    """What every run's loop calls. What is behind a name may live in other processes."""

    trainer: StepTrainer
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

    trainer: TaughtTrainer
    lessons: Stream[Lesson]
    held_out: Mapping[str, Sequence[Lesson]]
    """By the name of their set, "" for data.eval_path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopServices(StepServices):
    """What the loop of reinforcement calls."""

    trainer: PublishingTrainer
    supervisor: Supervisor
    router: Router
    prompts: Stream[Prompt]
    eval_sets: Mapping[str, Sequence[Prompt]]
    """Held-out prompts by the name of their set, "" for data.eval_path."""
    rewards: Rewards
    traces: Path
    """Where the timelines of publishes are written."""
    episodes: Episodes | None = None
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
