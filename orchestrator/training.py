"""What a run starts, in which order, what another controller takes over, and what it leaves behind.

    files --> rewards, teacher, agents; trainer ranks, rollout workers --> Controller --> export, curves    reinforce
    files --> trainer ranks -------------------------------------------> Finetuner ---> export, curves      finetune

Owns: the order of a start, what the run goes on from, when its processes outlive their controller, its loggers and rows
as one thing, its export, and the words at its end. Does not own: the loops (loop/), where processes live
(cluster/placement.py), Ray and the run's lock (run.py, the caller).
Invariant: whatever was started is ended on the way out, in reverse order, whatever the reason.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.conf.failures import undone_by
from slipstream.conf.schema import Objective, RunConfig, SyncMode, TrainMode
from slipstream.fleet.fleet_log import FleetLog, count_tokens
from slipstream.fleet.router import Router
from slipstream.fleet.supervisor import Supervisor
from slipstream.fleet.waiting import together
from slipstream.orchestrator.checkpoints.journal import Journal, remove_journal, write_journal
from slipstream.orchestrator.checkpoints.loop_state import RunState
from slipstream.orchestrator.checkpoints.manifest import flush
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore, checkpoints_of, step_of
from slipstream.orchestrator.cluster.own_ray import OwnRay
from slipstream.orchestrator.control.control_folder import answer_requests, note_start, note_started, workers_asked
from slipstream.orchestrator.data.training_stream import held_out_items, training_stream
from slipstream.orchestrator.files.may_write import check_own
from slipstream.orchestrator.files.row_files import last_rows, read_figures
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.run_log import ProgressLine, RunLog
from slipstream.orchestrator.files.startup import RUN, Startup
from slipstream.orchestrator.files.timeline import Activities
from slipstream.orchestrator.inputs.model_folder import complete_export, prepare_model
from slipstream.orchestrator.inputs.rows.prompt_rows import PromptRows, lesson_reader
from slipstream.orchestrator.inputs.text_encoder import TextEncoder
from slipstream.orchestrator.loop.controller import Controller
from slipstream.orchestrator.loop.finetuner import Finetuner
from slipstream.orchestrator.loop.ports import LoopServices, LoopTrainer, TaughtServices
from slipstream.orchestrator.loop.publication import RAY_CALL_S
from slipstream.orchestrator.metrics.catalogue import RewardNames, catalogue
from slipstream.orchestrator.metrics.curves import PANELS, draw_curves
from slipstream.orchestrator.metrics.held_out import TAUGHT_FIGURES, eval_names, in_words
from slipstream.orchestrator.metrics.loggers import open_loggers
from slipstream.orchestrator.metrics.step_rows import failed_of, failure_counts
from slipstream.orchestrator.metrics.telemetry import Telemetry
from slipstream.rollout.agents.episode_runner import EpisodeRunner
from slipstream.rollout.rewards.runner import RewardRunner
from slipstream.rollout.teacher import Teacher

if TYPE_CHECKING:
    from slipstream.orchestrator.cluster.placement import Cluster


@dataclass(frozen=True, slots=True)
class Ray:
    """The run's own, if it has one, and what a controller left there that was killed."""

    own: OwnRay | None
    left: Journal | None


@dataclass(frozen=True, slots=True)
class RunResult:
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


async def reinforce(config: RunConfig, folder: RunFolder, log: RunLog, ray: Ray) -> RunResult:
    """Rollouts, rewards and publishes around the trainer (loop/controller.py)."""
    from slipstream.orchestrator.cluster.placement import Cluster  # imports Ray

    model = prepare_model(config.model, folder.model, folder.began)
    rows = PromptRows(config, TextEncoder(folder.model))
    prompts, eval_sets = rows.stream(), rows.held_out()
    checkpoints = checkpoints_of(config, folder)
    origin = None if ray.left is not None else await _Origin.of_checkpoint(checkpoints, config)
    if origin is not None and origin.checkpoint is not None:  # rows that have changed are refused before all starts
        prompts.load_state_dict(checkpoints.prompts_of(origin.checkpoint))
    async with AsyncExitStack() as stack:
        progress, startup = await _begin_start(stack, folder, log, checkpoints)
        rewards, teacher, episodes = _judges(stack, config, folder, model.folder)
        left = None if ray.left is None else ray.left.processes
        num_asked = workers_asked(folder)
        cluster = await stack.enter_async_context(Cluster(config, folder, startup, ray.own, left, num_asked))
        await stack.enter_async_context(startup)  # left before the cluster: a start that fails is over then
        starts = [rewards.start(), cluster.start(model.hf_config)]
        await together(*starts, *([] if episodes is None else [episodes.start()]))
        if ray.left is not None and await _has_state(cluster, ray.left.state, log):
            origin = _Origin(living=ray.left.state)
        origin = origin or await _Origin.of_checkpoint(checkpoints, config)
        telemetry = stack.enter_context(_open_telemetry(config, folder, progress, origin.step))
        supervisor = _supervisor(stack, config, cluster, folder, num_asked)
        activities = Activities()
        router = Router(supervisor, request_timeout_s=config.rollout.request_timeout_s, note=activities.note)
        if episodes is not None:
            episodes.sample_with(router.generate)
        # Processes of our own Ray wait for another controller when theirs is killed.
        outlives = ray.own if config.num_versions_kept else None
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
            hold=None if outlives is None else partial(_hold, outlives, cluster, folder),
            on_clock=log.context.set,
        )
        controller = Controller(config, services)
        startup.enter(RUN, f"publish of step {origin.step}" if config.run.resume else "publish and evaluation")
        stack.callback(progress.say, "ending the run's processes")
        if cluster.is_taken_over:
            checkpoints.discard_unfinished()
            await supervisor.find_again(cluster.trainer.known)
            await router.find_left()
        await (controller.start(origin.checkpoint) if origin.living is None else controller.go_on(origin.living))
        startup.end()
        note_started(folder)
        if config.rollout.follows_machines:
            supervisor.follow(patience_s=config.cluster.start_timeout_s)
        if outlives is not None:
            stack.callback(_let_go, outlives, folder)
            await cluster.trainer.keep()
        await controller.train()
        export = await export_policy(cluster.trainer, config, folder)
        drawing = asyncio.create_task(_draw(config, folder))  # while the processes end
    await drawing
    held_out = telemetry.last_eval_reward
    newest = checkpoints.newest()
    return RunResult(folder, controller.step, controller.policy_version, "reward", held_out, newest, export)


async def finetune(config: RunConfig, folder: RunFolder, log: RunLog, ray: Ray) -> RunResult:
    """The trainer alone, taught by given answers or preferences (loop/finetuner.py)."""
    from slipstream.orchestrator.cluster.placement import Cluster  # imports Ray

    model = prepare_model(config.model, folder.model, folder.began)
    read = lesson_reader(config, TextEncoder(folder.model))
    lessons = training_stream(config.data, read, seed=config.run.seed)
    held_out = {name: items.found for name, items in held_out_items(config.data, read).items()}
    checkpoints = checkpoints_of(config, folder)
    resume_from = await asyncio.to_thread(checkpoints.to_resume, config.run.resume)
    if resume_from is not None:  # rows that have changed are refused before all starts
        lessons.load_state_dict(checkpoints.prompts_of(resume_from))
    async with AsyncExitStack() as stack:
        progress, startup = await _begin_start(stack, folder, log, checkpoints)
        cluster = await stack.enter_async_context(Cluster(config, folder, startup, ray.own))
        await stack.enter_async_context(startup)  # left before the cluster: a start that fails is over then
        await cluster.start(model.hf_config)
        startup.end()
        note_started(folder)
        telemetry = stack.enter_context(_open_telemetry(config, folder, progress, step_of(resume_from)))
        stack.callback(progress.say, "ending the run's processes")
        services = TaughtServices(
            trainer=cluster.trainer,
            lessons=lessons,
            held_out=held_out,
            telemetry=telemetry,
            checkpoints=checkpoints,
            on_clock=log.context.set,
        )
        tuner = Finetuner(config, services)
        await tuner.train(resume_from)
        export = await export_policy(cluster.trainer, config, folder)
        drawing = asyncio.create_task(_draw(config, folder))  # while the processes end
    await drawing
    metric, newest = TAUGHT_FIGURES[config.algorithm.objective][0][0], checkpoints.newest()
    return RunResult(folder, tuner.step, tuner.policy_version, metric, tuner.held_out_figure, newest, export)


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a run goes on from: what the trainer has that another controller left, or a checkpoint, or nothing."""

    checkpoint: Path | None = None
    living: RunState | None = None

    @classmethod
    async def of_checkpoint(cls, checkpoints: CheckpointStore, config: RunConfig) -> _Origin:
        """The one that run.resume names."""
        return cls(await asyncio.to_thread(checkpoints.to_resume, config.run.resume))

    @property
    def step(self) -> int:
        return step_of(self.checkpoint) if self.living is None else self.living.step


def _judges(
    stack: AsyncExitStack, config: RunConfig, folder: RunFolder, model_folder: Path
) -> tuple[RewardRunner, Teacher | None, EpisodeRunner | None]:
    """Who judges responses and who makes them in several turns, as far as the run has them; the stack closes them."""
    rewards = RewardRunner(
        config.reward, max_response_tokens=config.max_response_tokens, log_path=folder.root / "rewards.log"
    )
    stack.push_async_callback(rewards.close)
    teacher = Teacher(config.algorithm.teacher) if config.algorithm.distill_coef > 0 else None
    if teacher is not None:
        stack.push_async_callback(teacher.close)
    if config.rollout.agent is None:
        return rewards, teacher, None
    episodes = EpisodeRunner(config, model_folder, log_path=folder.root / "agents.log")
    stack.push_async_callback(episodes.close)
    return rewards, teacher, episodes


async def _hold(own_ray: OwnRay, cluster: Cluster, folder: RunFolder, state: RunState) -> None:
    """Write down what another controller needs. From now on processes outlive this one."""
    await asyncio.to_thread(write_journal, folder, Journal(own_ray.whereabouts, cluster.living, state))
    own_ray.hold(True)


def _let_go(own_ray: OwnRay, folder: RunFolder) -> None:
    """From now on processes end with this controller, as if none had been held."""
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


def _supervisor(
    stack: AsyncExitStack, config: RunConfig, cluster: Cluster, folder: RunFolder, num_asked: int | None
) -> Supervisor:
    """Who keeps the run's workers alive, and answers what commands ask about them; the stack ends that."""
    fleet_log = FleetLog(folder.fleet)
    is_adapter_mode = config.weight_sync.mode is SyncMode.adapter
    supervisor = Supervisor(
        cluster.workers,
        restart=cluster.restart_worker,
        make_room=cluster.rooms.make,
        end=cluster.end_worker,
        look=cluster.rooms.look if config.rollout.follows_machines else None,
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
    stack.push_async_callback(supervisor.close)
    counted = supervisor.roster.replicas.values()
    for work in (answer_requests(folder.root, supervisor), count_tokens(counted, fleet_log)):
        stack.callback(asyncio.create_task(work).cancel)
    return supervisor


async def _begin_start(
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


def _open_telemetry(config: RunConfig, folder: RunFolder, progress: ProgressLine, first_step: int) -> Telemetry:
    """Open what a run writes of its steps: rows, samples and loggers, after `first_step`."""
    rewards, evals = RewardNames(), eval_names(config)
    if config.algorithm.objective is Objective.policy:
        reward = config.reward
        judges = [name for name, part in reward.by_name.items() if part.kind == "judge"]
        rewards = RewardNames((*reward.names, *reward.shapings), judges)
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


async def _draw(config: RunConfig, folder: RunFolder) -> None:
    if config.run.num_steps > 0:
        await asyncio.to_thread(draw_curves, folder.metrics, folder.curves, PANELS[config.algorithm.objective])


async def export_policy(trainer: LoopTrainer, config: RunConfig, folder: RunFolder) -> Path | None:
    """What was trained, as others read it, whole or not at all. Returns where; None of a run of no step: it would copy
    what was read. Raises RunTakenOver."""
    if config.run.num_steps == 0:
        return None
    export = folder.adapter if config.trainer.mode is TrainMode.lora else folder.merged
    partial_export = export.with_name(f".{export.name}.partial")
    shutil.rmtree(partial_export, ignore_errors=True)  # of a controller that was killed
    with undone_by(lambda _: shutil.rmtree(partial_export, ignore_errors=True)):
        await trainer.export(partial_export)
        if config.trainer.mode is TrainMode.full:
            complete_export(folder.model, partial_export)
        await asyncio.to_thread(flush, partial_export)
        check_own(folder)
        shutil.rmtree(export, ignore_errors=True)  # of an earlier part of the run
        partial_export.replace(export)
    return export
