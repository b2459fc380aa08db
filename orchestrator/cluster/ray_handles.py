"""The run's Ray actors as the controller calls them: all trainer ranks as one, and one rollout worker.

Owns: the calls to trainer ranks, their time limits, and which of them change a rank; how a worker is ended. Does not
own: ranks that die (rebirth.py), Ray's errors (ray_cluster.py), processes (trainer_ranks.py, rollout_workers.py), what
they do (actors.py), or the calls to a rollout worker, which do not pass through Ray (rollout/worker_verbs.py).
Invariant: weights never pass through the object store, only batches do.
"""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slipstream.conf.plural import counted
from slipstream.fleet.errors import FleetError
from slipstream.fleet.waiting import wait_for
from slipstream.orchestrator.cluster.actors import RolloutActor
from slipstream.orchestrator.cluster.nodes import ProcessId, end_trees
from slipstream.orchestrator.cluster.ray_cluster import STOP_TIMEOUT_S, RayCluster, kill_actor
from slipstream.orchestrator.cluster.rebirth import KEEP, Arguments, Engines, LivingRanks, Ranks, Rebirth
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.rollout.worker_verbs import WorkerClient
from slipstream.trainer.checkpoint.keeper import Readiness
from slipstream.trainer.types import Denominators, LossStats, OptimStats, Sample, Scores
from slipstream.weight_sync.calls.connection import Connection
from slipstream.weight_sync.publish.report import PublishReport

T = TypeVar("T")

_SAVE_TIMEOUT_S = 1800.0
"""Longest a rank may write or read its files: 100 GB at 60 MB/s, a slow shared disk."""
_DEATH_TOLD_S = 10.0
"""How long after a rank's error it is asked whether another has died; Ray tells within a second, if not very busy."""
_SETTLE_S = 60.0
"""Longest that ranks may be busy with what a controller asked for that is gone. They are started again then."""
_KEEP_S = 10.0
"""Longest wait until a rank has room for a copy of its state."""
_LOOK_S = 1.0
"""How often ranks that nobody calls are asked whether they are there."""
_STEP_TIMEOUT_S = 3600.0
"""Longest forward-backward of one batch. A backstop only: a rank that dies ends its call at once, and one that hangs in
a collective fails there after 10 minutes (trainer.process_group). What is left is a rank that computes for ever."""


def no_arguments(_: int) -> tuple[()]:
    return ()


async def call_all(cluster: RayCluster, ranks: Ranks, what: str, arguments: Arguments, timeout_s: float) -> list[Any]:
    """Call TrainerActor.call() on every rank. Raises the first failure, without waiting for the other ranks, which may
    hang in a collective. If a rank died, its death is raised, though Ray tells it after its peers' failures."""
    calls = [
        asyncio.ensure_future(cluster.result_of(actor.call.remote(what, *arguments(rank)), name, TrainingStopped))
        for rank, (actor, name) in enumerate(zip(ranks.actors, ranks.names, strict=True))
    ]
    waited_for = f"{what} on {counted(len(calls), 'trainer rank')}"
    try:
        return await wait_for(_all_of(calls, cluster), waited_for, timeout_s=timeout_s)
    finally:
        for one in calls:
            one.cancel()


async def _all_of(calls: Sequence[asyncio.Future[T]], cluster: RayCluster) -> list[T]:
    done, others = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
    failed = [error for call in done if (error := call.exception()) is not None]
    if not failed:
        return [call.result() for call in calls]
    if others:
        done, _ = await asyncio.wait(calls, timeout=_DEATH_TOLD_S)
    errors = [call.exception() for call in calls if call in done]
    died = [e for e in errors if e is not None and any(str(e).startswith(f"{who} ") for who in cluster.dead)]
    raise (died or failed)[0]


class RayTrainerGroup:
    """All trainer ranks as one: every method runs on all of them at once, because they meet in collectives. When one
    has died, a method returns after all were started again."""

    def __init__(self, cluster: RayCluster, ranks: Ranks, rebirth: Rebirth, *, is_lora: bool) -> None:
        self._cluster = cluster
        self._ranks = ranks
        self._rebirth = rebirth
        self._is_lora = is_lora
        self._mending = asyncio.Lock()
        self.num_ranks = len(ranks.names)

    @property
    def down_s(self) -> list[float]:
        """Seconds that each restart of the ranks took."""
        return self._rebirth.down_s

    @property
    def unkept_steps(self) -> int | None:
        return self._rebirth.unkept_steps

    async def outlive_ranks(self) -> None:
        """From now on a rank that dies does not end the run, as far as trainer.max_restarts and host memory go."""
        await self._rebirth.begin(self._ranks)

    async def meanwhile(self, work: Awaitable[T]) -> T:
        """Await what ranks wait for. One that dies meanwhile is started again at once, not when it is called."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_S))[0]:
                await self._on_all("has_written", no_arguments, _STEP_TIMEOUT_S)  # changes nothing
            return task.result()
        finally:
            task.cancel()

    async def keep(self) -> None:
        """Keep the state that ranks have now, as after a step, if states are kept."""
        deadline = time.monotonic() + _KEEP_S
        readiness = Readiness.later
        while readiness is Readiness.later and (number := self._rebirth.next_number) and time.monotonic() < deadline:
            readiness = (await self._changing(KEEP, lambda _, number=number: (number,), _STEP_TIMEOUT_S))[0]
            await asyncio.sleep(0.02)

    @property
    def known(self) -> set[str]:
        """Endpoints of workers that ranks have met."""
        return set(self._rebirth.engines.slots or self._rebirth.engines.endpoints)

    @property
    def living(self) -> LivingRanks:
        return self._rebirth.living(self._ranks)

    async def return_to(self, policy_version: int) -> bool:
        """Bring the ranks of a controller that was killed to the state that was kept last, of this version.
        Returns whether they have it. Those that died, or that do not answer, are started again with it."""
        ranks = self._ranks
        try:
            if any(name in self._cluster.dead for name in ranks.names):
                raise TrainingStopped("; ".join(f"{name} {how}" for name, how in self._cluster.dead.items()))
            versions = await call_all(self._cluster, ranks, "settle", no_arguments, _SETTLE_S)
        except (TrainingStopped, FleetError) as error:
            if isinstance(error, FleetError):  # its peers were not called for what it waits for
                self._cluster.dead |= dict.fromkeys(ranks.names, "does not answer")
            self._ranks = await self._rebirth.after(ranks, error)
            return True
        return await self._rebirth.return_to(ranks, has_it=set(versions) == {policy_version})

    async def warm_up(self, lengths: list[int], timeout_s: float) -> list[dict[str, float]]:
        """Try a made-up microbatch of sequences of these lengths (TrainerRank.warm_up)."""
        return await self._on_all("warm_up", lambda _: (lengths,), timeout_s)

    async def forward_backward(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]:
        """Accumulate the gradients of one batch. One list of microbatches per rank, equally long."""
        return await self._changing(
            "forward_backward", lambda rank: (microbatches_by_rank[rank], denominators), _STEP_TIMEOUT_S
        )

    async def evaluate(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]:
        """The loss of these samples and its metrics, without gradients. One list of microbatches per rank."""
        return await self._on_all("evaluate", lambda rank: (microbatches_by_rank[rank], denominators), _STEP_TIMEOUT_S)

    async def score(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], policy_version: int
    ) -> list[list[list[Scores]]]:
        """Log-probabilities of these samples before the step's first update, by rank, microbatch and sample."""
        return await self._on_all("score", lambda rank: (microbatches_by_rank[rank], policy_version), _STEP_TIMEOUT_S)

    async def optimizer_step(self, *, ends_version: bool = True) -> OptimStats:
        """Apply the gradients; every rank returns the same."""
        rebirth = self._rebirth
        results = await self._changing(
            "optimizer_step", lambda _: (ends_version, rebirth.next_number if ends_version else None), _STEP_TIMEOUT_S
        )
        return results[0][0]

    async def connect(self, endpoints: Sequence[str], timeout_s: float, adapter_endpoints: Sequence[str] = ()) -> None:
        """Fetch the replicas' layouts, build the plan, bind it to their addresses; in adapter mode, send the base."""
        endpoints, slots = list(endpoints), list(adapter_endpoints)
        await self._on_all("connect", lambda _: (endpoints, slots, None), timeout_s)
        self._rebirth.engines = Engines(endpoints, slots)

    async def publish(self, timeout_s: float, exclude: Sequence[int] = (), trace: Path | None = None) -> PublishReport:
        """Send the current policy version to all replicas but those excluded. Rank 0 writes the timeline to `trace`."""
        self._rebirth.engines.absent.update(exclude)
        return (await self._on_all("publish", lambda _: (list(exclude), trace), timeout_s))[0]

    async def disconnect(self, replicas: Sequence[int]) -> None:
        """Close every rank's links to dead replicas: their memory is free then. Waits for the call under way."""
        self._rebirth.engines.absent.update(replicas)
        await self._on_all("disconnect", lambda _: (list(replicas),), _STEP_TIMEOUT_S)

    async def reconnect(self, replica: int, endpoint: str, timeout_s: float, base_endpoint: str = "") -> None:
        """Meet a replica that was started again; send its base first, where it has none."""
        await self._on_all("reconnect", lambda _: (replica, endpoint, base_endpoint), timeout_s)
        self._rebirth.engines.came(replica, endpoint)

    async def export(self, folder: Path) -> None:
        """Write what was trained: the adapter in PEFT format, or the whole model when there is no adapter."""
        await self._on_all("save_adapter" if self._is_lora else "save_merged", lambda _: (folder,), _SAVE_TIMEOUT_S)

    async def begin_checkpoint(self, folder: Path, adapter: Path | None) -> None:
        """Copy trainable parameters, optimizer and generators, and begin to write them, one set of files per rank; with
        `adapter` the adapter, too, in PEFT format. Steps may follow at once."""
        await self._changing("begin_checkpoint", lambda _: (folder, adapter), _SAVE_TIMEOUT_S)

    async def has_written(self) -> bool:
        """Whether all files of begin_checkpoint() are there. Waits for the call under way. Raises CheckpointLost: a
        rank died before its files were there, and the step has passed."""
        written = await self._on_all("has_written", no_arguments, _STEP_TIMEOUT_S)
        self._rebirth.raise_if_checkpoint_lost()
        if all(written):
            self._rebirth.checkpoint_is_written()
        return all(written)

    async def load_state(self, folder: Path) -> None:
        await self._changing("load_state", lambda _: (folder,), _SAVE_TIMEOUT_S)

    async def shutdown(self) -> None:
        await call_all(self._cluster, self._ranks, "shutdown", no_arguments, STOP_TIMEOUT_S)

    async def _changing(self, what: str, arguments: Arguments, timeout_s: float) -> list[Any]:
        """_on_all() of a call that changes what a rank holds: it is made again on ranks that start anew."""
        results = await self._on_all(what, arguments, timeout_s)
        self._rebirth.note(what, arguments, timeout_s, results[0])
        async with self._mending:
            await self._rebirth.keep_again(self._ranks)
        return results

    async def _on_all(self, what: str, arguments: Arguments, timeout_s: float) -> list[Any]:
        """call_all(), and once more whenever ranks were started again. The first call that fails sees to that."""
        while True:
            ranks = self._ranks
            try:
                return await call_all(self._cluster, ranks, what, arguments, timeout_s)
            except TrainingStopped as error:
                async with self._mending:
                    if ranks is self._ranks:
                        self._ranks = await self._rebirth.after(ranks, error)


@dataclass(frozen=True, slots=True)
class LivingWorker:
    """What another controller has to know of a rollout worker to go on with it."""

    name: str
    address: str
    """Where it answers calls."""
    endpoint: str
    """Where versions are published: the adapter slots', in adapter mode."""
    base_endpoint: str
    """Where the base was sent at the start; the same without slots."""
    processes: Sequence[ProcessId]
    """The worker's, its engine's and the actor's."""
    node: str
    """Ray's id of the machine."""


class RayRolloutWorker(WorkerClient):
    """One rollout worker, as the supervisor sees it. `actor`: started its process; None: the actor is dead."""

    def __init__(
        self,
        actor: type[RolloutActor] | None,
        connection: Connection,
        living: LivingWorker,
        started_at: Mapping[str, float],
    ) -> None:
        super().__init__(connection)
        self.living = living
        self.name, self.node = living.name, living.node
        self.endpoint, self.base_endpoint = living.endpoint, living.base_endpoint
        self._actor = actor
        self.pid = living.processes[0].pid
        self.started_at = started_at

    def kill(self) -> None:
        """End what is left of it, also a process that is stopped and would never see the end of its parent."""
        if self._actor is not None:
            kill_actor(self._actor)
        end_trees(self.node, self.living.processes)

    async def end(self) -> None:
        """End the engine; Ray ends the processes."""
        try:
            await wait_for(self.stop(), f"{self.name} to stop", timeout_s=STOP_TIMEOUT_S)
        finally:
            self.connection.close()
