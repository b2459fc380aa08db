"""Which rollout workers serve, and which of them samples the next group.

Owns: the state of every replica, routing to the least loaded, and what a failed request costs: the worker leaves the
router, the group is sampled again elsewhere, and both are counted.
Does not own: publishing (the controller brackets it with `hold` and `settle`), nor restarting workers.
Invariant: a request goes only to a replica that has committed the newest published version.

    starting --settle: committed--> serving --hold--> updating --settle: committed--> serving
        |                              |                  |
        +--- settle: failed -----------+--- request failed +--- settle: failed ---> out (for the rest of the run)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from orchestrator.errors import NoReplicasLeft, WaitTimeout
from orchestrator.waiting import wait_for
from rollout.types import Prompt, Rollout
from weight_sync.errors import ReplicaDirty

logger = logging.getLogger(__name__)


class RolloutHandle(Protocol):
    """The controller's view of one rollout worker: a Ray actor, or a fake of ten lines in tests."""

    name: str

    async def generate_group(self, prompt: Prompt, n: int) -> list[Rollout]:
        """Sample `n` responses to one prompt."""
        ...


class ReplicaOutcome(Protocol):
    """What a publish reports about one replica (weight_sync.publisher)."""

    @property
    def committed(self) -> bool: ...
    @property
    def error(self) -> str | None: ...


class ReplicaState(StrEnum):
    """See the module's docstring."""

    starting = "starting"
    serving = "serving"
    updating = "updating"
    out = "out"


@dataclass(eq=False)
class Replica:
    """One rollout worker and what the router knows about it."""

    index: int
    worker: RolloutHandle
    state: ReplicaState = ReplicaState.starting
    reason: str = ""
    """Why it is out."""
    num_in_flight: int = 0
    """Groups it samples right now."""
    num_updates: int = 0
    """Publishes that began on it."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it goes out, so that groups in flight on it are given up at once."""


class Supervisor:
    """See the module's docstring.

    Args:
        workers: in the order of the endpoints that the publisher was given.
        request_timeout_s: a group that takes longer is given up, and its worker with it.
    """

    def __init__(self, workers: Sequence[RolloutHandle], *, request_timeout_s: float) -> None:
        self.replicas = [Replica(index, worker) for index, worker in enumerate(workers)]
        self.num_failed_groups = 0
        """Groups that had to be sampled again because their worker failed."""
        self._request_timeout_s = request_timeout_s
        self._changed = asyncio.Condition()

    @property
    def num_serving(self) -> int:
        """Replicas that take requests right now."""
        return sum(replica.state is ReplicaState.serving for replica in self.replicas)

    @property
    def out_of_service(self) -> list[int]:
        """Positions of the replicas that are out: a publish must not wait for them."""
        return [replica.index for replica in self.replicas if replica.state is ReplicaState.out]

    def require_replicas(self) -> None:
        """Raise NoReplicasLeft, with every replica's reason, if all of them are out."""
        if len(self.out_of_service) == len(self.replicas):
            reasons = "; ".join(f"{replica.worker.name}: {replica.reason}" for replica in self.replicas)
            raise NoReplicasLeft(f"no rollout worker is left to sample from. {reasons}")

    async def generate_group(self, prompt: Prompt, n: int) -> list[Rollout]:
        """Sample a group on the least loaded serving replica; on another one when that fails.

        Raises:
            NoReplicasLeft: every replica is out. Ends the loop: each failure takes one replica out.
        """
        while True:
            replica = await self._least_loaded()
            num_updates = replica.num_updates
            replica.num_in_flight += 1
            try:
                return await self._generate_on(replica, prompt, n)
            except ReplicaDirty as error:
                # The request crossed a publish on its way: Ray and ZMQ are two roads, and `begin` won. Nothing was
                # sampled and the worker is well. Only when no publish explains it, the worker really is dirty.
                if replica.num_updates == num_updates and replica.state is ReplicaState.serving:
                    await self.mark_out(replica, f"it committed the newest version, yet it refuses: {error}")
            except Exception as error:
                # The boundary to another process: whatever failed there costs this group one try, never the run.
                logger.debug("a group on %s failed", replica.worker.name, exc_info=True)
                self.num_failed_groups += 1
                await self.mark_out(replica, f"{type(error).__name__}: {error}")
            finally:
                replica.num_in_flight -= 1

    async def hold(self) -> None:
        """A publish begins: no group starts until `settle`. Groups in flight go on; engines pause and resume them."""
        async with self._changed:
            for replica in self.replicas:
                if replica.state is not ReplicaState.out:
                    replica.state = ReplicaState.updating
                    replica.num_updates += 1

    async def settle(self, outcomes: Sequence[ReplicaOutcome]) -> None:
        """A publish ended: whoever committed serves, whoever failed is out.

        When nobody is left the next `generate_group` says so: the step that was published is whole all the same.
        """
        for replica, outcome in zip(self.replicas, outcomes, strict=True):
            if replica.state is ReplicaState.out:
                continue
            if outcome.committed:
                replica.state = ReplicaState.serving
            else:
                await self.mark_out(replica, outcome.error or "it did not commit and gave no reason")
        async with self._changed:
            self._changed.notify_all()

    async def mark_out(self, replica: Replica, reason: str) -> None:
        """Take a replica out of the router for the rest of the run; its groups in flight are sampled elsewhere."""
        if replica.state is ReplicaState.out:
            return
        async with self._changed:
            replica.state, replica.reason = ReplicaState.out, reason
            replica.left.set()
            self._changed.notify_all()
        num_left = sum(other.state is not ReplicaState.out for other in self.replicas)
        logger.warning("%s is out of service, %d left: %s", replica.worker.name, num_left, reason)

    async def _least_loaded(self) -> Replica:
        """Wait until a replica serves, and return the one with the fewest groups in flight."""

        def is_decided() -> bool:
            return self.num_serving > 0 or len(self.out_of_service) == len(self.replicas)

        async with self._changed:
            # No deadline of its own: `starting` and `updating` end with the publish, which has one.
            await self._changed.wait_for(is_decided)
        self.require_replicas()
        serving = [replica for replica in self.replicas if replica.state is ReplicaState.serving]
        return min(serving, key=lambda replica: (replica.num_in_flight, replica.index))

    async def _generate_on(self, replica: Replica, prompt: Prompt, n: int) -> list[Rollout]:
        """One try. Ends early when the replica goes out: a frozen engine would hold the group until its deadline."""
        call = asyncio.ensure_future(replica.worker.generate_group(prompt, n))
        left = asyncio.ensure_future(replica.left.wait())
        try:
            await wait_for(
                asyncio.wait({call, left}, return_when=asyncio.FIRST_COMPLETED),
                f"a group of {n} on {replica.worker.name} (prompt {prompt.prompt_id})",
                timeout_s=self._request_timeout_s,
            )
            if not call.done():
                raise WaitTimeout(f"{replica.worker.name} went out of service meanwhile")
            rollouts = call.result()
            if len(rollouts) != n or not all(rollout.token_ids for rollout in rollouts):
                raise ValueError(f"asked for {n} responses, got {len(rollouts)}, or one without a token")
            return rollouts
        finally:
            call.cancel()
            left.cancel()
