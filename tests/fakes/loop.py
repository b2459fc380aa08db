"""A controller on fakes of its services: a trainer that counts, workers and rewards that answer at once.

They share one `World`: the version that the trainer has, the version that each worker has committed, and a diary of
what was called in which order. Nothing here sleeps; a test that wants an order holds an `asyncio.Event`.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from rich.console import Console

from slipstream.conf.schema import (
    AlgorithmConfig,
    RolloutConfig,
    RunConfig,
    RunSection,
    SamplingConfig,
    WeightSyncConfig,
)
from slipstream.fleet.router import Router
from slipstream.fleet.supervisor import Supervisor
from slipstream.orchestrator.checkpoints.loop_state import RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore, fingerprint
from slipstream.orchestrator.figures.held_out import eval_names
from slipstream.orchestrator.files.metrics_catalogue import RewardNames
from slipstream.orchestrator.files.row_files import read_rows
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.run_log import ProgressLine
from slipstream.orchestrator.files.telemetry import Telemetry
from slipstream.orchestrator.files.timeline import Activities
from slipstream.orchestrator.loop.controller import Controller
from slipstream.orchestrator.loop.ports import LoopServices
from slipstream.rollout.agents.episode_runner import FinishedEpisode
from slipstream.rollout.types import ABORTED, Judgement, Progress, Prompt, Rollout, Turn
from slipstream.trainer.step.mismatch_bins import NUM_K3_BINS, POSITION_STARTS
from slipstream.trainer.types import Denominators, LossStats, OptimStats, Sample, Scores
from slipstream.weight_sync.errors import PlanMismatch
from slipstream.weight_sync.layout import Binding
from slipstream.weight_sync.publish.report import PublishReport, ReplicaReport
from slipstream.weight_sync.replica.recovery import Offer, Pulled

SUMS = (
    "loss/total_sum",
    "loss/policy_sum",
    "policy/num_tokens",
    "policy/entropy_sum",
    "policy/ratio_sum",
    "policy/num_clipped_low",
    "policy/num_clipped_high",
    "policy/num_sequences",
    "correction/weight_sum",
    "correction/weight_square_sum",
    "correction/num_truncated",
    "correction/num_masked",
    "correction/num_truncated_sequences",
    "correction/num_masked_sequences",
    "kl/ref_k3_sum",
    *(f"parity/{name}{suffix}" for name in ("k3_sum", "prob_diff_sum", "num_tokens") for suffix in ("", "_stale")),
)
MAXIMA = tuple(f"parity/{name}_max{suffix}" for name in ("k3", "prob_diff", "log_ratio") for suffix in ("", "_stale"))
VECTORS = {
    "parity/k3_histogram": NUM_K3_BINS,
    "parity/k3_histogram_stale": NUM_K3_BINS,
    "parity/k3_by_position": len(POSITION_STARTS),
    "parity/num_tokens_by_position": len(POSITION_STARTS),
}
"""What a rank measures, and the length of each vector."""


def measured(sums: Mapping[str, float] = MappingProxyType({}), **maxima: float) -> LossStats:
    """What a rank returns that measured these, and zeros for the others."""
    return LossStats(
        dict.fromkeys(SUMS, 0.0) | dict(sums),
        dict.fromkeys(MAXIMA, 0.0) | maxima,
        {name: [0.0] * length for name, length in VECTORS.items()},
    )


def outcome(committed: bool, error: str | None = None) -> ReplicaReport:
    """One replica's part of a publish."""
    return ReplicaReport("tcp://replica", committed, error)


def publish_report(version: int, replicas: Sequence[ReplicaReport], num_changed: int | None = 5) -> PublishReport:
    """A publish that took 60 ms and wrote 1000 bytes."""
    return PublishReport(
        version=version, epoch=1, replicas=tuple(replicas), pause_s=0.01, begin_s=0.01, idle_s=0.01, mark_s=0.0,
        prepare_s=0.01, write_s=0.01, verify_s=0.01, commit_s=0.01, total_s=0.06, num_bytes=1000, peak_bytes=100,
        watermark_bytes=1 << 20, num_changed_params=num_changed,
    )  # fmt: skip


def an_offer(version: int, epoch: int = 1) -> Offer:
    """What a worker of that version lets a peer read: no parameter at all."""
    return Offer(version, epoch, plan="plan", layout="layout", link="tcp", binding=Binding("session", {}), hashes={})


class Unpublished(WeightSyncConfig):
    """Engines keep version 0."""

    __slots__ = ()
    enabled = False


@dataclass
class World:
    """What the fakes agree on."""

    version: int = 0
    committed: list[int] = field(default_factory=list)
    diary: list[tuple[Any, ...]] = field(default_factory=list)
    scored: list[tuple[int, list[int]]] = field(default_factory=list)
    """Version and tokens of every sequence that a worker was asked to score."""


class Watched:
    """What a test awaits before a call: it may wait, change the world, or raise."""

    def __init__(self) -> None:
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        """By the call's name."""

    async def _reached(self, call: str) -> None:
        if call in self.before:
            await self.before[call]()


T = TypeVar("T")


class FakeTrainer(Watched):
    """Raises the version by one a step, unless the step is listed as not finite."""

    def __init__(self, world: World, num_workers: int, *, num_ranks: int = 2) -> None:
        super().__init__()
        self.world = world
        self.num_ranks = num_ranks
        self.num_steps = 0
        self._is_changed = False
        self.not_finite: set[int] = set()
        self.failing_replicas: dict[int, set[int]] = {}
        """version -> replicas that do not commit it."""
        self.trained: list[tuple[int, list[Sample]]] = []
        self.traced: dict[int, Path] = {}
        self.excluded: list[tuple[int, list[int]]] = []
        """Per publish: its version, and the replicas it was told to leave out."""
        self.num_changed_params: int | None = 5
        self.refuses_reconnect: set[int] = set()
        self.log_ratio = 0.125
        """Its log-probabilities minus those of the engines."""
        self.being_written: list[tuple[Path, int]] = []
        """Files of a checkpoint, and what each is to hold."""
        self.is_slow_to_write = False
        self.extra_sums: dict[str, float] = {}
        self.down_s: list[float] = []
        self.unkept_steps: int | None = None
        self.grad_norm = 1.0
        """Sums of every step's loss, over those of a trainer that agrees with its engines."""
        world.committed = [-1] * num_workers

    async def forward_backward(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]:
        assert len(microbatches_by_rank) == self.num_ranks
        assert len({len(microbatches) for microbatches in microbatches_by_rank}) == 1
        samples = [s for rank in microbatches_by_rank for microbatch in rank for s in microbatch]
        assert denominators.num_sequences == len(samples)
        assert denominators.num_possible_tokens == RolloutConfig().sampling.max_tokens * len(samples)
        self.trained.append((denominators.policy_version, samples))
        self.world.diary.append(("train", denominators.policy_version))
        await asyncio.sleep(0)
        tokens = float(denominators.num_valid_tokens)
        sums = {"policy/num_tokens": tokens, "policy/entropy_sum": 2.0 * tokens}
        shown = [sample for sample in samples if sample.is_shown]
        logprobs = {sample.origin: sample.rollout_logprobs[sample.loss_mask] + self.log_ratio for sample in shown}
        return [measured(sums | self.extra_sums), replace(measured(), logprobs=logprobs)]

    async def score(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], policy_version: int
    ) -> list[list[list[Scores]]]:
        assert policy_version == self.world.version
        self.world.diary.append(("score", policy_version))

        def of(sample: Sample) -> Scores:
            ones = np.ones(sample.num_valid_tokens, np.float32)
            return Scores(-2 * ones, -3 * ones, ones)

        return [[[of(s) for s in microbatch] for microbatch in rank] for rank in microbatches_by_rank]

    async def optimizer_step(self, *, ends_version: bool = True) -> OptimStats:
        await self._reached("optimizer_step")
        is_finite = self.num_steps not in self.not_finite
        self.num_steps += 1
        self._is_changed = self._is_changed or is_finite
        if ends_version:
            self.world.version += int(self._is_changed)
            self._is_changed = False
        return OptimStats(self.world.version, self.grad_norm if is_finite else math.nan, 1e-3, is_finite)

    async def publish(self, timeout_s: float, exclude: Sequence[int] = (), trace: Path | None = None) -> PublishReport:
        await self._reached("publish")
        version = self.world.version
        if trace is not None:
            self.traced[version] = trace
        self.world.diary.append(("publish", version))
        self.excluded.append((version, list(exclude)))
        await asyncio.sleep(0)
        failing = self.failing_replicas.get(version, set()) | set(exclude)
        outcomes = []
        for index in range(len(self.world.committed)):
            if index not in failing:
                self.world.committed[index] = version
            error = "IntegrityError: lm_head.weight" if index in failing else None
            outcomes.append(outcome(index not in failing, error))
        return publish_report(version, outcomes, self.num_changed_params)

    async def reconnect(self, replica: int, endpoint: str, timeout_s: float, base_endpoint: str = "") -> None:
        self.world.diary.append(("reconnect", replica, endpoint))
        if replica in self.refuses_reconnect:
            raise PlanMismatch("another layout")

    async def evaluate(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]:
        tokens = float(denominators.num_valid_tokens)
        return [LossStats({"sft/nll_sum": tokens, "policy/num_tokens": tokens}, {})]

    async def begin_checkpoint(self, folder: Path, adapter: Path | None) -> None:
        self.being_written = [(folder / "rank0.json", self.world.version)]
        if adapter is not None:
            self.being_written += [(adapter / "adapter_model.safetensors", self.world.version)]
        await self._reached("end of begin_checkpoint")

    async def meanwhile(self, work: Awaitable[T]) -> T:
        return await work

    async def has_written(self) -> bool:
        await self._reached("has_written")
        if self.is_slow_to_write:
            return False
        for path, version in self.being_written:
            await asyncio.to_thread(path.parent.mkdir, exist_ok=True)
            path.write_text(str(version))
        return True

    async def export(self, folder: Path) -> None:
        await asyncio.to_thread(folder.mkdir)
        (folder / "adapter_model.safetensors").write_text(str(self.world.version))

    async def load_state(self, folder: Path) -> None:
        self.world.version = int((folder / "rank0.json").read_text())


class FakeWorker(Watched):
    """Answers with the version it has committed; every second sibling is right."""

    def __init__(self, world: World, index: int) -> None:
        super().__init__()
        self.world = world
        self.index = index
        self.name = f"rollout-{index}"
        self.endpoint = f"tcp://{self.name}"
        self.node = "one"
        self.pid = 1000 + index
        self.started_at: Mapping[str, float] = {"process_up": 1.0, "up": 3.0}
        self.progress_made = Progress(10.0, 0, 0, None)
        self.fails_after: int | None = None
        """Number of groups after which it dies."""
        self.gate: asyncio.Event | None = None
        self.num_groups = 0
        self.wants_base_at = ""
        self.death = ""
        """How its process has ended."""
        self.scores_fail = False
        self.told, self.who_told = asyncio.Event(), "SIGTERM"
        self.is_going = False
        """Hands over: the first of two tokens was sampled."""
        self.num_done = 0
        """... but for so many responses, which have both."""

    async def keep_version(self, version: int | None) -> bool:
        return False

    async def told_to_go(self) -> str:
        await self.told.wait()
        return self.who_told

    async def hand_over(self) -> None:
        await self._reached("hand_over")
        self.is_going = True
        if self.gate is not None:
            self.gate.set()

    async def generate_group(
        self,
        prompt: Prompt,
        n: int,
        sampling: SamplingConfig | None = None,
        version: int | None = None,
        so_far: Sequence[Rollout] = (),
    ) -> list[Rollout]:
        await self._reached("generate_group")
        if self.fails_after is not None and self.num_groups >= self.fails_after:
            raise ConnectionError(f"{self.name} died")
        self.num_groups += 1
        version = self.world.committed[self.index]
        self.world.diary.append(("sample", prompt.prompt_id, version))
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        if self.is_going:
            begun = [Rollout([5], [-1.0], [version], "", ABORTED)] * (n - self.num_done)
            return [Rollout([5, 2], [-1.0, -0.5], [version] * 2, "done", "stop")] * self.num_done + begun
        begun = [one.policy_versions for one in so_far] or [[]] * n
        texts = ["right" if i % 2 else "wrong" for i in range(n)]
        return [
            Rollout([5, 2], [-1.0, -0.5], [*versions, version, version][:2], text, "stop")
            for versions, text in zip(begun, texts, strict=True)
        ]

    async def score(self, token_ids: Sequence[int], version: int) -> list[float] | None:
        """Half a nat above what it sampled with, [5, 2] at -1.0 and -0.5."""
        self.world.scored.append((version, list(token_ids)))
        if self.scores_fail:
            raise ConnectionError(f"{self.name} died")
        return None if version != self.world.committed[self.index] else [0.0] * (len(token_ids) - 3) + [-0.5, 0.0]

    async def check(self) -> None:
        if self.death:
            raise ConnectionError(self.death)

    async def progress(self) -> Progress:
        await self._reached("progress")
        return self.progress_made

    async def offer(self) -> list[Offer]:
        await self._reached("offer")
        return [an_offer(self.world.committed[self.index])]

    async def pull(self, offers: Sequence[Offer]) -> Pulled:
        await self._reached("pull")
        self.world.diary.append(("pull", self.index, offers[0].version))
        return Pulled(num_bytes=10, read_s=0.5, verify_s=0.1)

    async def adopt(self, version: int, epoch: int) -> None:
        await self._reached("adopt")
        self.world.committed[self.index] = version

    async def release(self, offers: Sequence[Offer]) -> None:
        self.world.diary.append(("release", self.index))

    async def base_wanted_at(self) -> str:
        await self._reached("base_wanted_at")
        return self.wants_base_at


class FakeRewards:
    """1 for "right"; `fails` says that every reward fails, `is_flat` for which prompts every reward is 1."""

    def __init__(self) -> None:
        self.fails: Callable[[], bool] = lambda: False
        self.is_flat: Callable[[Prompt], bool] = lambda prompt: False
        self.requests: int | None = None
        """How often a judge named style was asked since its cost was taken; None: there is no judge."""

    async def score_group(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Judgement]:
        if self.fails():
            return [Judgement(None)] * len(rollouts)
        values = [float(rollout.text == "right" or self.is_flat(prompt)) for rollout in rollouts]
        if self.requests is None:
            return [Judgement(value) for value in values]
        self.requests += len(values)
        return [Judgement(value, {"style": value / 2}) for value in values]

    def take_counts(self) -> dict[str, float]:
        taken, self.requests = self.requests, None if self.requests is None else 0
        return {} if taken is None else {"style_requests": taken}


class FakeTeacher:
    """-2 for the first token and -0.25 for the second; None for every response that `fails` picks, by its text."""

    def __init__(self, fails: Callable[[str], bool] = lambda text: False) -> None:
        self.fails = fails
        self.num_asked = 0

    async def group_logprobs(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[list[float] | None]:
        assert prompt.prompt_id < 1000, "held-out prompts teach nothing"
        self.num_asked += len(rollouts)
        return [None if self.fails(rollout.text) else [-2.0, -0.25] for rollout in rollouts]

    def take_counts(self) -> dict[str, float | None]:
        return {"failures": 1, "retries": 2, "response_s": 0.5}


class FakePrompts:
    """Prompt i is the i-th drawn; the cursor is a number."""

    def __init__(self) -> None:
        self.cursor = 0
        self.observed: list[tuple[int, list[float | None]]] = []
        """Every group's prompt and rewards, in the order in which they were judged."""

    def __next__(self) -> Prompt:
        self.cursor += 1
        return Prompt(self.cursor - 1, (1, 7), f"prompt {self.cursor - 1}", {})

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor = state["cursor"]

    def observe(self, prompt_id: int, rewards: Sequence[float | None]) -> None:
        self.observed.append((prompt_id, list(rewards)))

    def metrics(self) -> dict[str, float | None]:
        return {}


class FakeEpisodes:
    """Two turns and a third that begins a branch, by the version that worker 0 has committed. Of four episodes, the
    first is worth 1, the second 0; the third has no reward of its own, and its last response is right; the fourth
    failed.
    """

    first_report = "Traceback:\n  agent.py, line 7, in play\nKeyError: 'hints'\n"

    def __init__(self, world: World) -> None:
        self.world = world
        self.num_groups = 0
        self.all_fail = False
        self.has_rewards = True

    async def run_group(self, prompt: Prompt, n: int, sampling: SamplingConfig | None = None) -> list[FinishedEpisode]:
        version = self.world.committed[0]
        self.num_groups += 1
        await asyncio.sleep(0)
        turns = (Turn(None, [1, 7], 2, "start"), Turn(0, [8], 1, ""), Turn(None, [1, 9], 1, "edited"))
        episodes: list[FinishedEpisode] = []
        for index in range(n):
            failure = "raised" if index % 4 == 3 or self.all_fail else ""
            rollout = Rollout(
                [5, 2, 6, 3], [-1.0, -0.5, -0.25, -0.75], [version] * 4, "right", "stop",
                turns=turns, failure=failure, seconds=0.5,
            )  # fmt: skip
            reward = None if failure or not self.has_rewards else [1.0, 0.0, None, None][index % 4]
            episodes.append(FinishedEpisode(rollout, reward))
        return episodes


class Loop:
    """A controller on fakes, in a run folder of its own."""

    def __init__(self, folder: Path, config: RunConfig, *, num_workers: int = 2, resume_step: int = 0) -> None:
        self.folder = RunFolder(folder)
        self.config = config
        self.world = World()
        self.trainer = FakeTrainer(self.world, num_workers)
        self.workers: list[FakeWorker] = [FakeWorker(self.world, i) for i in range(num_workers)]
        self.prompts = FakePrompts()
        self.rewards = FakeRewards()
        self.episodes: FakeEpisodes | None = None
        self.teacher: FakeTeacher | None = None
        self.checkpoints = CheckpointStore(self.folder.checkpoints, keep=2, options=fingerprint(config))
        self.resume_step = resume_step
        self.max_restarts = 0
        self.controller: Controller | None = None
        self.before_step: Callable[[RunState], Awaitable[None]] | None = None
        self.found: RunState | None = None
        """What the trainer has, which another controller left."""

    async def restart(self, index: int) -> FakeWorker:
        self.world.diary.append(("restart", index))
        self.world.committed[index] = -1
        self.workers[index] = FakeWorker(self.world, index)
        return self.workers[index]

    async def run(self) -> Controller:
        """To the last step; `controller` is there meanwhile."""
        telemetry = Telemetry(
            self.folder,
            num_steps=self.config.run.num_steps,
            first_step=self.resume_step,
            progress=ProgressLine(Console(file=StringIO())),
            rewards=RewardNames() if self.rewards.requests is None else RewardNames(("style",), ("style",)),
            samples_per_step=self.config.run.samples_per_step,
            max_sample_bytes_per_step=self.config.run.max_sample_bytes_per_step,
            evals=eval_names(self.config),
        )
        with telemetry:
            supervisor = Supervisor(
                self.workers,
                restart=lambda name: self.restart(int(name[-1])),
                max_restarts=self.max_restarts,
                backoff_s=0,
            )
            activities = Activities()
            services = LoopServices(
                trainer=self.trainer,
                supervisor=supervisor,
                router=Router(supervisor, request_timeout_s=60, note=activities.note),
                activities=activities,
                prompts=self.prompts,
                eval_sets={"": [Prompt(1000, (1,), "held out"), Prompt(1001, (1,), "held out")]},
                rewards=self.rewards,
                episodes=self.episodes,
                teacher=self.teacher,
                telemetry=telemetry,
                checkpoints=self.checkpoints,
                traces=Path("traces"),
                before_step=self.before_step,
            )
            self.controller = Controller(self.config, services)
            async with asyncio.timeout(120):
                if self.found is None:
                    await self.controller.start(self.checkpoints.newest() if self.resume_step else None)
                else:
                    await self.controller.go_on(self.found)
                await self.controller.train()
        return self.controller

    @property
    def rows(self) -> list[dict]:
        return read_rows(self.folder.metrics)


def make_config(*, staleness: int = 0, num_steps: int = 4, groups_per_step: int = 3, **algorithm: object) -> RunConfig:
    return RunConfig(
        run=RunSection(num_steps=num_steps, eval_every_steps=0, checkpoint_every_steps=2),
        algorithm=AlgorithmConfig(
            group_size=2, groups_per_step=groups_per_step, max_staleness_steps=staleness, **algorithm
        ),
    )
