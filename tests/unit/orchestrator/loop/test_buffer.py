"""Locks: the staleness bound holds without drops, back-pressure is exact, tickets keep their order, nothing is lost."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.loop.buffer import GroupBuffer, Ticket
from rollout.types import Group, Prompt, Rollout


def group_of(prompt_id: int, version: int) -> Group:
    return Group(Prompt(prompt_id, (1,), "p"), [Rollout([2], [-0.1], [version], "x", "stop")], [1.0])


async def settle() -> None:
    """Let every ready task run."""
    for _ in range(20):
        await asyncio.sleep(0)


@settings(deadline=None, max_examples=60)
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
            batch = await buffer.take_batch(committed)
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


async def test_tickets_stop_at_the_bound_and_go_on_with_the_commit() -> None:
    buffer = GroupBuffer(groups_per_step=2, max_staleness_steps=0)
    tickets = [await buffer.claim_ticket(), await buffer.claim_ticket()]
    waiting = asyncio.create_task(buffer.claim_ticket())
    await settle()
    assert not waiting.done()
    for ticket in tickets:
        await buffer.deliver(ticket, group_of(ticket.number, 0))
    await buffer.take_batch(0)
    await settle()
    assert not waiting.done(), "consumed is not yet committed: version 1 does not serve"
    await buffer.open_next_batch()
    assert (await waiting) == Ticket(2)


async def test_late_group_is_waited_for_and_not_overtaken() -> None:
    buffer = GroupBuffer(groups_per_step=1, max_staleness_steps=1)
    late, early = await buffer.claim_ticket(), await buffer.claim_ticket()
    await buffer.deliver(early, group_of(early.number, 0))
    taking = asyncio.create_task(buffer.take_batch(0))
    await settle()
    assert not taking.done()
    await buffer.deliver(late, group_of(late.number, 0))
    assert [group.prompt.prompt_id for group in (await taking).groups] == [late.number]


async def test_too_old_group_is_dropped_counted_and_its_prompt_sampled_again() -> None:
    buffer = GroupBuffer(groups_per_step=1, max_staleness_steps=1)
    ticket = await buffer.claim_ticket()
    await buffer.deliver(ticket, group_of(41, version=3))
    taking = asyncio.create_task(buffer.take_batch(5))  # staleness 2 > 1
    await settle()
    again = await buffer.claim_ticket()
    assert again.number == ticket.number
    assert again.prompt is not None and again.prompt.prompt_id == 41
    await buffer.deliver(again, group_of(41, version=4))
    batch = await taking
    assert (batch.num_dropped, batch.staleness_steps) == (1, [1])


async def test_bound_is_not_enforced_when_nothing_is_published() -> None:
    buffer = GroupBuffer(groups_per_step=1, max_staleness_steps=0, enforce_bound=False)
    ticket = await buffer.claim_ticket()
    await buffer.deliver(ticket, group_of(0, version=0))
    assert (await buffer.take_batch(9)).staleness_steps == [9]


async def test_failure_reaches_the_waiting_train_loop() -> None:
    buffer = GroupBuffer(groups_per_step=1, max_staleness_steps=0)
    taking = asyncio.create_task(buffer.take_batch(0))
    await settle()
    await buffer.fail(RuntimeError("all workers are out"))
    with pytest.raises(RuntimeError, match="all workers are out"):
        await taking


async def test_state_hands_out_every_unfinished_ticket_again() -> None:
    buffer = GroupBuffer(groups_per_step=2, max_staleness_steps=1)
    tickets = [await buffer.claim_ticket() for _ in range(4)]
    for ticket in tickets:
        buffer.assign_prompt(ticket, Prompt(100 + ticket.number, (1,), "p"))
    for ticket in tickets[:3]:
        await buffer.deliver(ticket, group_of(100 + ticket.number, 0))
    await buffer.take_batch(0)
    state = buffer.state()
    assert set(state.groups) == {2} and set(state.in_flight) == {3}

    resumed = GroupBuffer(groups_per_step=2, max_staleness_steps=1)
    resumed.load_state(state)
    again = await resumed.claim_ticket()
    assert again.number == 3 and again.prompt is not None and again.prompt.prompt_id == 103
    assert (await resumed.claim_ticket()) == Ticket(4)
    await resumed.deliver(again, group_of(103, 1))
    assert [group.prompt.prompt_id for group in (await resumed.take_batch(1)).groups] == [102, 103]


async def test_group_cannot_be_delivered_twice() -> None:
    buffer = GroupBuffer(groups_per_step=1, max_staleness_steps=0)
    ticket = await buffer.claim_ticket()
    await buffer.deliver(ticket, group_of(0, 0))
    with pytest.raises(AssertionError, match="delivered twice"):
        await buffer.deliver(ticket, group_of(0, 0))


async def test_nothing_is_sampled_beyond_the_last_batch() -> None:
    buffer = GroupBuffer(groups_per_step=1, max_staleness_steps=3, num_batches=2)
    await buffer.claim_ticket()
    await buffer.claim_ticket()
    third = asyncio.create_task(buffer.claim_ticket())
    await settle()
    assert not third.done()
    third.cancel()
