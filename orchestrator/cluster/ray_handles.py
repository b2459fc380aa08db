"""The run's Ray actors as the controller calls them: all trainer ranks as one, and one rollout worker.

Owns: the calls, their time limits, and the translation of Ray's errors. Does not own: processes (placement.py) or what
they do (actors.py). Invariant: weights never pass through the object store, only batches and rollouts do.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from conf.errors import SlipstreamError
from orchestrator.cluster.nodes import ProcessId, end_trees
from orchestrator.errors import OrchestratorError, TrainingStopped
from orchestrator.waiting import together, wait_for
from rollout.types import Prompt, Rollout
from trainer.types import Denominators, LossStats, OptimStats, Sample

if TYPE_CHECKING:
    from conf.schema import SamplingConfig
    from weight_sync.publish.report import PublishReport
    from weight_sync.replica.recovery import Offer, Pulled

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 20.0
_SAVE_TIMEOUT_S = 1800.0
"""Longest a rank may write or read its files: 100 GB at 60 MB/s, a slow shared disk."""
_STEP_TIMEOUT_S = 3600.0
"""Longest forward-backward of one batch. A backstop only: a rank that dies ends its call at once, and one that hangs in
a collective fails there after 10 minutes (trainer.control). What is left is a rank that computes for ever."""


class RayTrainerGroup:
    """All trainer ranks as one: every method runs on all of them at once, because they meet in collectives."""

    def __init__(self, actors: Sequence[Any], *, is_lora: bool) -> None:
        self._actors = actors
        self._is_lora = is_lora
        self.num_ranks = len(actors)

    async def warm_up(self, lengths: list[int], timeout_s: float) -> list[dict[str, float]]:
        """Try a made-up microbatch of sequences of these lengths (TrainerRank.warm_up)."""
        return await self._call("warm_up", [(lengths,)] * self.num_ranks, timeout_s=timeout_s)

    async def forward_backward(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]:
        """Accumulate the gradients of one batch. One list of microbatches per rank, equally long."""
        per_rank = [(microbatches, denominators) for microbatches in microbatches_by_rank]
        return await self._call("forward_backward", per_rank, timeout_s=_STEP_TIMEOUT_S)

    async def evaluate(
        self, microbatches_by_rank: Sequence[list[list[Sample]]], denominators: Denominators
    ) -> list[LossStats]:
        """The loss of these samples and its metrics, without gradients. One list of microbatches per rank."""
        per_rank = [(microbatches, denominators) for microbatches in microbatches_by_rank]
        return await self._call("evaluate", per_rank, timeout_s=_STEP_TIMEOUT_S)

    async def optimizer_step(self) -> OptimStats:
        """Apply the gradients; every rank returns the same."""
        return (await self._call("optimizer_step", timeout_s=_STEP_TIMEOUT_S))[0]

    async def connect(self, endpoints: Sequence[str], timeout_s: float, adapter_endpoints: Sequence[str] = ()) -> None:
        """Fetch the replicas' layouts, build the plan, bind it to their addresses; in adapter mode, send the base."""
        arguments = (list(endpoints), None, list(adapter_endpoints))
        await self._call("connect", [arguments] * self.num_ranks, timeout_s=timeout_s)

    async def publish(self, timeout_s: float, exclude: Sequence[int] = (), trace: Path | None = None) -> PublishReport:
        """Send the current policy version to every replica but those excluded. Rank 0 speaks for all, and writes the
        timeline to `trace`.
        """
        orders = [(list(exclude), trace)] * self.num_ranks
        return (await self._call("publish", orders, timeout_s=timeout_s))[0]

    async def disconnect(self, replicas: Sequence[int], timeout_s: float = _STEP_TIMEOUT_S) -> None:
        """Close every rank's links to dead replicas: their memory is free then. Waits for the call under way."""
        await self._call("disconnect", [(list(replicas),)] * self.num_ranks, timeout_s=timeout_s)

    async def reconnect(self, replica: int, endpoint: str, timeout_s: float, base_endpoint: str = "") -> None:
        """Meet a replica that was started again; send its base first, where it has none."""
        await self._call("reconnect", [(replica, endpoint, base_endpoint)] * self.num_ranks, timeout_s=timeout_s)

    async def export(self, folder: Path) -> None:
        """Write what was trained: the adapter in PEFT format, or the whole model when there is no adapter."""
        method = "save_adapter" if self._is_lora else "save_merged"
        await self._call(method, [(str(folder),)] * self.num_ranks, timeout_s=_SAVE_TIMEOUT_S)

    async def save_state(self, folder: Path) -> None:
        """Write trainable parameters, optimizer and generators, one set of files a rank."""
        await self._call("save_state", [(str(folder),)] * self.num_ranks, timeout_s=_SAVE_TIMEOUT_S)

    async def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote."""
        await self._call("load_state", [(str(folder),)] * self.num_ranks, timeout_s=_SAVE_TIMEOUT_S)

    async def shutdown(self) -> None:
        """Leave the process group and close links."""
        await self._call("shutdown", timeout_s=STOP_TIMEOUT_S)

    async def _call(
        self, method: str, args_by_rank: Sequence[tuple[Any, ...]] | None = None, *, timeout_s: float
    ) -> list[Any]:
        """Call on every rank. The first failure is raised at once: its peers may hang in a collective without it."""
        args = args_by_rank if args_by_rank is not None else [()] * self.num_ranks
        calls = [
            result_of(
                actor.call.options(name=f"TrainerRank.{method}").remote(method, *a),
                f"trainer rank {rank}",
                TrainingStopped,
            )
            for rank, (actor, a) in enumerate(zip(self._actors, args, strict=True))
        ]
        return await wait_for(together(*calls), f"{method} on {self.num_ranks} trainer ranks", timeout_s=timeout_s)


class RayRolloutWorker:
    """One rollout worker, as the supervisor sees it.

    Args:
        endpoint: where versions are published: the adapter slots', in adapter mode.
        base_endpoint: where the base was sent at the start; the same without slots.
        processes: the actor's and its engine's.
        node: Ray's id of the machine.
    """

    def __init__(
        self, name: str, actor: Any, endpoint: str, base_endpoint: str, processes: Sequence[ProcessId], node: str
    ) -> None:
        self.name = name
        self.node = node
        self.endpoint = endpoint
        self.base_endpoint = base_endpoint
        self._actor = actor
        self._processes = list(processes)

    async def generate_group(self, prompt: Prompt, n: int, sampling: SamplingConfig | None = None) -> list[Rollout]:
        """Sample `n` responses to one prompt, by rollout.sampling unless told otherwise."""
        return await self._call("generate_group", prompt, n, sampling)

    async def offer(self) -> list[Offer]:
        """What a restarted worker may read here."""
        return await self._call("offer")

    async def pull(self, offers: Sequence[Offer]) -> Pulled:
        """Read a peer's weights."""
        return await self._call("pull", list(offers))

    async def adopt(self, version: int, epoch: int) -> None:
        """Serve what was pulled."""
        await self._call("adopt", version, epoch)

    async def release(self, offers: Sequence[Offer]) -> None:
        """Close the links to the peer."""
        await self._call("release", list(offers))

    async def base_wanted_at(self) -> str:
        """Where its base must be sent before a version; "" when it needs none."""
        return await self._call("base_wanted_at")

    async def _call(self, method: str, *args: Any) -> Any:
        call = self._actor.call.options(name=f"RolloutWorker.{method}")
        return await result_of(call.remote(method, *args), self.name, OrchestratorError)

    def kill(self) -> None:
        """End what is left of it, also a process that is stopped and would never see the end of its parent."""
        ray.kill(self._actor)
        end_trees(self.node, self._processes)

    async def stop(self) -> None:
        """End the engine and its processes."""
        call = result_of(self._actor.call.remote("stop"), self.name, OrchestratorError)
        await wait_for(call, f"{self.name} to stop", timeout_s=STOP_TIMEOUT_S)


async def result_of(reference: Any, who: str, error_type: type[OrchestratorError]) -> Any:
    """Await a Ray call. An error of ours arrives as itself, any other as `error_type`, naming process and cause."""
    try:
        return await reference
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        logger.debug("traceback of %s:\n%s", who, error)
        if isinstance(cause, SlipstreamError):
            raise cause from None
        raise error_type(f"{who} failed with {type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        raise error_type(f"the process of {who} died: {error}") from error
