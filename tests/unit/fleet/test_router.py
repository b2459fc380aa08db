"""Locks: which replica is asked, and what a failed request costs."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fakes.clock import on_jumping_clock, turns
from fakes.fleet import PROMPT, Cast, serving, until
from fakes.trainer import outcome
from fakes.workers import FakeWorker
from fakes.world import World

from slipstream.conf.schema import SamplingConfig
from slipstream.fleet import router as router_module
from slipstream.fleet.errors import NoReplicasLeft
from slipstream.fleet.replicas import ReplicaState
from slipstream.fleet.router import ANSWER_S, Router
from slipstream.orchestrator.files.timeline import Activities
from slipstream.rollout.types import ABORTED, Prompt, Rollout
from slipstream.rollout.worker_verbs import digest_of
from slipstream.weight_sync.errors import ReplicaDirty

ONE = Rollout([1], [0.0], [0], "x", "stop")
BEGUN = Rollout([5], [-1.0], [0], "", ABORTED)
GREEDY = SamplingConfig(temperature=0.0)


async def routed(num_workers: int) -> Cast:
    """Workers that serve, of which none is started again."""
    return await serving(num_workers, max_restarts=0)


def answering(worker: FakeWorker, answer: Callable[..., Awaitable[Any]]) -> AsyncMock:
    """Let a worker answer requests in this way. What it is asked is noted."""
    worker.generate_group = AsyncMock(side_effect=answer)  # type: ignore[method-assign]
    return worker.generate_group


async def test_no_group_starts_before_the_first_commit_or_during_a_publish() -> None:
    cast = Cast()
    for number in (0, 1):
        if number:
            await cast.supervisor.hold()
        call = asyncio.create_task(cast.router.generate_group(PROMPT, 2))
        await turns()
        assert sum(cast.worker(index).num_groups for index in range(2)) == number
        if number:
            await cast.supervisor.settle([outcome(True), outcome(True)])
        else:
            await cast.publish()
        await call


async def test_replica_that_refuses_without_a_publish_goes_out() -> None:
    cast = await routed(1)
    refusals = [ReplicaDirty("phase DIRTY")] * 20  # asked for ever, it would answer at last
    cast.worker(0).before["generate_group"] = refused = AsyncMock(side_effect=[*refusals, None])
    with pytest.raises(NoReplicasLeft, match="it committed the newest version, yet it refuses: phase DIRTY"):
        await cast.router.generate_group(PROMPT, 2)
    assert refused.await_count == 1


@on_jumping_clock
async def test_hanging_request_times_out_and_moves_to_another_replica() -> None:
    cast = await routed(2)
    router = Router(cast.supervisor, request_timeout_s=50)
    cast.worker(0).gate = asyncio.Event()
    assert len(await router.generate_group(PROMPT, 2)) == 2
    assert router.num_failed_groups == 1
    assert cast.states[0] is ReplicaState.out
    assert "gave up after 50 s of waiting for a group of 2 on rollout-0 (prompt 0)" in cast.replica(0).reason
    assert asyncio.get_running_loop().time() == pytest.approx(1050)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "ValueError: asked for 2 responses, got 1"),
        ([ONE] * 2, "ValueError: asked for 2 responses, got 3"),
        ([Rollout([], [], [], "", "stop")], "or one without a token"),
    ],
)
async def test_a_response_that_is_missing_too_many_or_empty_is_a_failure(more: list[Rollout], said: str) -> None:
    cast = await routed(1)
    answering(cast.worker(0), AsyncMock(return_value=[ONE, *more]))
    with pytest.raises(NoReplicasLeft, match=said):
        await cast.router.generate_group(PROMPT, 2)


async def test_a_response_that_is_handed_over_without_a_token_is_sampled_on_and_no_failure() -> None:
    cast = await routed(1)
    nothing = [Rollout([], [], [], "", ABORTED)] * 2
    answering(cast.worker(0), AsyncMock(side_effect=[nothing, nothing, [ONE, ONE]]))
    assert await cast.router.generate_group(PROMPT, 2) == [ONE, ONE]
    assert (cast.router.num_handed_over, cast.router.num_failed_groups) == (4, 0)


async def test_what_was_sampled_is_gone_on_from_after_a_refusal_and_after_a_failure() -> None:
    cast = await routed(2)
    begun, asked = [BEGUN] * 2, []

    async def answer(*args: Any) -> list[Rollout]:
        asked.append(args[-1])
        if len(asked) == 2:
            await cast.publish()
            raise ReplicaDirty("begin came first")
        if len(asked) == 3:
            raise ConnectionError("it died")
        return begun if len(asked) == 1 else [ONE, ONE]

    for index in range(2):
        answering(cast.worker(index), answer)
    assert await cast.router.generate_group(PROMPT, 2) == [ONE, ONE]
    assert asked == [[], begun, begun, begun]
    assert (cast.router.num_handed_over, cast.router.num_failed_groups) == (2, 0)


async def test_groups_are_in_flight_until_they_are_answered_or_have_failed() -> None:
    cast, activities = await routed(2), Activities()
    router = Router(cast.supervisor, request_timeout_s=60, note=activities.note)

    def in_flight() -> list[int]:
        return [replica.num_in_flight for replica in cast.roster.replicas.values()]

    first, second = cast.worker(0), cast.worker(1)
    second.name = "rollout-1.1"  # as after a restart
    first.gate = asyncio.Event()
    held = asyncio.create_task(router.generate_group(PROMPT, 2))
    await until(lambda: first.num_groups == 1)
    num_tasks = len(asyncio.all_tasks())
    for _ in range(2):
        assert in_flight() == [1, 0]
        await router.generate_group(PROMPT, 2)
    assert (first.num_groups, second.num_groups) == (1, 2), "the one that is busy is not asked"
    await until(lambda: len(asyncio.all_tasks()) == num_tasks)  # nothing waits on for the end of the worker
    first.gate.set()
    await held
    assert in_flight() == [0, 0]
    first.fails_after = 0
    await router.generate_group(PROMPT, 2)
    assert (in_flight(), router.num_failed_groups) == ([0, 0], 1)
    assert sorted(activity.who for activity in activities.take()) == ["rollout-0"] * 2 + ["rollout-1"] * 3


async def test_each_try_is_noted_from_its_own_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(router_module, "time", SimpleNamespace(time=lambda: clock.now))
    cast, noted = await routed(2), list[tuple[object, ...]]()
    router = Router(cast.supervisor, request_timeout_s=60, note=lambda *row: noted.append(row))

    async def dies() -> None:
        clock.now += 5
        raise ConnectionError("it died")

    cast.worker(0).before["generate_group"] = dies
    await router.generate_group(Prompt(7, (1,), "p"), 2)
    assert noted == [("rollout-0", "sample", 100.0, 7), ("rollout-1", "sample", 105.0, 7)]


@pytest.mark.parametrize("why", ["given up", "out of service"])
async def test_a_group_ends_at_once_that_nobody_waits_for_or_whose_worker_goes_out_of_service(why: str) -> None:
    cast, ended = await routed(2), asyncio.Event()
    cast.worker(0).gate = asyncio.Event()
    generate = cast.worker(0).generate_group

    async def watched(*args: Any) -> list[Rollout]:
        try:
            return await generate(*args)
        finally:
            ended.set()

    answering(cast.worker(0), watched)
    group = asyncio.create_task(cast.router.generate_group(PROMPT, 2))
    await until(lambda: cast.worker(0).num_groups == 1)
    if why == "given up":
        group.cancel()
    else:
        await cast.fail(0, "its engine froze")
    await until(group.done)
    await until(ended.is_set)
    assert cast.replica(0).num_in_flight == 0
    assert (cast.worker(1).num_groups, cast.router.num_failed_groups) == ((0, 0) if why == "given up" else (1, 1))
    assert cast.replica(0).reason in ("", "its engine froze"), "and not what the group says of it"


async def test_a_worker_is_told_what_to_sample_and_from_which_version() -> None:
    cast = await routed(1)
    asked = answering(cast.worker(0), cast.worker(0).generate_group)
    await cast.router.generate_group(PROMPT, 3, GREEDY, 7)
    await cast.router.generate(PROMPT, GREEDY)
    assert [call.args for call in asked.await_args_list] == [(PROMPT, 3, GREEDY, 7, []), (PROMPT, 1, GREEDY, None, [])]


@on_jumping_clock
async def test_only_workers_that_serve_are_asked_to_keep_a_version_and_silence_costs_nobody() -> None:
    cast = await routed(6)
    answers = [True, True, False, ConnectionError("lost")]

    async def keep(version: int | None) -> bool:
        if not answers:
            await asyncio.Event().wait()
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    asked = AsyncMock(side_effect=keep)
    for index in range(6):
        cast.worker(index).keep_version = asked  # type: ignore[method-assign]
    await cast.fail(5)
    assert await asyncio.wait_for(cast.router.keep_version(7), 2 * ANSWER_S) == 2
    assert [call.args for call in asked.await_args_list] == [(7,)] * 5
    assert cast.roster.num_serving == 5


async def test_scores_come_from_the_least_loaded_worker_and_from_nobody_where_none_serves() -> None:
    cast = Cast()
    scoring = asyncio.create_task(cast.router.score([1, 5, 2], 0))
    await until(scoring.done)  # nobody is waited for
    assert scoring.result() is None
    await cast.publish(0)
    cast.replica(0).num_in_flight = 1
    assert await cast.router.score([1, 5, 2], 0) == [-0.5, 0.0]
    assert cast.world.scored == [(0, [1, 5, 2])]
    cast.worker(1).scores_fail = True
    with pytest.raises(ConnectionError):
        await cast.router.score([1, 5, 2], 0)
    assert cast.roster.num_serving == 2
    assert (cast.replica(0).num_in_flight, cast.replica(1).num_in_flight) == (1, 0)


async def test_a_worker_that_fails_after_a_publish_or_a_restart_is_not_blamed() -> None:
    """A dirty answer is explained by a publish that began meanwhile, also when it is over by then."""
    cast = await routed(1)
    for pauses in (True, False):

        async def published_meanwhile(pauses: bool = pauses) -> None:
            cast.worker(0).before.clear()
            await cast.supervisor.hold(pauses=pauses)
            await cast.supervisor.settle([outcome(True)])
            raise ReplicaDirty("begin came first")

        cast.worker(0).before["generate_group"] = published_meanwhile
        assert len(await cast.router.generate_group(PROMPT, 2)) == 2

    for error in (ReplicaDirty("this process is not that process"), ConnectionError("that process died")):

        async def succeeded_meanwhile(error: Exception = error) -> None:
            cast.replica(0).handle = FakeWorker(World(committed=[0]), 0)
            raise error

        cast.worker(0).before["generate_group"] = succeeded_meanwhile
        assert len(await cast.router.generate_group(PROMPT, 2)) == 2
        assert cast.roster.num_serving == 1
    assert cast.router.num_failed_groups == 1, "a request that crossed a publish did not fail"


async def test_a_group_of_the_controller_before_is_asked_for_where_it_is_once_while_that_worker_serves() -> None:
    cast, other = Cast(3, max_restarts=0), Prompt(1, (1,), "p")

    def num_groups() -> list[int]:
        return [cast.worker(index).num_groups for index in range(3)]

    cast.worker(2).groups_kept = [digest_of(PROMPT, 2, None)] * 2 + [digest_of(other, 2, None)]
    cast.worker(1).groups_kept = [digest_of(PROMPT, 1, GREEDY), digest_of(other, 1, GREEDY)]
    await cast.router.find_left()  # before the publish with which a resumed run begins: nobody serves yet
    await cast.publish()
    await cast.fail(0, "it must not be asked at all")
    for _ in range(3):
        await cast.router.generate_group(PROMPT, 2)
    await cast.router.generate_group(other, 2, None, 0)  # of another version: nobody keeps it
    assert num_groups() == [0, 2, 2]
    await cast.fail(2, "it is gone, and what it had")
    await cast.router.generate_group(other, 2)
    await cast.router.generate(PROMPT, GREEDY)
    assert num_groups() == [0, 4, 2]


@on_jumping_clock
async def test_what_is_handed_over_is_no_group_of_the_controller_before_although_the_same_was_asked_for_then() -> None:
    """What another worker has for that controller stays there for the next request of its kind. One that does not say
    what it has left costs nobody."""
    cast = await routed(4)
    for index in (1, 2):
        cast.worker(index).groups_kept = [digest_of(PROMPT, 2, None)]
    cast.worker(3).before["groups_left"] = asyncio.Event().wait  # type: ignore[assignment]
    await asyncio.wait_for(cast.router.find_left(), 2 * ANSWER_S)
    handing_over = answering(cast.worker(1), AsyncMock(return_value=[BEGUN] * 2))
    assert [one.token_ids[0] for one in await cast.router.generate_group(PROMPT, 2)] == [5, 5]
    assert (handing_over.await_count, cast.worker(0).num_groups) == (1, 1), "the least loaded one goes on with it"
    await cast.router.generate_group(PROMPT, 2)
    assert (handing_over.await_count, cast.worker(0).num_groups, cast.worker(2).num_groups) == (1, 1, 1)
