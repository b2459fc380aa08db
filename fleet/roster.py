"""The rollout workers of a run, by name, and the state of each.

Owns: every change of a state, the waits for one, and what is noted about it. Does not own: why a state changes
(supervisor.py draws it), nor the facts about one worker (replicas.py).
Invariant: whoever waits for states holds `changed`, and is told of every change.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from slipstream.conf.plural import counted
from slipstream.fleet.errors import NoReplicasLeft
from slipstream.fleet.fleet_log import Fact, FleetEvent, FleetRow
from slipstream.fleet.replicas import Recovery, Replica, ReplicaState, RolloutHandle

logger = logging.getLogger(__name__)


class Roster:
    """See the module's docstring. `workers` are in the order of the endpoints that the publisher was given; None: that
    one has gone. `note` is called with every event of a worker (fleet_log.py)."""

    def __init__(self, workers: Sequence[RolloutHandle | None], note: Callable[[FleetRow], None]) -> None:
        self.replicas = {one.name: one for one in map(_replica_of, range(len(workers)), workers)}
        self.num_wanted = sum(worker is not None for worker in workers)
        """How many workers were asked for last."""
        self.recoveries: list[Recovery] = []
        self.num_publishes = 0
        self.awaits_room = False
        """Machines may come on which workers are started (scaling.py): without a worker the run waits."""
        self.changed = asyncio.Condition()
        self._write = note
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_serving(self) -> int:
        return self.count(ReplicaState.serving)

    @property
    def out_of_service(self) -> list[str]:
        """The replicas that do not come back by themselves."""
        return [name for name, replica in self.replicas.items() if replica.state is ReplicaState.out]

    @property
    def is_hopeless(self) -> bool:
        """No replica serves, or will by itself."""
        ends = (ReplicaState.out, ReplicaState.gone)
        return not self.awaits_room and all(one.state in ends for one in self.replicas.values())

    @property
    def is_publishing(self) -> bool:
        """A publish is under way, on some replicas at least."""
        return any(one.is_held for one in self.replicas.values())

    def require_replicas(self) -> None:
        """Raise NoReplicasLeft, with every replica's reason, if all of them are out."""
        if self.is_hopeless:
            reasons = "; ".join(f"{replica.process}: {replica.reason}" for replica in self.replicas.values())
            raise NoReplicasLeft(f"no rollout worker is left to sample from. {reasons}")

    @property
    def in_words(self) -> str:
        """How many workers serve, for people: "2 of 3 rollout workers serve". One that a publish holds counts."""
        num_there = self.count(ReplicaState.serving, ReplicaState.updating)
        return f"{num_there} of {counted(self.num_wanted, 'rollout worker')} serve"

    async def least_loaded(self) -> Replica:
        """Wait until a replica serves, and return the one with the fewest groups in flight, the first of equal ones.
        Raises NoReplicasLeft if every replica is out."""
        async with self.changed:
            # No deadline: a publish, a restart and a recovery have theirs, and every other state ends with one of them.
            await self.changed.wait_for(lambda: self.num_serving > 0 or self.is_hopeless)
        self.require_replicas()
        serving = [replica for replica in self.replicas.values() if replica.state is ReplicaState.serving]
        return min(serving, key=lambda replica: replica.num_in_flight)

    async def stranded(self) -> None:
        """Wait until a replica needs weights and no replica serves, from which it could read them."""
        others = (ReplicaState.serving, ReplicaState.updating, ReplicaState.recovering)
        async with self.changed:
            await self.changed.wait_for(lambda: self.count(ReplicaState.pending) > 0 and self.count(*others) == 0)

    async def leave(self, replica: Replica, state: ReplicaState, reason: str) -> None:
        """Take a failed worker out of service; whoever waits for an answer of it gives up."""
        async with self.changed:
            replica.state, replica.reason, replica.failed_at = state, reason, time.monotonic()
            replica.left.set()
            self.changed.notify_all()
        self.note(replica, FleetEvent.failed, reason=reason)

    def serve(self, replica: Replica) -> None:
        """Put it in service, and note its return if it had failed."""
        replica.state = ReplicaState.serving
        if replica.reason and replica.is_further:
            start_s = time.monotonic() - replica.failed_at
            self.note(replica, FleetEvent.serving, start_s=round(start_s, 3))
            logger.info("%s serves, %.1f s after it was asked for: %s", replica.process, start_s, self.in_words)
        elif replica.reason:
            down_s = time.monotonic() - replica.failed_at
            self.recoveries.append(Recovery(replica.name, down_s, replica.pulled.read_s if replica.pulled else None))
            self.note(replica, FleetEvent.serving, down_s=round(down_s, 3))
            logger.info("%s serves again, %.1f s after it failed", replica.process, down_s)
        replica.reason, replica.is_further = "", False

    def note(self, replica: Replica, event: FleetEvent, **facts: Fact) -> None:
        self._write(FleetRow(time.time(), replica.place, replica.process, event, facts))

    def note_start(self, replica: Replica) -> None:
        """Write down, once a worker is up, when each phase of its start ended."""
        for name, at in sorted(replica.worker.started_at.items(), key=lambda item: item[1]):
            facts: dict[str, Fact] = {"pid": replica.worker.pid} if name == FleetEvent.process_up else {}
            self._write(FleetRow(at, replica.place, replica.process, FleetEvent(name), facts))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run this in a task of its own, until close() cancels it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def count(self, *states: ReplicaState) -> int:
        return sum(replica.state in states for replica in self.replicas.values())


def _replica_of(place: int, worker: RolloutHandle | None) -> Replica:
    """A worker, under the name that its first process had."""
    if worker is None:
        return Replica(f"rollout-{place}", place, None, ReplicaState.gone)
    return Replica(worker.name.partition(".")[0], place, worker)
