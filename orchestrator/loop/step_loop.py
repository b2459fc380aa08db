"""What reinforcement (controller.py) and fine-tuning (finetuner.py) both promise about their steps.

    while steps are left:  _next_step  -->  three refused in a row?  -->  checkpoint where due: copies of the state
                                                                                  |
                                            beside the steps that follow:  files  +--> checksums, flushing, name

Owns: the clock (step and policy version), the row of every step, checkpoints, and the orderly end of a run that cannot
go on or is told to end. Does not own: what a step does, or what is started and ended around the loop
(training.py).
Invariants: every step that the optimizer saw has a row, whatever fails after it. A checkpoint is made only while
trainer, clock and data agree (`_is_whole`). A run that is told to end finishes its step first, and is saved. A row or a
checkpoint that fails on the way out is logged, and does not hide why the run ends.
"""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from pathlib import Path

from slipstream.conf.failures import undone_by
from slipstream.conf.schema import RunConfig, TrainMode
from slipstream.fleet.errors import FleetError
from slipstream.fleet.waiting import finish_first, last_attempt
from slipstream.orchestrator.checkpoints.best_checkpoint import BestCheckpoint
from slipstream.orchestrator.checkpoints.loop_state import RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import step_of
from slipstream.orchestrator.errors import CheckpointLost, OrchestratorError, TrainingStopped
from slipstream.orchestrator.files.may_write import naming_a_full_disk
from slipstream.orchestrator.files.timeline import StepTimeline
from slipstream.orchestrator.loop.alarms import LearningAlarm, ParityAlarm
from slipstream.orchestrator.loop.ports import StepServices, Stopwatch
from slipstream.orchestrator.metrics.catalogue import Value
from slipstream.orchestrator.metrics.step_rows import StepRecord

logger = logging.getLogger(__name__)

MAX_REFUSED_STEPS = 3
"""Steps in a row without a finite loss and gradient after which the run stops: skipping more will not repair it."""
LAST_STEP_S = 60.0
"""Longest that the step under way may still take when the run is told to end."""
SAVE_S = 120.0
"""Longest that the checkpoint after it may take."""
_FIRST_LOOKS_S, _LOOK_EVERY_S = (0.02, 0.05, 0.1, 0.25, 0.5), 1.0
"""How long to wait between one look for the trainer's files and the next."""


class StepLoop(ABC):
    def __init__(self, config: RunConfig, services: StepServices) -> None:
        self.step = 0
        self.policy_version = 0
        self._config = config
        self._step_trainer = services.trainer
        self._telemetry = services.telemetry
        self._checkpoints = services.checkpoints
        self._on_clock = services.on_clock
        self._activities = services.activities
        self._hold = services.hold
        self._held_step = -1
        self._best: BestCheckpoint | None = None
        if config.run.keep_best is not None:
            first_step = step_of(self._checkpoints.newest()) if config.run.resume is not None else 0
            self._best = BestCheckpoint(self._checkpoints, config, up_to_step=first_step)
        self._is_whole = True
        """Whether trainer, clock and data agree."""
        self._completing: asyncio.Task[None] | None = None
        """Adds checksums to the newest checkpoint and flushes it, while steps go on."""
        self._num_refused_in_a_row = 0
        self._num_restarts_told = 0
        """Restarts of trainer ranks, in rows that are written."""
        self._alarm = ParityAlarm(
            config.parity, is_corrected=config.algorithm.is_corrected, loses_updates=config.loses_updates
        )
        self._learning = LearningAlarm(config.algorithm)
        self._alarm_raised = ""
        """Why the last row ends the run; "" when it does not."""

    @abstractmethod
    async def _next_step(self) -> None:
        """One optimizer step, with `_row_of` around what follows the update."""

    @abstractmethod
    def _state(self) -> RunState:
        """Everything beside the trainer's own files that the next step depends on, at one instant."""

    @abstractmethod
    def _restore(self, state: RunState) -> None:
        """Continue from what `_state` returned; the clock is set already."""

    def _counts(self) -> dict[str, Value]:
        """Further numbers of the step whose row is about to be written."""
        down_s = self._step_trainer.down_s[self._num_restarts_told :]
        self._num_restarts_told += len(down_s)
        return {
            "trainer/restarts": len(down_s),
            "trainer/down_s": sum(down_s) if down_s else None,
            "trainer/unkept_steps": self._step_trainer.unkept_steps,
        }

    async def run_steps(self) -> None:
        """Every step that is left. Cancelled, it finishes the step under way and saves."""
        run = self._config.run
        try:
            while self.step < run.num_steps:
                await self._held()
                await self._next_step()
                await self._stop_if_hopeless()
                if self._completing is not None and self._completing.done():
                    await self._completed()
                if run.is_due(run.checkpoint_every_steps, self.step):
                    await self._begin_save()
            await self._completed()
            self._learning.say_at_the_end()
        except asyncio.CancelledError:
            if self._is_whole and self.step > 0:
                logger.info("told to end: saving step %d first", self.step)
                await self._save_at_last()
            raise
        finally:
            if self._completing is not None:
                await last_attempt(self._completed(), "completing a checkpoint", timeout_s=SAVE_S)

    async def _held(self) -> None:
        """Let another controller go on from the state after this step, from its row on."""
        if self._hold is not None and self._held_step != self.step:
            await self._hold(self._state())
            self._held_step = self.step

    async def _held_ahead(self) -> None:
        """_held(), while the row of this step is still to come, unless an evaluation or a checkpoint is due: a
        controller that dies after the row has not come to it, and the next one would leave it out."""
        run = self._config.run
        if not any(run.is_due(every, self.step) for every in (run.eval_every_steps, run.checkpoint_every_steps)):
            await self._held()

    async def save(self) -> Path:
        """Write a checkpoint, unless this step has one, and return it once it is complete. What else goes on, sampling
        for one, goes on meanwhile. Raises DiskFull: the files that were written until then are removed."""
        await self._begin_save()
        await self._completed()
        saved = self._checkpoints.of_step(self.step)
        assert saved is not None
        return saved

    async def _begin_save(self) -> None:
        """Let the trainer copy what a checkpoint holds. It is completed beside steps; the next one waits for that."""
        await self._completed()
        if self._checkpoints.of_step(self.step) is not None:
            return  # it has the same weights; groups that were finished since are sampled again
        # Told to end meanwhile, ranks still write into that folder.
        await finish_first(self._begun_save(), "a checkpoint that has begun", timeout_s=SAVE_S)

    async def _begun_save(self) -> None:
        """Await the trainer's copy, and start the task that completes the checkpoint."""
        partial, times = self._checkpoints.begin(self.step), [time.monotonic()]
        adapter = partial / "adapter" if self._config.trainer.mode is TrainMode.lora else None
        with self._discarding_what_fails(partial):
            await self._step_trainer.begin_checkpoint(partial / "trainer", adapter)
        times.append(time.monotonic())
        self._completing = asyncio.create_task(self._complete(partial, self._state(), times))

    async def _complete(self, partial: Path, state: RunState, times: list[float]) -> None:
        """Wait for the trainer's files, add the run's state and checksums, flush all, and name the checkpoint."""
        try:
            with self._discarding_what_fails(partial):
                for pause_s in itertools.chain(_FIRST_LOOKS_S, itertools.repeat(_LOOK_EVERY_S)):
                    if await self._step_trainer.has_written():
                        break
                    await asyncio.sleep(pause_s)
                times.append(time.monotonic())
                path = await asyncio.to_thread(self._checkpoints.finish, partial, state)
        except CheckpointLost as error:
            logger.warning("step %d has no checkpoint: %s; the next one is made when it is due", state.step, error)
            return
        times.append(time.monotonic())
        parts = (end - begin for begin, end in itertools.pairwise(times))
        logger.info(
            "checkpoint: %s (training waited %.1f s; then, beside it, writing took %.1f s and checksums %.1f s)",
            path,
            *parts,
        )

    async def _completed(self) -> None:
        """Wait until the newest checkpoint is complete. Raises what kept it from that, once."""
        if self._completing is not None:
            try:
                await asyncio.shield(self._completing)
            finally:
                if self._completing.done():
                    self._completing = None

    @contextmanager
    def _discarding_what_fails(self, partial: Path) -> Generator[None]:
        try:
            with naming_a_full_disk(partial):
                yield
        except Exception:
            self._checkpoints.discard(partial)
            raise

    async def _judge(self, record: StepRecord, *, is_evaluated: bool) -> None:
        """Save an evaluated step, or one that is evaluated beside training, for its checkpoint may be the best one
        (run.keep_best), and keep the best of those whose evaluations the row has. A run that is killed before the row
        is there makes the step again; one that is killed after it finds the figure there."""
        if self._best is None:
            return
        if is_evaluated:
            self._best.evaluating(self.step)
            await self.save()
        for evaluation in record.evaluations:
            if evaluation.step > 0:
                value = evaluation.figures.get(str(self._config.run.keep_best))
                await asyncio.to_thread(self._best.judge, evaluation.step, value)

    async def _load(self, path: Path) -> None:
        state = await asyncio.to_thread(self._checkpoints.read, path)
        await self._step_trainer.load_state(path / "trainer")
        self._go_on_from(state)
        logger.info("resumed from %s at step %d, policy version %d", path, self.step, self.policy_version)

    def _go_on_from(self, state: RunState) -> None:
        """Take over a state that the trainer has."""
        self.step, self.policy_version = state.step, state.policy_version
        self._restore(state)
        self._on_clock(self.step, self.policy_version)

    async def _finish_step(self, work: Awaitable[None]) -> None:
        """Await the part of a step that must not be torn: also when the run is told to end."""
        self._is_whole = False
        await finish_first(work, "the step under way", timeout_s=LAST_STEP_S)

    @contextmanager
    def _row_of(self, record: StepRecord, clock: Stopwatch) -> Generator[None]:
        """Move the clock by the step that the optimizer saw, and write its row when the block ends or fails.

        The step always counts; the version moves only when the optimizer changed the policy.
        """
        self.step = record.step
        if record.optim is not None:
            self.policy_version = record.policy_version = record.optim.policy_version
            self._num_refused_in_a_row = 0 if record.optim.is_finite else self._num_refused_in_a_row + 1
            if not record.optim.is_finite:
                logger.warning("step %d: loss or gradient is not finite; nothing was updated or published", self.step)
        self._on_clock(self.step, self.policy_version)
        with undone_by(lambda _: self._write_last_row(record, clock)):
            yield
        self._write_row(record, clock)

    def _write_last_row(self, record: StepRecord, clock: Stopwatch) -> None:
        try:
            self._write_row(record, clock)
        except OSError as error:
            logger.error("the row of step %d is lost: %s", self.step, error)

    def _write_row(self, record: StepRecord, clock: Stopwatch) -> None:
        record.extra |= clock.laps | self._counts() | {"step/total_s": clock.total_s}
        record.timeline = StepTimeline(clock.began_at, time.time(), self._activities.take())
        row = self._telemetry.step(record)
        self._learning.look(record.step, row)
        self._alarm_raised = self._alarm.reason_to_stop(record.step, row)

    async def _save_at_last(self) -> None:
        await last_attempt(self.save(), "saving the run's state", timeout_s=SAVE_S)

    async def _stop_if_hopeless(self) -> None:
        """Refused steps changed nothing: the weights are the last finite step's, and are saved as such."""
        is_last = self.step >= self._config.run.num_steps
        how = "go on with slipstream resume" + (" and more run.num_steps" if is_last else "")
        if self._num_refused_in_a_row >= MAX_REFUSED_STEPS:
            raise TrainingStopped(
                f"{MAX_REFUSED_STEPS} steps in a row had no finite loss and gradient (step {self.step}). Policy "
                f"version {self.policy_version}, the last finite one, {await self._saved()}. Look at metrics.jsonl "
                f"(rewards and parity/k3), lower trainer.optim.lr, and {how}"
            )
        if self._alarm_raised:
            raise TrainingStopped(
                f"step {self.step}: {self._alarm_raised}. Policy version {self.policy_version} {await self._saved()}; "
                f"{how}"
            )

    async def _saved(self) -> str:
        """Save before the run ends, and say where; a save that fails does not hide why it ends."""
        try:
            return f"is saved in {await self.save()}"
        except (OrchestratorError, FleetError) as error:
            return f"could not be saved ({error})"
