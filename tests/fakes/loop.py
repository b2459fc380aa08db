"""A controller on fakes of its services: a trainer that counts, workers and rewards that answer at once. They share one
`World`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fakes.trainer import FakeTrainer
from fakes.workers import FakeWorker
from fakes.world import World
from slipstream.conf.schema import (
    AlgorithmConfig,
    DataConfig,
    RolloutConfig,
    RunConfig,
    RunSection,
    SamplingConfig,
    TrainerConfig,
    WeightSyncConfig,
)
from slipstream.fleet.router import Router
from slipstream.fleet.supervisor import Supervisor
from slipstream.orchestrator.checkpoints.loop_state import RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore, fingerprint
from slipstream.orchestrator.data.streams import Stream
from slipstream.orchestrator.files.row_files import read_rows
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.run_log import ProgressLine
from slipstream.orchestrator.files.timeline import Activities
from slipstream.orchestrator.loop.controller import Controller
from slipstream.orchestrator.loop.ports import LoopServices
from slipstream.orchestrator.metrics.catalogue import RewardNames
from slipstream.orchestrator.metrics.held_out import eval_names
from slipstream.orchestrator.metrics.telemetry import Telemetry
from slipstream.rollout.agents.episode_runner import FinishedEpisode
from slipstream.rollout.types import Judgement, Prompt, Rollout, Turn


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


class FakePrompts(Stream[Prompt]):
    """Prompt i is the i-th drawn; the cursor is a number."""

    def __init__(self) -> None:
        self.cursor = 0
        self.observed: list[tuple[int, list[float | None]]] = []
        """Every group's prompt and rewards, in the order in which they were judged."""

    @property
    def epoch(self) -> int:
        return 0

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
        self.clock: list[tuple[int, int]] = []
        """Step and policy version, whenever the loop was told to say that one has changed."""
        self.hold: Callable[[RunState], Awaitable[None]] | None = None
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
                hold=self.hold,
                on_clock=lambda step, policy_version: self.clock.append((step, policy_version)),
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
    def saved(self) -> RunState:
        """The newest checkpoint's."""
        return self.checkpoints.read(self.checkpoints.newest())

    @property
    def rows(self) -> list[dict]:
        return read_rows(self.folder.metrics)


async def end(running: asyncio.Task[object]) -> None:
    """Tell a run to end, and wait until it has."""
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def make_config(
    *,
    staleness: int = 0,
    num_steps: int = 4,
    groups_per_step: int = 3,
    run: Mapping[str, object] = {},
    rollout: Mapping[str, object] = {},
    trainer: Mapping[str, object] = {},
    eval_path: str | None = None,
    sync: WeightSyncConfig | None = None,
    **algorithm: object,
) -> RunConfig:
    """Options of these sections, and of `algorithm` for the rest."""
    options = {"group_size": 2, "groups_per_step": groups_per_step, "max_staleness_steps": staleness} | algorithm
    return RunConfig(
        run=RunSection(**{"num_steps": num_steps, "eval_every_steps": 0, "checkpoint_every_steps": 2, **run}),
        algorithm=AlgorithmConfig(**options),
        rollout=RolloutConfig(**rollout),
        trainer=TrainerConfig(**trainer),
        data=DataConfig(eval_path=eval_path),
        weight_sync=sync or WeightSyncConfig(),
    )
