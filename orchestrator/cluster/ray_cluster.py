# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Ray has types for a part of what it offers.
"""Ray, for one run: its own cluster on this machine, or one that the user brings.

    RayCluster --own--> own_ray.py --> Ray's servers       a session, a token and a folder of the run's own
               --attached--> ray.init(address)             the user's mode of authentication

Owns: joining and leaving Ray, actors and placement groups, and what a call raises once Ray is lost. Does not own:
Ray's servers (own_ray.py), which actors there are (trainer_ranks.py, rollout_workers.py), or what they do (actors.py).
Invariant: after `stop`, every process that a cluster of our own started has ended, also after an error or an interrupt.
What runs in such a cluster is detached: Ray does not end it with the driver, but our cluster's servers do, in time
(own_ray.py).

Ray's CPUs are tickets, not cores: a trainer rank and an engine ask for 1/100 each, so that the four processes of the
quick start fit on two cores. GPUs are whole, one per trainer rank and `rollout.tp_size` per rollout worker, but
for cluster.share_gpu and rollout.workers_per_gpu: shares of one GPU, which Ray fills before it begins the next.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import ray
from ray import ObjectRef
from ray._private import worker as ray_worker
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from slipstream.conf.errors import ConfigError, SlipstreamError
from slipstream.conf.failures import raised_as
from slipstream.conf.json_files import JsonObject
from slipstream.conf.schema import RunConfig
from slipstream.fleet.waiting import in_abandoned_thread, wait_for
from slipstream.orchestrator.cluster.own_ray import OwnRay
from slipstream.orchestrator.control.control_folder import note_dashboard
from slipstream.orchestrator.environment import RunDevice, variables_for_actors
from slipstream.orchestrator.errors import ClusterLost, OrchestratorError, PlacementError
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.orchestrator.files.startup import Startup
from slipstream.orchestrator.machine import DASHBOARD_PORT, free_bytes
from slipstream.orchestrator.signals import take_sigterm_back
from slipstream.orchestrator.socket_folder import socket_folder
from slipstream.rollout.crash_reports import death_in

logger = logging.getLogger(__name__)
T = TypeVar("T")
ActorT = TypeVar("ActorT")

RAY_TIMEOUT_S = 300.0
"""For Ray's servers, all tries together (own_ray.py). One that cannot start ends by itself and is told at once; on two
cores at a load of 32 a try took 57 to 94 s to fail."""
PLACE_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 8.0
CPU_TICKETS = 0.01
_FULL_BYTES = 1 << 20
"""With less room in the temporary folder a process does not come up."""


class RayCluster:
    """See the module's docstring.

    Args:
        own: the servers of our own cluster, which have begun to start; None: config.cluster.ray_address names another.
        on_lost: called when a server of our own cluster has ended by itself.
        name: of a run that is taken over; None: a new one.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        own: OwnRay | None,
        *,
        needs_gpus: bool,
        on_lost: Callable[[], object],
        name: str | None = None,
    ) -> None:
        self.is_own = own is not None
        self._config = config
        self._folder = folder
        self._own = own
        self.name = name or f"{folder.run_id}-{secrets.token_hex(4)}"
        """The run's name in Ray. Two runs of a shared cluster may have begun in the same second."""
        self.needs_gpus = needs_gpus
        self._crashes = folder.crashes
        self.dead: dict[str, str] = {}
        """Actors whose process has died, and how."""
        self._actors: list[object] = []
        self._groups: dict[str, PlacementGroup] = {}
        """By name; the first one is the run's own."""
        self._lifetime = None if own is None else "detached"
        self._joining: asyncio.Future[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._on_lost = on_lost
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def lost(self) -> ClusterLost | None:
        """Why no call can succeed any more; None while Ray is there."""
        return ClusterLost(self._lost.result()) if self._lost.done() else None

    async def start(self) -> None:
        """Start our own cluster on loopback, or join the given one. Raises ConfigError: there is no cluster at
        cluster.ray_address. Raises PlacementError: Ray did not start."""
        if self._own is not None:
            address = await wait_for(self._own.address(), "Ray to start", timeout_s=RAY_TIMEOUT_S)
            self._listening = asyncio.create_task(self._listen(self._own))
        else:
            address = self._config.cluster.ray_address
            assert address is not None
        # The thread cannot be cancelled, and Ray asks a cluster that does not answer for ten minutes and more.
        self._joining = asyncio.ensure_future(in_abandoned_thread(partial(self._join, address)))
        await wait_for(asyncio.shield(self._joining), "Ray to be joined", timeout_s=RAY_TIMEOUT_S)
        take_sigterm_back()
        # What it would print here of an actor that died, in a long paragraph, result_of() tells.
        ray_worker._worker_logs_enabled = False  # pyright: ignore[reportPrivateUsage]
        if self._own is not None and self._own.dashboard is not None:
            where = f"http://{self._own.dashboard}"
            taken = "" if where.endswith(f":{DASHBOARD_PORT}") else f" ({DASHBOARD_PORT} is taken)"
            logger.info("Ray dashboard: %s asks for the token in %s%s", where, self._own.token, taken)
            note_dashboard(self._folder, f"{where}, asks for the token in {self._own.token}")

    async def place(
        self,
        gpus: Sequence[float],
        what: str,
        *,
        on: Mapping[str, float] | None = None,
        timeout_s: float = PLACE_TIMEOUT_S,
    ) -> PlacementGroup:
        """Reserve a bundle for every process, with so many GPUs each, or a share of one. Ray packs them as a whole.
        Raises PlacementError: there is no room.

        Args:
            what: the processes, for people.
            on: what else Ray must have where a bundle is, such as the name of a node.
        """
        bundles = [{"CPU": CPU_TICKETS, **(on or {})} | ({"GPU": num} if self.needs_gpus else {}) for num in gpus]
        name = f"{self.name}-{secrets.token_hex(4)}"
        group = await self.in_thread(
            lambda: placement_group(bundles, strategy="PACK", name=name, lifetime=self._lifetime)
        )
        self._groups[name] = group
        ready = self.result_of(group.ready(), "the placement group", PlacementError)
        try:
            await wait_for(ready, f"room for {what}", timeout_s=timeout_s)
        except TimeoutError as error:
            free = {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU")}
            await self.give_back(group)
            raise PlacementError(
                f"the Ray cluster cannot hold {what}; it has {free} free, and an engine's must be of one machine"
            ) from error
        return group

    async def give_back(self, group: PlacementGroup) -> None:
        """Reserve this no more. What runs there ends."""
        del self._groups[self.name_of(group)]
        await self.in_thread(lambda: ray.util.remove_placement_group(group))

    def name_of(self, group: PlacementGroup) -> str:
        return next(name for name, one in self._groups.items() if one == group)

    async def find_group(self, name: str) -> PlacementGroup:
        """What a controller reserved that is gone, the run's own first."""
        self._groups[name] = await self.in_thread(lambda: ray.util.get_placement_group(name))
        return self._groups[name]

    async def find_actor(self, cls: type[ActorT], name: str) -> type[ActorT] | None:
        """An actor that a controller started that is gone; None: it has died."""
        try:
            actor = await self.in_thread(lambda: cast("Any", ray.get_actor(name)))
        except ValueError:
            self.dead.setdefault(name, "died while the run had no controller")
            return None
        self._actors.append(actor)
        return actor

    async def new_actor(
        self,
        cls: type[ActorT],
        name: str,
        bundle: int,
        *,
        num_gpus: float,
        max_concurrency: int = 1,
        group: PlacementGroup | None = None,
    ) -> type[ActorT]:
        """Start an actor in a bundle of a placement group, the first one if none is named. Its handle has the class's
        methods, with `.remote`."""
        described = ray.remote(cls).options(
            name=name,
            num_cpus=CPU_TICKETS,
            num_gpus=num_gpus if self.needs_gpus else 0,
            max_concurrency=max_concurrency,
            max_restarts=0,
            lifetime=self._lifetime,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group or next(iter(self._groups.values())), placement_group_bundle_index=bundle
            ),
        )
        return await self._made(described, name)

    async def new_actor_of_node(self, cls: type[ActorT], name: str, node: str) -> type[ActorT]:
        """Start an actor without a bundle on a node (Ray's id), unless it is there. Ray restarts it when it dies."""
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        described = ray.remote(cls).options(
            name=name,
            get_if_exists=True,
            num_cpus=0,
            num_gpus=0,
            max_restarts=-1,
            lifetime=self._lifetime,
            scheduling_strategy=where,
        )
        return await self._made(described, name)

    async def _made(self, described: Any, name: str) -> Any:
        actor = await self.in_thread(lambda: described.remote(name, self._crashes))
        self._actors.append(actor)
        return actor

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Await a Ray call that asks the GCS and blocks. Without a GCS it blocks for 60 s and then ends the process.
        Raises ClusterLost: a server of our own cluster is gone."""
        return await self._unless_lost(in_abandoned_thread(call))

    async def result_of(self, reference: ObjectRef[T], who: str, error_type: type[OrchestratorError]) -> T:
        """Await a Ray call. `who` is the actor's name, where it is an actor's. Raises SlipstreamError as the call
        raised it, `error_type` for any other error, naming process and cause, and ClusterLost where Ray itself is gone:
        Ray's own word for it takes 15 s to 60 s."""
        try:
            return await self._unless_lost(_awaited(reference))
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            logger.debug("traceback of %s:\n%s", who, error)
            if isinstance(cause, SlipstreamError):
                raise cause from None
            raise error_type(f"{who} failed with {type(cause).__name__}: {cause}") from error
        except RayActorError as error:
            if who not in self.dead:
                logger.debug("what Ray says of %s:\n%s", who, error)
                self.dead[who] = death_in(self._crashes / who) or as_ray_says(error)
            raise error_type(f"{who} {self.dead[who]}") from None

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
        if self._own is not None:
            await self._own.end()

    async def _listen(self, own: OwnRay) -> None:
        """Fail all calls, and cancel the run, when a server of our own has ended."""
        self._lost.set_result(await own.lost())
        logger.error("%s", self._lost.result())
        self._on_lost()

    def _join(self, address: str) -> None:
        runtime_env = None if self.is_own else {"env_vars": variables_for_actors(self._config)}
        refusal = PlacementError, "Ray did not start: ", ""
        if not self.is_own:
            cure = (
                "); give the address that `ray start` printed, of the same Ray version, or let the run start its own "
                "cluster: cluster=local"
            )
            refusal = ConfigError, f"cluster.ray_address={address} is no Ray cluster that can be joined (", cure
        with raised_as(*refusal):
            ray.init(
                address=address,
                namespace=self.name,
                runtime_env=runtime_env,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        if not self.is_own and not self.needs_gpus and (num_gpus := ray.cluster_resources().get("GPU", 0)):
            logger.warning(
                "the Ray cluster has %d GPUs, unused: cluster.device=cpu, or auto without one here", num_gpus
            )

    def _leave(self) -> None:
        """End the actors, give their room back, and be a driver no more."""
        if self.lost is None:
            for actor in self._actors:
                with contextlib.suppress(RayError):
                    kill_actor(actor)
            for group in self._groups.values():
                with contextlib.suppress(RayError):
                    ray.util.remove_placement_group(group)
        self._actors, self._groups = [], {}
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all processes of a run are started with."""

    config: RunConfig
    cluster: RayCluster
    device: RunDevice
    hf_config: JsonObject
    """The policy's Hugging Face config."""
    sync_key: bytes
    """Authenticates the control messages of a publish, and who sends or reads a state that a keeper holds."""
    is_one_node: bool
    """Whether all processes share one machine, hence loopback."""
    startup: Startup
    """Told what each process does."""


def kill_actor(actor: object) -> None:
    """End an actor's process at once. Its handle passes for the actor's class, so that its methods have types."""
    ray.kill(cast("ActorHandle[Any]", actor))


def as_ray_says(error: RayActorError) -> str:
    """How an actor's process ended that left no report, in one line; Ray's own text is three paragraphs."""
    text = str(error)
    if "connection error code 2" in text:
        said = "died without a word: by SIGKILL, as the kernel ends processes where memory runs out, or by a library"
        folder = socket_folder()
        is_full = free_bytes(folder) < _FULL_BYTES
        return (
            f"{said}; or because {folder} is full, where each process has files: make room there" if is_full else said
        )
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\t")]
    line = lines[-1] if error.actor_init_failed else " ".join(lines[:2])
    return f"died: {line[:300]}"


async def _awaited(reference: ObjectRef[T]) -> T:
    return await reference
