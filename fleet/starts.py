"""How a rollout worker's process is started while the run goes on, and how it gets its weights.

    starting: a new process with dummy weights, tried again until it is up or has no more restarts (then: out)
        |
    recovering: reads a serving peer's weights, one-sided, proves them and adopts them   --> serving
        |
    pending: no healthy peer, or the version moved in every try; the next publish fills it

Owns: the tries of a start, whom a worker reads from, and the links that readers keep. Does not own: which worker is
started and why (supervisor.py, scaling.py), nor its processes (`restart` is handed in). Invariant: publishes leave out
replicas that are `starting` or `recovering`, so the trainer neither takes part in a recovery nor waits for one. What
was read while the version moved is worthless; that is noticed here (num_publishes) and at the peer (its epoch). The
replica then reads again as soon as that publish is over; after NUM_READS tries it joins the next one. In adapter mode a
worker reads base and newest adapter in one recovery, and keeps the base also when the adapter fails; only a worker that
could not read the base asks the trainer for it (`base_wanted_at`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from slipstream.conf.failures import in_words, outcome_when_done
from slipstream.fleet.fleet_log import FleetEvent
from slipstream.fleet.replicas import Replica, ReplicaState, RolloutHandle
from slipstream.fleet.roster import Roster
from slipstream.fleet.waiting import wait_for
from slipstream.weight_sync.replica.recovery import Offer, Pulled

logger = logging.getLogger(__name__)
NUM_READS = 2
"""Tries of one recovery to read between two publishes. A second read costs a second (the link is closed before)."""
T = TypeVar("T")


class Starts:
    """See the module's docstring.

    Args:
        restart: ends what is left of the worker of this name, if there was one, and starts it with dummy weights.
        failed: told of a worker that came up and failed before it served, and why.
        max_restarts: attempts per worker; one that was asked for has at least one.
        backoff_s: pause after an attempt that failed; doubles with every further one. The first attempt comes at once.
        timeout_s: longest that one call of a recovery may take.
    """

    def __init__(
        self,
        roster: Roster,
        restart: Callable[[str], Awaitable[RolloutHandle]],
        *,
        when_up: Callable[[Replica], None],
        failed: Callable[[Replica, str], Awaitable[None]],
        max_restarts: int,
        backoff_s: float,
        timeout_s: float,
    ) -> None:
        self.num_restarts = 0
        self.max_restarts = max_restarts
        self.num_closing = 0
        """Dead workers whose readers are closing their links just now."""
        self._roster = roster
        self._restart = restart
        self._when_up = when_up
        self._failed = failed
        self._backoff_s = backoff_s
        self._timeout_s = timeout_s
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def start(self, replica: Replica, *, is_asked_for: bool = False) -> None:
        """Start a worker, and fill it when it is up. One that is asked for is tried however often it has failed."""
        most = self.max_restarts
        if is_asked_for:
            most, replica.num_restarts = max(1, most), 0
        self._under_way[replica.name] = self._roster.spawn(self._bring_back(replica, most))

    async def find_again(self, replica: Replica, is_known: bool) -> None:
        """A worker that another controller left: whether it lives, and what it needs where the trainer has not met it.
        One that has died is started again."""
        death = await outcome_when_done(self.call(replica, "check", replica.worker.check()))
        if death is not None:
            await self._failed(replica, str(death))
            return
        if not is_known:
            replica.is_known = False
            await self._wait_for_publish(replica, "the trainer has not met it")

    async def give_up(self, replica: Replica) -> None:
        if (start := self._under_way.pop(replica.name, None)) is not None:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)

    async def call(self, replica: Replica, verb: str, call: Awaitable[T]) -> T:
        """A worker's answer, for which one call of a recovery's time is waited."""
        return await wait_for(call, f"{verb} on {replica.process}", timeout_s=self._timeout_s)

    async def close_links_to(self, dead: Replica) -> None:
        """Let every replica that read from a dead worker close its link: the memory is free for a successor only then.

        Waits for the end of a publish: closing a link gives a worker another address, which the trainer does not know.
        """
        if not any(dead.name in other.links for other in self._roster.replicas.values()):
            return
        async with self._roster.changed:
            await self._roster.changed.wait_for(lambda: not self._roster.is_publishing)
            self.num_closing += 1
        try:
            readers = [other for other in self._roster.replicas.values() if dead.name in other.links]
            await asyncio.gather(*(self._release(other, dead, other.links.pop(dead.name)) for other in readers))
        finally:
            async with self._roster.changed:
                self.num_closing -= 1
                self._roster.changed.notify_all()

    async def _bring_back(self, replica: Replica, most: int) -> None:
        num_failed = 0
        while replica.num_restarts < most:
            if num_failed:
                await asyncio.sleep(self._backoff_s * 2 ** (num_failed - 1))
            replica.num_restarts += 1
            if not replica.is_further:
                self._roster.note(replica, FleetEvent.restarting, attempt=replica.num_restarts)
            await self.close_links_to(replica)
            worker = await outcome_when_done(self._restart(replica.name))
            if isinstance(worker, Exception):
                replica.reason = f"restart {replica.num_restarts} of {most} failed: {in_words(worker)}"
                logger.warning("%s: %s", replica.process, replica.reason)
                num_failed += 1
                continue
            self.num_restarts += not replica.is_further
            replica.handle, replica.left, replica.is_known = worker, asyncio.Event(), False
            replica.pulled, replica.base_wanted_at, replica.num_missed, replica.links = None, "", 0, {}
            self._when_up(replica)
            since = "it was asked for" if replica.is_further else "it failed"
            logger.info("%s is up, %.1f s after %s", worker.name, time.monotonic() - replica.failed_at, since)
            await self._recover(replica)
            return
        async with self._roster.changed:
            replica.state = ReplicaState.out
            self._roster.changed.notify_all()
        self._roster.note(replica, FleetEvent.out, reason=replica.reason)
        logger.error("%s stays out of service: %s", replica.process, replica.reason)

    async def _release(self, reader: Replica, peer: Replica, offers: Sequence[Offer]) -> None:
        failure = await outcome_when_done(self.call(reader, "release", reader.worker.release(offers)))
        if failure is not None:  # it goes on serving, with a link too many
            logger.warning("%s keeps its link to %s: %s", reader.process, peer.process, failure)

    async def _recover(self, replica: Replica) -> None:
        """Give a restarted worker a healthy peer's weights; leave it pending, for a publish, where that cannot be."""
        replica.state, left, why = ReplicaState.recovering, replica.left, ""
        for _ in range(NUM_READS):
            async with self._roster.changed:  # a peer in a publish can be read from once it has committed
                await self._roster.changed.wait_for(lambda: not self._roster.is_publishing)
            if left.is_set():
                return  # a restart was asked for meanwhile
            num_publishes = self._roster.num_publishes
            why = await self._read_from_a_peer(replica)
            if not why or left.is_set():
                return
            if num_publishes == self._roster.num_publishes:
                break  # no publish is to blame
        await self._wait_for_publish(replica, why)

    async def _read_from_a_peer(self, replica: Replica) -> str:
        """Returns why it does not serve now; empty when it does, or has left meanwhile."""
        left = replica.left
        peers = [other for other in self._roster.replicas.values() if other.state is ReplicaState.serving]
        if not peers:
            return "no other worker serves, from which it could read"
        peer = min(peers, key=lambda other: (other.num_missed, other.num_in_flight))
        num_publishes = self._roster.num_publishes
        read = await outcome_when_done(self._read(replica, peer))
        if isinstance(read, Exception):
            return f"reading from {peer.process} failed with {in_words(read)}"
        offers, pulled, is_current = read
        async with self._roster.changed:  # so that no publish begins between this check and `_serve`
            if left.is_set():
                return ""
            is_current = is_current and self._roster.num_publishes == num_publishes
            if is_current:
                replica.pulled = pulled
                self._roster.serve(replica)
                self._roster.changed.notify_all()
        if not is_current:
            return f"{peer.process}, which it read from, is at an older version"
        logger.info(
            "%s read %d bytes of version %d from %s in %.3f s and proved them in %.3f s",
            replica.process, pulled.num_bytes, offers[-1].version, peer.process, pulled.read_s, pulled.verify_s,
        )  # fmt: skip
        await self._release(replica, peer, offers)
        return ""

    async def _read(self, replica: Replica, peer: Replica) -> tuple[list[Offer], Pulled, bool]:
        """What the peer offered, what was read of it, and whether it was adopted: not if the peer has moved on."""
        offers = await self.call(peer, "offer", peer.worker.offer())
        pulled = await self.call(replica, "pull", replica.worker.pull(offers))
        facts = {"bytes": pulled.num_bytes, "read_s": pulled.read_s, "verify_s": pulled.verify_s}
        self._roster.note(replica, FleetEvent.read, peer=peer.process, version=offers[-1].version, **facts)
        is_current = not peer.num_missed and await self.call(peer, "offer", peer.worker.offer()) == offers
        if is_current:
            await self.call(replica, "adopt", replica.worker.adopt(offers[-1].version, offers[-1].epoch))
        return offers, pulled, is_current

    async def _wait_for_publish(self, replica: Replica, why: str) -> None:
        left = replica.left
        asked = self.call(replica, "base_wanted_at", replica.worker.base_wanted_at())
        base_wanted_at = await outcome_when_done(asked)
        if isinstance(base_wanted_at, Exception):
            if not left.is_set():
                await self._failed(replica, in_words(base_wanted_at))
            return
        self._roster.note(replica, FleetEvent.waiting, reason=why)
        needs = " and needs its base before" if base_wanted_at else ""
        logger.info("%s joins the next publish%s: %s", replica.process, needs, why)
        async with self._roster.changed:
            if not left.is_set():
                replica.state, replica.base_wanted_at = ReplicaState.pending, base_wanted_at
                self._roster.changed.notify_all()
