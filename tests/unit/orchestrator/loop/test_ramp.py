"""Batches of a run with staleness begin at even distances, and nothing holds them back once the first one is in."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.clock import on_jumping_clock
from fakes.loop import Loop, make_config
from fakes.workers import FakeWorker
from fakes.world import World
from hypothesis import given, strategies as st

from slipstream.fleet.replicas import Replica, ReplicaState
from slipstream.orchestrator.loop import ramp
from slipstream.orchestrator.loop.buffer import GroupBuffer
from slipstream.orchestrator.loop.controller import Controller
from slipstream.orchestrator.loop.ramp import Ramp, num_ahead
from slipstream.rollout.types import Group, Prompt, Rollout

CONFIG = make_config(staleness=3, groups_per_step=2)
"""A batch has 2 groups of 2 responses."""
TOKENS_PER_BATCH = 2 * 2 * CONFIG.rollout.sampling.max_tokens


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ramp, "ASK_EVERY_S", 0.1)
    monkeypatch.setattr(ramp, "ANSWER_WITHIN_S", 5)


@given(max_staleness_steps=st.integers(1, 6), num_slots=st.integers(30, 400))
def test_each_batch_begins_when_the_first_has_done_its_share(max_staleness_steps: int, num_slots: int) -> None:
    """All batches in flight advance alike, a `num_slots`-th at a time."""
    done, began = [0.0], {}
    while done[0] < 1.0:
        done = [share + 1 / num_slots for share in done]
        for batch in range(len(done), num_ahead(sum(done), max_staleness_steps) + 1):
            began[batch] = done[0]
            done.append(0.0)
    assert sorted(began) == list(range(1, max_staleness_steps + 1))
    for batch, share in began.items():
        assert share == pytest.approx(batch / (max_staleness_steps + 1), abs=(batch + 1) / num_slots)


def test_the_example() -> None:
    assert [num_ahead(sampled, 3) for sampled in (0.0, 0.24, 0.25, 0.74, 0.75, 1.49, 1.5, 9.0)] == [
        0, 0, 1, 1, 2, 2, 3, 3,
    ]  # fmt: skip
    assert num_ahead(5.0, 0) == 0


class Fleet:
    """Two workers, what they have sampled, and how many tickets a buffer of theirs gives out."""

    def __init__(self) -> None:
        self.workers = [FakeWorker(World(2), index) for index in range(2)]
        self.replicas = [Replica(f"rollout-{index}", index, worker) for index, worker in enumerate(self.workers)]
        for replica in self.replicas:
            replica.state = ReplicaState.serving
        self.buffer = GroupBuffer(2, 3)
        roster: Any = SimpleNamespace(replicas={one.name: one for one in self.replicas})
        self.ramp = Ramp(CONFIG, roster, self.buffer)
        self.tickets: list[int] = []

    async def claim(self) -> None:
        while True:
            self.tickets.append((await self.buffer.claim_ticket()).number)

    @asynccontextmanager
    async def begun(self) -> AsyncIterator[asyncio.Task[None]]:
        """While the block runs, tickets are claimed, and the ramp opens batches, in the task that this yields."""
        await self.ramp.begin()
        claiming, opening = asyncio.create_task(self.claim()), asyncio.create_task(self.ramp.run())
        try:
            yield opening
        finally:
            claiming.cancel()
            opening.cancel()

    async def sampled(self, worker: int, *, tokens: int = 0, finished: int = 0) -> int:
        """Let a worker make progress. Returns how many batches are open then."""
        one = self.workers[worker]
        one.progress_made = replace(one.progress_made, num_tokens=tokens, num_finished=finished)
        await asyncio.sleep(3)
        assert self.tickets == list(range(len(self.tickets)))
        return len(self.tickets) // 2


@on_jumping_clock
async def test_batches_are_opened_by_tokens_of_the_whole_fleet() -> None:
    fleet = Fleet()
    await fleet.sampled(0, tokens=10**9)  # an evaluation, before the ramp
    before = 10**9
    async with fleet.begun() as opening:
        assert await fleet.sampled(0, tokens=before) == 1
        assert await fleet.sampled(0, tokens=before + TOKENS_PER_BATCH // 8) == 1
        assert await fleet.sampled(1, tokens=TOKENS_PER_BATCH // 8) == 2
        assert await fleet.sampled(1, tokens=TOKENS_PER_BATCH * 5 // 8) == 3
        assert await fleet.sampled(0, tokens=before + TOKENS_PER_BATCH) == 4
        assert fleet.buffer.is_wide_open
        await asyncio.wait_for(opening, 20)


@on_jumping_clock
async def test_responses_that_end_early_open_batches_too() -> None:
    """Most have far fewer than max_tokens: engines must not stand idle behind the longest."""
    fleet = Fleet()
    async with fleet.begun():
        assert [await fleet.sampled(0, finished=finished) for finished in (0, 1, 2, 3, 6)] == [1, 2, 2, 3, 4]


@on_jumping_clock
async def test_workers_that_do_not_serve_are_not_asked() -> None:
    fleet = Fleet()
    fleet.replicas[1].state = ReplicaState.starting
    async with fleet.begun():
        assert await fleet.sampled(1, tokens=TOKENS_PER_BATCH) == 1
        assert await fleet.sampled(0, tokens=TOKENS_PER_BATCH // 4) == 2


@on_jumping_clock
async def test_workers_that_fail_or_hang_hold_nothing_back_for_good() -> None:
    fleet = Fleet()

    async def fails() -> Any:
        raise ConnectionError

    async def hangs() -> Any:
        await asyncio.sleep(60)

    fleet.workers[0].progress, fleet.workers[1].progress = fails, hangs  # type: ignore[method-assign]
    async with fleet.begun() as opening:
        assert await fleet.sampled(0) == 1
        for number in range(2):
            ticket = SimpleNamespace(number=number)
            group = Group(Prompt(number, (1,), "p"), [Rollout([2], [-0.1], [0], "x", "stop")], [1.0])
            await fleet.buffer.deliver(ticket, group)  # type: ignore[arg-type]
        await fleet.buffer.take_batch(0)
        assert await fleet.sampled(0) == 4
        await asyncio.wait_for(opening, 20)


async def test_a_run_begins_with_one_batch_and_a_resumed_one_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake workers report no progress, so only the first batch that is taken ends the ramp."""
    train = Controller.train

    async def asked_for(wanted: int, resume_step: int, num_steps: int) -> int:
        """Groups that workers are asked for in the first moments of training, while none ends: once they are those that
        are wanted, there are no more.
        """
        loop = Loop(tmp_path, make_config(staleness=2, num_steps=num_steps), resume_step=resume_step)
        before = asyncio.get_running_loop().create_future()

        async def gated(controller: Controller) -> None:
            for worker in loop.workers:
                worker.gate = asyncio.Event()
            before.set_result(sum(worker.num_groups for worker in loop.workers))
            await train(controller)

        monkeypatch.setattr(Controller, "train", gated)
        running = asyncio.create_task(loop.run())
        num_before = await before

        def num_asked_now() -> int:
            return sum(worker.num_groups for worker in loop.workers) - num_before

        async with asyncio.timeout(60):
            while num_asked_now() < wanted:
                await asyncio.sleep(0.001)
        for _ in range(100):
            await asyncio.sleep(0)
        num_asked = num_asked_now()
        for worker in loop.workers:
            assert worker.gate is not None
            worker.gate.set()
        await running
        return num_asked

    assert await asked_for(3, resume_step=0, num_steps=4) == 3
    assert await asked_for(6, resume_step=4, num_steps=6) == 6
