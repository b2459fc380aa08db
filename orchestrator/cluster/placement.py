"""Where the run's processes live: a Ray cluster, a placement group, a named Ray actor for each rank and each worker.

    Cluster -- RayCluster -- placement group -- TrainerActor "trainer-0", ...  each wraps a trainer.rank.TrainerRank
                                     |--------- RolloutActor "rollout-0", ...  each starts and watches the process of a
                          |                                                    rollout.worker.RolloutWorker
                          +-- on each node ---- ForkServerActor, which has imported vLLM: it forks these processes

Owns: who gets which bundle, the order of start and end, and the checks of nodes. Does not own: Ray's life
(ray_cluster.py), the start of ranks and workers (trainer_ranks.py, rollout_workers.py), what runs inside the actors
(actors.py), or how they are called (ray_handles.py).
Invariant: trainer and rollout never share a GPU, unless cluster.share_gpu says that all do. Engines share one only with
rollout.workers_per_gpu.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from ray.util.placement_group import PlacementGroup

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject
from slipstream.conf.plural import counted
from slipstream.conf.schema import Objective, RunConfig, SyncMode, TransportKind
from slipstream.fleet.waiting import together
from slipstream.orchestrator.cluster.nodes import (
    check_nodes,
    describe_nodes,
    most_gpus_of_a_node,
    node_after_node,
    nodes_of,
)
from slipstream.orchestrator.cluster.own_ray import OwnRay
from slipstream.orchestrator.cluster.ray_cluster import RayCluster, RunContext
from slipstream.orchestrator.cluster.ray_handles import RayRolloutWorker, RayTrainerGroup
from slipstream.orchestrator.cluster.rebirth import LivingRanks
from slipstream.orchestrator.cluster.rollout_workers import LivingWorkers, RolloutWorkers, Rooms, place_of
from slipstream.orchestrator.cluster.trainer_ranks import start_trainer_ranks
from slipstream.orchestrator.environment import RunDevice, resolve_device
from slipstream.orchestrator.errors import PlacementError
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.startup import RUN, Startup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Living:
    """What another controller has to know of a run's processes to go on with them; Ray's servers apart (own_ray.py)."""

    name: str
    """The run's, in Ray."""
    sync_key: bytes
    group: str
    """The run's own placement group."""
    bundles: Sequence[int]
    """The group's bundle in which each trainer rank stands."""
    only_node: str | None
    trainer: LivingRanks
    rollout: LivingWorkers


class Cluster:
    """All processes of one run but the controller and the rewards. Use as an async context manager.

    When a server of our own Ray cluster ends by itself, the task that entered is cancelled, and the exit raises
    ClusterLost, which says which one and why.

    Args:
        own_ray: the run's own Ray, which has begun to start; None: cluster.ray_address names another.
        left: what `living` was of a controller that was killed; used if own_ray holds its processes still.
        num_asked: rollout workers to start with, as far as there is room; None: as the options say.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        startup: Startup,
        own_ray: OwnRay | None,
        left: str | None = None,
        num_asked: int | None = None,
    ) -> None:
        self._config = config = _with_absolute_paths(config)  # processes elsewhere have another working directory
        self._folder = folder
        self._startup = startup
        self._own_ray = own_ray
        self._device: RunDevice = resolve_device(config.cluster.device)
        self._num_asked = num_asked
        self._has_workers = config.algorithm.objective is Objective.policy
        self._left: Living | None = None
        if left is not None and own_ray is not None and own_ray.is_taken_over:
            self._left = msgspec.json.decode(left, type=Living)
        self._sync_key = secrets.token_bytes(32) if self._left is None else self._left.sync_key
        """Authenticates the control messages of a publish; known to this run's processes alone."""
        self._ray: RayCluster | None = None
        self._trainer: RayTrainerGroup | None = None
        self._rollout: RolloutWorkers | None = None
        self._group: PlacementGroup | None = None
        self._bundles: Sequence[int] = ()
        self._only_node: str | None = None
        """The node of all processes; None: they are on several."""
        self._checked: set[str] = set()
        """Nodes that fit the run."""

    async def __aenter__(self) -> Cluster:
        run = asyncio.current_task()
        assert run is not None
        needs_gpus = self._device == "cuda"
        self._ray = RayCluster(
            self._config,
            self._folder,
            self._own_ray,
            needs_gpus=needs_gpus,
            on_lost=run.cancel,
            name=None if self._left is None else self._left.name,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._ray is not None
        lost = self._ray.lost
        await self.stop()
        if lost is not None:
            raise lost

    @property
    def trainer(self) -> RayTrainerGroup:
        """All trainer ranks; after `start`."""
        assert self._trainer is not None
        return self._trainer

    @property
    def workers(self) -> list[RayRolloutWorker | None]:
        """Rollout workers, in the places in which the publisher knows them; after `start`. None: it has gone."""
        workers = {} if self._rollout is None else self._rollout.workers
        num_places = max((place_of(name) for name in workers), default=-1) + 1
        return [workers.get(f"rollout-{place}") for place in range(num_places)]

    @property
    def living(self) -> str:
        """For a controller that comes after this one: JSON of Living. Runs with rollout workers have one."""
        assert self._ray is not None and self._group is not None and self._rollout is not None
        living = Living(
            self._ray.name,
            self._sync_key,
            self._ray.name_of(self._group),
            self._bundles,
            self._only_node,
            self.trainer.living,
            self._rollout.living,
        )
        return msgspec.json.encode(living).decode()

    async def start(self, hf_config: JsonObject) -> None:
        """Start Ray, then trainer ranks and engines at the same time, then join them by a transfer plan."""
        assert self._ray is not None
        config = self._config
        self._startup.enter(RUN, "Ray")
        await self._ray.start()
        if self.is_taken_over:
            await self._take_over(self._ray, hf_config)
            return
        self._startup.enter(RUN, "places in Ray")
        self._group = group = await self._place(self._ray)
        nodes = await self._ray.in_thread(lambda: nodes_of(group))
        # Machines that come must reach the run's first ones, which then do not listen on loopback.
        may_grow = config.rollout.follows_machines and self._has_workers and not self._ray.is_own
        is_one_node = len(set(nodes.values())) == 1 and not may_grow
        self._only_node = nodes[0] if is_one_node else None
        self._bundles = node_after_node({bundle: nodes[bundle] for bundle in range(config.trainer.num_ranks)})
        if not self._ray.is_own:
            logger.info("nodes of the run: %s", describe_nodes(self._held(nodes)))
        if not is_one_node and config.weight_sync.transport is TransportKind.nvlink:
            spread = "may come to several" if may_grow else f"is on {len(set(nodes.values()))}"
            raise ConfigError(
                f"weight_sync.transport=nvlink reaches the GPUs of one machine, and the run {spread}; set "
                "weight_sync.transport=rdma, or auto"
            )
        await self._check(*nodes.values())
        self._startup.enter(RUN, "trainer ranks and engines" if self._has_workers else "trainer ranks")
        run = self._context(self._ray, hf_config)
        trainer = self._start_trainer(run)
        if not self._has_workers:
            await trainer
            await self.trainer.outlive_ranks()
            return
        self._rollout = self._workers_of(run)
        num_workers = await self._make_room_at_start()
        await together(trainer, self._rollout.start(num_workers, self._held(nodes)["rollout"]))
        self._startup.enter(RUN, "the plan of transfers")
        is_adapter_mode = config.weight_sync.mode is SyncMode.adapter
        workers = list(self._rollout.workers.values())
        slots = [worker.endpoint for worker in workers] if is_adapter_mode else []
        endpoints = [worker.base_endpoint for worker in workers]
        await together(
            self.trainer.connect(endpoints, config.cluster.start_timeout_s, slots), self.trainer.outlive_ranks()
        )

    @property
    def is_taken_over(self) -> bool:
        """Whether a controller that was killed had started the processes."""
        return self._left is not None and self._own_ray is not None and self._own_ray.is_taken_over

    async def _take_over(self, ray: RayCluster, hf_config: JsonObject) -> None:
        """Find what the other controller left; nothing is started."""
        left = self._left
        assert left is not None
        self._startup.enter(RUN, "the living ranks and engines")
        self._group = await ray.find_group(left.group)
        self._only_node, self._bundles = left.only_node, left.bundles
        run = self._context(ray, hf_config)
        self._rollout = self._workers_of(run)
        await together(self._start_trainer(run, left.trainer), self._rollout.take_over(left.rollout))

    async def restart_worker(self, name: str) -> RayRolloutWorker:
        """End what is left of a rollout worker and start it again in the same bundle, without the weights it had.

        Its links are closed before the engine starts: it looks for free device memory, and what the trainer still maps
        of the dead one's is not free. That waits for the trainer's step under way, and the new process imports vLLM
        beside it. One that was not there before is started alone.
        """
        assert self._rollout is not None
        if name not in self._rollout.workers:
            return await self._rollout.restart(name, None)
        await asyncio.to_thread(self._rollout.workers[name].kill)
        closing = asyncio.ensure_future(self._close_links_to(place_of(name)))
        try:
            return await self._rollout.restart(name, closing)
        finally:
            closing.cancel()

    @property
    def rooms(self) -> Rooms:
        """Where further workers may be placed; after `start`. A run on one machine keeps them there, because its
        processes listen on loopback."""
        assert self._rollout is not None
        return self._rollout.rooms

    async def _make_room_at_start(self) -> int:
        """For workers beyond those of the run's placement group, as far as there is room. Returns how many start."""
        least, most = self._config.rollout.bounds
        wanted = most if self._num_asked is None else self._num_asked
        if wanted <= least:
            return wanted
        room = await self.rooms.look()
        free = [node for node, number in room.free.items() for _ in range(min(number, wanted))][: wanted - least]
        try:
            await self.rooms.make({f"rollout-{least + index}": node for index, node in enumerate(free)})
        except PlacementError as error:  # what Ray says to be free may be some moments old
            logger.info("%s", error)
            free = []
        if (num_workers := least + len(free)) < wanted:
            logger.info("there is room for %d of %s", num_workers, counted(wanted, "rollout worker"))
        return num_workers

    async def end_worker(self, name: str) -> None:
        """End a worker for good: nobody calls it any more. Its memory is free once the trainer has closed its links."""
        assert self._rollout is not None
        try:
            await self._close_links_to(place_of(name))
        finally:
            await self._rollout.end(name)

    async def _close_links_to(self, place: int) -> float:
        """Returns when the trainer's ranks had closed theirs, in seconds since 1970."""
        await self.trainer.disconnect([place])
        return time.time()

    async def stop(self) -> None:
        """End every process of the run: politely first, then for certain. Never raises; what went wrong is logged."""
        if self._ray is None:
            return
        if self._ray.lost is None:
            told = [f"{who} {how}" for who, how in self._ray.dead.items()]
            problems = await asyncio.gather(self._stop_trainer(), self._stop_workers(), return_exceptions=True)
            for problem in problems:
                if problem is not None and str(problem) not in told:
                    logger.warning("while stopping: %s", problem)
        self._trainer = self._rollout = None
        await self._ray.stop()
        self._ray = None

    async def _stop_trainer(self) -> None:
        if self._trainer is not None:
            await self._trainer.shutdown()

    async def _stop_workers(self) -> None:
        for problem in [] if self._rollout is None else await self._rollout.stop():
            logger.warning("while stopping: %s", problem)

    def _context(self, cluster: RayCluster, hf_config: JsonObject) -> RunContext:
        is_one_node = self._only_node is not None
        return RunContext(self._config, cluster, self._device, hf_config, self._sync_key, is_one_node, self._startup)

    def _workers_of(self, run: RunContext) -> RolloutWorkers:
        assert self._group is not None
        rooms = Rooms(self._config, run.cluster, self._group, self._only_node)
        return RolloutWorkers(run, self._folder.model, rooms, self._check)

    async def _start_trainer(self, run: RunContext, left: LivingRanks | None = None) -> None:
        self._trainer = await start_trainer_ranks(run, self._bundles, left)

    async def _place(self, cluster: RayCluster) -> PlacementGroup:
        """Reserve a bundle for each trainer rank, then one for each rollout worker. Raises ConfigError: no machine can
        hold an engine. Raises PlacementError: there is no room."""
        num_ranks, rollout = self._config.trainer.num_ranks, self._config.rollout
        num_workers = rollout.least_workers if self._has_workers else 0
        needs_gpus = self._device == "cuda"
        if needs_gpus and num_workers:
            most = await cluster.in_thread(most_gpus_of_a_node)
            if rollout.tp_size > most:
                raise ConfigError(
                    f"rollout.tp_size={rollout.tp_size}: an engine must fit one machine, and the largest of the Ray "
                    f"cluster has {most} GPUs; lower it to that"
                )
        gpus = [self._config.gpus_of_rank] * num_ranks + [self._config.gpus_of_worker] * num_workers
        what = f"{num_ranks} trainer ranks and {num_workers} engines" + (
            f", {math.ceil(sum(gpus))} GPUs" if needs_gpus else ""
        )
        return await cluster.place(gpus, what)

    def _held(self, nodes: dict[int, str]) -> dict[str, list[str]]:
        """Kind of process -> the node of each."""
        num_ranks = self._config.trainer.num_ranks
        return {
            "trainer": [node for bundle, node in nodes.items() if bundle < num_ranks],
            "rollout": [node for bundle, node in nodes.items() if bundle >= num_ranks],
        }

    async def _check(self, *nodes: str) -> None:
        """Check nodes that are not checked yet (nodes.check_nodes). Our own cluster is this machine."""
        assert self._ray is not None
        model = None if self._config.model.path is None else Path(self._config.model.path)
        new = set(nodes) - self._checked
        if not self._ray.is_own and new:
            await asyncio.to_thread(check_nodes, new, self._folder.root, model)
            self._checked |= new


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """For processes that run in another folder; without an adapter that nobody needs, and that may be gone."""
    model, lora = config.model, config.trainer.lora
    if model.path is not None:
        config = replace(config, model=replace(model, path=str(Path(model.path).absolute())))
    if lora.init_from is not None:
        init_from = str(Path(lora.init_from).absolute()) if config.reads_initial_adapter else None
        config = replace(config, trainer=replace(config.trainer, lora=replace(lora, init_from=init_from)))
    return config
