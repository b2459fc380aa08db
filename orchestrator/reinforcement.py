"""A run that samples and is rewarded: what it starts, in which order, and what another controller takes over.

    files --> rewards, teacher, agents; trainer ranks, rollout workers --> Controller --> export, curves

Owns: the order of a start, what the run goes on from, and when its processes outlive their controller. Does not own:
the loop (loop/controller.py), where processes live (cluster/placement.py), Ray and the run's lock (run.py, the caller).
Invariant: whatever was started is ended on the way out, in reverse order, whatever the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.conf.schema import RunConfig, SyncMode
from slipstream.fleet.fleet_log import FleetLog, count_tokens
from slipstream.fleet.router import Router
from slipstream.fleet.supervisor import Supervisor
from slipstream.fleet.waiting import together
from slipstream.orchestrator.checkpoints.journal import Journal, remove_journal, write_journal
from slipstream.orchestrator.checkpoints.loop_state import RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore, checkpoints_of, step_of
from slipstream.orchestrator.cluster.own_ray import OwnRay
from slipstream.orchestrator.control.control_folder import answer_requests, workers_asked
from slipstream.orchestrator.control.run_state import note_started
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.run_log import RunLog
from slipstream.orchestrator.files.startup import RUN
from slipstream.orchestrator.files.timeline import Activities
from slipstream.orchestrator.inputs.model_folder import prepare_model
from slipstream.orchestrator.inputs.rows.prompt_rows import PromptRows
from slipstream.orchestrator.inputs.text_encoder import TextEncoder
from slipstream.orchestrator.loop.controller import Controller
from slipstream.orchestrator.loop.ports import LoopServices
from slipstream.orchestrator.loop.publication import RAY_CALL_S
from slipstream.orchestrator.run_parts import Ray, RunResult, begin_start, draw, export_policy, open_telemetry
from slipstream.rollout.agents.episode_runner import EpisodeRunner
from slipstream.rollout.rewards.runner import RewardRunner
from slipstream.rollout.teacher import Teacher

if TYPE_CHECKING:
    from slipstream.orchestrator.cluster.placement import Cluster


async def reinforce(config: RunConfig, folder: RunFolder, log: RunLog, ray: Ray) -> RunResult:
    """Rollouts, rewards and publishes around the trainer (orchestrator.loop.controller)."""
    from slipstream.orchestrator.cluster.placement import Cluster  # imports Ray

    model = prepare_model(config.model, folder.model, folder.began)
    rows = PromptRows(config, TextEncoder(folder.model))
    prompts, eval_sets = rows.stream(), rows.held_out()
    checkpoints = checkpoints_of(config, folder)
    origin = None if ray.left is not None else await _Origin.of_checkpoint(checkpoints, config)
    if origin is not None and origin.checkpoint is not None:  # rows that have changed are refused before all starts
        prompts.load_state_dict(checkpoints.prompts_of(origin.checkpoint))
    async with contextlib.AsyncExitStack() as stack:
        progress, startup = await begin_start(stack, folder, log, checkpoints)
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
        telemetry = stack.enter_context(open_telemetry(config, folder, progress, origin.step))
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
        drawing = asyncio.create_task(draw(config, folder))  # while the processes end
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
    stack: contextlib.AsyncExitStack, config: RunConfig, folder: RunFolder, model_folder: Path
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
    stack: contextlib.AsyncExitStack, config: RunConfig, cluster: Cluster, folder: RunFolder, num_asked: int | None
) -> Supervisor:
    """Who keeps the run's workers alive, as its options have it, and answers what commands ask about them; the stack
    ends that."""
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
