"""Locks: which replica is asked, and what a failed request costs."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.clock import on_jumping_clock, turns
from fakes.fleet import serve, supervised, until
from fakes.trainer import outcome
from fakes.workers import FakeWorker
from fakes.world import World

from slipstream.conf.schema import SamplingConfig
from slipstream.fleet import router as router_module
from slipstream.fleet.errors import NoReplicasLeft
from slipstream.fleet.replicas import ReplicaState
from slipstream.fleet.router import ANSWER_S, Router
from slipstream.fleet.supervisor import Supervisor
from slipstream.orchestrator.files.timeline import Activities
from slipstream.rollout.types import ABORTED, Prompt, Rollout
from slipstream.rollout.worker_verbs import digest_of
from slipstream.weight_sync.errors import ReplicaDirty

PROMPT = Prompt(0, (1,), "p")


async def routed(num_workers: int, timeout_s: float = 60) -> tuple[Router, Supervisor, list[FakeWorker]]:
    """A router of workers that serve."""
    supervisor, workers = supervised(num_workers)
    await serve(supervisor)
    return Router(supervisor, request_timeout_s=timeout_s), supervisor, workers


async def test_no_group_starts_before_the_first_commit_or_during_a_publish() -> None:
    supervisor, workers = supervised()
    router = Router(supervisor, request_timeout_s=60)
    call = asyncio.create_task(router.generate_group(PROMPT, 2))
    await turns()
    assert sum(worker.num_groups for worker in workers) == 0
    await serve(supervisor)
    await call
    await supervisor.hold()
    call = asyncio.create_task(router.generate_group(PROMPT, 2))
    await turns()
    assert sum(worker.num_groups for worker in workers) == 1
    await supervisor.settle([outcome(True), outcome(True)])
    await call


async def test_replica_that_refuses_without_a_publish_goes_out() -> None:
    router, _, (worker,) = await routed(1)

    num_refused = 0

    async def dirty() -> None:
        nonlocal num_refused
        num_refused += 1
        if num_refused < 20:  # asked for ever, it would answer at last
            raise ReplicaDirty("phase DIRTY")

    worker.before["generate_group"] = dirty
    with pytest.raises(NoReplicasLeft, match="it committed the newest version, yet it refuses: phase DIRTY"):
        await router.generate_group(PROMPT, 2)
    assert num_refused == 1


@on_jumping_clock
async def test_hanging_request_times_out_and_moves_to_another_replica() -> None:
    router, supervisor, workers = await routed(2, timeout_s=50)
    workers[0].gate = asyncio.Event()
    assert len(await router.generate_group(PROMPT, 2)) == 2
    assert router.num_failed_groups == 1
    assert supervisor.roster.replicas["rollout-0"].state is ReplicaState.out
    assert (
        "gave up after 50 s of waiting for a group of 2 on rollout-0 (prompt 0)"
        in supervisor.roster.replicas["rollout-0"].reason
    )
    assert asyncio.get_running_loop().time() == pytest.approx(1050)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "ValueError: asked for 2 responses, got 1"),
        ([Rollout([1], [0.0], [0], "x", "stop")] * 2, "ValueError: asked for 2 responses, got 3"),
        ([Rollout([], [], [], "", "stop")], "or one without a token"),
    ],
)
async def test_a_response_that_is_missing_too_many_or_empty_is_a_failure(more: list[Rollout], said: str) -> None:
    router, _, (worker,) = await routed(1)

    async def answer(prompt: Prompt, n: int, *_: object) -> list[Rollout]:
        return [Rollout([1], [0.0], [0], "x", "stop")] * (n - 1) + more

    worker.generate_group = answer  # type: ignore[method-assign]
    with pytest.raises(NoReplicasLeft, match=said):
        await router.generate_group(PROMPT, 2)


async def test_a_response_that_is_handed_over_without_a_token_is_sampled_on_and_no_failure() -> None:
    router, _, (worker,) = await routed(1)
    generate, num_asked = worker.generate_group, 0

    async def hands_over_twice(prompt: Prompt, n: int, *_: object) -> list[Rollout]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:
            worker.generate_group = generate  # type: ignore[method-assign]
        return [Rollout([], [], [], "", ABORTED)] * n

    worker.generate_group = hands_over_twice  # type: ignore[method-assign]
    assert all(rollout.token_ids for rollout in await router.generate_group(PROMPT, 2))
    assert (router.num_handed_over, router.num_failed_groups) == (4, 0)


async def test_what_was_sampled_is_gone_on_from_after_a_refusal_and_after_a_failure() -> None:
    router, supervisor, (first, second) = await routed(2)
    begun, asked = [Rollout([5], [-1.0], [0], "", ABORTED)] * 2, []
    generate = second.generate_group

    async def answer(prompt: Prompt, n: int, *args: Any) -> list[Rollout]:
        asked.append(args[-1])
        if len(asked) == 2:
            await supervisor.hold()
            await supervisor.settle([outcome(True), outcome(True)])
            raise ReplicaDirty("begin came first")
        if len(asked) == 3:
            raise ConnectionError("it died")
        return begun if len(asked) == 1 else await generate(prompt, n, *args)

    first.generate_group = second.generate_group = answer  # type: ignore[method-assign]
    assert len(await router.generate_group(PROMPT, 2)) == 2
    assert asked == [[], begun, begun, begun]
    assert (router.num_handed_over, router.num_failed_groups) == (2, 0)


async def test_groups_are_in_flight_until_they_are_answered_or_have_failed() -> None:
    supervisor, workers = supervised(2)
    activities = Activities()
    router = Router(supervisor, request_timeout_s=60, note=activities.note)
    await serve(supervisor)
    workers[1].name = "rollout-1.1"  # as after a restart
    workers[0].gate = asyncio.Event()
    held = asyncio.create_task(router.generate_group(PROMPT, 2))
    await until(lambda: workers[0].num_groups == 1)
    counts = [replica.num_in_flight for replica in supervisor.roster.replicas.values()]
    assert counts == [1, 0]
    num_tasks = len(asyncio.all_tasks())
    for _ in range(2):
        await router.generate_group(PROMPT, 2)
        assert [replica.num_in_flight for replica in supervisor.roster.replicas.values()] == counts
    assert [worker.num_groups for worker in workers] == [1, 2], "the one that is busy is not asked"
    await until(lambda: len(asyncio.all_tasks()) == num_tasks)  # nothing waits on for the end of the worker
    workers[0].gate.set()
    await held
    assert [replica.num_in_flight for replica in supervisor.roster.replicas.values()] == [0, 0]
    workers[0].fails_after = 0
    await router.generate_group(PROMPT, 2)
    assert [replica.num_in_flight for replica in supervisor.roster.replicas.values()] == [0, 0]
    assert router.num_failed_groups == 1
    assert sorted(activity.who for activity in activities.take()) == ["rollout-0"] * 2 + ["rollout-1"] * 3


async def test_each_try_is_noted_from_its_own_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(router_module, "time", SimpleNamespace(time=lambda: clock.now))
    supervisor, workers = supervised(2)
    noted: list[tuple[object, ...]] = []
    router = Router(supervisor, request_timeout_s=60, note=lambda *row: noted.append(row))
    await serve(supervisor)

    async def dies() -> None:
        clock.now += 5
        raise ConnectionError("it died")

    workers[0].before["generate_group"] = dies
    await router.generate_group(Prompt(7, (1,), "p"), 2)
    assert noted == [("rollout-0", "sample", 100.0, 7), ("rollout-1", "sample", 105.0, 7)]


async def test_a_group_that_is_given_up_is_cancelled_at_its_worker() -> None:
    router, supervisor, workers = await routed(1)
    workers[0].gate = asyncio.Event()
    ended = asyncio.Event()
    generate = workers[0].generate_group

    async def watched(*args: Any) -> list[Rollout]:
        try:
            return await generate(*args)
        finally:
            ended.set()

    workers[0].generate_group = watched  # type: ignore[method-assign]
    group = asyncio.create_task(router.generate_group(PROMPT, 2))
    await until(lambda: workers[0].num_groups == 1)
    group.cancel()
    await until(group.done)
    await until(ended.is_set)
    assert supervisor.roster.replicas["rollout-0"].num_in_flight == 0


async def test_a_group_leaves_a_worker_that_goes_out_of_service_at_once() -> None:
    router, supervisor, workers = await routed(2, timeout_s=3600)
    workers[0].gate = asyncio.Event()
    group = asyncio.create_task(router.generate_group(PROMPT, 2))
    await until(lambda: workers[0].num_groups == 1)
    await supervisor.fail(supervisor.roster.replicas["rollout-0"], "its engine froze")
    await until(group.done)
    assert len(group.result()) == 2
    assert (workers[1].num_groups, router.num_failed_groups) == (1, 1)
    assert supervisor.roster.replicas["rollout-0"].reason == "its engine froze", "and not what the group says of it"


async def test_a_worker_is_told_what_to_sample_and_from_which_version() -> None:
    router, _, (worker,) = await routed(1)
    asked: list[tuple[object, ...]] = []
    generate = worker.generate_group

    async def watched(*args: Any) -> list[Rollout]:
        asked.append(args)
        return await generate(*args)

    worker.generate_group = watched  # type: ignore[method-assign]
    greedy = SamplingConfig(temperature=0.0)
    await router.generate_group(PROMPT, 3, greedy, 7)
    await router.generate(PROMPT, greedy)
    assert asked == [(PROMPT, 3, greedy, 7, []), (PROMPT, 1, greedy, None, [])]


@on_jumping_clock
async def test_only_workers_that_serve_are_asked_to_keep_a_version_and_silence_costs_nobody() -> None:
    router, supervisor, workers = await routed(6)
    await supervisor.fail(supervisor.roster.replicas["rollout-5"], "it died")
    asked: list[tuple[int, int | None]] = []

    def answers(worker: FakeWorker, answer: bool | Exception | None) -> None:
        async def keep(version: int | None) -> bool:
            asked.append((worker.index, version))
            if isinstance(answer, Exception):
                raise answer
            return await asyncio.Event().wait() if answer is None else answer

        worker.keep_version = keep  # type: ignore[method-assign]

    for worker, answer in zip(workers, (True, True, False, ConnectionError("lost"), None, True), strict=True):
        answers(worker, answer)
    assert await asyncio.wait_for(router.keep_version(7), 2 * ANSWER_S) == 2
    assert sorted(asked) == [(number, 7) for number in range(5)]
    assert supervisor.roster.num_serving == 5


async def test_scores_come_from_the_least_loaded_worker_and_from_nobody_where_none_serves() -> None:
    supervisor, workers = supervised(2)
    router = Router(supervisor, request_timeout_s=60)
    scoring = asyncio.create_task(router.score([1, 5, 2], 0))
    await until(scoring.done)  # nobody is waited for
    assert scoring.result() is None
    await serve(supervisor)
    supervisor.roster.replicas["rollout-0"].num_in_flight = 1
    assert await router.score([1, 5, 2], 0) == [-0.5, 0.0]
    assert workers[1].world.scored == [(0, [1, 5, 2])]
    workers[1].scores_fail = True
    with pytest.raises(ConnectionError):
        await router.score([1, 5, 2], 0)
    assert supervisor.roster.num_serving == 2
    assert [one.num_in_flight for one in supervisor.roster.replicas.values()] == [1, 0]


async def test_a_worker_that_fails_after_a_publish_or_a_restart_is_not_blamed() -> None:
    """A dirty answer is explained by a publish that began meanwhile, also when it is over by then."""
    router, supervisor, (worker,) = await routed(1)

    for pauses in (True, False):

        async def published_meanwhile(pauses: bool = pauses) -> None:
            worker.before.clear()
            await supervisor.hold(pauses=pauses)
            await supervisor.settle([outcome(True)])
            raise ReplicaDirty("begin came first")

        worker.before["generate_group"] = published_meanwhile
        assert len(await router.generate_group(PROMPT, 2)) == 2

    for error in (ReplicaDirty("this process is not that process"), ConnectionError("that process died")):
        failing = supervisor.roster.replicas["rollout-0"].worker

        async def succeeded_meanwhile(error: Exception = error) -> None:
            supervisor.roster.replicas["rollout-0"].handle = FakeWorker(World(committed=[0]), 0)
            raise error

        failing.before["generate_group"] = succeeded_meanwhile  # type: ignore[attr-defined]
        assert len(await router.generate_group(PROMPT, 2)) == 2
        assert supervisor.roster.num_serving == 1
    assert router.num_failed_groups == 1, "a request that crossed a publish did not fail"


async def test_a_group_of_the_controller_before_is_asked_for_where_it_is_once_while_that_worker_serves() -> None:
    supervisor, workers = supervised(3)
    router = Router(supervisor, request_timeout_s=60)
    other, greedy = Prompt(1, (1,), "p"), SamplingConfig(temperature=0.0)
    workers[2].groups_kept = [digest_of(PROMPT, 2, None)] * 2 + [digest_of(other, 2, None)]
    workers[1].groups_kept = [digest_of(PROMPT, 1, greedy), digest_of(other, 1, greedy)]
    await router.find_left()  # before the publish with which a resumed run begins: nobody serves yet
    await serve(supervisor)
    await supervisor.fail(supervisor.roster.replicas["rollout-0"], "it must not be asked at all")
    for _ in range(3):
        await router.generate_group(PROMPT, 2)
    await router.generate_group(other, 2, None, 0)  # of another version: nobody keeps it
    assert [worker.num_groups for worker in workers] == [0, 2, 2]
    await supervisor.fail(supervisor.roster.replicas["rollout-2"], "it is gone, and what it had")
    await router.generate_group(other, 2)
    await router.generate(PROMPT, greedy)
    assert [worker.num_groups for worker in workers] == [0, 4, 2]


async def test_what_is_handed_over_is_no_group_of_the_controller_before_although_the_same_was_asked_for_then() -> None:
    """What another worker has for that controller stays there for the next request of its kind."""
    router, _, workers = await routed(3)
    workers[1].groups_kept = workers[2].groups_kept = [digest_of(PROMPT, 2, None)]
    await router.find_left()

    async def hands_over(prompt: Prompt, n: int, *_: object) -> list[Rollout]:
        workers[1].num_groups += 1
        return [Rollout([5], [-1.0], [0], "", ABORTED)] * n

    workers[1].generate_group = hands_over  # type: ignore[method-assign]
    assert [one.token_ids[0] for one in await router.generate_group(PROMPT, 2)] == [5, 5]
    assert [worker.num_groups for worker in workers] == [1, 1, 0], "the least loaded one goes on with it"
    await router.generate_group(PROMPT, 2)
    assert [worker.num_groups for worker in workers] == [1, 1, 1]


@on_jumping_clock
async def test_a_worker_that_does_not_say_what_it_has_left_costs_nobody() -> None:
    router, _, workers = await routed(2)

    async def hang() -> None:
        await asyncio.Event().wait()

    workers[0].before["groups_left"] = hang
    workers[1].groups_kept = [digest_of(PROMPT, 2, None)]
    await asyncio.wait_for(router.find_left(), 2 * ANSWER_S)
    await router.generate_group(PROMPT, 2)
    assert [worker.num_groups for worker in workers] == [0, 1]
