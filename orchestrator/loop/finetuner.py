"""Learning from given answers: the same trainer, taught by conversations (sft) or by pairs of answers of which one is
preferred (dpo), instead of rewards. No engines, no weight sync.

    lessons --shuffled, epoch after epoch--> sequences_per_step of them --pack--> trainer ranks --> a row

Owns: what a step of such a run does. Does not own: what it shares with reinforcement (step_loop), the trainer
(trainer/), where it lives (placement), which tokens count (conversations, preferences), rows (telemetry), what is
started and ended around it (finetuning).
Invariants: a resumed run continues with the next lesson. Both samples of a pair are in one microbatch.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path

from slipstream.conf.schema import Objective, RunConfig
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState
from slipstream.orchestrator.files.timeline import StepTimeline
from slipstream.orchestrator.inputs.rows.conversations import Lesson
from slipstream.orchestrator.loop.ports import Stopwatch, TaughtServices
from slipstream.orchestrator.loop.step_loop import StepLoop
from slipstream.orchestrator.loop.updates import denominators_of
from slipstream.orchestrator.metrics.held_out import TAUGHT_FIGURES, Evaluation, Figures
from slipstream.orchestrator.metrics.step_rows import StepRecord
from slipstream.trainer.step.microbatches import pack
from slipstream.trainer.types import LossStats, Sample


class Finetuner(StepLoop):
    """See the module's docstring. `await tuner.train(...)` runs to the last step."""

    def __init__(self, config: RunConfig, services: TaughtServices) -> None:
        super().__init__(config, services)
        self._services = services
        self._objective = config.algorithm.objective
        self.held_out_figure: float | None = None
        """The first of figures.held_out.TAUGHT_FIGURES, of the newest evaluation; None without data.eval_path."""

    async def train(self, resume_from: Path | None) -> None:
        """All steps that are left. Cancelled, it finishes the step under way and saves."""
        if resume_from is not None:
            await self._load(resume_from)
        else:
            record, began = StepRecord(0, 0), time.time()
            await self._evaluate_into(record)
            record.timeline = StepTimeline(began, time.time(), self._activities.take())
            self._telemetry.step(record)
        await self.run_steps()

    async def _next_step(self) -> None:
        await self._finish_step(self._train_on_next())

    async def _train_on_next(self) -> None:
        trainer, clock = self._services.trainer, Stopwatch(self._activities)
        batch = [next(self._services.lessons) for _ in range(self._config.algorithm.sequences_per_step)]
        samples, microbatches = self._packed(batch)
        record = StepRecord(self.step + 1, self.policy_version, num_ranks=trainer.num_ranks)
        record.loss = await trainer.forward_backward(microbatches, denominators_of(samples, self.policy_version))
        clock.lap("trainer/forward_backward_s")
        record.optim = await trainer.optimizer_step()  # refuses a loss or norm that is not finite
        clock.lap("trainer/optimizer_s")
        record.extra |= {
            "trainer/num_microbatches": len(microbatches[0]),
            "trainer/num_tokens": sum(sample.num_tokens for sample in samples),
            f"{self._objective}/epoch": self._services.lessons.epoch,
        }
        with self._row_of(record, clock):
            self._is_whole = True
            if self._config.run.is_due(self._config.run.eval_every_steps, self.step):
                await self._evaluate_into(record)
        await self._judge(record, is_evaluated=bool(record.evaluations))

    async def _evaluate_into(self, record: StepRecord) -> None:
        """The objective's figures of the held-out rows, of each set and of all."""
        if not self._services.held_out:
            return
        clock, figures, everything = Stopwatch(self._activities), Figures(), list[LossStats]()
        for name, lessons in self._services.held_out.items():
            samples, microbatches = self._packed(lessons)
            stats = await self._services.trainer.evaluate(microbatches, denominators_of(samples, self.policy_version))
            everything += stats
            if name:
                figures |= _figures(stats, self._objective, f"eval/{name}")
        of_all = _figures(everything, self._objective, "eval")
        self.held_out_figure = next(iter(of_all.values()))
        clock.lap("eval/wait_s")
        record.extra |= clock.laps
        figures |= {"eval/step": self.step, **of_all, "eval/total_s": clock.laps["eval/wait_s"]}
        record.evaluations.append(Evaluation(self.step, self.policy_version, {}, figures))

    def _packed(self, lessons: Sequence[Lesson]) -> tuple[list[Sample], list[list[list[Sample]]]]:
        """(all samples, the microbatches of each rank)."""
        parts = [part for lesson in lessons for part in lesson.samples(self.policy_version)]
        lengths = [sum(sample.num_tokens for sample in part) for part in parts]
        options = self._config.trainer
        plan = pack(lengths, self._services.trainer.num_ranks, options.max_microbatch_tokens, cp_size=options.cp_size)
        microbatches = [[[one for i in indices for one in parts[i]] for indices in of_rank] for of_rank in plan]
        return [sample for part in parts for sample in part], microbatches

    def _state(self) -> RunState:
        return RunState(self.step, self.policy_version, self._services.lessons.state_dict(), {}, BufferState())

    def _restore(self, state: RunState) -> None:
        self._services.lessons.load_state_dict(state.prompts)


def _figures(stats: Sequence[LossStats], objective: Objective, prefix: str) -> Figures:
    def total(name: str) -> float:
        return math.fsum(rank.sums[name] for rank in stats)

    return {f"{prefix}/{name}": total(part) / total(count) for name, part, count in TAUGHT_FIGURES[objective]}
