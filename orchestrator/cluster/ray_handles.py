"""The run's Ray actors as the controller calls them: all trainer ranks as one, and one rollout worker.

Owns: the calls to trainer ranks and their time limits, and how a worker is ended. Does not own: Ray's errors
(ray_cluster.py), processes (trainer_ranks.py, rollout_workers.py), what they do (actors.py), or the calls to a rollout
worker, which do not pass through Ray (rollout/calls.py).
Invariant: weights never pass through the object store, only batches do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ray import ObjectRef

from slipstream.fleet.waiting import wait_for
from slipstream.orchestrator.cluster.actors import RolloutActor, TrainerActor
from slipstream.orchestrator.cluster.nodes import ProcessId, end_trees
from slipstream.orchestrator.cluster.ray_cluster import STOP_TIMEOUT_S, RayCluster, kill_actor
from slipstream.orchestrator.errors import TrainingStopped
from slipstream.rollout.calls import Connection, WorkerClient
from slipstream.trainer.types import Denominators, LossStats, OptimStats, Sample, Scores

if TYPE_CHECKING:
    from slipstream.weight_sync.publish.report import PublishReport

T = TypeVar("T")

_SAVE_TIMEOUT_S = 1800.0
"""Longest a rank may write or read its files: 100 GB at 60 MB/s, a slow shared disk."""
_DEATH_TOLD_S = 3.0
"""How long after a rank's error it is asked whether another one has died, of which Ray tells within a second."""
_STEP_TIMEOUT_S = 3600.0
"""Longest forward-backward of one batch. A backstop only: a rank that dies ends its call at once, and one that hangs in
a collective fails there after 10 minutes (trainer.process_group). What is left is a rank that computes for ever."""


class RayTrainerGroup:
    """All trainer ranks as one: every method runs on all of them at once, because they meet in collectives."""

    def __init__(self, cluster: RayCluster, actors: Sequence[type[TrainerActor]], *, is_lora: bool) -> None:
        self._cluster = cluster
        self._actors = actors
        self._is_lora = is_lora
        self.num_ranks = len(actors)

    async def warm_up(self, lengths: list[int], timeout_s: float) -> list[dict[str, float]]:
        """Try a made-up microbatch of sequences of these lengths (TrainerRank.warm_up)."""
        return await self._on_all("warm_up", lambda actor, _: actor.warm_up.remote(lengths), timeout_s)

    async def forward_backward(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]:
        """Accumulate the gradients of one batch. One list of microbatches per rank, equally long."""
        return await self._on_all(
            "forward_backward",
            lambda actor, rank: actor.forward_backward.remote(microbatches_by_rank[rank], denominators),
            _STEP_TIMEOUT_S,
        )

    async def evaluate(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]:
        """The loss of these samples and its metrics, without gradients. One list of microbatches per rank."""
        return await self._on_all(
            "evaluate",
            lambda actor, rank: actor.evaluate.remote(microbatches_by_rank[rank], denominators),
            _STEP_TIMEOUT_S,
        )

    async def score(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], policy_version: int
    ) -> list[list[list[Scores]]]:
        """Log-probabilities of these samples before the step's first update, by rank, microbatch and sample."""
        return await self._on_all(
            "score",
            lambda actor, rank: actor.score.remote(microbatches_by_rank[rank], policy_version),
            _STEP_TIMEOUT_S,
        )

    async def optimizer_step(self, *, ends_version: bool = True) -> OptimStats:
        """Apply the gradients; every rank returns the same."""
        results = await self._on_all(
            "optimizer_step", lambda actor, _: actor.optimizer_step.remote(ends_version), _STEP_TIMEOUT_S
        )
        return results[0]

    async def connect(self, endpoints: Sequence[str], timeout_s: float, adapter_endpoints: Sequence[str] = ()) -> None:
        """Fetch the replicas' layouts, build the plan, bind it to their addresses; in adapter mode, send the base."""
        await self._on_all(
            "connect", lambda actor, _: actor.connect.remote(list(endpoints), list(adapter_endpoints)), timeout_s
        )

    async def publish(self, timeout_s: float, exclude: Sequence[int] = (), trace: Path | None = None) -> PublishReport:
        """Send the current policy version to every replica but those excluded. Rank 0 speaks for all, and writes the
        timeline to `trace`.
        """
        return (await self._on_all("publish", lambda actor, _: actor.publish.remote(list(exclude), trace), timeout_s))[
            0
        ]

    async def disconnect(self, replicas: Sequence[int], timeout_s: float = _STEP_TIMEOUT_S) -> None:
        """Close every rank's links to dead replicas: their memory is free then. Waits for the call under way."""
        await self._on_all("disconnect", lambda actor, _: actor.disconnect.remote(list(replicas)), timeout_s)

    async def reconnect(self, replica: int, endpoint: str, timeout_s: float, base_endpoint: str = "") -> None:
        """Meet a replica that was started again; send its base first, where it has none."""
        await self._on_all(
            "reconnect", lambda actor, _: actor.reconnect.remote(replica, endpoint, base_endpoint), timeout_s
        )

    async def export(self, folder: Path) -> None:
        """Write what was trained: the adapter in PEFT format, or the whole model when there is no adapter."""
        if self._is_lora:
            await self._on_all("save_adapter", lambda actor, _: actor.save_adapter.remote(folder), _SAVE_TIMEOUT_S)
        else:
            await self._on_all("save_merged", lambda actor, _: actor.save_merged.remote(folder), _SAVE_TIMEOUT_S)

    async def begin_checkpoint(self, folder: Path, adapter: Path | None) -> None:
        """Copy trainable parameters, optimizer and generators, and begin to write them, one set of files per rank; with
        `adapter` the adapter, too, in PEFT format. Steps may follow at once.
        """
        await self._on_all(
            "begin_checkpoint", lambda actor, _: actor.begin_checkpoint.remote(folder, adapter), _SAVE_TIMEOUT_S
        )

    async def has_written(self) -> bool:
        """Whether all files of begin_checkpoint() are there. Waits for the call under way."""
        return all(await self._on_all("has_written", lambda actor, _: actor.has_written.remote(), _STEP_TIMEOUT_S))

    async def load_state(self, folder: Path) -> None:
        """Read what `begin_checkpoint` wrote."""
        await self._on_all("load_state", lambda actor, _: actor.load_state.remote(folder), _SAVE_TIMEOUT_S)

    async def shutdown(self) -> None:
        """Leave the process group and close links."""
        await self._on_all("shutdown", lambda actor, _: actor.shutdown.remote(), STOP_TIMEOUT_S)

    async def _on_all(
        self, what: str, call: Callable[[type[TrainerActor], int], ObjectRef[T]], timeout_s: float
    ) -> list[T]:
        """Call every rank. A failure is raised without waiting for its peers, which may hang in a collective. But of a
        rank that died Ray tells later than its peers, whose collective fails at once: the one that died is raised.
        """
        calls = [
            asyncio.ensure_future(self._cluster.result_of(call(actor, rank), f"trainer-{rank}", TrainingStopped))
            for rank, actor in enumerate(self._actors)
        ]
        waited_for = f"{what} on {self.num_ranks} trainer ranks"
        try:
            return await wait_for(self._all_of(calls), waited_for, timeout_s=timeout_s)
        finally:
            for one in calls:
                one.cancel()

    async def _all_of(self, calls: Sequence[asyncio.Future[T]]) -> list[T]:
        done, others = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        failed = [error for call in done if (error := call.exception()) is not None]
        if not failed:
            return [call.result() for call in calls]
        if others:
            done, _ = await asyncio.wait(calls, timeout=_DEATH_TOLD_S)
        errors = [call.exception() for call in calls if call in done]
        died = [e for e in errors if e is not None and any(str(e).startswith(f"{who} ") for who in self._cluster.dead)]
        raise (died or failed)[0]


class RayRolloutWorker(WorkerClient):
    """One rollout worker, as the supervisor sees it.

    Args:
        actor: started its process.
        connection: to that process.
        endpoint: where versions are published: the adapter slots', in adapter mode.
        base_endpoint: where the base was sent at the start; the same without slots.
        processes: the worker's, its engine's and the actor's.
        node: Ray's id of the machine.
        started_at: how far its start had come, and when.
    """

    def __init__(
        self,
        actor: type[RolloutActor],
        connection: Connection,
        *,
        name: str,
        endpoint: str,
        base_endpoint: str,
        processes: Sequence[ProcessId],
        node: str,
        started_at: Mapping[str, float],
    ) -> None:
        super().__init__(connection)
        self.name = name
        self.node = node
        self.endpoint = endpoint
        self.base_endpoint = base_endpoint
        self._actor = actor
        self._processes = list(processes)
        self.pid = self._processes[0].pid
        self.started_at = started_at

    def kill(self) -> None:
        """End what is left of it, also a process that is stopped and would never see the end of its parent."""
        kill_actor(self._actor)
        end_trees(self.node, self._processes)

    async def end(self) -> None:
        """End the engine; Ray ends the processes."""
        try:
            await wait_for(self.stop(), f"{self.name} to stop", timeout_s=STOP_TIMEOUT_S)
        finally:
            self.connection.close()
