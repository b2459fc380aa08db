"""Supervised fine-tuning: the same trainer, taught by conversations instead of rewards. No engines, no weight sync.

    conversations --shuffled, epoch after epoch--> sequences_per_step of them --pack--> trainer ranks --> one row a step

Owns: the order of things in such a run. Does not own: the trainer (trainer/), where it lives (placement), which tokens
count (conversations), rows (telemetry). Caller: orchestrator.cli, through `run`.
Invariant: one iteration = one optimizer step, as in controller.py; a resumed run continues with the next conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from conf.schema import RunConfig, TrainMode
from orchestrator.advantages import denominators_of
from orchestrator.buffer import BufferState
from orchestrator.checkpoint import CheckpointStore, RunState, fingerprint
from orchestrator.controller import RunResult
from orchestrator.conversations import Conversation, read_conversations
from orchestrator.curves import SFT_PANELS, draw_curves
from orchestrator.errors import TrainingStopped
from orchestrator.prepare import TextEncoder, prepare_model
from orchestrator.rooms import Stopwatch
from orchestrator.run_folder import RunFolder, open_run_folder, write_description
from orchestrator.run_log import ProgressLine, RunLog
from orchestrator.telemetry import StepRecord, Telemetry, Value
from rollout.prompts import Shuffled
from trainer.packing import pack
from trainer.types import LossStats, Sample

if TYPE_CHECKING:
    from orchestrator.placement import RayTrainerGroup

MAX_REFUSED_STEPS = 3
"""Steps in a row without a finite loss and gradient after which the run stops."""


def run(config: RunConfig, overrides: list[str]) -> RunResult:
    """One run from start to end. On the way out, whatever the reason, no process of the run is left.

    Args:
        config: complete and checked (orchestrator.preflight), algorithm.objective=sft.
        overrides: the words of the command line, for the record.
    """
    folder = open_run_folder(config.run, datetime.now())
    write_description(folder, config, overrides)
    with RunLog(folder.log) as log:
        return asyncio.run(_run(config, folder, log))


async def _run(config: RunConfig, folder: RunFolder, log: RunLog) -> RunResult:
    from orchestrator.placement import Cluster  # imports Ray

    model = prepare_model(config.model, folder.model)
    encoder = TextEncoder(folder.model)
    assert config.data.path is not None  # conf.checks
    training = read_conversations(config.data.path, encoder, config.data)
    held_out = read_conversations(config.data.eval_path, encoder, config.data) if config.data.eval_path else []
    checkpoints = CheckpointStore(folder.checkpoints, keep=config.run.keep_checkpoints, options=fingerprint(config))
    resume_from = checkpoints.to_resume(config.run.resume)
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster(config, folder))
        await cluster.start(model.hf_config)
        telemetry = stack.enter_context(
            Telemetry(
                folder,
                num_steps=config.run.num_steps,
                first_step=checkpoints.step_of(resume_from),
                tensorboard=config.run.tensorboard,
                progress=ProgressLine(log.console),
            )
        )
        tuner = Finetuner(config, cluster.trainer, training, held_out, telemetry, checkpoints)
        await tuner.train(resume_from, on_clock=log.context.set)
        export = folder.adapter if config.trainer.mode is TrainMode.lora else folder.merged
        await cluster.trainer.export(export)
    await asyncio.to_thread(draw_curves, folder.metrics, folder.curves, SFT_PANELS)
    result = RunResult(folder, tuner.step, tuner.policy_version, tuner.held_out_nll, checkpoints.newest(), export)
    log.say(result.summary())
    return result


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
        self.held_out_nll: float | None = None
        """Of the newest evaluation; None without data.eval_path."""

    async def train(self, resume_from: Path | None, on_clock: Callable[[int, int], None]) -> None:
        """All steps that are left. `on_clock` is told of every step and version; logs carry them."""
        if resume_from is not None:
            await self._load(resume_from)
        else:
            record = StepRecord(0, 0)
            record.extra |= await self._evaluate()
            self._telemetry.step(record)
        while self.step < self.config.run.num_steps:
            await self._one_step()
            on_clock(self.step, self.policy_version)
            if self._is_due(self.config.run.checkpoint_every_steps):
                await self._save()

    async def _one_step(self) -> None:
        trainer, clock = self._trainer, Stopwatch()
        batch = [next(self._stream) for _ in range(self.config.algorithm.sequences_per_step)]
        samples = [conversation.sample(self.policy_version) for conversation in batch]
        microbatches = self._pack(samples)
        loss = await trainer.forward_backward(microbatches, denominators_of(samples, self.policy_version))
        clock.lap("trainer/forward_backward_s")
        optim = await trainer.optimizer_step()  # refuses a loss or norm that is not finite
        clock.lap("trainer/optimizer_s")
        self.step, self.policy_version = self.step + 1, optim.policy_version
        train_s = clock.total_s
        record = StepRecord(self.step, self.policy_version, loss=loss, optim=optim, num_ranks=trainer.num_ranks)
        if self._is_due(self.config.run.eval_every_steps):
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
        partial = self._checkpoints.begin(self.step)
        await self._trainer.save_state(partial / "trainer")
        state = RunState(self.step, self.policy_version, self._stream.state_dict(), {}, BufferState())
        return await asyncio.to_thread(self._checkpoints.finish, partial, state)

    async def _load(self, path: Path) -> None:
        state = await asyncio.to_thread(self._checkpoints.read, path)
        await self._trainer.load_state(path / "trainer")
        self._stream.load_state_dict(state.prompts)
        self.step, self.policy_version = state.step, state.policy_version

    def _is_due(self, every_steps: int) -> bool:
        """Whether something that happens every so many steps, and after the last one, happens now."""
        is_last = self.step == self.config.run.num_steps
        return is_last or (every_steps > 0 and self.step % every_steps == 0)


def _sum(stats: Sequence[LossStats], name: str) -> float:
    return math.fsum(rank.sums[name] for rank in stats)
