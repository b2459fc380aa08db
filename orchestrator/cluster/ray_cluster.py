# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Ray has types for a part of what it offers.
"""Ray, for one run: its own cluster on this machine, or one that the user brings.

    RayCluster --own--> ray_host.py (a process) --> Ray's servers      a session, a token and a folder of the run's own
               --attached--> ray.init(address)                         the user's mode of authentication

Owns: Ray's start and end, actors and the placement group, the token, the private folder, and what a call raises once
Ray is lost. Does not own: which actors there are (trainer_ranks.py, rollout_workers.py), or what they do (actors.py).
Invariant: after `stop`, every process that a cluster of our own started has ended, also after an error or an
interrupt. When the controller is killed, ray_host.py sees to that.

Ray's CPUs are tickets, not cores: a trainer rank and an engine ask for 1/100 each, so that the four processes of the
quick start fit on two cores. GPUs are whole, one per trainer rank and `rollout.tp_size` per rollout worker, but
for cluster.share_gpu.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from conf.errors import ConfigError, SlipstreamError
from conf.schema import Device, RunConfig
from orchestrator.cluster.private_folder import PrivateFolder, make_private_folder, remove_folders_of_dead_runs
from orchestrator.cluster.processes import end_processes
from orchestrator.cluster.ray_host import HostOptions
from orchestrator.environment import variables_for_actors
from orchestrator.errors import ClusterLost, OrchestratorError, PlacementError
from orchestrator.files.run_folder import RunFolder
from orchestrator.signals import take_sigterm_back
from orchestrator.waiting import in_abandoned_thread, wait_for
from rollout.engine.engine_options import compile_cache, set_engine_environment
from rollout.in_vllm.fork_server import imports_read

logger = logging.getLogger(__name__)
T = TypeVar("T")
ActorT = TypeVar("ActorT")

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 8.0
_HOST_END_TIMEOUT_S = 20.0
_CPU_TICKETS = 0.01


class RayCluster:
    """See the module's docstring.

    Args:
        config: the run's options.
        folder: the run folder: Ray's namespace begins with its name, and Ray's logs end up there.
        needs_gpus: whether a process of the run gets GPUs.
        has_workers: whether it has rollout workers.
        on_lost: called when a server of our own cluster has ended by itself.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        *,
        needs_gpus: bool,
        has_workers: bool,
        on_lost: Callable[[], object],
    ) -> None:
        self.is_own = config.cluster.ray_address is None
        self._config = config
        self._folder = folder
        self.name = f"{folder.run_id}-{secrets.token_hex(4)}"
        """The run's name in Ray. Two runs of a shared cluster may have begun in the same second."""
        self._needs_gpus = needs_gpus
        self._has_workers = has_workers
        self._actors: list[object] = []
        self._group: PlacementGroup | None = None
        self._host: asyncio.subprocess.Process | None = None
        self._private: PrivateFolder | None = None
        self._lock: int | None = None
        self._joining: asyncio.Future[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._on_lost = on_lost
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def lost(self) -> ClusterLost | None:
        """Why no call can succeed any more; None while Ray is there."""
        return ClusterLost(self._lost.result()) if self._lost.done() else None

    async def start(self) -> None:
        """Start our own cluster on loopback, or join the given one.

        Raises:
            ConfigError: there is no cluster at cluster.ray_address.
            PlacementError: Ray did not start.
        """
        address = self._config.cluster.ray_address
        if address is None:
            address = await wait_for(self._start_own(), "Ray to start", timeout_s=START_TIMEOUT_S)
        self._joining = asyncio.ensure_future(asyncio.to_thread(self._join, address))  # a thread cannot be cancelled
        await wait_for(asyncio.shield(self._joining), "Ray to be joined", timeout_s=START_TIMEOUT_S)
        take_sigterm_back()
        if self._private is not None and self._config.cluster.dashboard:
            port, token = self._config.cluster.dashboard_port, self._private.token
            logger.info("Ray dashboard: http://127.0.0.1:%d asks for the token in %s", port, token)

    async def place(self, gpus: list[float], what: str) -> PlacementGroup:
        """Reserve a bundle for every process, with so many GPUs each, or a share of one. Ray packs them as a whole.

        Raises:
            PlacementError: there is no room.
        """
        bundles = [{"CPU": _CPU_TICKETS} | ({"GPU": num} if self._needs_gpus else {}) for num in gpus]
        self._group = await self.in_thread(lambda: placement_group(bundles, strategy="PACK", name=self.name))
        ready = self.result_of(self._group.ready(), "the placement group", PlacementError)
        try:
            await wait_for(ready, f"room for {what}", timeout_s=START_TIMEOUT_S)
        except TimeoutError as error:
            free = {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU")}
            raise PlacementError(
                f"the Ray cluster cannot hold {what}; it has {free} free, and an engine's must be of one machine"
            ) from error
        return self._group

    async def new_actor(
        self, cls: type[ActorT], name: str, bundle: int, *, num_gpus: float, max_concurrency: int = 1
    ) -> type[ActorT]:
        """Start an actor in a bundle of the placement group. Its handle has the class's methods, with `.remote`."""
        assert self._group is not None
        described = ray.remote(cls).options(
            name=name,
            num_cpus=_CPU_TICKETS,
            num_gpus=num_gpus if self._needs_gpus else 0,
            max_concurrency=max_concurrency,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
        )
        return await self._made(described, name)

    async def new_actor_of_node(self, cls: type[ActorT], name: str, node: str) -> type[ActorT]:
        """Start an actor without a bundle on a node (Ray's id). Ray starts it there again when its process dies."""
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        described = ray.remote(cls).options(num_cpus=0, num_gpus=0, max_restarts=-1, scheduling_strategy=where)
        return await self._made(described, name)

    async def _made(self, described: Any, name: str) -> Any:
        actor = await self.in_thread(lambda: described.remote(name))
        self._actors.append(actor)
        return actor

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Await a Ray call that asks the GCS and blocks. Without a GCS it blocks for 60 s and then ends the process.

        Raises:
            ClusterLost: a server of our own cluster is gone.
        """
        return await self._unless_lost(in_abandoned_thread(call))

    async def result_of(self, reference: ObjectRef[T], who: str, error_type: type[OrchestratorError]) -> T:
        """Await a Ray call.

        Raises:
            SlipstreamError: as the call raised it.
            OrchestratorError: of `error_type`, naming process and cause, for any other error.
            ClusterLost: Ray itself is gone. Ray's own word for it takes 15 s to 60 s.
        """
        try:
            return await self._unless_lost(_awaited(reference))
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            logger.debug("traceback of %s:\n%s", who, error)
            if isinstance(cause, SlipstreamError):
                raise cause from None
            raise error_type(f"{who} failed with {type(cause).__name__}: {cause}") from error
        except RayActorError as error:
            raise error_type(f"the process of {who} died: {error}") from error

    async def _unless_lost(self, work: Awaitable[T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if self.lost is not None:
                raise self.lost
            return task.result()
        finally:
            task.cancel()

    async def stop(self) -> None:
        """End Ray, or leave the cluster that is not ours. Never raises; what went wrong is logged."""
        if self._listening is not None:
            self._listening.cancel()
        if self._joining is not None:
            for joined in (await asyncio.wait({self._joining}, timeout=STOP_TIMEOUT_S))[0]:
                if error := joined.exception():
                    logger.warning("while stopping: Ray was not joined: %s", error)
            await asyncio.to_thread(self._leave)
        await self._end_host()

    # ------------------------------------------------------------------------------------------- a cluster of our own

    async def _start_own(self) -> str:
        """Start Ray, a second time if one of its servers ends meanwhile: on a busy machine they give each other too
        little time (the raylet 15 s to its agent). Returns Ray's address.
        """
        try:
            return await self._start_host()
        except ServerEnded as error:
            logger.warning("%s; once more", error)
        await self._end_host()
        return await self._start_host()

    async def _start_host(self) -> str:
        """Start the process that holds Ray's servers. Returns Ray's address."""
        for root in remove_folders_of_dead_runs():
            logger.info("%s is removed: the run that made it was killed", root)
        self._private, self._lock = make_private_folder()
        os.environ.pop("RAY_AUTH_TOKEN", None)  # the user's, for other clusters: it would win
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(self._private.token)
        root = str(Path(__file__).parents[2])
        environment = {
            **compile_cache(),
            **os.environ,
            "TMPDIR": str(self._private.temporary),
            "PYTHONPATH": os.pathsep.join(
                dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
            ),
        }
        cluster = self._config.cluster
        options = HostOptions(
            folder=str(self._private.root),
            logs=str(self._folder.ray_logs),
            dashboard_port=cluster.dashboard_port if cluster.dashboard else None,
            object_store_bytes=cluster.object_store_bytes,
            workers_import_under=self._workers_import_under(environment) if self._has_workers else None,
        )
        self._host = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "orchestrator.cluster.ray_host", json.dumps(asdict(options))),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # what is sent to our process group is not for Ray's servers
            pass_fds=(self._lock,),  # held until both processes are gone
            env=environment,
        )
        said = await self._next_word()
        if "lost" in said:
            raise ServerEnded(f"Ray did not start: {said['lost']}: {said['how']} (its logs: {self._folder.ray_logs})")
        if "failed" in said:
            raise PlacementError(f"Ray did not start: {said['failed']}")
        self._listening = asyncio.create_task(self._listen())
        return said["address"]

    def _workers_import_under(self, environment: dict[str, str]) -> dict[str, str]:
        """Variables that imports read, in a rollout worker's actor of a Ray with this environment."""
        there = dict(environment)
        there.setdefault("OMP_NUM_THREADS", "1")  # by Ray, which counts the actor's cores
        device = Device.cuda if self._needs_gpus else Device.cpu
        set_engine_environment(device, batch_invariant=self._config.rollout.batch_invariant, environment=there)
        return imports_read(there)

    async def _next_word(self) -> dict[str, str]:
        """What the host says next; that it has ended, where it says no more."""
        assert self._host is not None
        assert self._host.stdout is not None
        line = await self._host.stdout.readline()
        if line:
            return json.loads(line)
        return {"lost": "ray_host", "how": f"it ended with code {await self._host.wait()}"}

    async def _listen(self) -> None:
        """Fail all calls, and cancel the run, when the host says that a server has ended."""
        said = await self._next_word()
        self._lost.set_result(f"{said['lost']}, which holds the run's Ray cluster, is gone: {said['how']}")
        logger.error("%s", self._lost.result())
        self._on_lost()

    async def _end_host(self) -> None:
        """Let the host end all that it holds, and remove the private folder."""
        if self._host is not None:
            assert self._host.stdin is not None
            self._host.stdin.close()
            try:
                await asyncio.wait_for(self._host.wait(), _HOST_END_TIMEOUT_S)
            except TimeoutError:
                logger.warning("process %d, which holds Ray, does not end and is killed", self._host.pid)
                await asyncio.to_thread(end_processes, _tree(self._host.pid), timeout_s=_HOST_END_TIMEOUT_S)
            self._host = None
        if self._private is not None and self._private.root.exists():  # the host was killed before it could
            self._private.keep_logs(self._folder.ray_logs)
            self._private.remove()
        if self._lock is not None:
            os.close(self._lock)
        self._private = self._lock = None

    # ---------------------------------------------------------------------------------------------------- any cluster

    def _join(self, address: str) -> None:
        """Become a driver of the cluster."""
        runtime_env = None if self.is_own else {"env_vars": variables_for_actors(self._config)}
        try:
            ray.init(
                address=address,
                namespace=self.name,
                runtime_env=runtime_env,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:  # the edge to Ray: its class depends on what answers there
            if self.is_own:
                raise PlacementError(f"Ray did not start: {type(error).__name__}: {error}") from error
            raise ConfigError(
                f"cluster.ray_address={address} is no Ray cluster that can be joined "
                f"({type(error).__name__}: {error}); give the address that `ray start` printed, of the same Ray "
                "version, or let the run start its own cluster: cluster=local"
            ) from error
        if not self.is_own and not self._needs_gpus and (num_gpus := ray.cluster_resources().get("GPU", 0)):
            logger.warning(
                "the Ray cluster has %d GPUs, unused: cluster.device=cpu, or auto without one here", num_gpus
            )

    def _leave(self) -> None:
        """End the actors, give their room back, and be a driver no more."""
        if self.lost is None:
            for actor in self._actors:
                with contextlib.suppress(RayError):
                    kill_actor(actor)
            if self._group is not None:
                with contextlib.suppress(RayError):
                    ray.util.remove_placement_group(self._group)
        self._actors, self._group = [], None
        ray.shutdown()


class ServerEnded(PlacementError):
    """One of Ray's servers ended while it started."""


def kill_actor(actor: object) -> None:
    """End an actor's process at once. Its handle passes for the actor's class, so that its methods have types."""
    ray.kill(cast("ActorHandle[Any]", actor))


async def _awaited(reference: ObjectRef[T]) -> T:
    return await reference


def _tree(pid: int) -> Callable[[], Iterable[psutil.Process]]:
    """Finds a process and all that descends from it, for `end_processes`."""

    def find() -> list[psutil.Process]:
        try:
            top = psutil.Process(pid)
            return [*top.children(recursive=True), top]
        except psutil.NoSuchProcess:
            return []

    return find
