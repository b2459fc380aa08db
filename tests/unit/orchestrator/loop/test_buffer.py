"""Locks: the staleness bound holds without drops, back-pressure is exact, tickets keep their order, nothing is lost."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from fakes.clock import turns
from hypothesis import example, given, settings, strategies as st

from slipstream.orchestrator.loop.buffer import Batch, GroupBuffer, Ticket
from slipstream.rollout.types import Group, Prompt, Rollout

T = TypeVar("T")


def group_of(prompt_id: int, version: int) -> Group:
    return Group(Prompt(prompt_id, (1,), "p"), [Rollout([2], [-0.1], [version], "x", "stop")], [1.0])


async def done(task: asyncio.Task[T], num_turns: int = 20) -> T:
    """The result of a task that nothing holds up: one that waits for ever fails here and at once."""
    for _ in range(num_turns):
        if not task.done():
            await asyncio.sleep(0)
    assert task.done(), "nobody woke it"
    return await task


async def claim(buffer: GroupBuffer) -> Ticket | None:
    """A ticket; None where it would be waited for."""
    claiming = asyncio.create_task(buffer.claim_ticket())
    await turns()
    if claiming.done():
        return claiming.result()
    claiming.cancel()
    return None


@settings(max_examples=60)
@given(
    groups_per_step=st.integers(1, 5),
    max_staleness_steps=st.integers(0, 3),
    num_steps=st.integers(1, 8),
    num_workers=st.integers(1, 20),
    refused=st.sets(st.integers(0, 7)),
    seed=st.integers(0, 10_000),
)
def test_bound_holds_without_drops_for_any_interleaving(
    groups_per_step: int, max_staleness_steps: int, num_steps: int, num_workers: int, refused: set[int], seed: int
) -> None:
    """Groups finish in any order; each is sampled with the version committed when it started."""

    async def run() -> None:
        rng = random.Random(seed)
        buffer = GroupBuffer(groups_per_step, max_staleness_steps)
        committed = 0
        most_outstanding = 0

        async def sample() -> None:
            nonlocal most_outstanding
            while True:
                ticket = await buffer.claim_ticket()
                most_outstanding = max(most_outstanding, buffer.num_outstanding)
                version = committed
                for _ in range(rng.randrange(15)):
                    await asyncio.sleep(0)
                await buffer.deliver(ticket, group_of(ticket.number, version))

        workers = [asyncio.create_task(sample()) for _ in range(num_workers)]
        for step in range(num_steps):
            batch = await done(asyncio.create_task(buffer.take_batch(committed)), num_turns=2000)
            assert batch.num_dropped == 0
            assert max(batch.staleness_steps) <= max_staleness_steps
            tickets = [group.prompt.prompt_id for group in batch.groups]
            assert tickets == list(range(step * groups_per_step, (step + 1) * groups_per_step))
            for _ in range(rng.randrange(10)):
                await asyncio.sleep(0)
            committed += step not in refused
            await buffer.open_next_batch()
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        assert most_outstanding <= (max_staleness_steps + 1) * groups_per_step

    asyncio.run(run())


async def test_groups_that_are_too_old_again_and_again_are_counted_each_time() -> None:
    buffer = GroupBuffer(groups_per_step=2, max_staleness_steps=1)
    tickets = [await buffer.claim_ticket() for _ in range(4)]
    for ticket in tickets[:2]:
        await buffer.deliver(ticket, group_of(ticket.number, version=3))
    waiting = [asyncio.create_task(buffer.claim_ticket()) for _ in range(4)]
    await turns()
    taking = asyncio.create_task(buffer.take_batch(5))
    for claiming, version in zip(waiting, (3, 3, 4, 4)):
        again = await done(claiming)
        assert buffer.num_outstanding == 4
        assert again.prompt is not None and again.prompt.prompt_id == again.number
        await buffer.deliver(again, group_of(again.number, version))
    batch = await done(taking)
    assert (batch.num_dropped, batch.staleness_steps) == (4, [1, 1])


@pytest.mark.parametrize("is_whole", [False, True])
async def test_failure_reaches_the_train_loop_although_the_next_batch_may_be_whole(is_whole: bool) -> None:
    buffer = GroupBuffer(groups_per_step=1, max_staleness_steps=0)
    ticket = await buffer.claim_ticket()
    taking = None if is_whole else asyncio.create_task(buffer.take_batch(0))
    await turns()
    if is_whole:
        await buffer.deliver(ticket, group_of(0, 0))
    await buffer.fail(RuntimeError("all workers are out"))
    with pytest.raises(RuntimeError, match="all workers are out"):
        await done(taking or asyncio.create_task(buffer.take_batch(0)))


async def test_a_state_stays_as_it_is_while_the_run_and_a_resumed_one_go_on() -> None:
    buffer = GroupBuffer(groups_per_step=1, max_staleness_steps=1)
    tickets = [await buffer.claim_ticket() for _ in range(2)]
    for ticket in tickets:
        buffer.assign_prompt(ticket, Prompt(ticket.number, (1,), "p"))
    await buffer.deliver(tickets[0], group_of(0, 0))
    state = buffer.state()
    resumed = GroupBuffer(groups_per_step=1, max_staleness_steps=1)
    resumed.load_state(state)
    for one in (buffer, resumed):
        ticket = tickets[1] if one is buffer else await claim(resumed)
        assert ticket is not None
        await one.deliver(ticket, group_of(1, 0))
        assert (set(state.groups), set(state.in_flight)) == ({0}, {1})
        await done(asyncio.create_task(one.take_batch(0)))
        assert (set(state.groups), set(state.in_flight)) == ({0}, {1})


async def test_group_cannot_be_delivered_twice() -> None:
    buffer = GroupBuffer(groups_per_step=1, max_staleness_steps=0)
    ticket = await buffer.claim_ticket()
    await buffer.deliver(ticket, group_of(0, 0))
    with pytest.raises(AssertionError, match="delivered twice"):
        await buffer.deliver(ticket, group_of(0, 0))


@pytest.mark.parametrize("num_batches", [None, 2])
@pytest.mark.parametrize(("groups_per_step", "max_staleness_steps"), [(1, 0), (3, 0), (2, 1), (1, 3)])
async def test_exactly_the_tickets_of_the_bound_are_given_out(
    groups_per_step: int, max_staleness_steps: int, num_batches: int | None
) -> None:
    """S + 1 batches before the first commit, and one more with each: no ticket more and none less."""
    buffer = GroupBuffer(groups_per_step, max_staleness_steps, num_batches=num_batches)
    claimed: list[Ticket] = []
    for opened in range(3):
        while (ticket := await claim(buffer)) is not None:
            claimed.append(ticket)
        batches = opened + max_staleness_steps + 1
        assert len(claimed) == groups_per_step * (batches if num_batches is None else min(batches, num_batches))
        assert buffer.num_outstanding == len(claimed) - opened * groups_per_step
        if opened == num_batches:
            break
        for ready, ticket in enumerate(claimed[opened * groups_per_step :][:groups_per_step]):
            assert buffer.num_ready == ready
            await buffer.deliver(ticket, group_of(ticket.number, opened))
        assert buffer.num_ready == groups_per_step
        assert (await done(asyncio.create_task(buffer.take_batch(opened)))).index == opened
        assert await claim(buffer) is None, "its version is not committed"
        await buffer.open_next_batch()


async def test_fewer_batches_are_open_ahead_until_the_first_is_taken() -> None:
    buffer = GroupBuffer(groups_per_step=2, max_staleness_steps=2)
    assert buffer.is_wide_open
    await buffer.open_ahead(0)
    assert not buffer.is_wide_open
    first = [await buffer.claim_ticket(), await buffer.claim_ticket()]
    waiting = asyncio.create_task(buffer.claim_ticket())
    await turns()
    assert not waiting.done()
    await buffer.open_ahead(1)
    assert await done(waiting) == Ticket(2) and not buffer.is_wide_open
    assert await claim(buffer) == Ticket(3) and await claim(buffer) is None
    waiting = asyncio.create_task(buffer.claim_ticket())
    await turns()
    for ticket in first:
        assert buffer.num_outstanding == 4
        await buffer.deliver(ticket, group_of(ticket.number, 0))
    await turns()
    await buffer.take_batch(0)
    assert buffer.num_outstanding == 2 and buffer.is_wide_open
    assert await done(waiting) == Ticket(4), "the first batch ends the ramp"
    await buffer.open_ahead(2)
    resumed = GroupBuffer(groups_per_step=2, max_staleness_steps=2)
    resumed.load_state(buffer.state())
    await resumed.open_ahead(0)
    assert resumed.is_wide_open, "a run that goes on has no start"


class ResumedRun:
    """A run on one buffer after the other. Prompt k belongs to ticket k; a resume takes the buffer's state and the
    cursor of the prompts."""

    def __init__(self, groups_per_step: int, max_staleness_steps: int, seed: int) -> None:
        self.groups_per_step, self.max_staleness_steps = groups_per_step, max_staleness_steps
        self.rng = random.Random(seed)
        self.buffer = GroupBuffer(groups_per_step, max_staleness_steps)
        self.cursor = self.num_taken = 0
        self.undrawn: list[Ticket] = []
        self.drawn: list[tuple[Ticket, Prompt]] = []
        self.taking: asyncio.Task[Batch] | None = None

    async def claim(self) -> None:
        ticket = await claim(self.buffer)
        if ticket is not None and ticket.prompt is None:
            self.undrawn.append(ticket)
        elif ticket is not None and ticket.prompt is not None:
            assert ticket.prompt.prompt_id == ticket.number
            self.drawn.append((ticket, ticket.prompt))

    async def draw(self) -> None:
        if self.undrawn:
            ticket, prompt = self.undrawn.pop(0), Prompt(self.cursor, (1,), "p")
            assert ticket.number == self.cursor
            self.cursor += 1
            self.buffer.assign_prompt(ticket, prompt)
            self.drawn.append((ticket, prompt))

    async def deliver(self, age: int = 0) -> None:
        if self.drawn:
            ticket, prompt = self.drawn.pop(self.rng.randrange(len(self.drawn)))
            await self.buffer.deliver(ticket, group_of(prompt.prompt_id, self.num_taken - age))

    async def deliver_too_old(self) -> None:
        await self.deliver(self.max_staleness_steps + 1)

    async def take(self) -> None:
        self.taking = self.taking or asyncio.create_task(self.buffer.take_batch(self.num_taken))
        await turns()
        await self.note_taken()

    async def note_taken(self) -> None:
        if self.taking is not None and self.taking.done():
            batch, self.taking = self.taking.result(), None
            assert batch.index == self.num_taken
            first = self.num_taken * self.groups_per_step
            prompts = [group.prompt.prompt_id for group in batch.groups]
            assert prompts == list(range(first, first + self.groups_per_step))
            self.num_taken += 1
            await self.buffer.open_next_batch()

    async def resume(self) -> None:
        await self.note_taken()  # a batch may have become whole since
        self.close()
        state, self.buffer = self.buffer.state(), GroupBuffer(self.groups_per_step, self.max_staleness_steps)
        self.undrawn.clear()
        self.drawn.clear()
        self.buffer.load_state(state)
        assert self.buffer.state() == state

    def close(self) -> None:
        if self.taking is not None:
            self.taking.cancel()
            self.taking = None


ACTIONS = (ResumedRun.claim, ResumedRun.draw, ResumedRun.deliver, ResumedRun.deliver_too_old, ResumedRun.take)


@settings(max_examples=80)
@given(
    groups_per_step=st.integers(1, 3),
    max_staleness_steps=st.integers(0, 2),
    actions=st.lists(st.sampled_from([*ACTIONS[:3], *ACTIONS, ResumedRun.resume]), max_size=60),
    seed=st.integers(0, 1000),
)
@example(1, 0, [*ACTIONS[:2], ResumedRun.take, ResumedRun.deliver, ResumedRun.claim, ResumedRun.resume], 0)
def test_no_ticket_or_prompt_is_lost_or_changed_by_any_number_of_resumes(
    groups_per_step: int, max_staleness_steps: int, actions: list[Callable[[ResumedRun], Awaitable[None]]], seed: int
) -> None:
    async def run() -> None:
        world = ResumedRun(groups_per_step, max_staleness_steps, seed)
        for action in actions:
            await action(world)
        goal = world.num_taken + max_staleness_steps + 2
        for _ in range(400):  # whatever happened, the run goes on from here
            if world.num_taken < goal:
                for action in (ResumedRun.take, ResumedRun.claim, ResumedRun.draw, ResumedRun.deliver):
                    await action(world)
        assert world.num_taken >= goal, "a batch never became whole"
        world.close()

    asyncio.run(run())
