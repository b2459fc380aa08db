"""Locks: fine-tuning keeps what both loops promise about rows, checkpoints and refused steps."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from fakes.fleet import until
from fakes.loop import end, make_config
from fakes.trainer import FakeTrainer
from fakes.world import World
from rich.console import Console

from slipstream.conf.schema import AlgorithmConfig, Objective
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore, fingerprint
from slipstream.orchestrator.data.streams import Shuffled
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.orchestrator.files.row_files import read_rows
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.run_log import ProgressLine
from slipstream.orchestrator.inputs.rows.conversations import Conversation, Lesson
from slipstream.orchestrator.loop.finetuner import Finetuner
from slipstream.orchestrator.loop.ports import TaughtServices
from slipstream.orchestrator.metrics.held_out import EvalNames
from slipstream.orchestrator.metrics.telemetry import Telemetry
from slipstream.trainer.types import Denominators, LossStats, Sample

CONVERSATIONS = [Lesson((Conversation((1, 5, 6 + i), (False, False, True)),)) for i in range(7)]


class Teacher(FakeTrainer):
    """Notes what it was taught; its evaluation may break."""

    def __init__(self) -> None:
        super().__init__(World(), 0)
        self.taught: list[list[int]] = []
        self.breaks_at_version: int | None = None

    async def forward_backward(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]:
        samples = [s for rank in microbatches_by_rank for microbatch in rank for s in microbatch]
        self.taught.append(sorted(int(s.token_ids[2]) for s in samples))
        await asyncio.sleep(0)
        return []

    async def evaluate(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]:
        if self.world.version == self.breaks_at_version:
            raise ConnectionError("rank 1 died")
        return await super().evaluate(microbatches_by_rank, denominators)


class Tuning:
    """A Finetuner on a fake trainer, in a run folder of its own."""

    def __init__(self, folder: Path, num_steps: int = 6) -> None:
        algorithm = AlgorithmConfig(objective=Objective.sft, sequences_per_step=2)
        self.config = replace(make_config(num_steps=num_steps, run={"eval_every_steps": 1}), algorithm=algorithm)
        self.folder = RunFolder(folder)
        self.trainer = Teacher()
        self.checkpoints = CheckpointStore(self.folder.checkpoints, keep=2, options=fingerprint(self.config))

    async def run(
        self,
        resume_step: int = 0,
        lessons: Sequence[Lesson] = CONVERSATIONS,
        held_out: Mapping[str, Sequence[Lesson]] = {"": CONVERSATIONS[:1]},
    ) -> Finetuner:
        progress = ProgressLine(Console(file=StringIO()))
        num_steps = self.config.run.num_steps
        evals = EvalNames([name for name in held_out if name])
        with Telemetry(
            self.folder, num_steps=num_steps, first_step=resume_step, progress=progress, evals=evals
        ) as telemetry:
            services = TaughtServices(
                trainer=self.trainer,
                lessons=Shuffled(lessons, seed=self.config.run.seed),
                held_out=held_out,
                telemetry=telemetry,
                checkpoints=self.checkpoints,
            )
            tuner = Finetuner(self.config, services)
            await tuner.train(self.checkpoints.newest() if resume_step else None)
        return tuner

    @property
    def steps(self) -> list[int]:
        return [row["step"] for row in read_rows(self.folder.metrics)]


async def test_every_step_has_a_row_and_a_run_in_two_parts_teaches_the_same(tmp_path: Path) -> None:
    whole = Tuning(tmp_path / "whole")
    (tmp_path / "whole").mkdir()
    await whole.run()
    assert whole.steps == list(range(7))
    spans = [[what for _, what, *_ in row["spans"]] for row in read_rows(whole.folder.timeline)]
    assert spans == [["evaluation"], *[["forward and backward", "optimizer", "evaluation"]] * 6]
    (tmp_path / "parts").mkdir()
    first = Tuning(tmp_path / "parts", num_steps=4)
    await first.run()
    rest = Tuning(tmp_path / "parts")
    tuner = await rest.run(resume_step=4)
    assert (tuner.step, tuner.policy_version) == (6, 6)
    assert rest.steps == list(range(7))
    assert first.trainer.taught + rest.trainer.taught == whole.trainer.taught


async def test_both_answers_of_a_pair_are_in_one_microbatch_and_evaluated_by_pairs(tmp_path: Path) -> None:
    """Pairs of 4 + 4 and of 3 + 3 tokens, microbatches of up to 8: sequences alone would be packed as 4 + 3 and 4 + 3.
    Two held-out sets have 1 and 3 pairs."""

    class Judge(Teacher):
        async def forward_backward(
            self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
        ) -> list[LossStats]:
            microbatches = [microbatch for rank in microbatches_by_rank for microbatch in rank]
            assert sorted([one.num_tokens for one in microbatch] for microbatch in microbatches) == [[3, 3], [4, 4]]
            assert all(chosen.token_ids[2] == rejected.token_ids[2] + 10 for chosen, rejected in microbatches)
            return await super().forward_backward(microbatches_by_rank, denominators)

        async def evaluate(
            self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
        ) -> list[LossStats]:
            num_pairs = denominators.num_sequences / 2
            preferred = 1.0 if num_pairs == 1 else 0.0
            sums = {"dpo/num_pairs": num_pairs, "dpo/loss_sum": 0.3 * num_pairs, "dpo/num_preferred": preferred}
            return [LossStats(sums, {})]

    pairs = [
        Lesson(
            tuple(Conversation((1, 5, one, *rest), (False, False, True, *map(bool, rest))) for one in (20, 10)), True
        )
        for rest in ((), (7,))
    ]
    tuning = Tuning(tmp_path, num_steps=1)
    tuning.trainer = Judge()
    tuning.config = replace(
        tuning.config,
        algorithm=AlgorithmConfig(objective=Objective.dpo, sequences_per_step=2),
        trainer=replace(tuning.config.trainer, max_microbatch_tokens=8),
    )
    tuner = await tuning.run(lessons=pairs, held_out={"a": pairs[:1], "b": pairs[1:] * 3})
    row = list(read_rows(tuning.folder.metrics))[-1]
    assert (row["eval/dpo_accuracy"], row["eval/a/dpo_accuracy"], row["eval/b/dpo_accuracy"]) == (0.25, 1.0, 0.0)
    assert row["eval/dpo_loss"] == tuner.held_out_figure == pytest.approx(0.3) and row["dpo/epoch"] == 1


async def test_steps_are_evaluated_where_it_is_due_and_their_rows_count_what_was_taught(tmp_path: Path) -> None:
    """Each step has two conversations of three tokens, of which one counts."""
    tuning = Tuning(tmp_path)
    tuning.config = replace(tuning.config, run=replace(tuning.config.run, eval_every_steps=4))
    await tuning.run()
    assert [row["step"] for row in read_rows(tuning.folder.evaluations)] == [0, 4, 6]
    counts = [(row["trainer/num_tokens"], row["trainer/num_microbatches"]) for row in read_rows(tuning.folder.metrics)]
    assert counts == [(None, None), *[(2 * 3, 1)] * 6], "one for each of two ranks"


async def test_a_step_under_way_is_ended_and_saved(tmp_path: Path) -> None:
    tuning, gate = Tuning(tmp_path), asyncio.Event()

    async def slow_at_2() -> None:
        if len(tuning.trainer.taught) == 3:
            await gate.wait()

    tuning.trainer.before["optimizer_step"] = slow_at_2
    running = asyncio.create_task(tuning.run())
    await until(lambda: len(tuning.trainer.taught) == 3)
    asyncio.get_running_loop().call_later(0.05, gate.set)
    await end(running)
    state = tuning.checkpoints.read(tuning.checkpoints.newest())
    assert (state.step, state.policy_version) == (3, 3)
    assert tuning.steps == [0, 1, 2, 3]


@pytest.mark.parametrize(("num_steps", "how"), [(4, "resume and more run.num_steps$"), (5, "resume$")])
async def test_refused_steps_at_the_end_leave_none_to_resume(tmp_path: Path, num_steps: int, how: str) -> None:
    tuning = Tuning(tmp_path, num_steps=num_steps)
    tuning.trainer.not_finite = {1, 2, 3}
    with pytest.raises(TrainingStopped, match=f"and go on with slipstream {how}"):
        await tuning.run()
