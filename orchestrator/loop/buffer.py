"""Groups in, batches out. The staleness bound and the back-pressure of the whole run live in this one small class.

Owns: which group belongs to which batch (tickets), when the next group may start, and the check at consumption.
Does not own: sampling, rewards, versions of workers. Pure asyncio: one Condition, no threads, no clock.

    claim_ticket() -> Ticket --> ... sample, reward ... --> deliver(ticket, group)
      |  waits while number >= (opened + S + 1) * P           |
      |                                                       v
      |     numbers    0 1 .. P-1 | P .. 2P-1 | 2P .. 3P-1 | ...    batch b is exactly the tickets [b*P, (b+1)*P)
      |                 batch 0       batch 1      batch 2
      +--<-- open_next_batch(), once version b+1 is committed       take_batch() waits for all tickets of batch b

The bound (P = groups_per_step, S = max_staleness_steps, `opened` = batches that were trained on and published):

    Ticket g can be claimed only while g < (opened + S + 1) * P, and its group is consumed in batch b = g // P. So
    b <= opened + S when it starts. Every batch raises the policy version by at most one (a refused step does not raise
    it), and all serving workers have committed the version of batch `opened` by then. Hence the version at consumption
    is at most (b - opened) <= S above the version that sampled the group's first token, and later tokens are younger.

At the start of a run fewer batches may be ahead (open_ahead), until the first one is taken. The bound holds as well.

With S = 0 the groups of batch b start only after version b is committed: strictly on-policy. With S > 0 workers sample
up to S batches ahead while the trainer works. Batches are filled in the order of tickets, not in the order in which
groups finish: a long response is neither starved nor overtaken, so batches carry no bias towards short responses, and
by these rules no group is ever late. Only something outside of them can break the bound (a worker that serves an old
version), so `take_batch` judges every group again. It drops and counts a group that is too old, and hands its prompt
out again with the same ticket. docs/staleness.md shows the numbers moving.
"""

import asyncio
from dataclasses import dataclass

from slipstream.orchestrator.checkpoints.loop_state import BufferState
from slipstream.rollout.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to sample one group. Ticket(17) is for the 18th group of the run, whose prompt must still be drawn."""

    number: int
    prompt: Prompt | None = None
    """Set when the ticket is handed out again: sample this prompt. None: draw the next one."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one optimizer step, in the order of their tickets."""

    index: int
    groups: list[Group]
    staleness_steps: list[int]
    """One per group: trainer's version at consumption - oldest version in the group."""
    num_dropped: int
    """Groups that were too old for this batch and were sampled again."""


class GroupBuffer:
    """See the module's docstring. `num_batches`: of the whole run; nothing is sampled beyond the last one."""

    def __init__(self, groups_per_step: int, max_staleness_steps: int, *, num_batches: int | None = None) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness_steps = max_staleness_steps
        self._end = None if num_batches is None else num_batches * groups_per_step
        self._num_ahead = max_staleness_steps
        """Batches that may be sampled ahead at the start of a run, until the first one is taken."""
        self._changed = asyncio.Condition()
        self._num_opened = 0
        """Batches that were trained on and published: how far tickets may be claimed."""
        self._num_batches = 0
        """Batches taken. Runs ahead of `_num_opened` while a step trains."""
        self._next_number = 0
        self._again: dict[int, Prompt] = {}
        """Prompts that must be sampled again, by ticket number."""
        self._in_flight: dict[int, Prompt | None] = {}
        """Claimed and not delivered, by ticket number; None until the prompt is drawn."""
        self._groups: dict[int, Group] = {}
        """Delivered and not consumed, by ticket number."""
        self._failure: BaseException | None = None

    @property
    def num_ready(self) -> int:
        """Groups of the next batch that have arrived."""
        return sum(number in self._groups for number in self._numbers_of(self._num_batches))

    @property
    def num_outstanding(self) -> int:
        """Groups claimed and not yet consumed; at most (S + 1) * P."""
        return len(self._again) + len(self._in_flight) + len(self._groups)

    @property
    def is_wide_open(self) -> bool:
        """Whether nothing but the staleness bound limits how many batches are sampled ahead."""
        return self._num_batches > 0 or self._num_ahead >= self._max_staleness_steps

    async def open_ahead(self, num_batches: int) -> None:
        """Let only so many batches be sampled ahead until the first one is taken (ramp.py)."""
        async with self._changed:
            self._num_ahead = num_batches
            self._changed.notify_all()

    async def claim_ticket(self) -> Ticket:
        """Wait until one more group may be sampled. Tickets that came back go first: the oldest batch waits."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._again or self._is_open(self._next_number))
            if self._again:
                number = min(self._again)
                prompt = self._again.pop(number)
                self._in_flight[number] = prompt
                return Ticket(number, prompt)
            number, self._next_number = self._next_number, self._next_number + 1
            self._in_flight[number] = None
            return Ticket(number)

    def assign_prompt(self, ticket: Ticket, prompt: Prompt) -> None:
        """Note which prompt is sampled for a ticket, so that a checkpoint can hand it out again."""
        self._in_flight[ticket.number] = prompt

    async def deliver(self, ticket: Ticket, group: Group) -> None:
        """Hand in the group of a claimed ticket. Never waits for room: there is room for every claimed ticket."""
        async with self._changed:
            if ticket.number not in self._in_flight:
                raise AssertionError(f"ticket {ticket.number} was not claimed, or was delivered twice")
            del self._in_flight[ticket.number]
            self._groups[ticket.number] = group
            self._changed.notify_all()

    async def take_batch(self, policy_version: int) -> Batch:
        """Wait for every group of the next batch, none of them older than the bound at `policy_version`.

        Raises: the error that `fail` was given. It is raised here and nowhere else, that is, between two steps.
        """
        num_dropped = 0
        async with self._changed:
            numbers = self._numbers_of(self._num_batches)
            while True:
                await self._changed.wait_for(lambda: self._failure or all(n in self._groups for n in numbers))
                if self._failure:
                    raise self._failure
                staleness = {n: self._groups[n].staleness_steps(policy_version) for n in numbers}
                too_old = [n for n in numbers if staleness[n] > self._max_staleness_steps]
                if not too_old:
                    break
                for number in too_old:
                    self._again[number] = self._groups.pop(number).prompt
                num_dropped += len(too_old)
                self._changed.notify_all()
            index, self._num_batches = self._num_batches, self._num_batches + 1
            self._changed.notify_all()  # the first one ends the ramp
            groups = [self._groups.pop(number) for number in numbers]
        ages = [group.staleness_steps(policy_version) for group in groups]
        return Batch(index, groups, ages, num_dropped)

    async def open_next_batch(self) -> None:
        """Let P more tickets be claimed. Call it once a batch was trained on and its version is committed."""
        async with self._changed:
            self._num_opened = self._num_batches
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """No more groups will come: wake the train loop, whose `take_batch` raises `error`."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    def state(self) -> BufferState:
        """Snapshot for a checkpoint. It leaves out tickets whose prompt is not drawn yet."""
        in_flight = {number: prompt for number, prompt in self._in_flight.items() if prompt is not None}
        return BufferState(self._num_batches, dict(self._groups), {**self._again, **in_flight})

    def load_state(self, state: BufferState) -> None:
        """Continue from a snapshot: groups as they were, prompts in flight handed out again.

        A ticket that is in neither was claimed and had no prompt yet; it is claimed anew. Such tickets are always the
        newest ones, because prompts are drawn in the order of tickets.
        """
        self._num_batches = self._num_opened = state.num_batches
        self._groups = dict(state.groups)
        self._again = dict(state.in_flight)
        first = state.num_batches * self._groups_per_step
        self._next_number = max([*self._groups, *self._again, first - 1]) + 1

    def _numbers_of(self, batch: int) -> range:
        return range(batch * self._groups_per_step, (batch + 1) * self._groups_per_step)

    def _is_open(self, number: int) -> bool:
        is_within_run = self._end is None or number < self._end
        num_ahead = self._max_staleness_steps if self.is_wide_open else self._num_ahead
        return is_within_run and number < (self._num_opened + num_ahead + 1) * self._groups_per_step
