"""Where the run's processes live: a Ray cluster, a placement group, a named Ray actor for each rank and each worker.

    Cluster -- placement group --- TrainerActor "trainer-0", ...   each wraps one trainer.rank.TrainerRank
                         |-------- RolloutActor "rollout-0", ...   each wraps one rollout.worker.RolloutWorker

Owns: Ray's start and end, resources (trainer and rollout never share a GPU), the rendezvous address, and that no
process outlives the run. Does not own: what runs inside the actors (actors.py), or how they are called
(ray_handles.py). Invariants: torch and vLLM are imported by the actors, never here; `Cluster.stop` ends every
process it started, also after an error or an interrupt.

A controller that is killed (SIGKILL, out of memory) stops nothing, and yet all ends: the kernel ends Ray's servers with
their parent, actors end when their raylet is gone, engines and rewards with their owner (rollout.lifeline), all within
seconds. Two of Ray's own agents follow after about a minute. What stays is Ray's folder in /tmp (slipstream-*), and, of
workers that were killed in adapter mode, an empty folder of sockets (slipstream-slots-*).

Ray's CPUs are tickets, not cores: a trainer rank and an engine ask for 1/100 each, so that the four processes of the
quick start fit on two cores. GPUs are whole: one per trainer rank, `rollout.tp_size` per rollout worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from conf.checks import packing_of
from conf.errors import ConfigError
from conf.schema import Device, Objective, RunConfig, SyncMode, TrainMode, TransportKind
from orchestrator.cluster.actors import RolloutActor, TrainerActor
from orchestrator.cluster.nodes import check_nodes, describe_nodes, most_gpus_of_a_node, node_after_node, nodes_of
from orchestrator.cluster.ray_handles import STOP_TIMEOUT_S, RayRolloutWorker, RayTrainerGroup, result_of
from orchestrator.environment import resolve_device, variables_for_actors
from orchestrator.errors import OrchestratorError, PlacementError, TrainingStopped
from orchestrator.files.run_folder import RunFolder
from orchestrator.inputs.model_folder import engine_checkpoint
from orchestrator.waiting import together, wait_for
from rollout.types import AdapterSlotsSpec
from trainer.architecture.families import read_config
from trainer.step.warm_up import full_microbatch
from trainer.weights.adapter_names import adapter_tensors, target_modules

logger = logging.getLogger(__name__)

_CPU_TICKETS = 0.01
_PLACE_TIMEOUT_S = 120.0


class Cluster:
    """The Ray cluster of one run: its own, or an attached one. Use as an async context manager.

    Args:
        config: the run's options.
        folder: where Ray's logs end up.
    """

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        self._config = config = _with_absolute_paths(config)  # processes elsewhere have another working directory
        self._folder = folder
        self._is_own = config.cluster.ray_address is None
        self._device = resolve_device(config.cluster.device)
        self._needs_gpus = self._device == "cuda"
        self._sync_key = secrets.token_bytes(32)
        """Authenticates the control messages of a publish; known to this run's processes alone."""
        self._actors: list[Any] = []
        self._group: PlacementGroup | None = None
        """A bundle for each trainer rank, then one for each rollout worker: one group, which Ray packs as a whole."""
        self._trainer: RayTrainerGroup | None = None
        self._workers: list[RayRolloutWorker] = []
        self._checked: set[str] = set()
        """Nodes that fit the run."""
        self._is_one_node = True
        """Whether all processes share one machine, hence loopback."""
        self._worker_options: dict[str, Any] = {}
        self._num_restarts: Counter[int] = Counter()
        self._temporary: Path | None = None
        self._starting: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def trainer(self) -> RayTrainerGroup:
        """All trainer ranks; after `start`."""
        assert self._trainer is not None
        return self._trainer

    @property
    def workers(self) -> list[RayRolloutWorker]:
        """Rollout workers, in the order in which the publisher knows them; after `start`."""
        return self._workers

    async def start(self, hf_config: dict[str, Any]) -> None:
        """Start Ray, then trainer ranks and engines at the same time, then join them by a transfer plan."""
        self._starting = asyncio.ensure_future(asyncio.to_thread(self._init_ray))
        await wait_for(asyncio.shield(self._starting), "Ray to start", timeout_s=_PLACE_TIMEOUT_S)
        _take_sigterm_back()
        trainer_bundles = await self._place()
        if self._config.algorithm.objective is Objective.sft:
            await self._start_trainer(hf_config, trainer_bundles)
            return
        await together(self._start_trainer(hf_config, trainer_bundles), self._start_workers(hf_config))
        slots: list[str] = []
        if self._config.weight_sync.mode is SyncMode.adapter:
            slots = [worker.endpoint for worker in self._workers]
        endpoints = [worker.base_endpoint for worker in self._workers]
        await self.trainer.connect(endpoints, self._config.cluster.start_timeout_s, slots)

    async def _start_trainer(self, hf_config: dict[str, Any], bundles: Sequence[int]) -> None:
        """Start the trainer ranks, each in its bundle, and load the model on them."""
        config = self._config
        num_ranks = config.trainer.num_ranks
        names = [f"trainer-{rank}" for rank in range(num_ranks)]
        actors = [
            self._actor(TrainerActor, name, bundle, num_gpus=1) for name, bundle in zip(names, bundles, strict=True)
        ]
        picked = actors[0].pick_rendezvous.remote(self._is_one_node)
        rendezvous: str = await result_of(picked, names[0], TrainingStopped)
        shared = {
            "model": config.model,
            "trainer": config.trainer,
            "algorithm": config.algorithm,
            "sampling_temperature": config.rollout.sampling.temperature,
            "weight_sync": config.weight_sync,
            "seed": config.run.seed,
            "num_steps": config.run.num_steps,
            "world_size": num_ranks,
            "rendezvous": rendezvous,
            "device": self._device,
            "hf_config": hf_config,
            "sync_key": self._sync_key,
        }
        starts = [
            result_of(
                actor.start.remote({**shared, "rank": rank}, self._is_one_node), f"trainer rank {rank}", TrainingStopped
            )
            for rank, actor in enumerate(actors)
        ]
        facts = await self._await_start(starts, "trainer ranks")
        _log_trainer(facts)
        self._trainer = RayTrainerGroup(actors, is_lora=config.trainer.mode is TrainMode.lora)
        if self._needs_gpus and config.algorithm.objective is not Objective.sft:  # engines start meanwhile
            await self._warm_up(self._trainer)

    async def _warm_up(self, trainer: RayTrainerGroup) -> None:
        """Have a full microbatch tried."""
        config = self._config
        num_samples = config.algorithm.groups_per_step * config.algorithm.group_size
        longest = min(config.rollout.max_model_len, config.data.max_prompt_tokens + config.rollout.sampling.max_tokens)
        lengths = full_microbatch(config.trainer.max_microbatch_tokens, longest, num_samples)
        found = await trainer.warm_up(lengths, config.cluster.start_timeout_s)
        logger.info(
            "a microbatch of %d sequences of %d tokens was tried in %.1f s; %.1f GB on a GPU at most",
            len(lengths),
            lengths[0],
            max(one["seconds"] for one in found),
            max(one["peak_device_bytes"] for one in found) / 1e9,
        )

    async def _start_workers(self, hf_config: dict[str, Any]) -> None:
        """Start the rollout workers and their engines."""
        rollout = self._config.rollout
        dtype = self._config.model.dtype
        tensors = engine_checkpoint(hf_config, dtype)
        self._worker_options = {
            "folder": self._folder.model,
            "config": rollout,
            "weight_sync": self._config.weight_sync,
            "dtype": dtype,
            "device": Device(self._device),
            "tensors": tensors,
            "key": self._sync_key,
            "adapters": adapter_slots(self._config, hf_config),
            "keep_special_tokens": self._config.reward.keep_special_tokens,
        }
        starts = [self._start_worker(index, f"rollout-{index}") for index in range(rollout.num_workers)]
        self._workers = await self._await_start(starts, "rollout workers")
        logger.info("%d rollout workers are up", len(self._workers))

    async def _start_worker(self, index: int, name: str) -> RayRolloutWorker:
        """One rollout worker, in its bundle."""
        rollout = self._config.rollout
        concurrency = rollout.max_concurrent_groups + 16  # groups, and calls beside them
        bundle = self._config.trainer.num_ranks + index
        actor = self._actor(RolloutActor, name, bundle, num_gpus=rollout.tp_size, max_concurrency=concurrency)
        # Workers sample apart from each other, and runs of different seeds too.
        seed = self._config.run.seed * 1000 + index
        try:
            node: str = await result_of(actor.node.remote(), name, OrchestratorError)
            await self._check({node})  # one that takes the place of a lost node is new
            start = actor.start.remote({**self._worker_options, "seed": seed}, self._is_one_node)
            endpoint = base_endpoint = await result_of(start, name, OrchestratorError)
            if self._config.weight_sync.mode is SyncMode.adapter:
                endpoint = await result_of(actor.call.remote("adapter_endpoint"), name, OrchestratorError)
            processes = await result_of(actor.processes.remote(), name, OrchestratorError)
            logger.info("%s is process %d at %s", name, processes[0].pid, endpoint)
            return RayRolloutWorker(name, actor, endpoint, base_endpoint, processes, node)
        except BaseException:  # a deadline cancels this: the bundle must be free for the next attempt
            ray.kill(actor)  # its engine's processes end with it
            raise

    async def restart_worker(self, index: int) -> RayRolloutWorker:
        """End what is left of a rollout worker and start it again in the same bundle, without the weights it had.

        Its links are closed before: an engine that starts looks for free device memory, and what the trainer still
        maps of the dead one's is not free.
        """
        dead = self._workers[index]
        await asyncio.to_thread(dead.kill)
        await self.trainer.disconnect([index])
        self._num_restarts[index] += 1
        name = f"rollout-{index}.{self._num_restarts[index]}"  # Ray frees a dead actor's name late
        (worker,) = await self._await_start([self._start_worker(index, name)], name)
        self._workers[index] = worker
        return worker

    async def stop(self) -> None:
        """End every process of the run: politely first, then for certain. Never raises; what went wrong is logged."""
        if self._starting is not None and not self._starting.done():
            # A thread cannot be cancelled, and Ray that is stopped while it starts takes half a minute to notice.
            for started in (await asyncio.wait({self._starting}, timeout=STOP_TIMEOUT_S))[0]:
                if error := started.exception():
                    logger.warning("while stopping: Ray did not start: %s", error)
        # Listed first: an engine process whose parent has died is no longer found as a descendant.
        processes = _processes_under(self._temporary) if self._temporary is not None else []
        polite: list[Awaitable[None]] = [worker.stop() for worker in self._workers]
        if self._trainer is not None:
            polite.append(self._trainer.shutdown())
        for problem in await asyncio.gather(*polite, return_exceptions=True):
            if isinstance(problem, BaseException):
                logger.warning("while stopping: %s", problem)
        self._trainer, self._workers = None, []
        await asyncio.to_thread(self._stop_ray)
        await asyncio.to_thread(_end_processes, processes)
        self._keep_logs()

    def _init_ray(self) -> None:
        """Start our own cluster on loopback, or attach to the given one."""
        cluster = self._config.cluster
        common: dict[str, Any] = {
            "namespace": self._folder.run_id,
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        if not self._is_own:
            variables = variables_for_actors(self._config)
            try:
                ray.init(address=cluster.ray_address, runtime_env={"env_vars": variables}, **common)
            except Exception as error:  # the edge to Ray: its class depends on what answers there
                raise ConfigError(
                    f"cluster.ray_address={cluster.ray_address} is no Ray cluster that can be joined "
                    f"({type(error).__name__}: {error}); give the address that `ray start` printed, of the same Ray "
                    "version, or let the run start its own cluster: cluster=local"
                ) from error
            if not self._needs_gpus and (num_gpus := ray.cluster_resources().get("GPU", 0)):
                logger.warning(
                    "the Ray cluster has %d GPUs, unused: cluster.device=cpu, or auto without one here", num_gpus
                )
            return
        # Ray's sockets live under its temporary folder, and a socket's path may have 107 characters at most: a run
        # folder is too deep for that. Its logs move to the run folder at the end.
        self._temporary = Path(tempfile.mkdtemp(prefix="slipstream-"))
        ray.init(
            address="local",
            include_dashboard=cluster.dashboard,
            dashboard_host="127.0.0.1",
            # Ray looks at the port even without a dashboard: None lets it look elsewhere when that one is taken.
            dashboard_port=cluster.dashboard_port if cluster.dashboard else None,
            object_store_memory=cluster.object_store_bytes,
            _temp_dir=str(self._temporary),
            **common,
        )
        if cluster.dashboard:
            logger.info("Ray dashboard: http://127.0.0.1:%d", cluster.dashboard_port)

    def _stop_ray(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(Exception):  # teardown: the cluster may be gone already, and its groups with it
                ray.util.remove_placement_group(self._group)
        self._actors, self._group = [], None
        ray.shutdown()

    def _keep_logs(self) -> None:
        """Move the logs of our own cluster into the run folder."""
        if self._temporary is None:
            return
        self._folder.ray_logs.mkdir(exist_ok=True)
        for log in self._temporary.glob("session_*/logs/*"):
            if log.is_file() and not log.parent.parent.is_symlink() and log.stat().st_size:
                shutil.copyfile(log, self._folder.ray_logs / log.name)
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary = None

    async def _place(self) -> list[int]:
        """Reserve a bundle for every process, and look at the nodes that Ray took. Returns the trainer ranks' bundles.

        Raises:
            ConfigError: No machine can hold an engine, a node does not fit the run, or NVLink was asked for between
                several.
            PlacementError: There is no room.
        """
        config = self._config
        num_ranks, rollout = config.trainer.num_ranks, config.rollout
        num_workers = 0 if config.algorithm.objective is Objective.sft else rollout.num_workers
        if self._needs_gpus and num_workers and rollout.tp_size > (most := most_gpus_of_a_node()):
            raise ConfigError(
                f"rollout.tp_size={rollout.tp_size}: an engine must fit one machine, and the largest of the Ray "
                f"cluster has {most} GPUs; lower it to that"
            )
        gpus = [1] * num_ranks + [rollout.tp_size] * num_workers
        bundles = [{"CPU": _CPU_TICKETS} | ({"GPU": float(num)} if self._needs_gpus else {}) for num in gpus]
        self._group = placement_group(bundles, strategy="PACK", name=self._folder.run_id)
        what = f"{num_ranks} trainer ranks and {num_workers} engines" + (
            f", {sum(gpus)} GPUs" if self._needs_gpus else ""
        )
        ready = result_of(self._group.ready(), "the placement group", PlacementError)
        try:
            await wait_for(ready, f"room for {what}", timeout_s=_PLACE_TIMEOUT_S)
        except TimeoutError as error:
            free = {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU")}
            raise PlacementError(
                f"the Ray cluster cannot hold {what}; it has {free} free, and an engine's must be of one machine"
            ) from error
        nodes = nodes_of(self._group)
        of_trainer = {bundle: node for bundle, node in nodes.items() if bundle < num_ranks}
        self._is_one_node = len(set(nodes.values())) == 1
        if not self._is_own:
            held = {
                "trainer": list(of_trainer.values()),
                "rollout": [nodes[b] for b in nodes.keys() - of_trainer.keys()],
            }
            logger.info("nodes of the run: %s", describe_nodes(held))
        if not self._is_one_node and config.weight_sync.transport is TransportKind.nvlink:
            raise ConfigError(
                "weight_sync.transport=nvlink reaches the GPUs of one machine, and Ray placed the run on "
                f"{len(set(nodes.values()))}; set weight_sync.transport=rdma, or auto"
            )
        await self._check(set(nodes.values()))
        return node_after_node(of_trainer)

    async def _check(self, nodes: set[str]) -> None:
        """nodes.check_nodes, of those that are not checked yet. Our own cluster is this machine."""
        model = None if self._config.model.path is None else Path(self._config.model.path)
        if not self._is_own and nodes - self._checked:
            await asyncio.to_thread(check_nodes, nodes - self._checked, self._folder.root, model)
            self._checked |= nodes

    def _actor(self, cls: type, name: str, bundle: int, *, num_gpus: int, max_concurrency: int = 1) -> Any:
        assert self._group is not None
        actor = (
            ray.remote(cls)
            .options(
                name=name,
                num_cpus=_CPU_TICKETS,
                num_gpus=num_gpus if self._needs_gpus else 0,
                max_concurrency=max_concurrency,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
            )
            .remote(name)
        )
        self._actors.append(actor)
        return actor

    async def _await_start(self, starts: Sequence[Awaitable[Any]], what: str) -> list[Any]:
        """All of them, naming how many are late."""
        tasks = [asyncio.ensure_future(start) for start in starts]

        def who_is_late() -> str:
            return f"{what} to start ({sum(task.done() for task in tasks)} of {len(tasks)} are up)"

        return await wait_for(together(*tasks), who_is_late, timeout_s=self._config.cluster.start_timeout_s)


def adapter_slots(config: RunConfig, hf_config: dict[str, Any]) -> AdapterSlotsSpec | None:
    """The slots that engines need in adapter mode; None when adapters are merged.

    One serves, one is written, and requests may be `max_staleness_steps` versions old.
    """
    if config.weight_sync.mode is SyncMode.merged:
        return None
    lora = config.trainer.lora
    # Factors are in the engine's dtype, whatever the matrices beside them are quantized to.
    tensors = read_config(hf_config).unpacked().checkpoint_tensors(config.model.dtype.value)
    return AdapterSlotsSpec(
        num_slots=config.algorithm.max_staleness_steps + 2,
        rank=lora.slot_rank,
        target_modules=tuple(target_modules(tensors, lora)),
        tensors=tuple(adapter_tensors(tensors, lora)),
        base=Path(config.model.path or "") if packing_of(hf_config) is not None else None,
    )


def _take_sigterm_back() -> None:
    """Ray's C++ core puts a handler of its own on SIGTERM, which aborts this process on the spot.

    Python does not see that and still lists its own handler (the command line's, which winds the run down): installing
    that once more is enough. Signals belong to the main thread.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


def _log_trainer(facts: Sequence[dict[str, Any]]) -> None:
    """What the ranks chose and loaded, in one line; what they could not place, in another."""
    first = facts[0]
    logger.info(
        "%d trainer ranks are up: %d parameters, %d of them trainable; kernels: %s",
        len(facts),
        first["num_parameters"],
        first["num_trainable_parameters"],
        ", ".join(f"{part} {backend}" for part, backend in first["backends"].items()),
    )
    if first["mtp_tensors"]:
        logger.info("%d tensors of multi-token prediction layers are left out: not the policy's", first["mtp_tensors"])
    ignored = first["ignored_tensors"]
    if ignored:
        logger.warning("%d tensors of the checkpoint have no place in the model: %s ...", len(ignored), ignored[:3])


def _processes_under(temporary: Path) -> list[psutil.Process]:
    """Ray's own processes, known by the temporary folder on their command lines, and all their descendants."""
    processes: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if str(temporary) in " ".join(child.cmdline()):
                processes += [child, *child.children(recursive=True)]
    return processes


def _end_processes(processes: list[psutil.Process]) -> None:
    """Wait for processes that should be ending, then end them."""
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        logger.warning("process %d outlived the run and is terminated", process.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(alive, timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    model, lora = config.model, config.trainer.lora
    if model.path is not None:
        config = replace(config, model=replace(model, path=str(Path(model.path).absolute())))
    if lora.init_from is not None:
        lora = replace(lora, init_from=str(Path(lora.init_from).absolute()))
        config = replace(config, trainer=replace(config.trainer, lora=lora))
    return config
