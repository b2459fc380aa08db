"""Which rollout workers serve: before, during and after a publish, and when one has failed.

Owns: what a publish (loop/publication.py calls `hold` before and `settle` after), a failure and a user's wish do to a
replica's state. Does not own: the states themselves (roster.py), requests (router.py), how a worker is started and
filled (starts.py), nor how workers come and go (scaling.py).
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

When no replica serves, the controller publishes the present version to `pending` replicas at once (`Roster.stranded`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from slipstream.conf.plural import counted
from slipstream.fleet.fleet_log import FleetEvent, FleetRow
from slipstream.fleet.replicas import Held, Replica, ReplicaState, RolloutHandle, cause_of
from slipstream.fleet.roster import Roster
from slipstream.fleet.scaling import MakeRoom, Room, Scaling
from slipstream.fleet.starts import Starts
from slipstream.weight_sync.publish.report import ReplicaReport

logger = logging.getLogger(__name__)


async def _done(_: object) -> None:
    """Nothing needs to be done."""


class Supervisor:
    """See the module's docstring.

    Args:
        workers: in the order of the endpoints that the publisher was given; None: that one has gone.
        restart, max_restarts, backoff_s, recovery_timeout_s: starts.py.
        make_room, end, look, bounds: scaling.py.
        max_missed_publishes: publishes in a row that may fail on a replica before it is out. More than 0 only in
            adapter mode, where a replica goes on serving the version before; the buffer judges its samples' age.
    """

    def __init__(
        self,
        workers: Sequence[RolloutHandle | None],
        *,
        restart: Callable[[str], Awaitable[RolloutHandle]],
        make_room: MakeRoom = _done,
        end: Callable[[str], Awaitable[None]] = _done,
        look: Callable[[], Awaitable[Room]] | None = None,
        bounds: tuple[int, int] | None = None,
        max_restarts: int = 0,
        backoff_s: float = 1.0,
        recovery_timeout_s: float = 60.0,
        max_missed_publishes: int = 0,
        note: Callable[[FleetRow], None] = lambda row: None,
    ) -> None:
        self.roster = Roster(workers, note)
        self.starts = Starts(
            self.roster,
            restart,
            when_up=self._begin,
            failed=self.fail,
            max_restarts=max_restarts,
            backoff_s=backoff_s,
            timeout_s=recovery_timeout_s,
        )
        self.scaling = Scaling(self.roster, self.starts, make_room=make_room, end=end, look=look, bounds=bounds)
        self._is_closed = False
        self._max_missed_publishes = max_missed_publishes
        for replica in self.roster.replicas.values():
            if replica.handle is not None:
                self._begin(replica)

    async def find_again(self, known: Collection[str]) -> None:
        """Look at workers that another controller left; `known`: endpoints that the trainer has met."""
        found = [one for one in self.roster.replicas.values() if one.handle is not None]
        await asyncio.gather(*(self.starts.find_again(one, one.worker.endpoint in known) for one in found))

    def follow(self, *, patience_s: float) -> None:
        """From now on workers come and go with machines (scaling.py)."""
        self.roster.spawn(self.scaling.follow(patience_s=patience_s))

    async def close(self) -> None:
        """Give up restarts under way. Workers that fail from here on are being ended: nothing follows."""
        self._is_closed = True
        await self.roster.close()

    async def hold(self, *, pauses: bool = True) -> Held:
        """Begin a publish, once no link is being closed. Returns who takes part.

        Args:
            pauses: no group starts until `settle`; engines pause the groups in flight and resume them. False: replicas
                that serve go on with the version before.
        """
        async with self.roster.changed:
            await self.roster.changed.wait_for(lambda: self.starts.num_closing == 0)
            self.roster.num_publishes += 1
            included: list[Replica] = []
            for replica in self.roster.replicas.values():
                if replica.state in (ReplicaState.pending, ReplicaState.serving):
                    if pauses or replica.state is ReplicaState.pending:
                        replica.state = ReplicaState.updating
                    replica.num_updates += 1
                    replica.is_held = True
                    included.append(replica)
        return Held(
            exclude=[replica.place for replica in self.roster.replicas.values() if replica not in included],
            joining=[replica for replica in included if not replica.is_known],
        )

    async def settle(self, outcomes: Sequence[ReplicaReport]) -> None:
        """End a publish: a replica that committed serves, one that failed is restarted, or out. When no replica is
        left, the next request says so: the step that was published is complete all the same."""
        for replica in list(self.roster.replicas.values()):
            was_held, replica.is_held = replica.is_held, False
            if not was_held or replica.state not in (ReplicaState.updating, ReplicaState.serving):
                continue  # it did not take part, or failed meanwhile
            outcome = outcomes[replica.place]
            if outcome.committed:
                replica.num_missed = 0
                self.roster.serve(replica)
            elif replica.state is ReplicaState.serving and replica.num_missed < self._max_missed_publishes:
                replica.num_missed += 1
                logger.warning(
                    "%s serves the version before, after %d failed publishes: %s",
                    replica.process, replica.num_missed, outcome.error,
                )  # fmt: skip
            else:
                reason = outcome.error or "it did not commit and gave no reason"
                await self.fail(replica, reason, told_by_others=True)
        async with self.roster.changed:
            self.roster.changed.notify_all()

    async def fail(self, replica: Replica, reason: str, *, told_by_others: bool = False) -> None:
        """Take a replica out of the router; its groups in flight are sampled elsewhere. Restart it if it may be.

        Args:
            told_by_others: by the trainer, which may know no more than that a link broke: the worker is asked how it
                died.
        """
        if self._has_left(replica):
            return
        if told_by_others:
            worker = replica.worker
            reason = await cause_of(worker, reason)
            if self._has_left(replica) or replica.worker is not worker:  # its successor did not fail
                return
        is_last = replica.num_restarts >= self.starts.max_restarts
        await self.roster.leave(replica, ReplicaState.out if is_last else ReplicaState.starting, reason)
        num_left = sum(
            other.is_wanted and other.state is not ReplicaState.starting for other in self.roster.replicas.values()
        )
        logger.warning(
            "%s is out of service%s, %s left: %s",
            replica.process, "" if is_last else " and is restarted", counted(num_left, "other worker"), reason,
        )  # fmt: skip
        if is_last:
            self.roster.note(replica, FleetEvent.out, reason=reason)
        else:
            self.starts.start(replica)

    async def restart_now(self, name: str) -> str:
        """Restart a worker because a user asks for it, whatever its state is and however often it was restarted.
        Returns what will happen, for people."""
        replica = self.roster.replicas[name]
        if replica.state is ReplicaState.starting:
            return f"{replica.process} is being restarted already"
        if replica.state in (ReplicaState.leaving, ReplicaState.gone):
            return f"{replica.process} is {replica.state} ({replica.reason}): slipstream scale asks for more workers"
        before = replica.state
        await self.roster.leave(replica, ReplicaState.starting, "a restart was asked for")
        self.starts.start(replica, is_asked_for=True)
        logger.warning("%s was %s and is restarted on request", replica.process, before)
        return f"{replica.process} was {before} and is being restarted"

    def _has_left(self, replica: Replica) -> bool:
        return self._is_closed or not replica.is_wanted or replica.state is ReplicaState.starting

    def _begin(self, replica: Replica) -> None:
        """A worker is up: note how its start went on, and listen whether it is told to go."""
        self.roster.note_start(replica)
        self.roster.spawn(self.scaling.listen(replica))
