"""Starts the trainer ranks of a run, each in its bundle of the placement group.

Owns: their rendezvous, and the microbatch that they try before the run. Does not own: Ray (ray_cluster.py), what a rank
does (actors.py), or how ranks are called (ray_handles.py). Invariant: torch is imported by the actors, never here.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from slipstream.conf.failures import undone_by
from slipstream.conf.functions import absolute
from slipstream.conf.json_files import JsonObject
from slipstream.conf.plural import counted
from slipstream.conf.schema import Objective, RunConfig, TrainMode
from slipstream.fleet.waiting import all_started
from slipstream.orchestrator.cluster.actors import TrainerActor
from slipstream.orchestrator.cluster.ray_cluster import RayCluster, RunContext, kill_actor
from slipstream.orchestrator.cluster.ray_handles import RayTrainerGroup, call_all
from slipstream.orchestrator.cluster.rebirth import Keepers, LivingRanks, Ranks, Rebirth
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.trainer.checkpoint.keeper import Address
from slipstream.trainer.step.microbatches import full_microbatch
from slipstream.trainer.types import TrainerOptions

logger = logging.getLogger(__name__)


async def start_trainer_ranks(
    run: RunContext, bundles: Sequence[int], left: LivingRanks | None = None
) -> RayTrainerGroup:
    """Start all ranks, load the model on them, and on GPUs try a full microbatch. When a rank dies, the group does it
    again. `bundles`: one of the run's placement group for each rank. `left`: ranks that a killed controller left; they
    are taken over, no rank is started, and RayTrainerGroup.return_to comes next."""
    config, cluster, startup = run.config, run.cluster, run.startup
    options = TrainerOptions(
        model=config.model,
        trainer=config.trainer,
        algorithm=replace(config.algorithm, loss=absolute(config.algorithm.loss)),
        sampling_temperature=config.rollout.sampling.temperature,
        weight_sync=config.weight_sync,
        seed=config.run.seed,
        num_steps=config.run.num_steps,
        device=run.device,
        hf_config=run.hf_config,
        sync_key=run.sync_key,
        parity=config.parity,
        engine_ranks=config.rollout.tp_size,
    )

    start = partial(_start, run, options, bundles)
    ranks = await start(0, ()) if left is None else await _found(cluster, left)
    rebirth = Rebirth(
        cluster,
        start,
        Keepers(cluster, run.sync_key, is_one_node=run.is_one_node),
        partial(call_all, cluster),
        max_restarts=config.trainer.max_restarts if config.run.num_steps else 0,
        start_timeout_s=config.cluster.start_timeout_s,
    )
    group = RayTrainerGroup(cluster, ranks, rebirth, is_lora=config.trainer.mode is TrainMode.lora)
    if left is not None:
        await rebirth.take_over(left)
        return group
    _log_start(ranks.facts)
    if run.device == "cuda" and config.algorithm.objective is Objective.policy:  # engines start meanwhile
        for name in ranks.names:
            startup.enter(name, "trying a full microbatch")
        await _warm_up(config, group)
    for name in ranks.names:
        startup.ready(name)
    return group


async def _found(cluster: RayCluster, left: LivingRanks) -> Ranks:
    """Living ranks. A rank that has died has no actor, and the cluster knows it as dead."""
    actors = [await cluster.find_actor(TrainerActor, name) for name in left.names]
    return Ranks([actor for actor in actors if actor is not None], left.names, left.facts)


async def _start(
    run: RunContext, options: TrainerOptions, bundles: Sequence[int], life: int, kept: Sequence[tuple[Address, int]]
) -> Ranks:
    """Start all ranks and load the model on them. `life`: how often they were started before. `kept`: each one's
    keeper, and the number of its state that will be asked for; none in the first life."""
    cluster, startup = run.cluster, run.startup
    names = [f"trainer-{rank}{f'.{life}' if life else ''}" for rank in range(len(bundles))]
    if life:  # Ray frees a dead actor's name late
        for name in names:
            startup.enter(name, "waiting for a process")
    else:
        startup.expect("trainer ranks", names)
    actors: list[type[TrainerActor]] = []

    async def start(rank: int, rendezvous: str) -> JsonObject:
        actor, who = actors[rank], names[rank]
        startup.enter(names[rank], "importing PyTorch")
        await cluster.result_of(prepared[rank], who, TrainingStopped)
        startup.enter(names[rank], "meeting the other ranks")
        mine = replace(options, rendezvous=rendezvous)
        await cluster.result_of(actor.join.remote(rank, mine, run.is_one_node), who, TrainingStopped)
        startup.enter(names[rank], "loading weights")
        facts = await cluster.result_of(actor.load.remote(), who, TrainingStopped)
        startup.enter(names[rank], "waiting for the other ranks")
        return facts

    def end(_: BaseException) -> None:  # their places must be free for the next attempt
        for actor in actors:
            kill_actor(actor)

    try:
        with undone_by(end):
            for name, bundle in zip(names, bundles, strict=True):
                actors.append(await cluster.new_actor(TrainerActor, name, bundle, num_gpus=run.config.gpus_of_rank))
            picked = actors[0].pick_rendezvous.remote(run.is_one_node)
            states = [(keeper, options.sync_key, rank, number) for rank, (keeper, number) in enumerate(kept)]
            prepared = [
                actor.prepare.remote(state) for actor, state in zip(actors, states or [None] * len(actors), strict=True)
            ]
            rendezvous = await cluster.result_of(picked, names[0], TrainingStopped)
            starts = [start(rank, rendezvous) for rank in range(len(actors))]
            facts = await all_started(starts, "trainer ranks", timeout_s=run.config.cluster.start_timeout_s)
    finally:
        if life:
            for name in names:
                startup.came_back(name)
    parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in facts[0]["load_parts_s"].items())
    logger.info("trainer ranks are processes %s; loaded: %s", ", ".join(str(one["pid"]) for one in facts), parts)
    return Ranks(actors, names, facts)


async def _warm_up(config: RunConfig, trainer: RayTrainerGroup) -> None:
    num_samples = config.algorithm.groups_per_step * config.algorithm.group_size
    longest = min(config.rollout.max_model_len, config.max_prompt_tokens + config.max_response_tokens)
    max_tokens = config.trainer.max_microbatch_tokens * config.trainer.cp_size
    lengths = full_microbatch(max_tokens, longest, num_samples)
    found = await trainer.warm_up(lengths, config.cluster.start_timeout_s)
    logger.info(
        "a microbatch of %d sequences of %d tokens was tried in %.1f s; %.1f GB on a GPU at most",
        len(lengths),
        lengths[0],
        max(one["seconds"] for one in found),
        max(one["peak_device_bytes"] for one in found) / 1e9,
    )


def _log_start(facts: Sequence[JsonObject]) -> None:
    """What the ranks chose and loaded, in one line; what they could not place, in another."""
    first = facts[0]
    chosen = first["backends"] | ({} if first["device"] == "cpu" else {"CUDA graphs": first["cuda_graphs"]})
    logger.info(
        "up: %s; %d parameters, %d of them trainable; kernels: %s",
        counted(len(facts), "trainer rank"),
        first["num_parameters"],
        first["num_trainable_parameters"],
        ", ".join(f"{part}: {backend}" for part, backend in chosen.items()),
    )
    if len(facts) > 1:
        logger.info(
            "dense weights are gathered %s: whole they take %.2f GB more of a rank's memory, gradients included",
            first["dense_weights"],
            first["whole_bytes"] / 1e9,
        )
    if first["mtp_tensors"]:
        logger.info("%d tensors of multi-token prediction layers are left out: not the policy's", first["mtp_tensors"])
    if first["unadapted_matrices"]:
        logger.info(
            "%d of the matrices that are trained have no factors in trainer.lora.init_from: their adapters start at "
            "zero",
            first["unadapted_matrices"],
        )
    ignored = first["ignored_tensors"]
    if ignored:
        logger.warning("%d tensors of the checkpoint have no place in the model: %s ...", len(ignored), ignored[:3])
