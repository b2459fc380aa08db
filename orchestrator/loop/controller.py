"""The loop. One iteration = one optimizer step = one policy version, and the version is the only clock of a run.

                    prompts                                   (trainer: FSDP2 + EP ranks)
                       |                                        ^            |
                       v                                        | batch      | publish(v): one-sided writes,
    Sampler.run:    sample a group --> reward --> GroupBuffer --+            |  never through this process
                       ^  least loaded replica    (tickets, bound)           v
                       +------------------- rollout workers (vLLM) <--- DIRTY -> VERIFIED -> CLEAN(v)

    loop          consumes          waits for                         unblocked by
    Sampler.run   tickets, prompts  buffer.claim_ticket               train_loop: buffer.open_next_batch
                                    a place (max_concurrent_groups)   a group that was delivered
                                    a serving replica                 supervisor: a publish settled, a recovery
    train_loop    batches           buffer.take_batch                 Sampler.run: buffer.deliver, or buffer.fail
                                    the trainer, the publish          deadlines of their own

No deadlock: the sampler waits for nothing but train_loop's publish, and train_loop waits for groups only while the
tickets of its batch are open to the sampler (that and the staleness bound: orchestrator/loop/buffer.py,
docs/staleness.md). A restarted worker that has no peer to read from would wait for a publish while train_loop waits
for its groups: wherever train_loop waits for groups it publishes to such a worker at once (`_fed`).

Owns: the order of things; when to publish, evaluate, save and stop. Does not own: how groups are sampled and judged
(sampler), what is started and ended around it (run), where processes live (placement), who serves (supervisor), what a
row means (telemetry), any mathematics but calling it.
Invariants: nothing is published from a step whose loss or gradient is not finite; no group older than
algorithm.max_staleness_steps is trained on; every step that the optimizer saw has a row, whatever fails after it.
`step`, `policy_version` and the buffer agree whenever a batch or an evaluation is awaited. A failure of sampling is
raised there and nowhere else, so the run's state is saved before it ends the run; a failure of the trainer leaves
nothing to save, and the run ends with the last checkpoint. A run that is told to end ends its step first, and is saved.
Needs neither torch nor vLLM in its process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from conf.schema import Relay, RunConfig, SyncMode, TrainMode
from orchestrator.cluster.relay import publish_by_relay
from orchestrator.errors import NoReplicasLeft, TrainingStopped
from orchestrator.files.run_checkpoint import RunState
from orchestrator.files.telemetry import StepRecord, Value
from orchestrator.loop.advantages import build_samples, denominators_of
from orchestrator.loop.buffer import Batch, GroupBuffer
from orchestrator.loop.ports import LoopServices, Stopwatch
from orchestrator.loop.sampler import Sampler
from orchestrator.waiting import finish_first, last_attempt, wait_for
from trainer.step.microbatches import pack
from trainer.types import OptimStats, Sample
from weight_sync.errors import WeightSyncError

if TYPE_CHECKING:
    from weight_sync.publish.report import PublishReport

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_REFUSED_STEPS = 3
"""Steps in a row without a finite loss and gradient after which the run stops: skipping more will not repair it."""
RAY_CALL_S = 10.0
"""What a call to a healthy worker may take beside its work."""
LAST_STEP_S = 60.0
"""What a step under way may take yet when the run is told to end."""
SAVE_S = 120.0
"""... and then the checkpoint."""


class Controller:
    """See the module's docstring. `await controller.train()` runs to the last step."""

    def __init__(self, config: RunConfig, services: LoopServices) -> None:
        self.config = config
        self.services = services
        self.step = 0
        self.policy_version = 0
        self.buffer = GroupBuffer(
            config.algorithm.groups_per_step,
            config.algorithm.max_staleness_steps,
            num_batches=config.run.num_steps,
            enforce_bound=config.weight_sync.enabled,
        )
        self.sampler = Sampler(config, services, self.buffer)
        self._is_whole = True
        """Whether trainer, clock and buffer agree: what a checkpoint may be made of."""
        self._shuffle_rng = np.random.default_rng([config.run.seed, 0x5A])
        self._num_refused_in_a_row = 0
        self._num_reported = (0, 0, 0, 0)

    async def train(self) -> None:
        """Sample and train until the last step. Cancelled, it ends the step under way and saves."""
        sampling = asyncio.create_task(self.sampler.run())
        try:
            await self.train_loop()
        except asyncio.CancelledError:
            if self._is_whole and self.step > 0:
                logger.info("told to end: saving step %d first", self.step)
                await self._save_at_last()
            raise
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)

    async def start(self, resume_from: Path | None) -> None:
        """Bring trainer and replicas to one version: 0, or the checkpoint's. Rewrites no row of a resumed run."""
        is_synced = self.config.weight_sync.enabled
        if resume_from is not None and is_synced:
            await self._load(resume_from)
        started = time.monotonic()
        report = await self.publish()
        if report.num_committed == 0:  # restarts repair workers, not a set-up in which none ever served
            reasons = "; ".join(f"{replica.endpoint}: {replica.error}" for replica in report.replicas)
            raise NoReplicasLeft(f"no rollout worker adopted version {self.policy_version}, the first one. {reasons}")
        if resume_from is not None and not is_synced:  # replicas keep version 0, as before
            await self._load(resume_from)
        if resume_from is None:
            record = StepRecord(self.step, self.policy_version, sync=report)
            await self._fed(self._evaluate_into(record))
            record.extra["step/total_s"] = time.monotonic() - started
            self.services.telemetry.step(record)

    async def train_loop(self) -> None:
        """One iteration = one optimizer step = one policy version.

        consumes: batches     waits for: a batch, the trainer, the publish     unblocked by: Sampler.run, deadlines
        """
        run = self.config.run
        while self.step < run.num_steps:
            clock = Stopwatch()
            batch = await self._or_save(self._fed(self._next_batch()))
            clock.lap("rollout/wait_s")
            await finish_first(self._train_on(batch, clock), "the step under way", timeout_s=LAST_STEP_S)
            await self._stop_if_hopeless()
            if run.is_due(run.checkpoint_every_steps, self.step):
                await self.save()

    async def _train_on(self, batch: Batch, clock: Stopwatch) -> None:
        """A step: update, publish, evaluate where due. It has a row, whatever fails after the update."""
        config, num_ranks = self.config, self.services.trainer.num_ranks
        self._is_whole = False
        record = StepRecord(
            self.step + 1, self.policy_version, batch.groups, batch.staleness_steps, num_ranks=num_ranks
        )
        samples = build_samples(batch.groups, config.algorithm, self._shuffle_rng)
        if samples:
            await self._update(samples, record, clock)
        else:
            logger.warning("step %d: no response of its batch counts, so nothing is updated or published", record.step)
            record.extra |= {"optim/skipped": 1, "trainer/num_microbatches": 0}
        self._advance(record)
        try:
            if record.optim is not None and record.optim.is_finite and config.weight_sync.enabled:
                record.sync = await self.publish()
                self._check_that_weights_moved(record.optim, record.sync)
            await self.buffer.open_next_batch()  # only after the commit: what starts now starts from the new version
            self._is_whole = True
            is_due = config.run.is_due(config.run.eval_every_steps, self.step)
            record.shows_groups = is_due or self.step == 1
            if is_due:
                await self._or_save(self._fed(self._evaluate_into(record)))
        finally:
            record.extra |= clock.laps | self._counts() | {
                "staleness/dropped_groups": batch.num_dropped,
                "step/total_s": clock.total_s,
            }  # fmt: skip
            self.services.telemetry.step(record)

    async def _update(self, samples: list[Sample], record: StepRecord, clock: Stopwatch) -> None:
        """Gradients of a batch, and the optimizer's step."""
        trainer, config = self.services.trainer, self.config
        # Of the whole batch, for every microbatch.
        denominators = denominators_of(samples, self.policy_version, config.rollout.sampling.max_tokens)
        plan = pack([s.num_tokens for s in samples], trainer.num_ranks, config.trainer.max_microbatch_tokens)
        record.loss = await trainer.forward_backward(
            [[[samples[i] for i in indices] for indices in microbatches] for microbatches in plan], denominators
        )
        clock.lap("trainer/forward_backward_s")
        record.optim = await trainer.optimizer_step()  # refuses a loss or norm that is not finite
        clock.lap("trainer/optimizer_s")
        record.extra["trainer/num_microbatches"] = len(plan[0])

    async def publish(self) -> PublishReport:
        """Send the trainer's version to every replica. Who fails is restarted, or out; the others go on."""
        supervisor, trainer, config = self.services.supervisor, self.services.trainer, self.config.weight_sync
        held = await supervisor.hold(pauses=config.mode is not SyncMode.adapter)
        # Every replica has its own deadline inside; these only catch a trainer that is lost.
        timeout_s = 2 * config.timeout_s * config.publish_waves + 60
        for index, endpoint in held.joining.items():
            replica = supervisor.replicas[index]
            try:
                # Its base, where it lacks one, is a publish of its own: three answers more to wait for.
                join_s = timeout_s + 3 * config.timeout_s * bool(replica.base_wanted_at)
                await trainer.reconnect(index, endpoint, join_s, replica.base_wanted_at)
                supervisor.joined(index)
            except WeightSyncError as error:
                held.exclude.append(index)
                await supervisor.fail(replica, f"{type(error).__name__}: {error}")
        is_traced = config.trace_every_steps > 0 and self.policy_version % config.trace_every_steps == 0

        async def write(exclude: list[int], number: int = 0) -> PublishReport:
            name = f"publish-{self.policy_version:06d}{f'-round{number}' * bool(number)}.json"
            trace = self.services.traces / name if is_traced else None
            return await trainer.publish(timeout_s=timeout_s, exclude=exclude, trace=trace)

        if config.relay is Relay.node:
            call_s = config.timeout_s + RAY_CALL_S
            report = await publish_by_relay(write, supervisor.replicas, timeout_s=call_s)
        else:
            report = await write(held.exclude)
        await supervisor.settle(report.replicas)
        return report

    async def _fed(self, sampling: Awaitable[T]) -> T:
        """Await what depends on rollout workers. One that comes back when nobody serves gets the weights at once."""
        task = asyncio.ensure_future(sampling)
        try:
            while True:
                stranded = asyncio.ensure_future(self.services.supervisor.stranded())
                try:
                    await asyncio.wait({task, stranded}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stranded.cancel()
                if task.done():
                    return task.result()
                await self.publish()
        finally:
            task.cancel()

    async def save(self) -> Path:
        """Write a checkpoint of trainer, prompts, buffer and generators; sampling goes on meanwhile."""
        saved = self.services.checkpoints.of_step(self.step)
        if saved is not None:  # of the same weights; groups that came since are sampled again
            return saved
        partial = self.services.checkpoints.begin(self.step)
        await self.services.trainer.save_state(partial / "trainer")
        if self.config.trainer.mode is TrainMode.lora:
            await self.services.trainer.export(partial / "adapter")
        # One instant for prompts and buffer: nothing is awaited between them.
        state = RunState(
            step=self.step,
            policy_version=self.policy_version,
            prompts=self.services.prompts.state_dict(),
            shuffle_rng=dict(self._shuffle_rng.bit_generator.state),
            buffer=self.buffer.state(),
        )
        path = await asyncio.to_thread(self.services.checkpoints.finish, partial, state)
        logger.info("checkpoint: %s", path)
        return path

    async def _load(self, path: Path) -> None:
        state = await asyncio.to_thread(self.services.checkpoints.read, path)
        await self.services.trainer.load_state(path / "trainer")
        self.services.prompts.load_state_dict(state.prompts)
        self._shuffle_rng.bit_generator.state = state.shuffle_rng
        self.buffer.load_state(state.buffer)
        self.step, self.policy_version = state.step, state.policy_version
        self.services.on_clock(self.step, self.policy_version)
        logger.info("resumed from %s at step %d, policy version %d", path, self.step, self.policy_version)

    async def _next_batch(self) -> Batch:
        groups_per_step = self.config.algorithm.groups_per_step
        return await wait_for(
            self.buffer.take_batch(self.policy_version),
            lambda: (
                f"a batch: {self.buffer.num_ready} of {groups_per_step} groups are in, "
                f"{self.services.supervisor.num_serving} replicas serve, "
                f"{self.sampler.num_uninformative - self._num_reported[1]} groups had equal rewards and were replaced"
            ),
            timeout_s=self.sampler.patience_s,
            progress=lambda: self.sampler.num_generated,
        )

    async def _evaluate_into(self, record: StepRecord) -> None:
        if self.services.eval_prompts:
            started = time.monotonic()
            record.eval_groups = await self.sampler.evaluate()
            record.extra["eval/total_s"] = time.monotonic() - started

    def _advance(self, record: StepRecord) -> None:
        """The clock moves: the step always, the version only when the optimizer changed the policy."""
        self.step = record.step
        if record.optim is not None:
            self.policy_version = record.policy_version = record.optim.policy_version
            self._num_refused_in_a_row = 0 if record.optim.is_finite else self._num_refused_in_a_row + 1
            if not record.optim.is_finite:
                logger.warning("step %d: loss or gradient is not finite; nothing was updated or published", self.step)
        self.services.on_clock(self.step, self.policy_version)

    async def _or_save(self, sampling: Awaitable[T]) -> T:
        """Await what depends on workers and rewards. When they fail the trainer is well: save before the run ends."""
        try:
            return await sampling
        except Exception:
            await self._save_at_last()
            raise

    async def _save_at_last(self) -> None:
        await last_attempt(self.save(), "saving the run's state", timeout_s=SAVE_S)

    async def _stop_if_hopeless(self) -> None:
        """Refused steps changed nothing: the weights are the last finite step's, and are saved as such."""
        if self._num_refused_in_a_row >= MAX_REFUSED_STEPS:
            path = await self.save()
            raise TrainingStopped(
                f"{MAX_REFUSED_STEPS} steps in a row had no finite loss and gradient (step {self.step}). Policy "
                f"version {self.policy_version}, the last finite one, is saved in {path}. Look at rewards and "
                "parity/k3 in metrics.jsonl, lower trainer.optim.lr, and go on with run.resume"
            )

    def _check_that_weights_moved(self, optim: OptimStats, report: PublishReport) -> None:
        """Every byte can be proven to have arrived and still be the old one: then the step is lost between the two."""
        if report.num_changed_params == 0 and optim.grad_norm > 0 and optim.lr > 0:
            logger.warning(
                "step %d: sync/changed_params is 0, although the optimizer stepped (gradient norm %.3g, rate %.3g): "
                "the step never reached the weights that are published, or all of it was lost in rounding to the "
                "engine's format", self.step, optim.grad_norm, optim.lr,
            )  # fmt: skip

    def _counts(self) -> dict[str, Value]:
        """Counters since the last row."""
        supervisor = self.services.supervisor
        counts = (
            supervisor.num_failed_groups,
            self.sampler.num_uninformative,
            supervisor.num_restarts,
            len(supervisor.recoveries),
        )
        failed, uninformative, restarts, recoveries = map(int.__sub__, counts, self._num_reported)
        self._num_reported = counts
        recent = supervisor.recoveries[len(supervisor.recoveries) - recoveries :]
        return {
            "rollout/groups_failed": failed,
            "rollout/groups_uninformative": uninformative,
            "rollout/replicas_serving": supervisor.num_serving,
            "rollout/restarts": restarts,
            "rollout/recoveries": recoveries,
            "rollout/down_s": max((item.down_s for item in recent), default=None),
            "rollout/recovery_read_s": max((item.read_s for item in recent if item.read_s is not None), default=None),
        }
