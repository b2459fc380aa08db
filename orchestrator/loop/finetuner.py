"""Supervised fine-tuning: the same trainer, taught by conversations instead of rewards. No engines, no weight sync.

    conversations --shuffled, epoch after epoch--> sequences_per_step of them --pack--> trainer ranks --> a row

Owns: what a step of such a run does. Does not own: what it shares with reinforcement (step_loop), the trainer
(trainer/), where it lives (placement), which tokens count (conversations), rows (telemetry), what is started and ended
around it.
Invariant: a resumed run continues with the next conversation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from conf.schema import RunConfig
from orchestrator.data.streams import Stream
from orchestrator.figures.held_out import Evaluation, Figures
from orchestrator.files.run_checkpoint import BufferState, CheckpointStore, RunState
from orchestrator.files.step_rows import StepRecord
from orchestrator.files.telemetry import Telemetry
from orchestrator.inputs.conversations import Conversation
from orchestrator.loop.ports import Stopwatch, TaughtTrainer
from orchestrator.loop.samples import denominators_of
from orchestrator.loop.step_loop import StepLoop
from trainer.step.microbatches import pack
from trainer.types import LossStats, Sample


class Finetuner(StepLoop):
    """See the module's docstring. `await tuner.train(...)` runs to the last step."""

    def __init__(
        self,
        config: RunConfig,
        trainer: TaughtTrainer,
        training: Stream[Conversation],
        held_out: Mapping[str, Sequence[Conversation]],
        telemetry: Telemetry,
        checkpoints: CheckpointStore,
        on_clock: Callable[[int, int], None] = lambda step, policy_version: None,
    ) -> None:
        super().__init__(config, trainer, telemetry, checkpoints, on_clock)
        self._trainer = trainer
        self._stream = training
        self._held_out = held_out
        self.held_out_nll: float | None = None
        """The newest evaluation's; None without data.eval_path."""

    async def train(self, resume_from: Path | None) -> None:
        """All steps that are left. Cancelled, it finishes the step under way and saves."""
        if resume_from is not None:
            await self._load(resume_from)
        else:
            record = StepRecord(0, 0)
            await self._evaluate_into(record)
            self._telemetry.step(record)
        await self.run_steps()

    async def _next_step(self) -> None:
        await self._finish_step(self._train_on_next())

    async def _train_on_next(self) -> None:
        trainer, clock = self._trainer, Stopwatch(self._activities)
        batch = [next(self._stream) for _ in range(self._config.algorithm.sequences_per_step)]
        samples = [conversation.sample(self.policy_version) for conversation in batch]
        microbatches = self._pack(samples)
        record = StepRecord(self.step + 1, self.policy_version, num_ranks=trainer.num_ranks)
        record.loss = await trainer.forward_backward(microbatches, denominators_of(samples, self.policy_version))
        clock.lap("trainer/forward_backward_s")
        record.optim = await trainer.optimizer_step()  # refuses a loss or norm that is not finite
        clock.lap("trainer/optimizer_s")
        num_tokens = sum(sample.num_tokens for sample in samples)
        record.extra |= {
            "trainer/num_microbatches": len(microbatches[0]),
            "trainer/tokens_per_s_per_rank": num_tokens / clock.total_s / trainer.num_ranks,
            "sft/epoch": self._stream.epoch,
        }
        with self._row_of(record, clock):
            self._is_whole = True
            if self._config.run.is_due(self._config.run.eval_every_steps, self.step):
                await self._evaluate_into(record)

    async def _evaluate_into(self, record: StepRecord) -> None:
        """Mean negative log-likelihood of the held-out conversations' taught tokens, of each set and of all."""
        if not self._held_out:
            return
        await self._save_to_judge()
        clock, figures = Stopwatch(), Figures()
        nll_sum, num_tokens = 0.0, 0.0
        for name, conversations in self._held_out.items():
            samples = [conversation.sample(self.policy_version) for conversation in conversations]
            stats = await self._trainer.evaluate(self._pack(samples), denominators_of(samples, self.policy_version))
            of_set, tokens = _sum(stats, "sft/nll_sum"), _sum(stats, "policy/num_tokens")
            nll_sum, num_tokens = nll_sum + of_set, num_tokens + tokens
            if name:
                figures[f"eval/{name}/nll"] = of_set / tokens
        self.held_out_nll = nll_sum / num_tokens
        figures |= {"eval/step": self.step, "eval/nll": self.held_out_nll, "eval/total_s": clock.total_s}
        await self._note(Evaluation(self.step, self.policy_version, {}, figures), record)

    def _pack(self, samples: Sequence[Sample]) -> list[list[list[Sample]]]:
        limit = self._config.trainer.max_microbatch_tokens
        plan = pack([sample.num_tokens for sample in samples], self._trainer.num_ranks, limit)
        return [[[samples[i] for i in indices] for indices in of_rank] for of_rank in plan]

    def _state(self) -> RunState:
        return RunState(self.step, self.policy_version, self._stream.state_dict(), {}, BufferState())

    def _restore(self, state: RunState) -> None:
        self._stream.load_state_dict(state.prompts)


def _sum(stats: Sequence[LossStats], name: str) -> float:
    return math.fsum(rank.sums[name] for rank in stats)
