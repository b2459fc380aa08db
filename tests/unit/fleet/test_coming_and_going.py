"""Locks: workers come and go while the run goes on; what they were sampling is handed on, and the others serve."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fakes.clock import turns
from fakes.fleet import FakeFleet
from fakes.trainer import outcome
from fakes.workers import FakeWorker, an_offer
from fakes.world import World

from slipstream.fleet import roster, scaling
from slipstream.fleet.errors import FleetRefusal, NoReplicasLeft
from slipstream.fleet.fleet_log import FleetEvent
from slipstream.fleet.replicas import ReplicaState
from slipstream.fleet.router import Router
from slipstream.fleet.supervisor import Supervisor
from slipstream.rollout.types import Prompt, Rollout

PROMPT = Prompt(0, (1,), "p")
S = ReplicaState
E = FleetEvent


class Fleet(FakeFleet):
    """Further workers come where there is `room` for them."""

    def __init__(self, num_workers: int = 1, room: int = 4, max_restarts: int = 1) -> None:
        self.room = room
        self.started: list[str] = []
        self.failures: list[Exception] = []
        self.ended: list[str] = []
        super().__init__(num_workers, make_room=self.make_room, end=self.end, max_restarts=max_restarts)
        self.router = Router(self.supervisor, request_timeout_s=60)

    async def restart(self, name: str) -> FakeWorker:
        self.started.append(name)
        if self.failures:
            raise self.failures.pop()
        return await super().restart(name)

    async def make_room(self, names: Mapping[str, str | None]) -> None:
        if len(names) > self.room:
            raise FleetRefusal(f"no room for {len(names)}")

    async def end(self, name: str) -> None:
        self.ended.append(name)
        self.world.diary.append(("end", name))


@pytest.mark.parametrize("max_restarts", [0, 1])
async def test_further_workers_read_from_a_peer_and_serve_and_the_trainer_meets_them_at_the_next_publish(
    max_restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, now in ((scaling, 50.0), (roster, 57.5)):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 0.0, monotonic=lambda now=now: now))
    fleet = await Fleet(1, max_restarts=max_restarts).published(7)
    fleet.gate.clear()
    assert await fleet.scaling.scale(3) == ["rollout-1 is being started", "rollout-2 is being started"]
    await fleet.until(S.serving, S.starting, S.starting)
    assert len(await fleet.router.generate_group(PROMPT, 2)) == 2, "the first one serves meanwhile"
    assert await fleet.publish(8) == [1, 2], "and publishes do not wait"
    fleet.gate.set()
    await fleet.until(S.serving, S.serving, S.serving)
    assert fleet.world.committed == [8, 8, 8]
    held = await fleet.supervisor.hold()
    assert [replica.name for replica in held.joining] == ["rollout-1", "rollout-2"]
    assert held.exclude == []
    fleet.roster.replicas["rollout-2"].is_known = True
    await fleet.supervisor.settle([outcome(True)] * 3)
    assert [replica.name for replica in (await fleet.supervisor.hold()).joining] == ["rollout-1"]
    assert fleet.events(1) == [E.joining, E.process_up, E.up, E.read, E.serving]
    assert fleet.rows[-1].facts == {"start_s": 7.5}
    assert (fleet.supervisor.starts.num_restarts, fleet.roster.recoveries) == (0, []), "nothing has failed"


async def test_a_worker_that_is_one_too_many_hands_its_responses_to_another_with_their_tokens() -> None:
    fleet = await Fleet(2).published(7)
    fleet.world.committed[1] = 6
    for index in (0, 1):
        fleet.worker(index).gate = asyncio.Event()
    generate = fleet.worker(1).generate_group

    async def arrives_later(*args: Any) -> list[Rollout]:
        rollouts = await generate(*args)
        await turns(200)
        return rollouts

    fleet.worker(1).generate_group = arrives_later  # type: ignore[method-assign]
    calls = [asyncio.create_task(fleet.router.generate_group(PROMPT, 2)) for _ in range(2)]
    await asyncio.sleep(0)
    assert await fleet.scaling.scale(1) == ["rollout-1 hands its requests over and ends"]
    await fleet.until(S.serving, S.gone)
    assert not calls[0].done()
    assert await fleet.publish(8) == [1]
    fleet.worker(0).gate.set()
    groups = await asyncio.gather(*calls)
    assert sorted(rollout.policy_versions for group in groups for rollout in group) == [[6, 7]] * 2 + [[7, 7]] * 2
    assert (fleet.router.num_handed_over, fleet.router.num_failed_groups) == (2, 0)
    assert fleet.ended == ["rollout-1"]
    assert fleet.events(1)[-2:] == [E.leaving, E.gone]
    assert fleet.roster.in_words == "1 of 1 rollout worker serve"


async def test_a_group_of_which_one_response_was_done_waits_for_the_others() -> None:
    fleet = await Fleet(2).published(7)
    fleet.worker(0).gate, fleet.worker(0).num_done = asyncio.Event(), 1
    call = asyncio.create_task(fleet.router.generate_group(PROMPT, 3))
    await asyncio.sleep(0)
    await fleet.scaling.drain("rollout-0")
    assert [(one.token_ids, one.finish_reason) for one in await call] == [([5, 2], "stop")] * 3
    assert fleet.router.num_handed_over == 2


async def test_a_signal_changes_nothing_for_a_worker_that_is_out_or_whose_process_was_replaced() -> None:
    fleet = await Fleet(2).published(0)
    before = fleet.worker(0)
    await fleet.fail(0)
    await fleet.until(S.serving, S.serving)
    before.told.set()
    await turns(50)
    assert fleet.states == [S.serving, S.serving] and fleet.worker(0) is not before
    await fleet.fail(0)
    fleet.worker(0).told.set()
    await turns(50)
    assert fleet.states == [S.out, S.serving]
    await fleet.scaling.drain("rollout-0")
    await fleet.until(S.gone, S.serving)
    assert fleet.roster.in_words == "1 of 2 rollout workers serve", "drained is only what serves"


async def test_a_worker_that_waits_is_stranded_as_soon_as_its_last_peer_leaves() -> None:
    fleet, hand_over = await Fleet(2).published(0), asyncio.Event()
    fleet.worker(1).before["offer"] = AsyncMock(side_effect=ConnectionError("no link"))
    fleet.worker(1).before["hand_over"] = hand_over.wait  # type: ignore[assignment]
    await fleet.fail(0)
    await fleet.until(S.pending, S.serving)
    stranded = asyncio.create_task(fleet.roster.stranded())
    await fleet.scaling.drain("rollout-1")
    await fleet.until(S.pending, S.leaving)
    await asyncio.wait_for(stranded, 5)
    hand_over.set()
    await fleet.until(S.pending, S.gone)


@pytest.mark.parametrize("is_publishing", [False, True])
async def test_those_that_do_not_serve_yet_go_first(is_publishing: bool) -> None:
    """The one that is being started would have cost its start; it is given up, and never serves."""
    fleet = await Fleet(2).published(0)
    fleet.gate.clear()
    await fleet.fail(0)
    await fleet.until(S.starting, S.serving)
    if is_publishing:
        await fleet.supervisor.hold()
    await fleet.scaling.scale(1)
    if is_publishing:
        await fleet.until(S.gone, S.updating)
        await fleet.supervisor.settle([outcome(False), outcome(True)])
    await fleet.until(S.gone, S.serving)
    fleet.gate.set()
    await turns(50)
    assert fleet.states == [S.gone, S.serving]


async def test_a_worker_in_a_publish_goes_after_it() -> None:
    fleet = await Fleet(2).published(0)
    fleet.roster.replicas["rollout-0"].links["rollout-1"] = [an_offer(0)]
    await fleet.supervisor.hold()
    await fleet.scaling.scale(1)
    fleet.worker(1).told.set()  # by a signal as well
    await turns()
    assert fleet.states == [S.updating, S.updating]
    await fleet.supervisor.settle([outcome(True), outcome(True)])
    await fleet.until(S.serving, S.gone)
    await turns()
    assert fleet.events(1)[-2:] == [E.leaving, E.gone], "once"
    assert fleet.world.diary[-2:] == [("release", 0), ("end", "rollout-1")], "links to it are closed while it lives"


async def test_a_worker_that_cannot_hand_over_costs_its_responses_and_nothing_else() -> None:
    fleet = await Fleet(2).published(0)
    fleet.worker(1).gate = asyncio.Event()  # what it was asked for never comes
    gate = fleet.worker(0).gate = asyncio.Event()
    calls = [asyncio.create_task(fleet.router.generate_group(PROMPT, 1)) for _ in range(2)]
    await asyncio.sleep(0)

    fleet.worker(1).before["hand_over"] = AsyncMock(side_effect=ConnectionError("gone already"))
    await fleet.scaling.drain("rollout-1")
    await fleet.until(S.serving, S.gone)
    gate.set()
    groups = await asyncio.wait_for(asyncio.gather(*calls), 30)  # before a request is given up
    assert [[rollout.token_ids for rollout in group] for group in groups] == [[[5, 2]]] * 2
    assert fleet.router.num_handed_over == 0
    assert (await fleet.router.generate_group(PROMPT, 1))[0].token_ids == [5, 2]


async def test_a_worker_that_is_told_to_go_goes_and_is_wanted_still_and_the_first_to_come_again() -> None:
    fleet = await Fleet(3).published(0)
    for index in (0, 2):
        fleet.worker(index).told.set()
    await fleet.until(S.gone, S.serving, S.gone)
    assert fleet.replica(0).reason == "it was told to go by SIGTERM"
    assert fleet.roster.in_words == "1 of 3 rollout workers serve"
    assert await fleet.scaling.scale(2) == ["rollout-0 is being started"]
    await fleet.until(S.serving, S.serving, S.gone)
    assert fleet.started == ["rollout-0"] and await fleet.publish(1) == [2]
    await fleet.supervisor.hold()
    assert await fleet.scaling.scale(2) == ["the run has 2 rollout workers already"]
    assert fleet.roster.num_serving == 0, "none takes a request meanwhile"
    assert fleet.roster.in_words == "2 of 2 rollout workers serve", "nor is one that a publish holds missing"


@pytest.mark.parametrize(("max_restarts", "num_failures"), [(0, 0), (1, 0), (1, 1)])
async def test_the_last_worker_that_is_told_to_go_is_started_again_and_its_responses_wait(
    max_restarts: int, num_failures: int
) -> None:
    """However often it may be restarted, and was: it did not fail."""
    fleet = await Fleet(1, max_restarts=max_restarts).published(3)
    for _ in range(num_failures):
        await fleet.fail(0)
        await fleet.until(S.pending)
        await fleet.publish(3)
    fleet.worker(0).gate = asyncio.Event()
    call = asyncio.create_task(fleet.router.generate_group(PROMPT, 1))
    await asyncio.sleep(0)
    fleet.worker(0).told.set()
    await fleet.until(S.pending)
    assert not call.done()
    await fleet.publish(3)
    (rollout,) = await call
    assert (rollout.token_ids, rollout.policy_versions) == ([5, 2], [3, 3])
    assert fleet.ended == []


async def test_what_cannot_be_is_refused_and_nothing_is_done() -> None:
    fleet = await Fleet(2, room=1).published(0)
    for number in (0, -1):
        with pytest.raises(FleetRefusal, match=f"rollout={number}: a run needs at least one rollout worker"):
            await fleet.scaling.scale(number)
    with pytest.raises(FleetRefusal, match="no room for 2"):
        await fleet.scaling.scale(4)
    assert fleet.states == [S.serving, S.serving]
    assert await fleet.scaling.scale(2) == ["the run has 2 rollout workers already"]
    await fleet.scaling.drain("rollout-0")
    await fleet.until(S.gone, S.serving)
    replica = fleet.replica(0)
    for replica.state in (S.leaving, S.gone):
        with pytest.raises(FleetRefusal, match=rf"rollout-0 is {replica.state} already \(slipstream drain\)"):
            await fleet.scaling.drain("rollout-0")
        assert "slipstream scale asks for more" in await fleet.supervisor.restart_now("rollout-0")
    with pytest.raises(FleetRefusal, match="rollout-1 is the only rollout worker, and nobody could go on"):
        await fleet.scaling.drain("rollout-1")
    assert fleet.states == [S.gone, S.serving]
    assert fleet.started == []


async def test_workers_that_went_do_not_keep_a_run_waiting_for_those_that_failed() -> None:
    fleet = await Fleet(2).published(0)
    await fleet.scaling.drain("rollout-1")
    await fleet.until(S.serving, S.gone)
    fleet.supervisor.starts.max_restarts = 0
    await fleet.fail(0)
    with pytest.raises(NoReplicasLeft, match="rollout-0: it died"):
        await fleet.router.generate_group(PROMPT, 1)


async def test_a_further_worker_that_cannot_be_started_is_out_and_is_tried_when_more_are_asked_for() -> None:
    fleet = await Fleet(1, max_restarts=2).published(0)
    fleet.failures = [RuntimeError("no memory")] * 2
    await fleet.scaling.scale(2)
    await fleet.until(S.serving, S.out)
    assert "no memory" in fleet.replica(1).reason
    assert await fleet.publish(1) == [1]
    await fleet.scaling.scale(2)
    await fleet.until(S.serving, S.serving)
    await fleet.fail(1)
    await fleet.until(S.serving, S.serving)
    (recovery,) = fleet.roster.recoveries
    assert recovery.replica == "rollout-1", "once it has served, it comes back like any other"


async def test_what_another_controller_left_is_found_again_with_the_names_and_places_of_before() -> None:
    world = World(committed=[3, -1, 3, 3])
    workers = [FakeWorker(world, index) for index in range(4)]
    workers[0].name = "rollout-0.2"
    workers[2].death = "rollout-2 died while the run had no controller"
    workers[3].wants_base_at = "tcp://base"

    async def never_up(name: str) -> None:
        await asyncio.Event().wait()

    restart = AsyncMock(side_effect=never_up)
    supervisor = Supervisor([workers[0], None, *workers[2:]], restart=restart, max_restarts=1)
    roster = supervisor.roster
    assert list(roster.replicas) == ["rollout-0", "rollout-1", "rollout-2", "rollout-3"] and roster.num_wanted == 3
    await supervisor.find_again({workers[0].endpoint, workers[2].endpoint})
    await asyncio.sleep(0)
    assert [replica.state for replica in roster.replicas.values()] == [S.pending, S.gone, S.starting, S.pending]
    assert "no controller" in roster.replicas["rollout-2"].reason
    restart.assert_awaited_once_with("rollout-2")
    held = await supervisor.hold()
    assert held.exclude == [1, 2]
    assert [(one.name, one.base_wanted_at) for one in held.joining] == [("rollout-3", "tcp://base")]
    await supervisor.close()
