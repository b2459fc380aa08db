"""Rollout workers that come and go while the run goes on: `slipstream scale`, `slipstream drain`, SIGTERM to a worker.

    any state --told to go--> leaving --others have its requests, its process has ended--> gone --asked for--> starting

Owns: how many workers are wanted, which ones go, and in which order one goes. Does not own: how one that comes is
started and filled (starts.py: as one that failed, under a name and in a place of its own; the trainer meets it at the
next publish), nor how the responses of one that goes are sampled to their end (router.py).
Invariant: one that goes takes no request and no publish any more. It returns every response under way as it stands. The
last one is started again: without it nobody would sample.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from slipstream.conf.plural import counted
from slipstream.fleet.errors import FleetRefusal
from slipstream.fleet.fleet_log import FleetEvent
from slipstream.fleet.replicas import Replica, ReplicaState
from slipstream.fleet.roster import Roster
from slipstream.fleet.starts import Starts

logger = logging.getLogger(__name__)
IDLE_POLL_S = 0.02


class Scaling:
    """See the module's docstring.

    Args:
        make_room: reserves what workers of these names need, or raises a SlipstreamError.
        end: ends the worker of this name, and gives back what was reserved for it.
    """

    def __init__(
        self,
        roster: Roster,
        starts: Starts,
        *,
        make_room: Callable[[Sequence[str]], Awaitable[None]],
        end: Callable[[str], Awaitable[None]],
    ) -> None:
        self._roster = roster
        self._starts = starts
        self._make_room = make_room
        self._end = end

    async def scale(self, num_workers: int) -> list[str]:
        """Have so many workers. Missing ones are started, beginning with those that ended; those with the highest
        places go, beginning with those that do not serve yet.

        Returns:
            What will happen, for people.

        Raises:
            SlipstreamError: It cannot be; nothing was done.
        """
        roster = self._roster
        if num_workers < 1:
            raise FleetRefusal(
                f"rollout={num_workers}: a run needs at least one rollout worker; slipstream stop ends it"
            )
        wanted = [one for one in roster.replicas.values() if one.is_wanted]
        lines: list[str] = []
        if (num_more := num_workers - len(wanted)) > 0:
            lines = await self._add(num_more)
        serve = (ReplicaState.serving, ReplicaState.updating)
        wanted.sort(key=lambda one: (one.state not in serve, one.place))
        for replica in wanted[num_workers:]:
            lines.append(f"{replica.process} hands its requests over and ends")
            roster.spawn(self._let_go(replica, f"{counted(num_workers, 'worker')} asked for"))
        roster.num_wanted = num_workers
        logger.info("slipstream scale: %s", "; ".join(lines) or f"{roster.in_words} already")
        return lines or [f"the run has {counted(num_workers, 'rollout worker')} already"]

    async def drain(self, name: str) -> str:
        """Let a worker go, of which one fewer is wanted from here on. Returns what will happen, for people.

        Raises:
            FleetRefusal: It has gone, or is the last one.
        """
        roster = self._roster
        replica = roster.replicas[name]
        if replica.state in (ReplicaState.leaving, ReplicaState.gone):
            raise FleetRefusal(f"{replica.process} is {replica.state} already ({replica.reason})")
        if not any(other.is_wanted for other in roster.replicas.values() if other is not replica):
            raise FleetRefusal(
                f"{replica.process} is the only rollout worker, and nobody could go on with its requests; add one "
                "before: slipstream scale RUN rollout=2"
            )
        roster.num_wanted -= replica.is_wanted
        roster.spawn(self._let_go(replica, "slipstream drain"))
        return f"{replica.process} hands its requests over and ends"

    async def listen(self, replica: Replica) -> None:
        """Let a worker go when it is told to."""
        worker = replica.worker
        try:
            who = await worker.told_to_go()
        except Exception:  # noqa: BLE001 - it has died, which its next call tells
            return
        if replica.handle is worker and replica.is_wanted:
            await self._let_go(replica, f"it was told to go by {who}")

    async def _add(self, num_more: int) -> list[str]:
        if not self._starts.are_possible:
            raise FleetRefusal(
                "this run publishes no weights (weight_sync.enabled=false): a further worker would get none"
            )
        replicas = self._roster.replicas
        idle = [one for one in replicas.values() if one.state in (ReplicaState.gone, ReplicaState.out)][:num_more]
        places = range(len(replicas), len(replicas) + num_more - len(idle))
        chosen = [*idle, *(Replica(f"rollout-{place}", place, None, ReplicaState.gone) for place in places)]
        await self._make_room([one.name for one in chosen])
        for replica in chosen:
            replicas[replica.name] = replica
            replica.state, replica.reason, replica.failed_at = (
                ReplicaState.starting,
                "it was asked for",
                time.monotonic(),
            )
            replica.is_further = True
            self._roster.note(replica, FleetEvent.joining)
            self._starts.start(replica, is_asked_for=True)
        return [f"{replica.name} is being started" for replica in chosen]

    async def _let_go(self, replica: Replica, why: str) -> None:
        """Hand a worker's requests over, and end it; start it again if it is the last one."""
        roster = self._roster
        async with roster.changed:  # a publish that it takes part in ends before
            await roster.changed.wait_for(lambda: not replica.is_held)
            if replica.state in (ReplicaState.leaving, ReplicaState.gone):
                return
            samples = replica.state is ReplicaState.serving
            replica.state, replica.reason, replica.failed_at = ReplicaState.leaving, why, time.monotonic()
            roster.changed.notify_all()
        roster.note(replica, FleetEvent.leaving, reason=why)
        await self._starts.give_up(replica)
        if samples:
            await self._hand_over(replica)
        replica.left.set()
        is_last = self._starts.are_possible and not any(other.is_wanted for other in roster.replicas.values())
        if not is_last:
            await self._starts.close_links_to(replica)
            await self._ended(replica)
        async with roster.changed:
            replica.state = ReplicaState.starting if is_last else ReplicaState.gone
            roster.changed.notify_all()
        roster.note(replica, FleetEvent.gone)
        logger.info("%s has gone (%s): %s", replica.process, why, roster.in_words)
        if is_last:
            logger.warning("%s is the last rollout worker and is started again", replica.process)
            self._starts.start(replica, is_asked_for=True)

    async def _hand_over(self, replica: Replica) -> None:
        """Ask a worker for its responses as they stand, and wait until the router has them."""

        async def idle() -> None:
            await replica.worker.hand_over()
            while replica.num_in_flight:
                await asyncio.sleep(IDLE_POLL_S)

        num_groups = replica.num_in_flight
        try:
            await self._starts.call(replica, "hand_over", idle())
            took_s = time.monotonic() - replica.failed_at
            logger.info("%s handed %d groups over in %.2f s", replica.process, num_groups, took_s)
        except Exception as error:  # noqa: BLE001 - the boundary to another process; its groups begin anew
            logger.warning("%s did not hand its requests over, and they begin anew: %s", replica.process, error)

    async def _ended(self, replica: Replica) -> None:
        try:
            await self._end(replica.name)
        except Exception as error:  # noqa: BLE001 - the boundary to another process, which is not needed any more
            logger.warning("%s did not end as it should: %s", replica.process, error)
