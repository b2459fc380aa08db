"""Which rollout workers serve, and how one that failed comes back.

Owns: the state of every replica, and how a worker that failed comes back. Does not own: requests (router.py),
publishing (loop/publication.py calls `hold` before and `settle` after), processes (`restart` is handed in), nor what is
noted about a replica (replicas.py).
Invariant: a replica serves only while it holds the newest published version, committed; in adapter mode, where
replicas go on serving during a publish, while it has missed at most `max_missed_publishes`.

    pending --hold--> updating --settle: committed--> serving --hold--> updating ...
       ^                 |                               |
       |                 +---- did not commit -----------+---- a request failed
       |                                                 v
       |                                     restarts left?  --no-->  out (for the rest of the run, or until
       |                                                 |                 somebody asks for it: slipstream recover)
       |                                                yes
       |                                                 v
       +---- no healthy peer, or the version moved --- starting --> recovering --adopted--> serving
             in every try: the next publish fills it  (a new process)  (reads a peer's weights, one-sided)

Publishes leave out replicas that are `starting` or `recovering`: the trainer neither takes part in a recovery nor waits
for one. What was read while the version moved is worthless; that is noticed here (num_publishes) and at the peer (its
epoch). The replica then reads again as soon as that publish is over, sooner than the next one by most of a step;
after NUM_READS tries it joins the next publish. When no replica serves, the controller publishes the present
version to `pending` replicas at once (`stranded`). In adapter mode a worker reads base and newest adapter in one
recovery, and keeps the base also when the adapter fails; only a worker that could not read the base asks the trainer
for it (`base_wanted_at`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from slipstream.fleet.errors import NoReplicasLeft
from slipstream.fleet.fleet_log import Fact, FleetEvent, FleetRow
from slipstream.fleet.replicas import Held, Recovery, Replica, ReplicaState, RolloutHandle, cause_of
from slipstream.fleet.waiting import wait_for

if TYPE_CHECKING:
    from slipstream.weight_sync.publish.report import ReplicaReport
    from slipstream.weight_sync.replica.recovery import Offer

logger = logging.getLogger(__name__)
NUM_READS = 2
"""Tries of one recovery to read between two publishes. A second read costs a second (the link is closed before)."""
T = TypeVar("T")


class Supervisor:
    """See the module's docstring.

    Args:
        workers: in the order of the endpoints that the publisher was given.
        restart: ends what is left of the worker of this name and starts it again with dummy weights. None: failed
            workers stay out.
        max_restarts: attempts per worker.
        backoff_s: pause after an attempt to restart that failed; doubles with every further one. The first attempt
            comes at once.
        recovery_timeout_s: longest that one call of a recovery may take.
        max_missed_publishes: publishes in a row that may fail on a replica before it is out. More than 0 only in
            adapter mode, where a replica goes on serving the version before; the buffer judges its samples' age.
        note: called with every event of a worker (fleet_log.py).
    """

    def __init__(
        self,
        workers: Sequence[RolloutHandle],
        *,
        restart: Callable[[str], Awaitable[RolloutHandle]] | None = None,
        max_restarts: int = 0,
        backoff_s: float = 1.0,
        recovery_timeout_s: float = 60.0,
        max_missed_publishes: int = 0,
        note: Callable[[FleetRow], None] = lambda row: None,
    ) -> None:
        self.replicas = {worker.name: Replica(worker.name, place, worker) for place, worker in enumerate(workers)}
        """By name."""
        self.num_restarts = 0
        """Workers started again, over all replicas."""
        self.recoveries: list[Recovery] = []
        """Every replica that came back, in order."""
        self._restart = restart
        self._max_restarts = max_restarts if restart is not None else 0
        self._backoff_s = backoff_s
        self._recovery_timeout_s = recovery_timeout_s
        self._num_publishes = 0
        self._num_closing = 0
        """Dead workers whose readers are closing their links just now."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._max_missed_publishes = max_missed_publishes
        self._write = note
        self._changed = asyncio.Condition()
        for replica in self.replicas.values():
            self._note_start(replica)

    @property
    def num_serving(self) -> int:
        """Replicas that take requests right now."""
        return self._count(ReplicaState.serving)

    @property
    def out_of_service(self) -> list[str]:
        """The replicas that do not come back by themselves."""
        return [name for name, replica in self.replicas.items() if replica.state is ReplicaState.out]

    def require_replicas(self) -> None:
        """Raise NoReplicasLeft, with every replica's reason, if all of them are out."""
        if len(self.out_of_service) == len(self.replicas):
            reasons = "; ".join(f"{replica.worker.name}: {replica.reason}" for replica in self.replicas.values())
            raise NoReplicasLeft(f"no rollout worker is left to sample from. {reasons}")

    async def close(self) -> None:
        """Give up restarts under way. Workers that fail from here on are being ended: nothing follows."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def least_loaded(self) -> Replica:
        """Wait until a replica serves, and return the one with the fewest groups in flight.

        Raises:
            NoReplicasLeft: every replica is out.
        """

        def is_decided() -> bool:
            return self.num_serving > 0 or len(self.out_of_service) == len(self.replicas)

        async with self._changed:
            # No deadline: a publish, a restart and a recovery have theirs, and every other state ends with one of them.
            await self._changed.wait_for(is_decided)
        self.require_replicas()
        serving = [replica for replica in self.replicas.values() if replica.state is ReplicaState.serving]
        return min(serving, key=lambda replica: (replica.num_in_flight, replica.place))

    # ---- publishes ----

    async def hold(self, *, pauses: bool = True) -> Held:
        """Begin a publish, once no link is being closed. Returns who takes part.

        Args:
            pauses: no group starts until `settle`; engines pause the groups in flight and resume them. False: replicas
                that serve go on with the version before.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_closing == 0)
            self._num_publishes += 1
            included: list[Replica] = []
            for replica in self.replicas.values():
                if replica.state in (ReplicaState.pending, ReplicaState.serving):
                    if pauses or replica.state is ReplicaState.pending:
                        replica.state = ReplicaState.updating
                    replica.num_updates += 1
                    replica.is_held = True
                    included.append(replica)
        return Held(
            exclude=[replica.place for replica in self.replicas.values() if replica not in included],
            joining=[replica for replica in included if not replica.is_known],
        )

    def joined(self, name: str) -> None:
        """The trainer has met this replica."""
        self.replicas[name].is_known = True

    def linked(self, reader: str, peer: str, offers: list[Offer]) -> None:
        """A replica has read from a peer in a publish, and keeps its link until the peer dies or is replaced."""
        self.replicas[reader].links[peer] = offers

    async def settle(self, outcomes: Sequence[ReplicaReport]) -> None:
        """End a publish: a replica that committed serves, one that failed is restarted, or out.

        When no replica is left, `least_loaded` raises next: the step that was published is complete all the same.
        """
        for replica in self.replicas.values():
            outcome = outcomes[replica.place]
            was_held, replica.is_held = replica.is_held, False
            if not was_held or replica.state not in (ReplicaState.updating, ReplicaState.serving):
                continue  # it did not take part, or failed meanwhile
            if outcome.committed:
                replica.num_missed = 0
                self._serve(replica)
            elif replica.state is ReplicaState.serving and replica.num_missed < self._max_missed_publishes:
                replica.num_missed += 1
                logger.warning(
                    "%s serves the version before, after %d failed publishes: %s",
                    replica.worker.name, replica.num_missed, outcome.error,
                )  # fmt: skip
            else:
                reason = outcome.error or "it did not commit and gave no reason"
                await self.fail(replica, reason, told_by_others=True)
        async with self._changed:
            self._changed.notify_all()

    async def stranded(self) -> None:
        """Wait until a replica needs weights and no replica serves, from which it could read them."""

        def is_stranded() -> bool:
            others = (ReplicaState.serving, ReplicaState.updating, ReplicaState.recovering)
            return self._count(ReplicaState.pending) > 0 and self._count(*others) == 0

        async with self._changed:
            await self._changed.wait_for(is_stranded)

    # ---- failure and return ----

    async def fail(self, replica: Replica, reason: str, *, told_by_others: bool = False) -> None:
        """Take a replica out of the router; its groups in flight are sampled elsewhere. Restart it if it may be.

        Args:
            reason: Why, for people.
            told_by_others: The trainer, which may know no more than that a link broke: the worker is asked how it died.
        """
        if self._has_left(replica):
            return
        if told_by_others:
            worker = replica.worker
            reason = await cause_of(worker, reason)
            if self._has_left(replica) or replica.worker is not worker:  # its successor did not fail
                return
        is_last = replica.num_restarts >= self._max_restarts
        await self._leave(replica, ReplicaState.out if is_last else ReplicaState.starting, reason)
        num_left = sum(other.state not in (ReplicaState.out, ReplicaState.starting) for other in self.replicas.values())
        logger.warning(
            "%s is out of service%s, %d left: %s",
            replica.worker.name, "" if is_last else " and is restarted", num_left, reason,
        )  # fmt: skip
        if is_last:
            self._note(replica, FleetEvent.out, reason=reason)
        else:
            self._spawn(self._bring_back(replica))

    def _has_left(self, replica: Replica) -> bool:
        return self._is_closed or replica.state in (ReplicaState.out, ReplicaState.starting)

    async def restart_now(self, name: str) -> str:
        """Restart a worker because a user asks for it, whatever its state is and however often it was restarted.

        Returns:
            What will happen, for people.
        """
        if self._restart is None:
            return "this run does not restart workers: nothing was done"
        replica = self.replicas[name]
        if replica.state is ReplicaState.starting:
            return f"{replica.worker.name} is being restarted already"
        before = replica.state
        await self._leave(replica, ReplicaState.starting, "a restart was asked for")
        replica.num_restarts = 0
        self._spawn(self._bring_back(replica, attempts=max(1, self._max_restarts)))
        logger.warning("%s was %s and is restarted on request", replica.worker.name, before)
        return f"{replica.worker.name} was {before} and is being restarted"

    async def _leave(self, replica: Replica, state: ReplicaState, reason: str) -> None:
        async with self._changed:
            replica.state, replica.reason, replica.failed_at = state, reason, time.monotonic()
            replica.left.set()
            self._changed.notify_all()
        self._note(replica, FleetEvent.failed, reason=reason)

    async def _bring_back(self, replica: Replica, attempts: int | None = None) -> None:
        """Restart a worker until it is up, then fill it."""
        assert self._restart is not None
        most = self._max_restarts if attempts is None else attempts
        num_failed = 0
        while replica.num_restarts < most:
            if num_failed:
                await asyncio.sleep(self._backoff_s * 2 ** (num_failed - 1))
            replica.num_restarts += 1
            self._note(replica, FleetEvent.restarting, attempt=replica.num_restarts)
            await self.close_links_to(replica)
            try:
                worker = await self._restart(replica.name)
            except Exception as error:  # noqa: BLE001 - the boundary to another process
                replica.reason = f"restart {replica.num_restarts} of {most} failed: {type(error).__name__}: {error}"
                logger.warning("%s: %s", replica.worker.name, replica.reason)
                num_failed += 1
                continue
            self.num_restarts += 1
            replica.worker, replica.left, replica.is_known = worker, asyncio.Event(), False
            replica.pulled, replica.base_wanted_at, replica.num_missed, replica.links = None, "", 0, {}
            self._note_start(replica)
            logger.info("%s is up again, %.1f s after it failed", worker.name, time.monotonic() - replica.failed_at)
            await self._recover(replica)
            return
        async with self._changed:
            replica.state = ReplicaState.out
            self._changed.notify_all()
        self._note(replica, FleetEvent.out, reason=replica.reason)
        logger.error("%s stays out of service: %s", replica.worker.name, replica.reason)

    async def close_links_to(self, dead: Replica) -> None:
        """Let every replica that read from a dead worker close its link: the memory is free for a successor only then.

        Waits for the end of a publish: closing a link gives a worker another address, which the trainer does not know.
        """
        if not any(dead.name in other.links for other in self.replicas.values()):
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not any(other.is_held for other in self.replicas.values()))
            self._num_closing += 1
        try:
            readers = [other for other in self.replicas.values() if dead.name in other.links]
            await asyncio.gather(*(self._release(other, dead, other.links.pop(dead.name)) for other in readers))
        finally:
            async with self._changed:
                self._num_closing -= 1
                self._changed.notify_all()

    async def _release(self, reader: Replica, peer: Replica, offers: Sequence[Offer]) -> None:
        try:
            await self._call(reader, "release", reader.worker.release(offers))
        except Exception as error:  # noqa: BLE001 - it goes on serving, with a link too many
            logger.warning("%s keeps its link to %s: %s", reader.worker.name, peer.worker.name, error)

    async def _recover(self, replica: Replica) -> None:
        """Give a restarted worker a healthy peer's weights; leave it pending, for a publish, where that cannot be."""
        replica.state, left, why = ReplicaState.recovering, replica.left, ""
        for _ in range(NUM_READS):
            async with self._changed:  # a peer in a publish can be read from once it has committed
                await self._changed.wait_for(lambda: not any(other.is_held for other in self.replicas.values()))
            if left.is_set():
                return  # a restart was asked for meanwhile
            num_publishes = self._num_publishes
            why = await self._read_from_a_peer(replica)
            if not why or left.is_set():
                return
            if num_publishes == self._num_publishes:
                break  # no publish is to blame
        await self._wait_for_publish(replica, why)

    async def _read_from_a_peer(self, replica: Replica) -> str:
        """Returns why it does not serve now; empty when it does, or has left meanwhile."""
        left = replica.left
        peers = [other for other in self.replicas.values() if other.state is ReplicaState.serving]
        if not peers:
            return "no other worker serves, from which it could read"
        peer = min(peers, key=lambda other: (other.num_missed, other.num_in_flight, other.place))
        num_publishes = self._num_publishes
        try:
            offers = await self._call(peer, "offer", peer.worker.offer())
            pulled = await self._call(replica, "pull", replica.worker.pull(offers))
            facts = {"bytes": pulled.num_bytes, "read_s": pulled.read_s, "verify_s": pulled.verify_s}
            self._note(replica, FleetEvent.read, peer=peer.worker.name, version=offers[-1].version, **facts)
            is_current = not peer.num_missed and await self._call(peer, "offer", peer.worker.offer()) == offers
            if is_current:
                await self._call(replica, "adopt", replica.worker.adopt(offers[-1].version, offers[-1].epoch))
        except Exception as error:  # noqa: BLE001 - the boundary to two other processes
            return f"reading from {peer.worker.name} failed with {type(error).__name__}: {error}"
        async with self._changed:  # so that no publish begins between this check and `_serve`
            if left.is_set():
                return ""
            is_current = is_current and self._num_publishes == num_publishes
            if is_current:
                replica.pulled = pulled
                self._serve(replica)
                self._changed.notify_all()
        if not is_current:
            return f"{peer.worker.name}, which it read from, is at an older version"
        logger.info(
            "%s read %d bytes of version %d from %s in %.3f s and proved them in %.3f s",
            replica.worker.name, pulled.num_bytes, offers[-1].version, peer.worker.name, pulled.read_s, pulled.verify_s,
        )  # fmt: skip
        await self._release(replica, peer, offers)
        return ""

    async def _wait_for_publish(self, replica: Replica, why: str) -> None:
        left = replica.left
        try:
            base_wanted_at = await self._call(replica, "base_wanted_at", replica.worker.base_wanted_at())
        except Exception as error:  # noqa: BLE001 - the boundary to another process
            if not left.is_set():
                await self.fail(replica, f"{type(error).__name__}: {error}")
            return
        self._note(replica, FleetEvent.waiting, reason=why)
        needs = " and needs its base before" if base_wanted_at else ""
        logger.info("%s joins the next publish%s: %s", replica.worker.name, needs, why)
        async with self._changed:
            if not left.is_set():
                replica.state, replica.base_wanted_at = ReplicaState.pending, base_wanted_at
                self._changed.notify_all()

    def _serve(self, replica: Replica) -> None:
        """Put it in service, and note its return if it had failed."""
        replica.state = ReplicaState.serving
        if replica.reason:
            down_s = time.monotonic() - replica.failed_at
            self.recoveries.append(Recovery(replica.name, down_s, replica.pulled.read_s if replica.pulled else None))
            self._note(replica, FleetEvent.serving, down_s=round(down_s, 3))
            logger.info("%s serves again, %.1f s after it failed", replica.worker.name, down_s)
            replica.reason = ""

    def _note(self, replica: Replica, event: FleetEvent, **facts: Fact) -> None:
        self._write(FleetRow(time.time(), replica.place, replica.worker.name, event, facts))

    def _note_start(self, replica: Replica) -> None:
        """How the worker's start went on, now that it is up."""
        for name, at in sorted(replica.worker.started_at.items(), key=lambda item: item[1]):
            facts: dict[str, Fact] = {"pid": replica.worker.pid} if name == FleetEvent.process_up else {}
            self._write(FleetRow(at, replica.place, replica.worker.name, FleetEvent(name), facts))

    async def _call(self, replica: Replica, verb: str, call: Awaitable[T]) -> T:
        return await wait_for(call, f"{verb} on {replica.worker.name}", timeout_s=self._recovery_timeout_s)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _count(self, *states: ReplicaState) -> int:
        return sum(replica.state in states for replica in self.replicas.values())
