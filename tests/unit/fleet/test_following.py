"""Locks: `rollout.num_workers=MIN..MAX` follows the machines that there are, and what was asked for by command."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from fakes.clock import on_jumping_clock
from fakes.fleet import FakeFleet, until
from fakes.workers import FakeWorker

from slipstream.fleet import scaling as scaling_module
from slipstream.fleet.errors import FleetRefusal, NoReplicasLeft
from slipstream.fleet.replicas import ReplicaState
from slipstream.fleet.scaling import Room
from slipstream.rollout.worker_verbs import NOTICE

S = ReplicaState


class Machines(FakeFleet):
    """Each has room for some workers; the run's first ones are on `m0`, where their room stays reserved."""

    def __init__(self, rooms: Mapping[str, int], bounds: tuple[int, int] | None, num_workers: int) -> None:
        self.free = dict(rooms)
        self.reserved = {f"rollout-{place}": "m0" for place in range(num_workers)}
        self.num_reserved = num_workers
        super().__init__(num_workers, make_room=self.make_room, end=self.end, look=self.look, bounds=bounds)

    def made(self, index: int) -> FakeWorker:
        worker = super().made(index)
        worker.node = self.reserved[f"rollout-{index}"]
        return worker

    async def look(self) -> Room:
        return Room(dict(self.free), {name: node for name, node in self.reserved.items() if node in self.free})

    async def make_room(self, where: Mapping[str, str | None]) -> None:
        for name, node in where.items():
            assert node is not None
            if not self.free.get(node):
                raise FleetRefusal(f"no room on {node}")
            self.free[node] -= 1
            self.reserved[name] = node

    async def end(self, name: str) -> None:
        if int(name[-1]) >= self.num_reserved or self.reserved.get(name) not in (None, "m0"):
            node = self.reserved.pop(name, "")
            if node in self.free:
                self.free[node] += 1

    def node(self, place: int) -> str:
        return self.replica(place).worker.node

    def follow(self) -> None:
        self.roster.spawn(self.scaling.follow(patience_s=60, every_s=0.001))


async def followed(rooms: Mapping[str, int], bounds: tuple[int, int] | None) -> Machines:
    """One worker serves, and further ones come with machines."""
    machines = await Machines(rooms, bounds, 1).published()
    machines.follow()
    return machines


async def test_a_machine_that_comes_gets_a_worker_and_one_that_leaves_takes_it() -> None:
    machines = await followed({"m0": 0}, (1, 3))
    await asyncio.sleep(0.02)
    assert (machines.states, machines.roster.num_wanted) == ([S.serving], 1), "no machine has room"
    machines.free["m1"] = 1
    await machines.until(S.serving, S.serving)
    assert machines.node(1) == "m1" and machines.roster.num_wanted == 2
    machines.gate.clear()
    del machines.free["m1"]
    await machines.fail(1, "its machine is gone")
    await machines.until(S.serving, S.gone)
    await asyncio.sleep(0.01)
    assert machines.roster.num_wanted == 1, "no machine has room for another"
    machines.gate.set()
    machines.free["m2"] = 5
    await machines.until(S.serving, S.serving, S.serving)
    assert (machines.node(1), machines.node(2), machines.free["m2"]) == ("m2", "m2", 3), "three are the most"


async def test_a_number_inside_the_range_is_obeyed_and_one_outside_is_refused() -> None:
    machines = await followed({"m0": 0, "m1": 2}, (1, 3))
    scaling, roster = machines.scaling, machines.roster
    await machines.until(S.serving, S.serving, S.serving)
    for number in (0, 4):
        with pytest.raises(FleetRefusal, match=f"rollout={number}: (this run has 1 to 3 workers|a run needs at least)"):
            await scaling.scale(number)
    assert await scaling.scale(2) == ["rollout-2 hands its requests over and ends"]
    await machines.until(S.serving, S.serving, S.gone)
    await asyncio.sleep(0.02)
    assert (machines.states[2], roster.num_wanted, scaling.num_asked) == (S.gone, 2, 2), "it stays so"
    machines.free["m1"] = 0
    assert await scaling.scale(3) == ["1 worker more: as soon as a machine has room"]
    assert (roster.num_wanted, scaling.num_asked) == (2, 3)
    machines.free["m3"] = 1
    await machines.until(S.serving, S.serving, S.serving)
    assert machines.node(2) == "m3"


async def test_whoever_was_told_to_go_starts_elsewhere_or_when_somebody_asks() -> None:
    machines = await followed({"m0": 0, "m1": 1}, (1, 2))
    await machines.until(S.serving, S.serving)
    await machines.scaling.drain("rollout-1")
    await machines.until(S.serving, S.gone)
    assert machines.scaling.num_asked == 1
    machines.scaling.ask(9)
    assert machines.scaling.num_asked == 2, "the most of the range"
    least = (await Machines({"m0": 0}, (2, 2), 2).published()).scaling
    await least.drain("rollout-1")
    assert least.num_asked == 2
    least.ask(0)
    assert least.num_asked == 2
    await asyncio.sleep(0.02)
    assert machines.states == [S.serving, S.gone] and machines.free["m1"] == 1, "its machine may be needed or taken"
    assert await machines.scaling.scale(2) == ["rollout-1 is being started"]
    await machines.until(S.serving, S.serving)
    machines.gate.clear()
    del machines.free["m1"]
    await machines.fail(1, "its machine is gone")
    await machines.until(S.serving, S.gone)
    machines.gate.set()
    machines.free["m1"] = 1  # which counts like any other since somebody asked
    await machines.until(S.serving, S.serving)


@pytest.mark.parametrize("state", [S.starting, S.out])
async def test_a_worker_is_given_up_whose_room_is_missing_at_two_looks_and_those_with_room_come_first(state: S) -> None:
    machines = await Machines({"m0": 0}, (1, 3), 3).published()
    scaling = machines.scaling
    machines.gate.clear()
    machines.replica(1).num_restarts = int(state is S.out)
    await machines.fail(1)
    for _ in range(2):  # another place is found in between
        del machines.reserved["rollout-1"]
        await scaling.follow_once()
        machines.reserved["rollout-1"] = "m0"
        await scaling.follow_once()
        await asyncio.sleep(0.01)
        assert machines.states == [S.serving, state, S.serving]
    del machines.reserved["rollout-1"]
    for _ in range(2):
        await scaling.follow_once()
    await machines.until(S.serving, S.gone, S.serving)
    await scaling.scale(1)
    await machines.until(S.serving, S.gone, S.gone)
    assert await scaling.scale(2) == ["rollout-2 is being started"]


async def test_a_worker_that_failed_too_often_stays_out_and_nobody_takes_its_place() -> None:
    machines = await followed({"m0": 0, "m1": 3}, (1, 2))
    await machines.until(S.serving, S.serving)
    machines.replica(1).num_restarts = 1
    await machines.fail(1, "it fails and fails")
    await asyncio.sleep(0.02)
    assert machines.states == [S.serving, S.out] and machines.roster.num_wanted == 2
    await machines.scaling.drain("rollout-1")
    assert machines.scaling.num_asked == 2, "it did not count any more"


async def test_nobody_is_started_where_more_are_there_or_out_than_were_asked_for() -> None:
    machines = await Machines({"m0": 0}, (1, 4), 4).published()
    scaling = machines.scaling
    await scaling.scale(2)
    await machines.until(S.serving, S.serving, S.gone, S.gone)
    machines.replica(1).num_restarts = 1
    await machines.fail(1, "it fails and fails")
    await scaling.scale(1)
    await scaling.follow_once()
    assert machines.states == [S.serving, S.out, S.gone, S.gone]


async def test_a_run_without_a_worker_waits_for_a_machine() -> None:
    machines = await followed({"m0": 0}, (1, 2))
    machines.gate.clear()
    del machines.free["m0"]
    await machines.fail(0, "its machine is gone")
    await machines.until(S.gone)
    waiting = asyncio.create_task(machines.roster.least_loaded())
    await asyncio.sleep(0.01)
    machines.gate.set()
    assert not waiting.done()
    machines.free["m1"] = 1
    await machines.until(S.pending)
    await machines.publish()
    assert (await waiting).name == "rollout-0" and machines.node(0) == "m1"


async def test_patience_begins_when_the_last_worker_has_left_and_is_not_for_those_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(scaling_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    machines = Machines({"m0": 0, "m1": 0}, (1, 2), 1)
    roster, num_looks = machines.roster, 0

    async def look() -> Room:
        nonlocal num_looks
        num_looks += 1
        return await machines.look()

    async def at(now: float) -> bool:
        clock.now, seen = now, num_looks
        await until(lambda: num_looks > seen + 1, every_s=0.001)
        return roster.awaits_room

    machines.scaling._look = look
    await machines.publish()
    machines.follow()
    assert await at(0.0) and await at(100.0), "it serves"
    machines.replica(0).num_restarts = 1
    await machines.fail(0, "it fails and fails")
    assert not await at(101.0), "no machine would help"
    del machines.free["m0"]
    await machines.until(S.gone)
    assert await at(159.0)
    assert not await at(160.0)


@pytest.mark.parametrize("patience_s", [30.0, 600.0])
@on_jumping_clock
async def test_a_supervisor_follows_with_the_patience_that_it_was_given_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(scaling_module, "time", SimpleNamespace(monotonic=loop.time))
    machines = await Machines({"m0": 0}, (1, 2), 1).published()
    machines.supervisor.follow(patience_s=patience_s)
    await asyncio.sleep(0)
    machines.gate.clear()
    del machines.free["m0"]
    await machines.fail(0, "its machine is gone")
    began = loop.time()
    with pytest.raises(NoReplicasLeft, match="its machine has left"):
        await machines.roster.least_loaded()
    assert patience_s - 5 <= loop.time() - began <= patience_s + 10, "it looks every 5 s"
    await machines.supervisor.close()
    machines.free["m1"] = 1
    await asyncio.sleep(60)
    assert machines.states == [S.gone], "nobody looks any longer"


async def test_room_that_another_run_took_is_looked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    machines = await Machines({"m0": 0, "m1": 1}, (1, 2), 1).published()
    real = machines.make_room

    machines.scaling._make_room = AsyncMock(side_effect=FleetRefusal("another run took it"))
    machines.follow()
    await asyncio.sleep(0.02)
    assert machines.states == [S.serving]
    assert caplog.text.count("another run took it") == 1, "said once"
    machines.scaling._make_room = real
    await machines.until(S.serving, S.serving)


@pytest.mark.parametrize("bounds", [(1, 2), None])
async def test_a_noticed_machine_gets_no_worker_again_not_even_by_command(bounds: tuple[int, int] | None) -> None:
    machines = await followed({"m0": 0}, bounds)
    told = machines.replica(0).worker
    assert isinstance(told, FakeWorker)
    told.who_told = NOTICE
    told.told.set()
    await machines.until(S.gone)
    await asyncio.sleep(0.02)
    assert machines.states == [S.gone], "the last one, too, waits for another machine"
    assert await machines.scaling.scale(1) == ["1 worker more: as soon as a machine has room"]
    machines.free["m1"] = 1
    await machines.until(S.pending)
    assert machines.node(0) == "m1"
    machines = await Machines({"m0": 0}, bounds, 1).published()
    machines.worker(0).told.set()
    await machines.until(S.pending)  # SIGTERM says nothing of the machine: the last one starts there again
