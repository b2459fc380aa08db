"""Locks: what a controller that was killed had asked for is sampled once, and goes to the next controller alone."""

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from fakes.clock import turns

from slipstream.rollout import kept_groups
from slipstream.rollout.kept_groups import KeptGroups
from slipstream.rollout.types import ABORTED, Rollout, Routes

KEPT_FOR = 2
"""Versions."""


class Fixture:
    """Groups of an engine that answers when it may, with what it is told to."""

    def __init__(self, num_versions: int = KEPT_FOR) -> None:
        self.version = 5
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_sampled = 0
        self.num_cancelled = 0
        self.ends: list[Any] = []
        """How the next samples end: a finish_reason, or an error. Later ones: "stop"."""
        self.routes: Routes | None = None
        self.kept = KeptGroups(num_versions, lambda: self.version)

    def ask(self, what: bytes = b"a") -> asyncio.Task[list[Rollout]]:
        return asyncio.create_task(self.kept.sample(what, self._sample))

    async def ask_and_wait(self, what: bytes = b"a") -> int:
        """Ask and wait. Returns which sample of all came back, from 1."""
        ((rollout,),) = await asyncio.gather(self.ask(what))
        return rollout.token_ids[0]

    async def _sample(self) -> list[Rollout]:
        self.num_sampled += 1
        number, end = self.num_sampled, self.ends.pop(0) if self.ends else "stop"
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if isinstance(end, Exception):
            raise end
        versions = [self.version - 1, self.version]
        return [Rollout([number, 0], [-1.0, -1.0], versions, "", end, routes=self.routes)]

    async def leave_while_it_samples(self) -> None:
        """A controller asks and is killed: the server cancels what it had asked (test_calls.py)."""
        self.may_answer.clear()
        asked = self.ask()
        await turns()
        self.kept.hand_on()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_a_group_under_way_goes_on_and_to_the_next_controller_once() -> None:
    engine = Fixture()
    await engine.leave_while_it_samples()
    assert engine.kept.left() == [b"a"]
    again, more = engine.ask(), engine.ask()
    await turns()
    engine.may_answer.set()
    assert [(await one)[0].token_ids[0] for one in (again, more)] == [1, 2]
    assert (engine.num_sampled, engine.num_cancelled, engine.kept.left()) == (2, 0, [])


async def test_a_group_that_waits_for_its_step_goes_to_the_next_controller_and_to_the_one_after_it() -> None:
    engine = Fixture()
    assert [await engine.ask_and_wait(what) for what in (b"a", b"b", b"a")] == [1, 2, 3], "never to who asked for it"
    engine.kept.hand_on()
    assert sorted(engine.kept.left()) == [b"a", b"a", b"b"]
    assert [await engine.ask_and_wait(what) for what in (b"a", b"c", b"b", b"a", b"a")] == [1, 4, 2, 3, 5]
    engine.kept.hand_on()
    assert [await engine.ask_and_wait(what) for what in (b"c", b"b", b"d")] == [4, 2, 6]


@pytest.mark.parametrize(("more", "is_kept"), [(-1, False), (0, True), (KEPT_FOR, True), (KEPT_FOR + 1, False)])
async def test_no_group_of_a_version_that_is_gone_or_too_old_is_given(more: int, is_kept: bool) -> None:
    engine = Fixture()
    await engine.ask_and_wait(b"b")
    await engine.leave_while_it_samples()
    engine.version += more
    again = engine.ask()
    await turns()
    engine.may_answer.set()
    assert ((await again)[0].token_ids[0], await engine.ask_and_wait(b"b")) == ((2, 1) if is_kept else (3, 4))
    assert engine.num_cancelled == (not is_kept)


async def test_results_are_forgotten_with_their_version_and_where_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Fixture()
    await engine.ask_and_wait(b"a")
    engine.version += KEPT_FOR
    await engine.ask_and_wait(b"b")
    engine.version += 1
    await engine.ask_and_wait(b"c")
    engine.kept.hand_on()
    assert engine.kept.left() == [b"b", b"c"]
    monkeypatch.setattr(kept_groups, "MOST_TOKENS", 4)
    engine.version += KEPT_FOR + 1
    for what in (b"d", b"e", b"f"):
        await engine.ask_and_wait(what)
    engine.kept.hand_on()
    assert engine.kept.left() == [b"e", b"f"]


async def test_routes_of_long_prompts_count_in_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Fixture()
    monkeypatch.setattr(kept_groups, "MOST_TOKENS", 20)
    engine.routes = Routes(np.zeros((9, 1, 1), np.uint8), np.ones(9, dtype=bool))
    for what in (b"a", b"b", b"c"):
        await engine.ask_and_wait(what)
    engine.kept.hand_on()
    assert engine.kept.left() == [b"b", b"c"]


@pytest.mark.parametrize("end", [ABORTED, ValueError("the engine failed")])
async def test_a_group_that_came_to_nothing_is_sampled_anew(end: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = Fixture()
    engine.ends = [end, end]
    await asyncio.gather(engine.ask(), return_exceptions=True)
    await engine.leave_while_it_samples()
    engine.may_answer.set()
    await turns()
    assert await engine.ask_and_wait() == 3
    assert not caplog.records


async def test_a_group_without_a_token_is_not_kept_and_harms_no_later_one() -> None:
    engine = Fixture()
    assert await engine.kept.sample(b"a", AsyncMock(return_value=[Rollout([], [], [], "", "stop")]))
    assert await engine.ask_and_wait(b"b") == 1
    engine.kept.hand_on()
    assert engine.kept.left() == [b"b"]


async def test_an_error_reaches_who_asks_now() -> None:
    engine = Fixture()
    engine.ends = [ValueError("the engine failed")]
    await engine.leave_while_it_samples()
    asked = engine.ask()
    await turns()
    engine.may_answer.set()
    with pytest.raises(ValueError, match="the engine failed"):
        await asked


@pytest.mark.parametrize("num_versions", [0, KEPT_FOR])
async def test_engines_sample_for_nobody_where_no_other_controller_comes(num_versions: int) -> None:
    engine = Fixture(num_versions)
    await engine.leave_while_it_samples()
    assert (engine.kept.left(), engine.num_cancelled) == (([], 1) if num_versions == 0 else ([b"a"], 0))
    engine.version += num_versions + 1
    engine.kept.hand_on()
    await turns()
    assert (engine.kept.left(), engine.num_cancelled) == ([], 1)
    asked = engine.ask()
    await turns()
    engine.kept.close()
    await turns()
    assert asked.done() == (num_versions > 0)
    asked.cancel()


async def test_a_controller_that_is_killed_before_it_asks_takes_nothing_away() -> None:
    engine = Fixture()
    await engine.leave_while_it_samples()
    engine.version += 1
    engine.kept.hand_on()
    engine.version += KEPT_FOR
    engine.kept.hand_on()
    assert engine.kept.left() == [b"a"]
    engine.may_answer.set()
    assert (await engine.ask_and_wait(), engine.num_sampled) == (1, 1)
    await engine.leave_while_it_samples()
    engine.version -= 1
    engine.kept.hand_on()
    assert engine.kept.left() == [], "of a version that there is no more"
