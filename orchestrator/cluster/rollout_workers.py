# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Ray has types for a part of what it offers.
"""Starts the rollout workers of a run, each in its bundle of the placement group, and starts one again that was lost.

Owns: what workers are built from, their names and bundles; where in Ray there is room for further ones, and a placement
group for each, which is given back with it: a group can neither grow nor shrink. Does not own: the run's own group,
which has the room of the first workers until the run's end; Ray (ray_cluster.py), a worker's process (actors.py), how
one is called (rollout/worker_verbs.py), when one is started again or room made (fleet/supervisor.py, scaling.py).
Invariant: vLLM is imported by processes that the actors start, never here.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup

from slipstream.conf.architecture.families import read_config
from slipstream.conf.checks.model import packing_of
from slipstream.conf.errors import SlipstreamError
from slipstream.conf.failures import undone_by
from slipstream.conf.json_files import JsonObject
from slipstream.conf.plural import counted
from slipstream.conf.schema import Device, RemoteMerge, RunConfig, SyncMode
from slipstream.fleet.scaling import Room
from slipstream.fleet.waiting import all_started
from slipstream.orchestrator.cluster.actors import ForkServerActor, RolloutActor
from slipstream.orchestrator.cluster.nodes import RAY_NODES, nodes_of
from slipstream.orchestrator.cluster.ray_cluster import CPU_TICKETS, RayCluster, RunContext, kill_actor
from slipstream.orchestrator.cluster.ray_handles import LivingWorker, RayRolloutWorker
from slipstream.orchestrator.errors import OrchestratorError
from slipstream.orchestrator.inputs.model_folder import engine_checkpoint, routing_shape
from slipstream.rollout.engine.start_log import IMPORTING
from slipstream.rollout.types import AdapterSlotsSpec, WorkerOptions
from slipstream.rollout.worker_verbs import WorkerClient
from slipstream.trainer.weights.adapter_names import adapter_tensors, target_modules
from slipstream.weight_sync.merging.factors import OwnMergeSpec

logger = logging.getLogger(__name__)

_CONCURRENT_CALLS = 100
"""How many calls to a worker's actor go on at once: one of each controller that the run had waits for its end."""
_ASK_EVERY_S = 0.5
"""Pause between two questions to a worker that starts: how exact its phases are."""
ROOM_TIMEOUT_S = 20.0
"""Longest wait for the room of further workers. A cluster that grows for them takes minutes: one asks again then."""
_NODE_TICKET = 0.001
"""How much of the one resource that Ray has for each node's name: enough to be placed there."""


class Rooms:
    """Where in Ray there is room for workers. Those that the run began with are in its own placement `group`, each
    further one has a group of its own. `only_node`: where all workers must be; None: anywhere."""

    def __init__(self, config: RunConfig, cluster: RayCluster, group: PlacementGroup, only_node: str | None) -> None:
        self._config = config
        self._cluster = cluster
        self._group = group
        self._only_node = only_node
        self._made: dict[str, PlacementGroup] = {}

    def of(self, name: str) -> PlacementGroup | None:
        """The placement group that a further worker has alone; None: it is in the run's."""
        return self._made.get(name)

    @property
    def living(self) -> dict[str, str]:
        return {name: self._cluster.name_of(room) for name, room in self._made.items()}

    async def take_over(self, left: Mapping[str, str]) -> None:
        for name, room in left.items():
            self._made[name] = await self._cluster.find_group(room)

    async def make(self, where: Mapping[str, str | None]) -> None:
        """Reserve what workers need, all or none. `where`: worker -> Ray's id of its node. None: where Ray finds room;
        those of the run's group have theirs. Raises PlacementError: there is no room for all of them."""
        wanted = {name: node for name, node in where.items() if name not in self._made or node is not None}
        made: dict[str, PlacementGroup] = {}
        what = counted(len(where), "further rollout worker")
        async with contextlib.AsyncExitStack() as failed:
            for name, node in wanted.items():
                if node is None and place_of(name) < self._config.rollout.least_workers:
                    continue
                gpus, timeout_s = [self._config.gpus_of_worker], ROOM_TIMEOUT_S / len(where)
                on = await self._on(node or self._only_node)
                made[name] = await self._cluster.place(gpus, what, on=on, timeout_s=timeout_s)
                failed.push_async_callback(self._cluster.give_back, made[name])
            failed.pop_all()
        for name in made.keys() & self._made.keys():
            await self.give_back(name)
        self._made |= made

    async def give_back(self, name: str) -> None:
        """Reserve a worker's own room no more, if it has one."""
        if (room := self._made.pop(name, None)) is not None:
            await self._cluster.give_back(room)

    async def look(self) -> Room:
        return await self._cluster.in_thread(self._seen)

    async def _on(self, node: str | None) -> dict[str, float] | None:
        if node is None or self._cluster.is_own:
            return None
        return {f"node:{await self._cluster.in_thread(lambda: RAY_NODES.name(node))}": _NODE_TICKET}

    def _seen(self) -> Room:
        alive = {one["NodeID"] for one in ray.nodes() if one["Alive"]}
        found = available_resources_per_node()
        usable = alive if self._only_node is None else alive & {self._only_node}
        free = {node: self._fits(found.get(node, {})) for node in usable}
        reserved = {name: nodes_of(room)[0] for name, room in self._made.items()}
        num_ranks = self._config.trainer.num_ranks
        for bundle, node in nodes_of(self._group).items():
            if bundle >= num_ranks:
                reserved.setdefault(f"rollout-{bundle - num_ranks}", node)
        workers = Counter(reserved.values())
        emptiest_first = sorted(free, key=workers.__getitem__)
        return Room(
            {node: free[node] for node in emptiest_first},
            {name: node for name, node in reserved.items() if node in alive},
        )

    def _fits(self, free: Mapping[str, float]) -> int:
        """How many workers a node has room for."""
        needs = {"CPU": CPU_TICKETS} | ({"GPU": self._config.gpus_of_worker} if self._cluster.needs_gpus else {})
        return min(int(free.get(what, 0.0) / number + 1e-6) for what, number in needs.items())


def place_of(name: str) -> int:
    """A worker's place in the publisher's lists, from its first name."""
    return int(name.rpartition("-")[2])


@dataclass(frozen=True, slots=True)
class LivingWorkers:
    """What another controller has to know of the workers to go on with them."""

    workers: dict[str, LivingWorker]
    """By the name that each had first."""
    num_starts: dict[str, int]
    rooms: dict[str, str]
    """Names of the placement groups of further ones."""


class RolloutWorkers:
    """The rollout workers of a run. `check_node`: raises where a node, given by Ray's id, does not fit the run."""

    def __init__(
        self, run: RunContext, model_folder: Path, rooms: Rooms, check_node: Callable[[str], Awaitable[None]]
    ) -> None:
        config = run.config
        self.workers: dict[str, RayRolloutWorker] = {}
        """By the name that each had first, without those that have gone; after `start`."""
        self.rooms = rooms
        self._config, self._cluster, self._startup = config, run.cluster, run.startup
        self._is_one_node = run.is_one_node
        self._check_node = check_node
        self._num_starts: Counter[str] = Counter()
        self._forks: dict[str, asyncio.Future[type[ForkServerActor]]] = {}
        """The fork server of each node."""
        options = worker_options(config, run.hf_config, model_folder, Device(run.device), run.sync_key)
        self._options = replace(options, num_versions_kept=config.num_versions_kept)

    async def start(self, num_workers: int, nodes: Iterable[str]) -> None:
        """Start so many, which have their room, and their engines. `num_workers`: those in the first places. `nodes`:
        Ray's ids of those that they will be on: their fork servers start at the same time."""
        for node in set(nodes):
            self._forks_on(node)
        names = [f"rollout-{index}" for index in range(num_workers)]
        self._startup.expect("engines", names)
        self._num_starts.update(names)
        starts = [self._start(index, name, room=self.rooms.of(name)) for index, name in enumerate(names)]
        timeout_s = self._config.cluster.start_timeout_s
        started = await all_started(starts, "rollout workers", timeout_s=timeout_s)
        self.workers = dict(zip(names, started, strict=True))
        num_seqs = self._options.config.max_num_seqs
        workers = counted(len(self.workers), "rollout worker")
        logger.info("up: %s; an engine takes up to %d requests at once", workers, num_seqs)

    @property
    def living(self) -> LivingWorkers:
        living = {name: worker.living for name, worker in self.workers.items()}
        return LivingWorkers(living, dict(self._num_starts), self.rooms.living)

    async def take_over(self, left: LivingWorkers) -> None:
        """Go on with the workers of a controller that was killed. A call to one that has died raises."""
        self._num_starts.update(left.num_starts)
        await self.rooms.take_over(left.rooms)
        for first_name, one in left.workers.items():
            actor = await self._cluster.find_actor(RolloutActor, one.name)
            ended = asyncio.ensure_future(self._ended(actor, one.name))
            connection = WorkerClient.at(one.address, self._options.key, ended).connection
            worker = RayRolloutWorker(actor, connection, one, {})  # pyright: ignore[reportAbstractUsage]
            self.workers[first_name] = worker

    async def _ended(self, actor: type[RolloutActor] | None, name: str) -> None:
        """Raise how a worker has ended, once it has."""
        if actor is None:
            raise OrchestratorError(f"{name} {self._cluster.dead[name]}")
        await self._cluster.result_of(actor.ended.remote(), name, OrchestratorError)

    async def end(self, name: str) -> None:
        """End a worker for good, politely first. Its room is given back if it was asked for while the run went on; that
        of the others is the run's until its end."""
        worker = self.workers.pop(name, None)
        try:
            if worker is not None:
                await worker.end()
        finally:
            if worker is not None:
                await asyncio.to_thread(worker.kill)
            await self.rooms.give_back(name)

    async def restart(self, first_name: str, until_free: Awaitable[float] | None) -> RayRolloutWorker:
        """Start a worker in its bundle, without the weights it may have had. What was left of it has ended.
        `until_free`: done, and returns the time, when nobody maps memory of the dead worker any more. The new process
        imports vLLM meanwhile. None: there was none."""
        num_before = self._num_starts[first_name]
        self._num_starts[first_name] += 1
        name = f"{first_name}.{num_before}" if num_before else first_name  # Ray frees a dead actor's name late
        timeout_s = self._config.cluster.start_timeout_s
        self._startup.enter(name, "waiting for a process")
        start = self._start(place_of(first_name), name, until_free, self.rooms.of(first_name))
        try:
            (self.workers[first_name],) = await all_started([start], name, timeout_s=timeout_s)
        finally:
            self._startup.came_back(name)
        return self.workers[first_name]

    async def stop(self) -> list[BaseException]:
        """End all engines politely. Returns what went wrong."""
        ends = await asyncio.gather(*(worker.end() for worker in self.workers.values()), return_exceptions=True)
        return [end for end in ends if end is not None]

    async def _start(
        self, index: int, name: str, until_free: Awaitable[float] | None = None, room: PlacementGroup | None = None
    ) -> RayRolloutWorker:
        config, cluster = self._config, self._cluster
        bundle = config.trainer.num_ranks + index if room is None else 0
        gpus = config.gpus_of_worker
        actor = await cluster.new_actor(
            RolloutActor, name, bundle, num_gpus=gpus, max_concurrency=_CONCURRENT_CALLS, group=room
        )
        seed = config.run.seed * 1000 + index  # workers sample apart from each other, and runs of different seeds too
        worker: WorkerClient | None = None

        def end(_: BaseException) -> None:  # a deadline cancels this: the bundle must be free for the next attempt
            kill_actor(actor)  # its engine's processes end with it
            if worker is not None:
                worker.connection.close()

        with undone_by(end):
            node = await cluster.result_of(actor.node.remote(), name, OrchestratorError)
            started_at = {"process_up": time.time()}
            self._startup.enter(name, IMPORTING)
            await self._check_node(node)  # one that takes the place of a lost node is new
            launch = actor.launch.remote(self._options, seed, self._is_one_node, await self._forks_on(node))
            address = await cluster.result_of(launch, name, OrchestratorError)
            ended = asyncio.ensure_future(self._ended(actor, name))
            worker = WorkerClient.at(address, self._options.key, ended)
            async with self._watched(worker, name):
                await worker.prepare()
            if until_free is not None:
                self._startup.enter(name, "waiting until nobody maps the dead one's memory")
                started_at["freed"] = await until_free
            async with self._watched(worker, name):
                endpoint = base_endpoint = await worker.start()
            if config.weight_sync.mode is SyncMode.adapter:
                endpoint = await worker.adapter_endpoint()
            status = await worker.start_status()
            processes = await cluster.result_of(actor.processes.remote(status.pids), name, OrchestratorError)
        self._startup.ready(name)
        worker_pid, engine_pid = status.pids[:2]
        logger.info("%s is process %d at %s; its engine is process %d", name, worker_pid, endpoint, engine_pid)
        return RayRolloutWorker(  # pyright: ignore[reportAbstractUsage] - its base is filled in
            actor,
            worker.connection,
            LivingWorker(name, address, endpoint, base_endpoint, processes, node),
            started_at | status.reached,
        )

    def _forks_on(self, node: str) -> asyncio.Future[type[ForkServerActor]]:
        """The actor that holds a node's fork server. Ray starts it again if it dies."""
        if node not in self._forks:
            name = f"fork server of {node[:8]}"
            self._forks[node] = asyncio.ensure_future(self._cluster.new_actor_of_node(ForkServerActor, name, node))
        return self._forks[node]

    @contextlib.asynccontextmanager
    async def _watched(self, worker: WorkerClient, name: str) -> AsyncGenerator[None]:
        """While the block runs, ask a worker what it is doing. That it died is told by the calls in the block."""

        async def watch() -> None:
            with contextlib.suppress(SlipstreamError):
                while True:
                    self._startup.enter(name, (await worker.start_status()).phase)
                    await asyncio.sleep(_ASK_EVERY_S)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()


def worker_options(
    config: RunConfig, hf_config: JsonObject, model_folder: Path, device: Device, sync_key: bytes
) -> WorkerOptions:
    """What every worker of a run is built from. `model_folder`: config and tokenizer, without weights."""
    return WorkerOptions(
        folder=model_folder,
        config=replace(config.rollout, max_num_seqs=config.engine_num_seqs),
        weight_sync=config.weight_sync,
        dtype=config.model.dtype,
        device=device,
        tensors=engine_checkpoint(hf_config, config.model.dtype),
        key=sync_key,
        adapters=adapter_slots(config, hf_config),
        own_merge=own_merge(config, hf_config),
        routing=routing_shape(config, hf_config),
        keep_special_tokens=config.reward.keep_special_tokens,
        batch_invariant=config.is_bitwise,
    )


def own_merge(config: RunConfig, hf_config: JsonObject) -> OwnMergeSpec | None:
    """What engines merge for themselves; None where the trainer merges."""
    sync = config.weight_sync
    if sync.remote_merge is RemoteMerge.none:
        return None
    from slipstream.trainer.weights.factors import planned_merges  # needs torch

    spec = read_config(hf_config, config.trainer.numerics.places.mla_norm_eps)
    merges = planned_merges(spec, config.model.dtype.value, config.trainer, config.rounding_seed)
    return OwnMergeSpec(config.model.path or "", sync.remote_merge is RemoteMerge.gpu, merges)


def adapter_slots(config: RunConfig, hf_config: JsonObject) -> AdapterSlotsSpec | None:
    """The slots that engines need in adapter mode; None when adapters are merged."""
    if config.weight_sync.mode is SyncMode.merged:
        return None
    lora = config.trainer.lora
    # Factors are in the engine's dtype, whatever the matrices beside them are quantized to.
    tensors = read_config(hf_config).unpacked().checkpoint_tensors(config.model.dtype.value)
    return AdapterSlotsSpec(
        num_slots=config.num_adapter_slots,
        rank=lora.slot_rank,
        target_modules=tuple(target_modules(tensors, lora)),
        tensors=tuple(adapter_tensors(tensors, lora)),
        base=Path(config.model.path or "") if packing_of(hf_config) is not None else None,
    )
