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

    any state --told to go--> leaving --others have its requests, its process has ended--> gone --asked for--> starting

Workers come and go while the run goes on (`scale`, `drain`, SIGTERM to a worker). One that comes is started as one that
failed, under a name and in a place of its own, and the trainer meets it at the next publish. One that goes takes no
request and no publish any more; it returns every response under way as it stands, and the router lets others go on with
them. The last one is started again: without it nobody would sample.

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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.conf.plural import counted
from slipstream.fleet.errors import FleetRefusal, NoReplicasLeft
from slipstream.fleet.fleet_log import Fact, FleetEvent, FleetRow
from slipstream.fleet.replicas import Held, Recovery, Replica, ReplicaState, RolloutHandle, cause_of
from slipstream.fleet.waiting import wait_for

if TYPE_CHECKING:
    from slipstream.weight_sync.publish.report import ReplicaReport
    from slipstream.weight_sync.replica.recovery import Offer

logger = logging.getLogger(__name__)
NUM_READS = 2
"""Tries of one recovery to read between two publishes. A second read costs a second (the link is closed before)."""
IDLE_POLL_S = 0.02
T = TypeVar("T")


async def _done(_: object) -> None:
    """Nothing needs to be done."""


class Supervisor:
    """See the module's docstring.

    Args:
        workers: in the order of the endpoints that the publisher was given.
        restart: ends what is left of the worker of this name, if there was one, and starts it with dummy weights.
            None: failed workers stay out, and none can be added.
        make_room: reserves what workers of these names need, or raises a SlipstreamError.
        end: ends the worker of this name, and gives back what was reserved for it.
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
        make_room: Callable[[Sequence[str]], Awaitable[None]] = _done,
        end: Callable[[str], Awaitable[None]] = _done,
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
        self.num_wanted = len(workers)
        """Workers that were asked for last."""
        self._restart = restart
        self._make_room = make_room
        self._end = end
        self._returns: dict[str, asyncio.Task[None]] = {}
        """Who is being started, by name."""
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
            self._begin(replica)

    @property
    def num_serving(self) -> int:
        """Replicas that take requests right now."""
        return self._count(ReplicaState.serving)

    @property
    def out_of_service(self) -> list[str]:
        """The replicas that do not come back by themselves."""
        return [name for name, replica in self.replicas.items() if replica.state is ReplicaState.out]

    @property
    def _is_hopeless(self) -> bool:
        """No replica serves, or will by itself."""
        return all(one.state in (ReplicaState.out, ReplicaState.gone) for one in self.replicas.values())

    def require_replicas(self) -> None:
        """Raise NoReplicasLeft, with every replica's reason, if all of them are out."""
        if self._is_hopeless:
            reasons = "; ".join(f"{replica.process}: {replica.reason}" for replica in self.replicas.values())
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
            return self.num_serving > 0 or self._is_hopeless

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
        for replica in list(self.replicas.values()):
            was_held, replica.is_held = replica.is_held, False
            if not was_held or replica.state not in (ReplicaState.updating, ReplicaState.serving):
                continue  # it did not take part, or failed meanwhile
            outcome = outcomes[replica.place]
            if outcome.committed:
                replica.num_missed = 0
                self._serve(replica)
            elif replica.state is ReplicaState.serving and replica.num_missed < self._max_missed_publishes:
                replica.num_missed += 1
                logger.warning(
                    "%s serves the version before, after %d failed publishes: %s",
                    replica.process, replica.num_missed, outcome.error,
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

    # ---- more and fewer ----

    @property
    def in_words(self) -> str:
        """How many workers serve, for people: "2 of 3 rollout workers serve"."""
        return f"{self.num_serving} of {counted(self.num_wanted, 'rollout worker')} serve"

    async def scale(self, num_workers: int) -> list[str]:
        """Have so many workers. Missing ones are started, beginning with those that ended; those with the highest
        places go, beginning with those that do not serve yet.

        Returns:
            What will happen, for people.

        Raises:
            SlipstreamError: It cannot be; nothing was done.
        """
        if num_workers < 1:
            raise FleetRefusal(
                f"rollout={num_workers}: a run needs at least one rollout worker; slipstream stop ends it"
            )
        wanted = [one for one in self.replicas.values() if one.is_wanted]
        lines: list[str] = []
        if (num_more := num_workers - len(wanted)) > 0:
            lines = await self._add(num_more)
        serve = (ReplicaState.serving, ReplicaState.updating)
        wanted.sort(key=lambda one: (one.state not in serve, one.place))
        for replica in wanted[num_workers:]:
            lines.append(f"{replica.process} hands its requests over and ends")
            self._spawn(self._let_go(replica, f"{counted(num_workers, 'worker')} asked for"))
        self.num_wanted = num_workers
        logger.info("slipstream scale: %s", "; ".join(lines) or f"{self.in_words} already")
        return lines or [f"the run has {counted(num_workers, 'rollout worker')} already"]

    async def drain(self, name: str) -> str:
        """Let a worker go, of which one fewer is wanted from here on. Returns what will happen, for people.

        Raises:
            FleetRefusal: It has gone, or is the last one.
        """
        replica = self.replicas[name]
        if replica.state in (ReplicaState.leaving, ReplicaState.gone):
            raise FleetRefusal(f"{replica.process} is {replica.state} already ({replica.reason})")
        if not any(other.is_wanted for other in self.replicas.values() if other is not replica):
            raise FleetRefusal(
                f"{replica.process} is the only rollout worker, and nobody could go on with its requests; add one "
                "before: slipstream scale RUN rollout=2"
            )
        self.num_wanted -= replica.is_wanted
        self._spawn(self._let_go(replica, "slipstream drain"))
        return f"{replica.process} hands its requests over and ends"

    async def _add(self, num_more: int) -> list[str]:
        if self._restart is None:
            raise FleetRefusal(
                "this run publishes no weights (weight_sync.enabled=false): a further worker would get none"
            )
        idle = [one for one in self.replicas.values() if one.state in (ReplicaState.gone, ReplicaState.out)][:num_more]
        places = range(len(self.replicas), len(self.replicas) + num_more - len(idle))
        chosen = [*idle, *(Replica(f"rollout-{place}", place, None, ReplicaState.gone) for place in places)]
        await self._make_room([one.name for one in chosen])
        for replica in chosen:
            self.replicas[replica.name] = replica
            replica.state, replica.reason, replica.failed_at = (
                ReplicaState.starting,
                "it was asked for",
                time.monotonic(),
            )
            replica.is_further, replica.num_restarts = True, 0
            self._note(replica, FleetEvent.joining)
            self._start(replica, attempts=max(1, self._max_restarts))
        return [f"{replica.name} is being started" for replica in chosen]

    async def _listen(self, replica: Replica) -> None:
        """Let a worker go that is told to."""
        worker = replica.worker
        try:
            who = await worker.told_to_go()
        except Exception:  # noqa: BLE001 - it has died, which its next call tells
            return
        if replica.handle is worker and replica.is_wanted:
            await self._let_go(replica, f"it was told to go by {who}")

    async def _let_go(self, replica: Replica, why: str) -> None:
        """Hand a worker's requests over, and end it; start it again if it is the last one."""
        async with self._changed:  # a publish that it takes part in ends before
            await self._changed.wait_for(lambda: not replica.is_held)
            if replica.state in (ReplicaState.leaving, ReplicaState.gone):
                return
            samples = replica.state is ReplicaState.serving
            replica.state, replica.reason, replica.failed_at = ReplicaState.leaving, why, time.monotonic()
            self._changed.notify_all()
        self._note(replica, FleetEvent.leaving, reason=why)
        if (start := self._returns.pop(replica.name, None)) is not None:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
        if samples:
            await self._hand_over(replica)
        replica.left.set()
        is_last = self._restart is not None and not any(other.is_wanted for other in self.replicas.values())
        if not is_last:
            await self.close_links_to(replica)
            await self._ended(replica)
        async with self._changed:
            replica.state = ReplicaState.starting if is_last else ReplicaState.gone
            self._changed.notify_all()
        self._note(replica, FleetEvent.gone)
        logger.info("%s has gone (%s): %s", replica.process, why, self.in_words)
        if is_last:
            logger.warning("%s is the last rollout worker and is started again", replica.process)
            self._start(replica, attempts=max(1, self._max_restarts))

    async def _hand_over(self, replica: Replica) -> None:
        """Ask a worker for its responses as they stand, and wait until the router has them."""

        async def idle() -> None:
            await replica.worker.hand_over()
            while replica.num_in_flight:
                await asyncio.sleep(IDLE_POLL_S)

        num_groups = replica.num_in_flight
        try:
            await self._call(replica, "hand_over", idle())
            took_s = time.monotonic() - replica.failed_at
            logger.info("%s handed %d groups over in %.2f s", replica.process, num_groups, took_s)
        except Exception as error:  # noqa: BLE001 - the boundary to another process; its groups begin anew
            logger.warning("%s did not hand its requests over, and they begin anew: %s", replica.process, error)

    async def _ended(self, replica: Replica) -> None:
        try:
            await self._end(replica.name)
        except Exception as error:  # noqa: BLE001 - the boundary to another process, which is not needed any more
            logger.warning("%s did not end as it should: %s", replica.process, error)

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
        num_left = sum(other.is_wanted and other.state is not ReplicaState.starting for other in self.replicas.values())
        logger.warning(
            "%s is out of service%s, %d left: %s",
            replica.process, "" if is_last else " and is restarted", num_left, reason,
        )  # fmt: skip
        if is_last:
            self._note(replica, FleetEvent.out, reason=reason)
        else:
            self._start(replica)

    def _has_left(self, replica: Replica) -> bool:
        return self._is_closed or not replica.is_wanted or replica.state is ReplicaState.starting

    async def restart_now(self, name: str) -> str:
        """Restart a worker because a user asks for it, whatever its state is and however often it was restarted.

        Returns:
            What will happen, for people.
        """
        if self._restart is None:
            return "this run does not restart workers: nothing was done"
        replica = self.replicas[name]
        if replica.state is ReplicaState.starting:
            return f"{replica.process} is being restarted already"
        if replica.state in (ReplicaState.leaving, ReplicaState.gone):
            return f"{replica.process} is {replica.state} ({replica.reason}): slipstream scale asks for more workers"
        before = replica.state
        await self._leave(replica, ReplicaState.starting, "a restart was asked for")
        replica.num_restarts = 0
        self._start(replica, attempts=max(1, self._max_restarts))
        logger.warning("%s was %s and is restarted on request", replica.process, before)
        return f"{replica.process} was {before} and is being restarted"

    async def _leave(self, replica: Replica, state: ReplicaState, reason: str) -> None:
        async with self._changed:
            replica.state, replica.reason, replica.failed_at = state, reason, time.monotonic()
            replica.left.set()
            self._changed.notify_all()
        self._note(replica, FleetEvent.failed, reason=reason)

    def _start(self, replica: Replica, attempts: int | None = None) -> None:
        self._returns[replica.name] = self._spawn(self._bring_back(replica, attempts))

    async def _bring_back(self, replica: Replica, attempts: int | None = None) -> None:
        """Restart a worker until it is up, then fill it."""
        assert self._restart is not None
        most = self._max_restarts if attempts is None else attempts
        num_failed = 0
        while replica.num_restarts < most:
            if num_failed:
                await asyncio.sleep(self._backoff_s * 2 ** (num_failed - 1))
            replica.num_restarts += 1
            if not replica.is_further:
                self._note(replica, FleetEvent.restarting, attempt=replica.num_restarts)
            await self.close_links_to(replica)
            try:
                worker = await self._restart(replica.name)
            except Exception as error:  # noqa: BLE001 - the boundary to another process
                replica.reason = f"restart {replica.num_restarts} of {most} failed: {type(error).__name__}: {error}"
                logger.warning("%s: %s", replica.process, replica.reason)
                num_failed += 1
                continue
            self.num_restarts += not replica.is_further
            replica.handle, replica.left, replica.is_known = worker, asyncio.Event(), False
            replica.pulled, replica.base_wanted_at, replica.num_missed, replica.links = None, "", 0, {}
            self._begin(replica)
            since = "it was asked for" if replica.is_further else "it failed"
            logger.info("%s is up, %.1f s after %s", worker.name, time.monotonic() - replica.failed_at, since)
            await self._recover(replica)
            return
        async with self._changed:
            replica.state = ReplicaState.out
            self._changed.notify_all()
        self._note(replica, FleetEvent.out, reason=replica.reason)
        logger.error("%s stays out of service: %s", replica.process, replica.reason)

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
            logger.warning("%s keeps its link to %s: %s", reader.process, peer.process, error)

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
            self._note(replica, FleetEvent.read, peer=peer.process, version=offers[-1].version, **facts)
            is_current = not peer.num_missed and await self._call(peer, "offer", peer.worker.offer()) == offers
            if is_current:
                await self._call(replica, "adopt", replica.worker.adopt(offers[-1].version, offers[-1].epoch))
        except Exception as error:  # noqa: BLE001 - the boundary to two other processes
            return f"reading from {peer.process} failed with {type(error).__name__}: {error}"
        async with self._changed:  # so that no publish begins between this check and `_serve`
            if left.is_set():
                return ""
            is_current = is_current and self._num_publishes == num_publishes
            if is_current:
                replica.pulled = pulled
                self._serve(replica)
                self._changed.notify_all()
        if not is_current:
            return f"{peer.process}, which it read from, is at an older version"
        logger.info(
            "%s read %d bytes of version %d from %s in %.3f s and proved them in %.3f s",
            replica.process, pulled.num_bytes, offers[-1].version, peer.process, pulled.read_s, pulled.verify_s,
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
        logger.info("%s joins the next publish%s: %s", replica.process, needs, why)
        async with self._changed:
            if not left.is_set():
                replica.state, replica.base_wanted_at = ReplicaState.pending, base_wanted_at
                self._changed.notify_all()

    def _serve(self, replica: Replica) -> None:
        """Put it in service, and note its return if it had failed."""
        replica.state = ReplicaState.serving
        if replica.reason and replica.is_further:
            start_s = time.monotonic() - replica.failed_at
            self._note(replica, FleetEvent.serving, start_s=round(start_s, 3))
            logger.info("%s serves, %.1f s after it was asked for: %s", replica.process, start_s, self.in_words)
        elif replica.reason:
            down_s = time.monotonic() - replica.failed_at
            self.recoveries.append(Recovery(replica.name, down_s, replica.pulled.read_s if replica.pulled else None))
            self._note(replica, FleetEvent.serving, down_s=round(down_s, 3))
            logger.info("%s serves again, %.1f s after it failed", replica.process, down_s)
        replica.reason, replica.is_further = "", False

    def _note(self, replica: Replica, event: FleetEvent, **facts: Fact) -> None:
        self._write(FleetRow(time.time(), replica.place, replica.process, event, facts))

    def _begin(self, replica: Replica) -> None:
        """A worker is up: note how its start went on, and listen whether it is told to go."""
        self._spawn(self._listen(replica))
        for name, at in sorted(replica.worker.started_at.items(), key=lambda item: item[1]):
            facts: dict[str, Fact] = {"pid": replica.worker.pid} if name == FleetEvent.process_up else {}
            self._write(FleetRow(at, replica.place, replica.process, FleetEvent(name), facts))

    async def _call(self, replica: Replica, verb: str, call: Awaitable[T]) -> T:
        return await wait_for(call, f"{verb} on {replica.process}", timeout_s=self._recovery_timeout_s)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _count(self, *states: ReplicaState) -> int:
        return sum(replica.state in states for replica in self.replicas.values())
