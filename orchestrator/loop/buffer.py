"""Groups in, batches out. The staleness bound and the back-pressure of the whole run live in this one small class.

Owns: which group belongs to which batch (tickets), when the next group may start, and the check at consumption.
Does not own: sampling, rewards, versions of workers. Pure asyncio: one Condition, no threads, no clock.

    admit() -> Slot --> ... sample, reward ... --> put(slot, group)
      |  waits while ticket >= (opened + S + 1) * P           |
      |                                                      v
      |      tickets   0 1 .. P-1 | P .. 2P-1 | 2P .. 3P-1 | ...      batch b is exactly tickets [b*P, (b+1)*P)
      |                 batch 0       batch 1      batch 2
      +--<-- open_next() after version b+1 is committed      take_batch() waits for all tickets of batch b

The bound (P = groups_per_step, S = max_staleness_steps, `opened` = batches trained on and published):

    Ticket g starts only when g < (opened + S + 1) * P, and it is consumed in batch b = g // P. So b <= opened + S when
    it starts. Every batch raises the policy version by at most one (a step that was refused raises it by none), and all
    serving workers have committed the version of batch `opened` by then. Hence the version at consumption is at most
    (b - opened) <= S above the version that sampled the group's first token, and later tokens are younger. QED.

With S = 0 the groups of batch b start only after version b is committed: strictly on-policy. With S > 0 workers sample
up to S batches ahead while the trainer works. Batches are filled in ticket order, not in order of completion: a long
response is neither starved nor overtaken, so batches carry no bias towards short responses, and by these rules no group
is ever late. What may still break the bound lies outside of them (a worker that serves an old version), so `take_batch`
judges every group again; one that is too old is dropped, counted, and its prompt is handed out again under its ticket.
docs/staleness.md shows the numbers moving.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rollout.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class Slot:
    """Leave to sample one group. Example: Slot(17, None) is the 18th group of the run, its prompt yet to be drawn."""

    ticket: int
    prompt: Prompt | None = None
    """Set when the ticket is handed out again: sample this prompt. None: draw the next one."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one optimizer step, in ticket order."""

    index: int
    groups: list[Group]
    staleness_steps: list[int]
    """One per group: trainer's version at consumption - oldest version in the group."""
    num_dropped: int
    """Groups that were too old for this batch and were sampled again."""


@dataclass(frozen=True, slots=True)
class BufferState:
    """What a checkpoint keeps. Example: BufferState(12, {97: Group(...)}, {98: Prompt(...)})."""

    num_batches: int = 0
    groups: dict[int, Group] = field(default_factory=dict[int, Group])
    """Finished, not yet consumed, by ticket."""
    in_flight: dict[int, Prompt] = field(default_factory=dict[int, Prompt])
    """Admitted, not finished: to be sampled again."""


class GroupBuffer:
    """See the module's docstring.

    Args:
        groups_per_step: groups in one batch (P).
        max_staleness_steps: how many batches may be sampled ahead (S).
        num_batches: batches of the whole run; nothing is sampled beyond the last one.
        enforce_bound: False when weights are deliberately not published; samples then age without limit.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_staleness_steps: int,
        *,
        num_batches: int | None = None,
        enforce_bound: bool = True,
    ) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness_steps = max_staleness_steps
        self._enforce_bound = enforce_bound
        self._end = None if num_batches is None else num_batches * groups_per_step
        self._changed = asyncio.Condition()
        self._opened = 0
        """Batches trained on and published: how far admission has been opened."""
        self._num_batches = 0
        """Batches taken. Runs ahead of `_opened` while a step trains."""
        self._next_ticket = 0
        self._again: dict[int, Prompt] = {}
        self._in_flight: dict[int, Prompt | None] = {}
        self._groups: dict[int, Group] = {}
        self._failure: BaseException | None = None

    @property
    def num_ready(self) -> int:
        """Groups of the next batch that have arrived."""
        return sum(ticket in self._groups for ticket in self._tickets_of(self._num_batches))

    @property
    def num_outstanding(self) -> int:
        """Groups admitted and not yet consumed; at most (S + 1) * P."""
        return len(self._again) + len(self._in_flight) + len(self._groups)

    async def admit(self) -> Slot:
        """Wait for leave to sample one group. A ticket that came back goes first: the oldest batch waits for it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._again or self._is_open(self._next_ticket))
            if self._again:
                ticket = min(self._again)
                prompt = self._again.pop(ticket)
                self._in_flight[ticket] = prompt
                return Slot(ticket, prompt)
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            self._in_flight[ticket] = None
            return Slot(ticket)

    def drew(self, slot: Slot, prompt: Prompt) -> None:
        """Remember which prompt a ticket samples, so that a checkpoint can hand it out again."""
        self._in_flight[slot.ticket] = prompt

    async def put(self, slot: Slot, group: Group) -> None:
        """Deliver the group of an admitted slot. Never waits for room: admission bounded it beforehand."""
        async with self._changed:
            if slot.ticket not in self._in_flight:
                raise AssertionError(f"ticket {slot.ticket} was not admitted, or was delivered twice")
            del self._in_flight[slot.ticket]
            self._groups[slot.ticket] = group
            self._changed.notify_all()

    async def take_batch(self, policy_version: int) -> Batch:
        """Wait for every group of the next batch, none of them older than the bound at `policy_version`.

        Raises: whatever `fail` was given. A failure is raised here and nowhere else, that is, between two steps.
        """
        num_dropped = 0
        async with self._changed:
            while True:
                tickets = self._tickets_of(self._num_batches)
                await self._changed.wait_for(lambda: self._failure or all(t in self._groups for t in tickets))  # noqa: B023
                if self._failure:
                    raise self._failure
                too_old = [t for t in tickets if self._is_too_old(self._groups[t], policy_version)]
                if not too_old:
                    break
                for ticket in too_old:
                    self._again[ticket] = self._groups.pop(ticket).prompt
                num_dropped += len(too_old)
                self._changed.notify_all()
            index, self._num_batches = self._num_batches, self._num_batches + 1
            groups = [self._groups.pop(ticket) for ticket in tickets]
        ages = [policy_version - group.oldest_version for group in groups]
        return Batch(index, groups, ages, num_dropped)

    async def open_next(self) -> None:
        """Call once a batch was trained on and its version is committed: P more groups may start."""
        async with self._changed:
            self._opened = self._num_batches
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """No more groups will come: wake the train loop, which raises `error` at `take_batch`."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    def state(self) -> BufferState:
        """Snapshot for a checkpoint. A ticket without a prompt yet is not in it: its draw has not happened."""
        in_flight = {ticket: prompt for ticket, prompt in self._in_flight.items() if prompt is not None}
        return BufferState(self._num_batches, dict(self._groups), {**self._again, **in_flight})

    def load_state(self, state: BufferState) -> None:
        """Continue from a snapshot: groups as they were, prompts in flight handed out again.

        A ticket that is in neither was admitted without a prompt; it is handed out anew. Such tickets are always the
        newest ones, because prompts are drawn in ticket order.
        """
        self._num_batches = self._opened = state.num_batches
        self._groups = dict(state.groups)
        self._again = dict(state.in_flight)
        first = state.num_batches * self._groups_per_step
        self._next_ticket = max([*self._groups, *self._again, first - 1]) + 1

    def _tickets_of(self, batch: int) -> range:
        return range(batch * self._groups_per_step, (batch + 1) * self._groups_per_step)

    def _is_open(self, ticket: int) -> bool:
        is_within_run = self._end is None or ticket < self._end
        return is_within_run and ticket < (self._opened + self._max_staleness_steps + 1) * self._groups_per_step

    def _is_too_old(self, group: Group, policy_version: int) -> bool:
        return self._enforce_bound and policy_version - group.oldest_version > self._max_staleness_steps
