"""Rollout workers that come and go while the run goes on: `slipstream scale`, `slipstream drain`, SIGTERM to a worker,
a notice to its machine, machines that come and leave.

    any state --told to go--> leaving --others have its requests, its process has ended--> gone --asked for--> starting

Owns: how many workers are wanted, which ones leave, the steps in which one leaves, and on which machine a worker starts
that no command asked for. With a range (rollout.num_workers=MIN..MAX), a run wants as many as machines have room for,
but no more than were asked for last, and looks for room every FOLLOW_EVERY_S. Does not own: how a new worker is started
and filled (starts.py treats it like one that failed, under a name and in a place of its own), who finishes the
responses of one that leaves (router.py), nor what machines there are (`look` is handed in).
Invariants: a worker that leaves takes no further request and no further publish. It returns every response under way as
it stands. The last worker is started again: without it nobody would sample. One that failed too often stays out, and
none takes its place: it would fail as well, on and on.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from slipstream.conf.failures import outcome_when_done
from slipstream.conf.plural import counted
from slipstream.fleet.errors import FleetRefusal
from slipstream.fleet.fleet_log import FleetEvent
from slipstream.fleet.replicas import Replica, ReplicaState
from slipstream.fleet.roster import Roster
from slipstream.fleet.starts import Starts
from slipstream.rollout.worker_verbs import NOTICE

logger = logging.getLogger(__name__)
IDLE_POLL_S = 0.02
FOLLOW_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Room:
    free: Mapping[str, int]
    """Machine -> how many further workers it has room for."""
    reserved: Mapping[str, str]
    """Worker -> the machine where its room is reserved. One that is missing has no room, or its machine has left."""


MakeRoom = Callable[[Mapping[str, str | None]], Awaitable[None]]
"""Reserves what workers need, by name, each on a machine or (None) on any; or raises a SlipstreamError."""


class Scaling:
    """See the module's docstring.

    Args:
        end: ends the worker of this name, and gives back what was reserved for it.
        look: at the machines. None: workers come and go by command alone.
        bounds: MIN and MAX. None: the run has a number of workers, whatever machines there are.
    """

    def __init__(
        self,
        roster: Roster,
        starts: Starts,
        *,
        make_room: MakeRoom,
        end: Callable[[str], Awaitable[None]],
        look: Callable[[], Awaitable[Room]] | None = None,
        bounds: tuple[int, int] | None = None,
    ) -> None:
        self._roster = roster
        self._starts = starts
        self._make_room = make_room
        self._end = end
        self._look = look
        self._bounds = bounds
        self._most = roster.num_wanted if bounds is None else bounds[1]
        """The number that was asked for last, within the range."""
        self._shunned: set[str] = set()
        """Machines whose workers were told to go: a worker starts there only by command."""
        self._taken: set[str] = set()
        """Those of them that will be taken away: no worker starts there at all."""
        self._seen_lost: set[str] = set()
        """Workers that had no place at the last look, and wait for one to start."""

    @property
    def num_asked(self) -> int:
        """Workers that were asked for last, whether machines have room for them or not."""
        return self._roster.num_wanted if self._bounds is None else self._most

    def ask(self, num_workers: int) -> None:
        """Take up what was asked for before a run was resumed, within its range; without a range nothing is done."""
        if self._bounds is not None:
            self._most = min(max(self._bounds[0], num_workers), self._bounds[1])

    async def scale(self, num_workers: int) -> list[str]:
        """Have so many workers. Missing ones are started, beginning with those that ended; those with the highest
        places go, beginning with those that do not serve yet.

        Returns what will happen, for people. Raises SlipstreamError if it cannot be; nothing was done then.
        """
        roster = self._roster
        if num_workers < 1:
            raise FleetRefusal(
                f"rollout={num_workers}: a run needs at least one rollout worker; slipstream stop ends it"
            )
        least, most = self._bounds or (1, num_workers)
        if not least <= num_workers <= most:
            raise FleetRefusal(f"rollout={num_workers}: this run has {least} to {most} workers (rollout.num_workers)")
        wanted = [one for one in roster.replicas.values() if one.is_wanted]
        lines: list[str] = []
        if (num_more := num_workers - len(wanted)) > 0:
            lines = await (self._add(num_more) if self._look is None else self._add_by_command(num_more))
        serve = (ReplicaState.serving, ReplicaState.updating)
        wanted.sort(key=lambda one: (one.state not in serve, one.place))
        for replica in wanted[num_workers:]:
            lines.append(f"{replica.process} hands its requests over and ends")
            roster.spawn(self._let_go(replica, f"{counted(num_workers, 'worker')} asked for"))
        roster.num_wanted = self._most = num_workers
        self._count_wanted()
        logger.info("slipstream scale: %s", "; ".join(lines) or f"{roster.in_words} already")
        return lines or [f"the run has {counted(num_workers, 'rollout worker')} already"]

    async def drain(self, name: str) -> str:
        """Let a worker go, of which one fewer is wanted from here on. Returns what will happen, for people. Raises
        FleetRefusal if it has gone, or is the last one."""
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
        if self._bounds is not None:
            self._most = max(self._bounds[0], self._most - replica.is_wanted)
        self._shun(replica)
        roster.spawn(self._let_go(replica, "slipstream drain"))
        return f"{replica.process} hands its requests over and ends"

    async def listen(self, replica: Replica) -> None:
        """Let a worker go when it is told to."""
        worker = replica.worker
        who = await outcome_when_done(worker.told_to_go())
        if isinstance(who, Exception):  # it has died, which its next call tells
            return
        if replica.handle is worker and replica.is_wanted:
            self._shun(replica)
            if is_taken := who == NOTICE and self._look is not None:
                self._taken.add(worker.node)
            await self._let_go(replica, f"it was told to go by {who}", is_lost=is_taken)

    async def follow(self, *, patience_s: float, every_s: float = FOLLOW_EVERY_S) -> None:
        """Have as many workers as was asked for and machines have room for, until cancelled.

        Args:
            patience_s: how long a run without a worker waits for room. It ends then, as if all had failed.
        """
        roster, served_at, said = self._roster, time.monotonic(), ""
        while True:
            if any(one.is_wanted for one in roster.replicas.values()):
                served_at = time.monotonic()
            async with roster.changed:
                # Two looks tell whether those that are out failed, or their machines left.
                limit_s = patience_s if roster.count(ReplicaState.gone, ReplicaState.leaving) else 3 * every_s
                roster.awaits_room = time.monotonic() - served_at < limit_s
                roster.changed.notify_all()
            refusal = await outcome_when_done(self.follow_once())  # Ray's: another run may have taken the room
            if refusal is not None and str(refusal) != said:
                logger.warning("no further rollout worker for now: %s", refusal)
            said = "" if refusal is None else str(refusal)
            await asyncio.sleep(every_s)

    async def follow_once(self) -> None:
        """Let workers go whose machine has left before they served, and start missing ones where there is room. Raises
        SlipstreamError where what looked like room was none."""
        assert self._look is not None, "this run does not look at machines"
        room = await self._look()
        replicas = self._roster.replicas
        may_be_lost = (ReplicaState.starting, ReplicaState.out)
        lost = {one.name for one in replicas.values() if one.state in may_be_lost} - room.reserved.keys()
        for name in lost & self._seen_lost:  # at the first look, Ray may be about to give it another place
            self._roster.spawn(self._let_go(replicas[name], "its machine has left", is_lost=True))
        self._seen_lost = lost
        self._count_wanted()
        num_out = self._roster.count(ReplicaState.out)
        num_more = self.num_asked - sum(one.is_wanted for one in replicas.values()) - num_out
        for line in await self._add_where_room_is(room, num_more, (ReplicaState.gone,), self._shunned):
            logger.info("%s, because a machine has room for it", line)
        self._count_wanted()

    def _count_wanted(self) -> None:
        """With a range, want as many workers as there are, and those that are out."""
        if self._bounds is not None:
            num_out = self._roster.count(ReplicaState.out)
            self._roster.num_wanted = num_out + sum(one.is_wanted for one in self._roster.replicas.values())

    def _shun(self, replica: Replica) -> None:
        if replica.handle is not None:
            self._shunned.add(replica.worker.node)

    async def _add(self, num_more: int) -> list[str]:
        """Start workers, whose room is where Ray finds it: all of them, or none."""
        chosen = self._chosen(num_more, (ReplicaState.gone, ReplicaState.out))
        await self._make_room(dict.fromkeys(one.name for one in chosen))
        return self._begin(chosen)

    async def _add_by_command(self, num_more: int) -> list[str]:
        """Start as many of them as there is room for now, on any machine."""
        assert self._look is not None
        self._shunned &= self._taken
        states = (ReplicaState.gone, ReplicaState.out)
        lines = await self._add_where_room_is(await self._look(), num_more, states, self._taken)
        if num_later := num_more - len(lines):
            lines.append(f"{counted(num_later, 'worker')} more: as soon as a machine has room")
        return lines

    async def _add_where_room_is(
        self, room: Room, num_more: int, states: Sequence[ReplicaState], shunned: Collection[str]
    ) -> list[str]:
        """Start at most so many workers; those first that have their room still."""
        free = [node for node, number in room.free.items() if node not in shunned for _ in range(min(number, num_more))]
        where: dict[str, str | None] = {}
        chosen: list[Replica] = []
        own = {name for name, node in room.reserved.items() if node not in shunned}
        for replica in self._chosen(max(0, num_more), states, own):
            if replica.name in own:
                chosen.append(replica)
            elif free:
                chosen.append(replica)
                where[replica.name] = free.pop(0)
        if where:
            await self._make_room(where)
        return self._begin(chosen)

    def _chosen(self, num: int, states: Sequence[ReplicaState], first: Collection[str] = ()) -> list[Replica]:
        """So many replicas to start: those in these states, among them `first` before others, then new ones."""
        replicas = self._roster.replicas
        idle = [one for one in replicas.values() if one.state in states]
        idle = sorted(idle, key=lambda one: one.name not in first)[:num]
        places = range(len(replicas), len(replicas) + num - len(idle))
        return [*idle, *(Replica(f"rollout-{place}", place, None, ReplicaState.gone) for place in places)]

    def _begin(self, chosen: Sequence[Replica]) -> list[str]:
        replicas = self._roster.replicas
        for replica in chosen:
            replicas[replica.name] = replica
            replica.state, replica.reason, replica.is_further = ReplicaState.starting, "it was asked for", True
            replica.failed_at = time.monotonic()
            self._roster.note(replica, FleetEvent.joining)
            self._starts.start(replica, is_asked_for=True)
        return [f"{replica.name} is being started" for replica in chosen]

    async def _let_go(self, replica: Replica, why: str, *, is_lost: bool = False) -> None:
        """Hand a worker's requests over, and end it; start it again if it is the last one, and its machine is there."""
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
        others_serve = any(other.is_wanted for other in roster.replicas.values())
        is_last = not is_lost and not others_serve
        if not is_last:
            await self._starts.close_links_to(replica)
            if (failure := await outcome_when_done(self._end(replica.name))) is not None:
                logger.warning("%s did not end as it should: %s", replica.process, failure)
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
        failure = await outcome_when_done(self._starts.call(replica, "hand_over", idle()))
        if failure is not None:
            logger.warning("%s did not hand its requests over, and they begin anew: %s", replica.process, failure)
            return
        took_s = time.monotonic() - replica.failed_at
        logger.info("%s handed %d groups over in %.2f s", replica.process, num_groups, took_s)
