"""Supervised fine-tuning: the same trainer, taught by conversations instead of rewards. No engines, no weight sync.

    conversations --shuffled, epoch after epoch--> sequences_per_step of them --pack--> trainer ranks --> one row a step

Owns: the order of things in such a run. Does not own: the trainer (trainer/), where it lives (placement), which tokens
count (conversations), rows (telemetry), what is started and ended around it.
Invariant: one iteration = one optimizer step, as in controller.py; a resumed run continues with the next conversation.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conf.schema import RunConfig, TrainMode
from orchestrator.errors import TrainingStopped
from orchestrator.files.run_checkpoint import BufferState, CheckpointStore, RunState
from orchestrator.files.telemetry import StepRecord, Telemetry, Value
from orchestrator.inputs.conversations import Conversation
from orchestrator.loop.advantages import denominators_of
from orchestrator.loop.controller import LAST_STEP_S, MAX_REFUSED_STEPS, SAVE_S
from orchestrator.loop.ports import Stopwatch
from orchestrator.waiting import finish_first, last_attempt
from rollout.prompts import Shuffled
from trainer.step.microbatches import pack
from trainer.types import LossStats, Sample

if TYPE_CHECKING:
    from orchestrator.cluster.ray_handles import RayTrainerGroup

logger = logging.getLogger(__name__)


class Finetuner:
    """See the module's docstring. `await tuner.train(...)` runs to the last step."""

    def __init__(
        self,
        config: RunConfig,
        trainer: RayTrainerGroup,
        training: Sequence[Conversation],
        held_out: Sequence[Conversation],
        telemetry: Telemetry,
        checkpoints: CheckpointStore,
    ) -> None:
        self.config = config
        self.step = 0
        self.policy_version = 0
        self._trainer = trainer
        self._stream = Shuffled(training, seed=config.run.seed, shuffle=config.data.shuffle)
        self._held_out = held_out
        self._telemetry = telemetry
        self._checkpoints = checkpoints
        self._num_refused_in_a_row = 0
        self._is_whole = True
        """Whether trainer, clock and stream agree: what a checkpoint may be made of."""
        self.held_out_nll: float | None = None
        """Of the newest evaluation; None without data.eval_path."""

    async def train(self, resume_from: Path | None, on_clock: Callable[[int, int], None]) -> None:
        """All steps that are left. `on_clock` is told of every step and version; logs carry them. Cancelled, it ends
        the step under way and saves.
        """
        if resume_from is not None:
            await self._load(resume_from)
        else:
            record = StepRecord(0, 0)
            record.extra |= await self._evaluate()
            self._telemetry.step(record)
        try:
            while self.step < self.config.run.num_steps:
                await finish_first(self._one_step(), "the step under way", timeout_s=LAST_STEP_S)
                on_clock(self.step, self.policy_version)
                if self.config.run.is_due(self.config.run.checkpoint_every_steps, self.step):
                    await self._save()
        except asyncio.CancelledError:
            if self._is_whole and self.step > 0:
                logger.info("told to end: saving step %d first", self.step)
                await last_attempt(self._save(), "saving the run's state", timeout_s=SAVE_S)
            raise

    async def _one_step(self) -> None:
        trainer, clock = self._trainer, Stopwatch()
        self._is_whole = False
        batch = [next(self._stream) for _ in range(self.config.algorithm.sequences_per_step)]
        samples = [conversation.sample(self.policy_version) for conversation in batch]
        microbatches = self._pack(samples)
        loss = await trainer.forward_backward(microbatches, denominators_of(samples, self.policy_version))
        clock.lap("trainer/forward_backward_s")
        optim = await trainer.optimizer_step()  # refuses a loss or norm that is not finite
        clock.lap("trainer/optimizer_s")
        self.step, self.policy_version = self.step + 1, optim.policy_version
        self._is_whole = True
        train_s = clock.total_s
        record = StepRecord(self.step, self.policy_version, loss=loss, optim=optim, num_ranks=trainer.num_ranks)
        if self.config.run.is_due(self.config.run.eval_every_steps, self.step):
            record.extra |= await self._evaluate()
        num_tokens = sum(sample.num_tokens for sample in samples)
        record.extra |= clock.laps | {
            "trainer/num_microbatches": len(microbatches[0]),
            "trainer/tokens_per_s_per_rank": num_tokens / train_s / trainer.num_ranks,
            "sft/epoch": self._stream.epoch,
            "step/total_s": clock.total_s,
        }
        self._telemetry.step(record)
        self._num_refused_in_a_row = 0 if optim.is_finite else self._num_refused_in_a_row + 1
        if self._num_refused_in_a_row >= MAX_REFUSED_STEPS:
            path = await self._save()
            raise TrainingStopped(
                f"{MAX_REFUSED_STEPS} steps in a row had no finite loss and gradient (step {self.step}). Policy "
                f"version {self.policy_version}, the last finite one, is saved in {path}; lower trainer.optim.lr and "
                "go on with run.resume"
            )

    async def _evaluate(self) -> dict[str, Value]:
        """Mean negative log-likelihood of the held-out conversations' taught tokens."""
        if not self._held_out:
            return {}
        clock = Stopwatch()
        samples = [conversation.sample(self.policy_version) for conversation in self._held_out]
        stats = await self._trainer.evaluate(self._pack(samples), denominators_of(samples, self.policy_version))
        self.held_out_nll = _sum(stats, "sft/nll_sum") / _sum(stats, "policy/num_tokens")
        return {"eval/nll": self.held_out_nll, "eval/total_s": clock.total_s}

    def _pack(self, samples: Sequence[Sample]) -> list[list[list[Sample]]]:
        limit = self.config.trainer.max_microbatch_tokens
        plan = pack([sample.num_tokens for sample in samples], self._trainer.num_ranks, limit)
        return [[[samples[i] for i in indices] for indices in of_rank] for of_rank in plan]

    async def _save(self) -> Path:
        saved = self._checkpoints.of_step(self.step)
        if saved is not None:
            return saved
        partial = self._checkpoints.begin(self.step)
        await self._trainer.save_state(partial / "trainer")
        if self.config.trainer.mode is TrainMode.lora:
            await self._trainer.export(partial / "adapter")
        state = RunState(self.step, self.policy_version, self._stream.state_dict(), {}, BufferState())
        return await asyncio.to_thread(self._checkpoints.finish, partial, state)

    async def _load(self, path: Path) -> None:
        state = await asyncio.to_thread(self._checkpoints.read, path)
        await self._trainer.load_state(path / "trainer")
        self._stream.load_state_dict(state.prompts)
        self.step, self.policy_version = state.step, state.policy_version


def _sum(stats: Sequence[LossStats], name: str) -> float:
    return math.fsum(rank.sums[name] for rank in stats)
