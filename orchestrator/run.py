"""One run from start to end: reads its files, starts its processes, lets the loop train, leaves its results.

    files --> processes (trainer ranks, rollout workers, rewards) --> Controller or Finetuner --> export, curves

Owns: what is started, in which order, and that on the way out, whatever the reason, no process of the run is left. Does
not own: the loop (controller.py, finetuner.py), where processes live (placement), the run folder's shape (run_folder).
Invariant: a mistake in a file ends the run before any process exists.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.conf.schema import Objective, RunConfig, SyncMode, TrainMode
from slipstream.fleet.fleet_log import FleetLog, count_tokens
from slipstream.fleet.router import Router
from slipstream.fleet.supervisor import Supervisor
from slipstream.fleet.waiting import together
from slipstream.orchestrator.cluster.own_ray import OwnRay, starting_ray
from slipstream.orchestrator.control.control_folder import alive, answer_requests, workers_asked
from slipstream.orchestrator.control.run_state import note_start, note_started
from slipstream.orchestrator.control.stop_request import end_when_asked
from slipstream.orchestrator.data.training_stream import held_out_items, training_stream
from slipstream.orchestrator.errors import DiskFull
from slipstream.orchestrator.figures.held_out import TAUGHT_FIGURES, eval_names, in_words
from slipstream.orchestrator.files.curves import PANELS, draw_curves
from slipstream.orchestrator.files.disk_space import naming_a_full_disk
from slipstream.orchestrator.files.journal import Journal, read_journal, remove_journal, write_journal
from slipstream.orchestrator.files.loggers.logger import open_loggers
from slipstream.orchestrator.files.loop_state import RunState
from slipstream.orchestrator.files.metrics_catalogue import RewardNames, catalogue
from slipstream.orchestrator.files.run_checkpoint import checkpoints_of, complete_checkpoints, step_of
from slipstream.orchestrator.files.run_folder import (
    RunFolder,
    changed_options,
    keep_sources,
    point_latest,
    write_description,
)
from slipstream.orchestrator.files.run_log import ProgressLine, RunLog
from slipstream.orchestrator.files.startup import FIRST_PHASE, RUN, Startup, clock_of_this_process
from slipstream.orchestrator.files.step_rows import failed_of
from slipstream.orchestrator.files.telemetry import Telemetry, read_rows
from slipstream.orchestrator.files.timeline import Activities
from slipstream.orchestrator.inputs.model_folder import complete_export, prepare_model
from slipstream.orchestrator.inputs.prompt_rows import PromptRows, lesson_reader
from slipstream.orchestrator.inputs.text_encoder import TextEncoder
from slipstream.orchestrator.loop.controller import Controller
from slipstream.orchestrator.loop.finetuner import Finetuner
from slipstream.orchestrator.loop.ports import LoopServices
from slipstream.orchestrator.loop.publication import RAY_CALL_S
from slipstream.orchestrator.signals import second_interrupt_ends_at_once
from slipstream.rollout.agents.episode_runner import EpisodeRunner
from slipstream.rollout.crash_reports import command_reports_crashes
from slipstream.rollout.rewards.runner import RewardRunner
from slipstream.rollout.teacher import Teacher

if TYPE_CHECKING:
    from slipstream.orchestrator.cluster.placement import Cluster

logger = logging.getLogger(__name__)


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
        newest = read_rows(self.folder.evaluations)[-1:]
        held_out = None if self.held_out is None else in_words(newest[0], self.metric)
        failed = (
            ("failed held-out", failed_of(newest, "eval")),
            ("failed rewards", failed_of(read_rows(self.folder.metrics), "reward")),
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


def run(config: RunConfig, overrides: list[str], folder: RunFolder) -> RunResult:
    """Train, by reinforcement or on given answers.

    Args:
        config: complete and checked (orchestrator.inputs.preflight).
        overrides: the words of the command line, for the record.
        folder: the run's (run_folder.open_run_folder).
    """
    train = _reinforce if config.algorithm.objective is Objective.policy else _finetune
    with alive(folder.root), RunLog(folder.log) as log, command_reports_crashes(folder.crashes):
        point_latest(folder.root)
        note_start(folder, clock_of_this_process()(), FIRST_PHASE)
        log.say(f"run folder: {folder.root}")
        left = read_journal(folder)
        if any(word.lstrip("+").startswith("rollout.num_workers=") for word in overrides):
            folder.workers_asked.unlink(missing_ok=True)
        for option in (changes := changed_options(folder, config)):
            log.say(f"resumed with another {option}")
        try:
            with naming_a_full_disk(folder.root):
                write_description(folder, config, overrides)  # under the lock: they may be another process's
                keep_sources(folder, config)
                result = asyncio.run(_beside_ray(train, config, folder, log, left, must_end=bool(changes)))
        except BaseException as error:
            logger.debug("the run has ended early", exc_info=True)  # run.log alone: the caller tells people
            if isinstance(error, DiskFull):
                raise DiskFull(
                    f"{error}; {_what_is_saved(folder)}. Make room, and go on with slipstream resume"
                ) from error
            raise
        log.say(result.summary())
    return result


@dataclass(frozen=True, slots=True)
class _Ray:
    """The run's own, if it has one, and what a controller left there that was killed."""

    own: OwnRay | None
    left: Journal | None


async def _beside_ray(
    train: Callable[[RunConfig, RunFolder, RunLog, _Ray], Coroutine[Any, Any, RunResult]],
    config: RunConfig,
    folder: RunFolder,
    log: RunLog,
    left: Journal | None,
    *,
    must_end: bool,
) -> RunResult:
    """The run, which Ctrl-C, SIGTERM and `slipstream stop` wind down. The servers of its own Ray begin to start before
    anything else, which imports Ray, too; or they are those that another controller left.

    Args:
        left: what that controller wrote down.
        must_end: whether its processes cannot be used: they have other options.
    """
    clusters: list[OwnRay] = []
    with second_interrupt_ends_at_once(lambda: [own.hold(False) for own in clusters]):
        listening = asyncio.create_task(end_when_asked(folder.root))
        try:
            if left is not None and must_end:
                log.say("the run's processes have the options from before: they are ended, and all is started again")
                own = OwnRay(config, folder)
                await own.take_over(left.ray)
                await own.end()
                left = None
            async with starting_ray(config, folder, None if left is None else left.ray) as own:
                if left is not None and (own is None or not own.is_taken_over):
                    log.say("no process of the run is alive any more: everything is started")
                    left = None
                clusters += [] if own is None else [own]
                return await train(config, folder, log, _Ray(own, left))
        finally:
            listening.cancel()


async def _reinforce(config: RunConfig, folder: RunFolder, log: RunLog, ray: _Ray) -> RunResult:
    """Rollouts, rewards and publishes around the trainer (orchestrator.loop.controller)."""
    from slipstream.orchestrator.cluster.placement import Cluster  # imports Ray

    model = prepare_model(config.model, folder.model)
    rows = PromptRows(config, TextEncoder(folder.model))
    prompts, eval_sets = rows.stream(), rows.held_out()
    checkpoints = checkpoints_of(config, folder)
    resume_from = None
    if ray.left is None:
        resume_from = await asyncio.to_thread(checkpoints.to_resume, config.run.resume)
    await asyncio.to_thread(checkpoints.begin_sending)

    async with contextlib.AsyncExitStack() as stack:
        progress = stack.enter_context(ProgressLine(log.console))
        startup = Startup(folder.startup, partial(_show_start, progress, folder))
        stack.callback(note_started, folder)
        stack.push_async_callback(asyncio.to_thread, checkpoints.finish_sending)
        rewards = RewardRunner(
            config.reward,
            max_response_tokens=config.rollout.sampling.max_tokens,
            log_path=folder.root / "rewards.log",
        )
        stack.push_async_callback(rewards.close)
        teacher = None
        if config.algorithm.distill_coef > 0:
            teacher = Teacher(config.algorithm.teacher)
            stack.push_async_callback(teacher.close)
        episodes = None
        if config.rollout.agent is not None:
            episodes = EpisodeRunner(config, model.folder, log_path=folder.root / "agents.log")
            stack.push_async_callback(episodes.close)
        left = None if ray.left is None else ray.left.processes
        num_asked = workers_asked(folder)
        cluster = await stack.enter_async_context(Cluster(config, folder, startup, ray.own, left, num_asked))
        await stack.enter_async_context(startup)  # left before the cluster: a start that fails is over then
        starts = [rewards.start(), cluster.start(model.hf_config)]
        await together(*starts, *([] if episodes is None else [episodes.start()]))
        found = ray.left.state if ray.left is not None and await _has_state(cluster, ray.left.state, log) else None
        if found is None and ray.left is not None:
            resume_from = await asyncio.to_thread(checkpoints.to_resume, config.run.resume)
        first_step = step_of(resume_from) if found is None else found.step
        telemetry = stack.enter_context(_telemetry(config, folder, progress, first_step))
        fleet_log = FleetLog(folder.fleet)
        supervisor = _supervisor(config, cluster, fleet_log, num_asked)
        stack.push_async_callback(supervisor.close)
        activities = Activities()
        router = Router(supervisor, request_timeout_s=config.rollout.request_timeout_s, note=activities.note)
        if episodes is not None:
            episodes.sample_with(router.generate)
        outlives = _outlives(config, ray.own)
        services = LoopServices(
            trainer=cluster.trainer,
            supervisor=supervisor,
            router=router,
            prompts=prompts,
            eval_sets=eval_sets,
            rewards=rewards,
            activities=activities,
            episodes=episodes,
            teacher=teacher,
            telemetry=telemetry,
            checkpoints=checkpoints,
            traces=folder.traces,
            before_step=None if outlives is None else partial(_hold, outlives, cluster, folder),
            on_clock=log.context.set,
        )
        controller = Controller(config, services)
        startup.enter(RUN, f"publish of step {first_step}" if config.run.resume else "publish and evaluation")
        stack.callback(progress.say, "ending the run's processes")
        listening = asyncio.create_task(answer_requests(folder.root, supervisor))
        stack.callback(listening.cancel)
        counting = asyncio.create_task(count_tokens(supervisor.roster.replicas.values(), fleet_log))
        stack.callback(counting.cancel)
        if cluster.is_taken_over:
            checkpoints.discard_unfinished()
            await supervisor.find_again(cluster.trainer.known)
        await (controller.start(resume_from) if found is None else controller.go_on(found))
        startup.end()
        note_started(folder)
        if config.rollout.follows_machines:
            supervisor.follow(patience_s=config.cluster.start_timeout_s)
        if outlives is not None:
            stack.callback(_let_go, outlives, folder)
            await cluster.trainer.keep()
        await controller.train()
        export = await _export(cluster, config, folder)
        drawing = asyncio.create_task(_draw(config, folder))  # while the processes end
    await drawing
    return RunResult(
        folder,
        controller.step,
        controller.policy_version,
        "reward",
        telemetry.last_eval_reward,
        checkpoints.newest(),
        export,
    )


def _outlives(config: RunConfig, own_ray: OwnRay | None) -> OwnRay | None:
    """The Ray whose processes wait for another controller when theirs is killed. Those of a Ray that is not ours end
    with it, and engines without publishes could not be brought to one version again.
    """
    return own_ray if config.weight_sync.enabled and config.run.num_steps > 0 else None


async def _hold(own_ray: OwnRay, cluster: Cluster, folder: RunFolder, state: RunState) -> None:
    """Write down what another controller needs. From now on processes outlive this one."""
    await asyncio.to_thread(write_journal, folder, Journal(own_ray.whereabouts, cluster.living, state))
    own_ray.hold(True)


def _let_go(own_ray: OwnRay, folder: RunFolder) -> None:
    """From now on they end with it."""
    own_ray.hold(False)
    remove_journal(folder)


async def _has_state(cluster: Cluster, state: RunState, log: RunLog) -> bool:
    """Whether the trainer that another controller left has this state now."""
    if not cluster.is_taken_over:
        return False
    has_it = await cluster.trainer.return_to(state.policy_version)
    log.say(
        f"processes of the run are alive: it goes on after step {state.step}"
        if has_it
        else f"trainer ranks are alive, but the state of step {state.step} is gone: the newest checkpoint is read"
    )
    return has_it


def _supervisor(config: RunConfig, cluster: Cluster, fleet_log: FleetLog, num_asked: int | None) -> Supervisor:
    """Who keeps the run's workers alive, as its options have it."""
    is_adapter_mode = config.weight_sync.mode is SyncMode.adapter
    supervisor = Supervisor(
        cluster.workers,
        # Without publishes a worker that comes back would never get the version that the others sample from.
        restart=cluster.restart_worker if config.weight_sync.enabled else None,
        make_room=cluster.make_room,
        end=cluster.end_worker,
        look=cluster.look if config.rollout.follows_machines else None,
        bounds=config.rollout.bounds if config.rollout.is_range else None,
        max_restarts=config.rollout.max_restarts,
        backoff_s=config.rollout.restart_backoff_s,
        # Base and adapter are two reads.
        recovery_timeout_s=config.weight_sync.timeout_s * (1 + is_adapter_mode) + RAY_CALL_S,
        max_missed_publishes=config.algorithm.max_staleness_steps if is_adapter_mode else 0,
        note=fleet_log.write,
    )
    if num_asked is not None:
        supervisor.scaling.ask(num_asked)
    return supervisor


async def _finetune(config: RunConfig, folder: RunFolder, log: RunLog, ray: _Ray) -> RunResult:
    """The trainer alone, taught by given answers (orchestrator.loop.finetuner)."""
    from slipstream.orchestrator.cluster.placement import Cluster  # imports Ray

    model = prepare_model(config.model, folder.model)
    encoder = TextEncoder(folder.model)
    read = lesson_reader(config, encoder)
    training = training_stream(config.data, read, seed=config.run.seed)
    held_out = {name: items.found for name, items in held_out_items(config.data, read).items()}
    checkpoints = checkpoints_of(config, folder)
    resume_from = await asyncio.to_thread(checkpoints.to_resume, config.run.resume)
    await asyncio.to_thread(checkpoints.begin_sending)

    async with contextlib.AsyncExitStack() as stack:
        progress = stack.enter_context(ProgressLine(log.console))
        startup = Startup(folder.startup, partial(_show_start, progress, folder))
        stack.callback(note_started, folder)
        stack.push_async_callback(asyncio.to_thread, checkpoints.finish_sending)
        cluster = await stack.enter_async_context(Cluster(config, folder, startup, ray.own))
        await stack.enter_async_context(startup)  # left before the cluster: a start that fails is over then
        await cluster.start(model.hf_config)
        startup.end()
        note_started(folder)
        telemetry = stack.enter_context(_telemetry(config, folder, progress, step_of(resume_from)))
        stack.callback(progress.say, "ending the run's processes")
        tuner = Finetuner(config, cluster.trainer, training, held_out, telemetry, checkpoints, log.context.set)
        await tuner.train(resume_from)
        export = await _export(cluster, config, folder)
        drawing = asyncio.create_task(_draw(config, folder))  # while the processes end
    await drawing
    objective = config.algorithm.objective
    return RunResult(
        folder,
        tuner.step,
        tuner.policy_version,
        TAUGHT_FIGURES[objective][0][0],
        tuner.held_out_figure,
        checkpoints.newest(),
        export,
    )


def _show_start(progress: ProgressLine, folder: RunFolder, seconds: float, waits_for: str) -> None:
    """On the live line, and in a file for slipstream status."""
    progress.wait(seconds, waits_for)
    note_start(folder, seconds, waits_for)


def _what_is_saved(folder: RunFolder) -> str:
    complete = complete_checkpoints(folder.checkpoints)
    return f"step {step_of(complete[-1])} is saved in {complete[-1]}" if complete else "no checkpoint is saved"


def _telemetry(config: RunConfig, folder: RunFolder, progress: ProgressLine, first_step: int) -> Telemetry:
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


async def _draw(config: RunConfig, folder: RunFolder) -> None:
    """The curves of a run that has steps."""
    if config.run.num_steps > 0:
        await asyncio.to_thread(draw_curves, folder.metrics, folder.curves, PANELS[config.algorithm.objective])


async def _export(cluster: Cluster, config: RunConfig, folder: RunFolder) -> Path | None:
    """What was trained, as others read it. Returns where; None of a run of no step: it would copy what was read."""
    if config.run.num_steps == 0:
        return None
    export = folder.adapter if config.trainer.mode is TrainMode.lora else folder.merged
    await cluster.trainer.export(export)
    if config.trainer.mode is TrainMode.full:
        complete_export(folder.model, export)
    return export
