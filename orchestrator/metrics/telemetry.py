"""The one place that emits metrics, progress, samples and timelines. Every other part of a run returns measurements.

    StepRecord --> step_rows.row_of --> metrics.jsonl    one row per step; step 0 is the state before training
                                    |-> loggers          the same numbers: TensorBoard, W&B, MLflow, Ray's gauges
                                    +-> a progress line  with the time left

Owns: where rows go. Does not own: what is in a row (step_rows.py, catalogue.py, samples.py, timeline.py), how
rows are sent elsewhere (loggers.py), the log (run_log), the picture at the end (curves).
Invariant: rows are in step order, one each. Tests and plots read metrics.jsonl, never stdout.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TextIO

import numpy as np

from slipstream.orchestrator.files.may_write import check_own, naming_a_full_disk
from slipstream.orchestrator.files.row_files import cut_rows, last_rows
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.run_log import ProgressLine
from slipstream.orchestrator.files.timeline import StepTimeline, row_of_step, write_row
from slipstream.orchestrator.metrics.catalogue import NO_EVALS, NO_REWARDS, RewardNames, Value
from slipstream.orchestrator.metrics.goodput import LOST, goodput_of
from slipstream.orchestrator.metrics.held_out import EvalNames, Evaluation, in_words
from slipstream.orchestrator.metrics.loggers import Logger
from slipstream.orchestrator.metrics.samples import SampleLog
from slipstream.orchestrator.metrics.step_rows import StepRecord, failed_of, row_of

NUM_GOODPUT_ROWS = 100
"""step/goodput is of this many steps; that of a whole run is what `slipstream status` says."""


class Telemetry:
    """Sinks of one run. Use as a context manager; `step` writes and shows one row. `first_step`: what was emitted after
    this step is removed: it belongs to work that a resumed run redoes. `gpus`: the trainer's and one rollout worker's;
    on CPUs their processes."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        num_steps: int,
        first_step: int,
        progress: ProgressLine,
        gpus: tuple[float, float] = (1.0, 1.0),
        loggers: Sequence[Logger] = (),
        rewards: RewardNames = NO_REWARDS,
        evals: EvalNames = NO_EVALS,
        samples_per_step: int = 0,
        max_sample_bytes_per_step: int = 0,
    ) -> None:
        self._folder = folder
        self._rewards = rewards
        self._evals = evals
        self._num_steps = num_steps
        self._progress = progress
        removed = cut_rows(folder.metrics, after_step=first_step, names=LOST)
        self._gpus = gpus
        self._rows = deque(last_rows(folder.metrics, NUM_GOODPUT_ROWS), maxlen=NUM_GOODPUT_ROWS)
        self._redone_s = sum(row.get(name) or 0.0 for row in removed for name in LOST) if first_step else None
        self._last_end_s: float | None = None
        cut_rows(folder.timeline, after_step=first_step)
        cut_rows(folder.evaluations, after_step=first_step)
        self._file: TextIO = folder.metrics.open("a")
        self._evaluations: TextIO = folder.evaluations.open("a")
        self._samples = SampleLog(
            folder, after_step=first_step, most=samples_per_step, most_bytes=max_sample_bytes_per_step
        )
        self._loggers = loggers
        self._recent_s: deque[float] | None = None
        self._last_eval: Evaluation | None = None

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *_: object) -> None:
        for sink in (self._file, self._samples, self._evaluations, *self._loggers):
            with suppress(OSError):  # what a full disk left in a buffer: the run has said why it ends
                sink.close()

    def step(self, record: StepRecord) -> dict[str, Value]:
        """Emit one row everywhere and return it. Raises RunTakenOver."""
        check_own(self._folder)
        row = row_of(record, self._rewards, self._evals)
        if record.step:
            self._add_goodput(row, record.timeline)
        finite = {name: _finite(value) for name, value in row.items()}
        try:
            self._write_beside(record)
        finally:  # the last of the step's rows: a resume after a kill takes a step that has it for done
            with naming_a_full_disk(self._folder.metrics):
                self._file.write(json.dumps(finite) + "\n")
                self._file.flush()
        numbers = {name: value for name, value in finite.items() if value is not None}
        with naming_a_full_disk(self._folder.tensorboard):
            for logger in self._loggers:
                logger.write(record.step, numbers)
        seconds = row["step/total_s"]
        if record.optim is not None and seconds is not None:
            if self._recent_s is None:
                self._recent_s = deque(maxlen=20)  # without the first step, which compiles kernels
            else:
                self._recent_s.append(float(seconds))
        left_s = (self._num_steps - record.step) * float(np.median(self._recent_s)) if self._recent_s else None
        self._progress.show(record.step, self._num_steps, self._describe(row), left_s)
        return row

    def _write_beside(self, record: StepRecord) -> None:
        for evaluation in record.evaluations:
            self._last_eval = evaluation
            figures = {name: _finite(value) for name, value in evaluation.figures.items()}
            line = {"step": evaluation.step, "policy_version": evaluation.policy_version, **figures}
            with naming_a_full_disk(self._folder.evaluations):
                self._evaluations.write(json.dumps(line) + "\n")
                self._evaluations.flush()
        with naming_a_full_disk(self._folder.samples):
            self._samples.write(record.step, record.policy_version, record.groups, record.evaluations, record.trained)
        if record.timeline is not None:
            with naming_a_full_disk(self._folder.timeline):
                write_row(self._folder.timeline, row_of_step(record.step, record.timeline, record.sync))

    def _add_goodput(self, row: dict[str, Value], timeline: StepTimeline | None) -> None:
        """What the step's time is measured by, and the goodput up to it."""
        row["step/gpus"] = self._gpus[0] + self._gpus[1] * float(row["rollout/replicas_wanted"] or 0)
        row["step/redone_s"], self._redone_s = self._redone_s, None
        if timeline is not None:
            if self._last_end_s is not None:
                row["step/between_s"] = max(0.0, timeline.from_s - self._last_end_s)
            self._last_end_s = timeline.to_s
        self._rows.append(row)
        goodput = goodput_of(self._rows)
        row["step/goodput"] = None if goodput is None else goodput.share

    @property
    def last_eval_reward(self) -> Value:
        """eval/reward of the last evaluation; None before the first."""
        return None if self._last_eval is None else self._last_eval.figures.get("eval/reward")

    def _describe(self, row: Mapping[str, Value]) -> str:
        parts = self._rewards.all if len(self._rewards.all) > 1 else ()
        spread, to_teacher = row["reward/no_spread_fraction"], row["distill/kl_mean"]
        evaluated = self._last_eval
        eval_step, figures = (0, {}) if evaluated is None else (evaluated.step, evaluated.figures)
        shown = (
            ("reward", row["reward/mean"], ".3f"),
            *((name, row[f"reward/{name}_mean"], ".3f") for name in parts),
            ("failed", failed_of([row], "reward"), ""),
            ("groups of equal rewards", spread if spread == 1 and to_teacher is None else None, ".0%"),
            ("KL to the teacher", to_teacher, ".3f"),
            (f"eval (step {eval_step})", in_words(figures, "reward"), ""),
            ("eval failed", failed_of([figures], "eval"), ""),
            ("tokens", row["rollout/response_tokens_mean"], ".0f"),
            ("cut off", row["rollout/truncated_fraction"], ".0%"),
            ("nll", row["sft/nll"], ".4f"),
            ("held-out nll", in_words(row, "nll", ".4f"), ""),
            ("loss", row["dpo/loss"], ".4f"),
            ("in order", row["dpo/accuracy"], ".3f"),
            ("held-out in order", in_words(row, "dpo_accuracy"), ""),
            ("k3", row["parity/k3"], ".1e"),
            ("k3 of stale tokens", row["parity/k3_stale"] if row["parity/k3"] is None else None, ".1e"),
            ("entropy", row["policy/entropy"], ".2f"),
            ("stale", row["staleness/max"], ".0f"),
            ("wait", row["rollout/wait_s"], ".2f"),
            ("sync", row["sync/total_s"], ".2f"),
            ("step", row["step/total_s"], ".2f"),
        )
        text = [f"{name} {format(value, spec)}{'s' if name in ('wait', 'sync', 'step') else ''}"
                for name, value, spec in shown if value is not None]  # fmt: skip
        return "  ".join(text)


def _finite(value: Value) -> Value:
    return value if value is None or math.isfinite(value) else None  # JSON has no NaN and no infinity
