"""What every run has, of whatever objective: its Ray, what is shown and measured of it, and what it leaves behind.

Owns: the run's loggers and rows as one thing, its export and curves, and the words at its end. Does not own: what a run
starts (reinforcement.py, finetuning.py), nor its way in and out (run.py), which call what is here.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from slipstream.conf.failures import undone_by
from slipstream.conf.schema import Objective, RunConfig, TrainMode
from slipstream.orchestrator.checkpoints.journal import Journal
from slipstream.orchestrator.checkpoints.manifest import flush
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore
from slipstream.orchestrator.cluster.own_ray import OwnRay
from slipstream.orchestrator.control.run_state import note_start
from slipstream.orchestrator.files.curves import PANELS, draw_curves
from slipstream.orchestrator.files.held_out import eval_names, in_words
from slipstream.orchestrator.files.loggers import open_loggers
from slipstream.orchestrator.files.may_write import check_own
from slipstream.orchestrator.files.metrics_catalogue import RewardNames, catalogue
from slipstream.orchestrator.files.row_files import last_rows, read_figures
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.run_log import ProgressLine, RunLog
from slipstream.orchestrator.files.startup import Startup
from slipstream.orchestrator.files.step_rows import failed_of, failure_counts
from slipstream.orchestrator.files.telemetry import Telemetry
from slipstream.orchestrator.inputs.model_folder import complete_export
from slipstream.orchestrator.loop.ports import LoopTrainer


@dataclass(frozen=True, slots=True)
class Ray:
    """The run's own, if it has one, and what a controller left there that was killed."""

    own: OwnRay | None
    left: Journal | None


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run left behind."""

    folder: RunFolder
    step: int
    policy_version: int
    metric: str
    """What `held_out` is: reward; nll (negative log-likelihood) of fine-tuning; dpo_loss."""
    held_out: float | None
    """Its mean on held-out rows after the last step; None without data.eval_path."""
    checkpoint: Path | None
    export: Path | None
    """The trained adapter (PEFT format), or the merged checkpoint when trainer.mode=full; None of a run of no step."""

    def summary(self) -> str:
        """Where everything is, for people."""
        newest = last_rows(self.folder.evaluations, 1)
        held_out = None if self.held_out is None else in_words(newest[0], self.metric)
        failed = (
            ("failed held-out", failed_of(newest, "eval")),
            ("failed rewards", failed_of(read_figures(self.folder.metrics, failure_counts("reward")), "reward")),
        )
        lines: list[tuple[str, object]] = [
            (f"held-out {self.metric}", held_out or "not evaluated (data.eval_path=null)"),
            *[(name, told) for name, told in failed if told is not None],
            ("metrics", self.folder.metrics),
            *([("samples", self.folder.samples)] if self.folder.samples.stat().st_size else []),
        ]
        if self.export is not None:
            lines += [
                ("policy version", f"{self.policy_version} after {self.step} steps"),
                ("curves", self.folder.curves),
                ("adapter" if self.export == self.folder.adapter else "model", self.export),
                *([("best checkpoint", self.folder.best)] if self.folder.best.exists() else []),
                ("checkpoint", self.checkpoint or "none (run.checkpoint_every_steps)"),
            ]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in lines)


async def begin_start(
    stack: AsyncExitStack, folder: RunFolder, log: RunLog, checkpoints: CheckpointStore
) -> tuple[ProgressLine, Startup]:
    """The live line, and the phases of a start: they are shown there, and in a file for slipstream status. The stack
    ends the line, once all checkpoints are where they are sent to."""
    await asyncio.to_thread(checkpoints.begin_sending)
    progress = stack.enter_context(ProgressLine(log.console))

    def show(seconds: float, waits_for: str) -> None:
        progress.wait(seconds, waits_for)
        note_start(folder, seconds, waits_for)

    stack.push_async_callback(asyncio.to_thread, checkpoints.finish_sending)
    return progress, Startup(folder.startup, show)


def open_telemetry(config: RunConfig, folder: RunFolder, progress: ProgressLine, first_step: int) -> Telemetry:
    """Open what a run writes of its steps: rows, samples and loggers, after `first_step`."""
    rewards, evals = _reward_names(config), eval_names(config)
    return Telemetry(
        folder,
        num_steps=config.run.num_steps,
        first_step=first_step,
        gpus=(config.trainer.num_ranks * config.gpus_of_rank, config.gpus_of_worker),
        progress=progress,
        loggers=open_loggers(config, folder, after_step=first_step, meanings=catalogue(rewards, evals)),
        rewards=rewards,
        evals=evals,
        samples_per_step=config.run.samples_per_step,
        # slipstream eval makes no steps, and shows every response.
        max_sample_bytes_per_step=config.run.max_sample_bytes_per_step if config.run.num_steps else 1 << 40,
    )


def _reward_names(config: RunConfig) -> RewardNames:
    if config.algorithm.objective is not Objective.policy:
        return RewardNames()
    reward = config.reward
    judges = [name for name, part in reward.by_name.items() if part.kind == "judge"]
    return RewardNames((*reward.names, *reward.shapings), judges)


async def draw(config: RunConfig, folder: RunFolder) -> None:
    """Draw the curves of a run that has steps."""
    if config.run.num_steps > 0:
        await asyncio.to_thread(draw_curves, folder.metrics, folder.curves, PANELS[config.algorithm.objective])


async def export_policy(trainer: LoopTrainer, config: RunConfig, folder: RunFolder) -> Path | None:
    """What was trained, as others read it, whole or not at all. Returns where; None of a run of no step: it would copy
    what was read. Raises RunTakenOver."""
    if config.run.num_steps == 0:
        return None
    export = folder.adapter if config.trainer.mode is TrainMode.lora else folder.merged
    partial = export.with_name(f".{export.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a controller that was killed
    with undone_by(lambda _: shutil.rmtree(partial, ignore_errors=True)):
        await trainer.export(partial)
        if config.trainer.mode is TrainMode.full:
            complete_export(folder.model, partial)
        await asyncio.to_thread(flush, partial)
        check_own(folder)
        shutil.rmtree(export, ignore_errors=True)  # of an earlier part of the run
        partial.replace(export)
    return export
