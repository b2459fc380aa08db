"""The loop. One iteration = one optimizer step = one policy version, and the version is the only clock of a run.

                    prompts                                   (trainer: FSDP2 + EP ranks)
                       |                                        ^            |
                       v                                        | batch      | publish(v): one-sided writes,
    Sampler.run:    sample a group --> reward --> GroupBuffer --+            |  never through this process
                       ^  least loaded replica    (tickets, bound)           v
                       +------------------- rollout workers (vLLM) <--- DIRTY -> VERIFIED -> CLEAN(v)

    loop          consumes          waits for                         unblocked by
    Sampler.run   tickets, prompts  buffer.claim_ticket               _train_on: buffer.open_next_batch, Ramp.run
                                    a place (max_concurrent_groups)   a group that was delivered
                                    a serving replica                 supervisor: a publish settled, a recovery
    _next_step    batches           buffer.take_batch                 Sampler.run: buffer.deliver, or buffer.fail
                                    the trainer, the publish          deadlines of their own

No deadlock: the sampler waits for nothing but a step's publish, and a step waits for groups only while the
tickets of its batch are open to the sampler (that and the staleness bound: orchestrator/loop/buffer.py,
docs/staleness.md). A restarted worker that has no peer to read from would wait for a publish while the step waits
for its groups: wherever a step waits for groups, such a worker is published to at once (`_fed`).

With run.eval_beside an evaluation goes on while steps do (evaluations.py); a step takes its figures when it has ended.

Owns: the order of things; when to publish, evaluate and stop. Does not own: what it shares with fine-tuning (step_loop:
the clock, rows, checkpoints, the end), how groups are sampled and judged (sampler), what a publish does (publication),
what is started and ended around it (training), where processes live (placement), who serves (supervisor), any
mathematics but calling it.
Invariants: nothing is published from a step whose loss or gradient is not finite; no group older than
algorithm.max_staleness_steps is trained on. `step`, `policy_version` and the buffer agree whenever a batch or an
evaluation is awaited. A failure of sampling is raised there and nowhere else, so the run's state is saved before it
ends the run; a failure of the trainer leaves nothing to save, and the run ends with the last checkpoint.
Needs neither torch nor vLLM in its process.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import numpy as np

from slipstream.conf.plural import counted
from slipstream.conf.schema import RunConfig
from slipstream.fleet.errors import NoReplicasLeft
from slipstream.fleet.waiting import together, wait_for
from slipstream.orchestrator.checkpoints.loop_state import RunState
from slipstream.orchestrator.files.timeline import TRAINER, StepTimeline
from slipstream.orchestrator.loop.buffer import Batch, GroupBuffer
from slipstream.orchestrator.loop.evaluations import Evaluations
from slipstream.orchestrator.loop.floor import FLOOR_EVERY_STEPS, measure_floor
from slipstream.orchestrator.loop.ports import LoopServices, Stopwatch
from slipstream.orchestrator.loop.publication import Publication
from slipstream.orchestrator.loop.ramp import Ramp
from slipstream.orchestrator.loop.sampler import Sampler
from slipstream.orchestrator.loop.step_loop import StepLoop
from slipstream.orchestrator.loop.updates import (
    Draft,
    advantage_function,
    draft_samples,
    filled,
    join,
    mark,
    score,
    update,
)
from slipstream.orchestrator.metrics.catalogue import Value
from slipstream.orchestrator.metrics.samples import shown_rollouts
from slipstream.orchestrator.metrics.step_rows import StepRecord
from slipstream.trainer.types import OptimStats
from slipstream.weight_sync.publish.report import PublishReport

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Controller(StepLoop):
    """See the module's docstring. `await controller.train()` runs to the last step."""

    def __init__(self, config: RunConfig, services: LoopServices) -> None:
        super().__init__(config, services)
        self.services = services
        self.buffer = GroupBuffer(
            config.algorithm.groups_per_step, config.algorithm.max_staleness_steps, num_batches=config.run.num_steps
        )
        self.sampler = Sampler(config, services, self.buffer)
        self._evaluations = Evaluations(config, services, self.sampler)
        self._shuffle_rng = np.random.default_rng([config.run.seed, 0x5A])
        self._advantages_of = advantage_function(config.algorithm)
        self._reported = Counter[str]()
        """What the counters of `_counts` were at the last row, by the name of their metric."""

    async def train(self) -> None:
        """Sample and train until the last step. Cancelled, it finishes the step under way and saves."""
        ramp = Ramp(self._config, self.services.supervisor.roster, self.buffer)
        await ramp.begin()
        sampling = asyncio.create_task(self.sampler.run())
        opening = asyncio.create_task(ramp.run())
        try:
            await self.run_steps()
            self.sampler.unjudged_of_all.stop_if_all()
        finally:
            self._evaluations.cancel()
            sampling.cancel()
            opening.cancel()
            await asyncio.gather(sampling, opening, return_exceptions=True)

    async def go_on(self, state: RunState) -> None:
        """Bring replicas to the version of this state, which the trainer has. They may hold a later one."""
        self._go_on_from(state)
        await self.publish()

    async def start(self, resume_from: Path | None) -> None:
        """Bring trainer and replicas to one version: 0, or the checkpoint's. A resumed run has row 0 already."""
        if resume_from is not None:
            await self._load(resume_from)
        started, began = time.monotonic(), time.time()
        report = await self.publish()
        if report.num_committed == 0:  # restarts repair workers, not a set-up in which none ever served
            reasons = "; ".join(f"{replica.endpoint}: {replica.error}" for replica in report.replicas)
            raise NoReplicasLeft(f"no rollout worker adopted version {self.policy_version}, the first one. {reasons}")
        if resume_from is None:
            record = StepRecord(self.step, self.policy_version, sync=report)
            await self._fed(self._evaluate_into(record, is_due=True))
            record.extra["step/total_s"] = time.monotonic() - started
            record.timeline = StepTimeline(began, time.time(), self._activities.take())
            self.services.telemetry.step(record)

    async def _next_step(self) -> None:
        """One optimizer step = one policy version.

        consumes: a batch     waits for: a batch, the trainer, the publish     unblocked by: Sampler.run, deadlines
        """
        clock = Stopwatch(self._activities)
        batch = await self._or_save(self._fed(self.services.trainer.meanwhile(self._next_batch())))
        clock.lap("rollout/wait_s")
        await self._finish_step(self._train_on(batch, clock))

    async def _train_on(self, batch: Batch, clock: Stopwatch) -> None:
        """Update, publish, evaluate where due.

        The publish is awaited in line. With staleness 0 nothing else is left to do; with more, the gradients of the
        next batch could be computed meanwhile, and docs/decisions/0016 says why they are not.
        """
        config, num_ranks = self._config, self.services.trainer.num_ranks
        record = StepRecord(
            self.step + 1, self.policy_version, batch.groups, batch.staleness_steps, num_ranks=num_ranks
        )
        record.extra["staleness/dropped_groups"] = batch.num_dropped
        drafts = draft_samples(batch.groups, config.algorithm)
        if drafts:
            floor = asyncio.create_task(self._floor_of(batch, record.step))
            try:
                await self._update(drafts, batch, record, clock)
                record.extra |= await floor  # before a publish changes the weights that sampled
            finally:
                floor.cancel()
        else:
            logger.warning("step %d: no response of its batch counts, so nothing is updated or published", record.step)
            record.extra |= {"optim/skipped": 1, "optim/updates": 0, "trainer/num_microbatches": 0}
        is_evaluating, is_due = False, config.run.is_due(config.run.eval_every_steps, record.step)
        try:
            with self._row_of(record, clock):
                await together(self._held_ahead(), self._publish_into(record))
                await self.buffer.open_next_batch()  # after the commit: what is sampled next is of the new version
                self._is_whole = is_evaluating = True
                await self._fed(self._evaluate_into(record, is_due=is_due))
                is_evaluating = False
        except Exception:
            if is_evaluating:  # after its row, which whoever goes on from the checkpoint does not write
                await self._save_at_last()
            raise
        await self._judge(record, is_evaluated=is_due and bool(self.services.eval_sets))

    async def _publish_into(self, record: StepRecord) -> None:
        """Publish, if the step made a version, and note in the record what came of it."""
        if record.optim is not None and record.optim.is_finite:
            record.sync = await self.publish()
            self._check_that_weights_moved(record.optim, record.sync)

    async def _update(self, drafts: list[Draft], batch: Batch, record: StepRecord, clock: Stopwatch) -> None:
        """Advantages of a batch, and every update that it is used for."""
        config, trainer, trained_version = self._config, self.services.trainer, self.policy_version
        if config.algorithm.scores_first:
            drafts = await score(trainer, drafts, config, trained_version)
            clock.lap("trainer/score_s")
        groups = filled(drafts, batch.groups, config.algorithm, self._advantages_of)
        places = shown_rollouts(batch.groups, config.run.samples_per_step)
        groups = [mark(samples, places) for samples in groups]
        done = await update(trainer, groups, config, trained_version, self._shuffle_rng, clock)
        record.loss, record.optim = done.loss, done.optim
        samples = [sample for group in groups for sample in group]
        record.trained = join(record.groups, samples, record.loss, trained_version)
        record.extra |= {
            "trainer/num_microbatches": done.num_microbatches,
            "trainer/num_tokens": done.num_tokens,
            "optim/updates": done.num_applied,
        }

    async def _floor_of(self, batch: Batch, step: int) -> dict[str, Value]:
        """The engines' mismatch with themselves, where it is due. While gradients are computed they have time."""
        is_due = step == 1 or step % FLOOR_EVERY_STEPS == 0
        if not is_due or self._config.rollout.sampling.temperature != 1:  # prefill's log-probabilities are without it
            return {}
        return await measure_floor(
            self.services.router, batch.groups, self.policy_version, max_model_len=self._config.rollout.max_model_len
        )

    async def publish(self) -> PublishReport:
        """Send the trainer's version to every replica. A replica that fails is restarted, or out; the others go on."""
        began = time.time()
        report = await Publication(self._config.weight_sync, self.services, self.policy_version).run()
        self._activities.note(TRAINER, "publish", began)
        return report

    async def _fed(self, sampling: Awaitable[T]) -> T:
        """Await what depends on rollout workers. When none serves, publish at once to a worker that comes back."""
        task = asyncio.ensure_future(sampling)
        try:
            while True:
                stranded = asyncio.ensure_future(self.services.supervisor.roster.stranded())
                try:
                    await asyncio.wait({task, stranded}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stranded.cancel()
                if task.done():
                    return task.result()
                await self.publish()
        finally:
            task.cancel()

    def _state(self) -> RunState:
        """One instant for prompts and buffer: nothing is awaited between them."""
        return RunState(
            step=self.step,
            policy_version=self.policy_version,
            prompts=self.services.prompts.state_dict(),
            shuffle_rng=dict(self._shuffle_rng.bit_generator.state),
            buffer=self.buffer.state(),
        )

    def _restore(self, state: RunState) -> None:
        self.services.prompts.load_state_dict(state.prompts)
        self._shuffle_rng.bit_generator.state = state.shuffle_rng
        self.buffer.load_state(state.buffer)

    async def _next_batch(self) -> Batch:
        def waits_for() -> str:
            num_replaced = self.sampler.num_uninformative - self._reported["rollout/groups_uninformative"]
            return (
                f"a batch: {self.buffer.num_ready} of {self._config.algorithm.groups_per_step} groups are in, "
                f"{counted(self.services.supervisor.roster.num_serving, 'replica')} in service, "
                f"{num_replaced} groups had equal rewards and were replaced"
            )

        return await wait_for(
            self.buffer.take_batch(self.policy_version),
            waits_for,
            timeout_s=self.sampler.patience_s,
            progress=lambda: self.sampler.num_generated,
        )

    async def _evaluate_into(self, record: StepRecord, *, is_due: bool) -> None:
        """Take the evaluation that has ended. Where one is due, begin it, once the one before it has ended. Wait for it
        unless it goes on beside training; of the last step it is always awaited."""
        evaluations, began, began_at = self._evaluations, time.monotonic(), time.time()
        if evaluations.has_ended or (is_due and evaluations.is_running):
            record.evaluations.append(await evaluations.finish())
        if is_due and self.services.eval_sets:
            await evaluations.begin(self.step, self.policy_version)
            if not self._config.evaluates_beside or self.step == self._config.run.num_steps:
                record.evaluations.append(await evaluations.finish())
            record.extra["eval/wait_s"] = time.monotonic() - began
            self._activities.note(TRAINER, "wait for the evaluation", began_at)

    async def _or_save(self, sampling: Awaitable[T]) -> T:
        """Await what depends on workers and rewards. When they fail, the trainer is well: save before the run ends."""
        try:
            return await sampling
        except Exception:
            await self._save_at_last()
            raise

    def _check_that_weights_moved(self, optim: OptimStats, report: PublishReport) -> None:
        """Warn when every byte arrived and none has changed: the step was lost between optimizer and engine."""
        if report.num_changed_params == 0 and optim.grad_norm > 0 and optim.lr > 0:
            logger.warning(
                "step %d: sync/changed_params is 0, although the optimizer stepped (gradient norm %.3g, rate %.3g): "
                "the step never reached the weights that are published, or all of it was lost in rounding to the "
                "engine's format", self.step, optim.grad_norm, optim.lr,
            )  # fmt: skip

    def _counts(self) -> dict[str, Value]:
        """Counters since the last row."""
        roster, starts, router = self.services.supervisor.roster, self.services.supervisor.starts, self.services.router
        now = Counter(
            {
                "rollout/groups_failed": router.num_failed_groups,
                "rollout/groups_uninformative": self.sampler.num_uninformative,
                "rollout/restarts": starts.num_restarts,
                "rollout/recoveries": len(roster.recoveries),
                "rollout/handed_over": router.num_handed_over,
            }
        )
        recent = roster.recoveries[self._reported["rollout/recoveries"] :]
        since, self._reported = {name: now[name] - self._reported[name] for name in now}, now
        teacher = self.services.teacher
        return {
            **super()._counts(),
            **self.services.prompts.metrics(),
            **since,
            "rollout/replicas_serving": roster.num_serving,
            "rollout/replicas_wanted": roster.num_wanted,
            "rollout/down_s": max((item.down_s for item in recent), default=None),
            "rollout/recovery_read_s": max((item.read_s for item in recent if item.read_s is not None), default=None),
            **{f"reward/{name}": number for name, number in self.services.rewards.take_counts().items()},
            **({} if teacher is None else {f"distill/{name}": value for name, value in teacher.take_counts().items()}),
        }
