"""Whose turn a slot is: who waits for the device, for a slot or for a link, whose seconds are counted, what is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from cases.pipeline_world import World
from fakes.memory_transport import Fault, MemoryFabric, MemoryTransport

from slipstream.weight_sync.errors import TransferTimeout, TransportError
from slipstream.weight_sync.pipeline import lanes, pipeline, staging_slots
from slipstream.weight_sync.pipeline.staging_slots import Filled, FreeSlots, SharedLock
from slipstream.weight_sync.plan.budget import NUM_SLOTS

pytestmark = pytest.mark.usefixtures("impatience")


def set_clock(monkeypatch: pytest.MonkeyPatch, now: Callable[[], float]) -> None:
    """Let a publish measure its seconds with another clock."""
    for module in (pipeline, lanes, staging_slots):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=now))


class WatchedTransport(MemoryTransport):
    """Slow writes, and a count of those under way whenever a session is reset, which takes an hour of its clock."""

    now = 0.0

    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric)
        self.num_writing = 0
        self.writing_at_reset: list[int] = []
        self._lock = threading.Lock()

    def write(self, *args: Any, **kwargs: Any) -> None:
        with self._lock:
            self.num_writing += 1
        try:
            super().write(*args, **kwargs)
        finally:
            with self._lock:
                self.num_writing -= 1

    def reset(self, session: str) -> None:
        self.writing_at_reset.append(self.num_writing)
        time.sleep(0.05)  # others may come meanwhile
        self.now += 1000.0
        self.writing_at_reset.append(self.num_writing)
        super().reset(session)


def test_a_failed_write_is_closed_alone_and_nobody_elses_time_runs_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(3, transport=WatchedTransport)
    set_clock(monkeypatch, lambda: world.transport.now)
    for replica in (0, 2):
        for transport in world.sessions[replica]:
            world.fabric.inject(transport.session, Fault(delay_s=0.1), Fault(delay_s=0.02))
    world.fabric.inject(world.sessions[1][0].session, Fault(delay_s=0.05, refuse=True))
    result = world.run(1)
    assert set(world.transport.writing_at_reset) == {0}
    assert set(result.report.errors) == {1}
    assert world.arrived(0, 1) and world.arrived(2, 1)
    assert (result.report.write_s[0], result.report.write_s[2]) == (0.0, 0.0)


class Events:
    """One device event a slot: packed once somebody has waited for it."""

    def __init__(self, world: World) -> None:
        assert world.pipeline._slots is not None
        self.slots = world.pipeline._slots
        self.packed = [True] * NUM_SLOTS
        self.num_waits = 0
        self.is_waiting = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()
        events: Any = [self.Event(self, slot) for slot in range(NUM_SLOTS)]
        self.slots._ready = events

    class Event:
        def __init__(self, of: Events, slot: int) -> None:
            self.of, self.slot = of, slot

        def record(self) -> None:
            self.of.packed[self.slot] = False

        def synchronize(self) -> None:
            self.of.num_waits += 1
            self.of.is_waiting.set()
            assert self.of.may_end.wait(timeout=60)
            self.of.packed[self.slot] = True

    def slot_of(self, address: int) -> int:
        starts = [slot.data_ptr() for slot in self.slots._slots]
        return next(i for i, start in enumerate(starts) if start <= address < start + self.slots._slots[i].numel())


class AfterPacking(MemoryTransport):
    """Notes of each write whether its slot was packed."""

    events: Events
    wrote_packed: list[bool]

    def write(self, session: str, src_ptrs: Sequence[int], *args: Any, **kwargs: Any) -> None:
        self.wrote_packed += [self.events.packed[self.events.slot_of(address)] for address in src_ptrs]
        super().write(session, src_ptrs, *args, **kwargs)


def packing_world() -> tuple[World, Events]:
    world = World(2, transport=AfterPacking)
    world.transport.events, world.transport.wrote_packed = Events(world), []
    return world, world.transport.events


def test_nothing_is_written_before_the_device_has_packed_it() -> None:
    world, events = packing_world()
    for version in (1, 2):
        assert world.run(version).report.errors == {}
        assert world.arrived(0, version) and world.arrived(1, version)
    assert world.transport.wrote_packed and all(world.transport.wrote_packed)
    assert events.num_waits == 2 * len(world.pipeline.loads), "one lane asks the device, the others wait for it"


def test_seconds_of_waiting_for_the_device_are_of_packing_and_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load takes a second of its lane's time, and nothing takes any of the others'."""
    world, events = packing_world()
    clock = threading.local()
    set_clock(monkeypatch, lambda: getattr(clock, "now", 0.0))
    wait = Events.Event.synchronize

    def second(event: Events.Event) -> None:
        wait(event)
        clock.now = getattr(clock, "now", 0.0) + 1.0

    monkeypatch.setattr(Events.Event, "synchronize", second)
    report = world.run(1).report
    assert report.prepare_s == events.num_waits == len(world.pipeline.loads)


def test_a_lane_waits_while_another_one_asks_the_device() -> None:
    world, events = packing_world()
    events.may_end.clear()
    running = threading.Thread(target=world.run, args=(1,))
    running.start()
    assert events.is_waiting.wait(timeout=60)
    assert not world.transport.wrote_packed
    time.sleep(0.05)  # a lane that does not wait writes by now; nothing fails where it is late
    assert not world.transport.wrote_packed
    events.may_end.set()
    running.join(timeout=60)
    assert all(world.transport.wrote_packed) and world.arrived(1, 1)


class ClockedTransport(MemoryTransport):
    """Each write takes two seconds of a clock that nothing else moves."""

    now = 1000.0

    def __init__(self, fabric: MemoryFabric) -> None:
        super().__init__(fabric)
        self.timeouts: list[float] = []

    def write(self, *args: Any, timeout_s: float) -> None:
        self.timeouts.append(timeout_s)
        self.now += 2.0
        super().write(*args, timeout_s=timeout_s)


@pytest.mark.parametrize(("budget_s", "ahead_s"), [(100.0, 0.0), (5.0, 0.0), (100.0, 30.0)])
def test_all_writes_to_a_rank_share_one_deadline(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, ahead_s: float
) -> None:
    """Each has what the ones before have left, down to nothing, also those of changes that were sent ahead; and their
    seconds are in the report.
    """
    world = World(transport=ClockedTransport)
    set_clock(monkeypatch, lambda: world.transport.now)
    dest, binding = world.bindings().popitem()
    world.budgets_s = {dest[0]: budget_s}
    world.pipeline.prepare(1)
    report = world.pipeline._prepared.result.report
    report.write_s[dest[0]] = report.busy_write_s = ahead_s
    result = world.pipeline.run(1, {dest: binding}, world.budgets_s)
    num_writes = len(world.transport.timeouts)
    assert num_writes > 2
    assert world.transport.timeouts == [max(budget_s - ahead_s - 2.0 * number, 0.0) for number in range(num_writes)]
    assert result.report.write_s == {0: ahead_s + 2.0 * num_writes}
    assert result.report.busy_write_s == ahead_s + 2.0 * num_writes


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_the_seconds_of_a_replica_are_those_of_its_slowest_rank(
    monkeypatch: pytest.MonkeyPatch, slow_rank: int
) -> None:
    """Two lanes: a load goes to one rank, or to both; each write takes its rank as many seconds as it has bytes, and
    one of the ranks three times as long."""
    world = World()
    slow_session = world.sessions[0][slow_rank].session
    per_thread = threading.local()
    spent: Counter[str] = Counter()
    num_bytes: list[int] = []
    write = world.transport.write

    def timed(session: str, src: Any, dst: Any, sizes: Sequence[int], *, timeout_s: float) -> None:
        assert timeout_s == 10_000 - spent[session]
        write(session, src, dst, sizes, timeout_s=timeout_s)
        seconds = sum(sizes) * (3 if session == slow_session else 1)
        spent[session] += seconds
        num_bytes.append(sum(sizes))
        per_thread.now = getattr(per_thread, "now", 0.0) + seconds

    world.transport.write = timed
    world.budgets_s = {0: 10_000.0}
    set_clock(monkeypatch, lambda: getattr(per_thread, "now", 0.0))
    report = world.run(1).report
    assert report.errors == {}
    assert report.write_s == {0: max(spent.values())}
    assert report.num_bytes == sum(num_bytes)


def test_a_load_is_over_when_its_last_lane_and_not_when_its_first_has_written() -> None:
    filled: Any = Filled(0, None, None, num_lanes=3)  # type: ignore[arg-type]
    assert [filled.part_is_over() for _ in range(3)] == [False, False, True]
    assert filled.wait_until_packed() == 0.0


def test_free_slots_say_what_they_wait_for_and_end() -> None:
    free = FreeSlots({})
    free.give_back(1)
    free.give_back(0)
    assert [free.take({}), free.take({})] == [1, 0]
    free.end()
    assert free.take({}) is None
    lost = FreeSlots({slot: ["session"] for slot in range(NUM_SLOTS)})
    lost.give_back(0)
    with pytest.raises(TransportError, match="no staging slot is left"):
        lost.take({})
    some = FreeSlots({0: ["session"]})
    some.give_back(0)
    some.give_back(1)
    assert some.take({}) == 1, "the lost one is not among them"
    some.end()
    assert some.take({}) is None, "a lane failed, whose error is told, and not that no slot is left"


def test_a_slot_is_quarantined_with_every_session_that_may_still_read_it() -> None:
    quarantined: dict[int, list[str]] = {}
    free = FreeSlots(quarantined)

    def stuck(session: str) -> None:
        raise TransferTimeout(f"{session} is still draining")

    closed: list[str] = []
    free.close_failed(0, "a", closed.append)
    assert (quarantined, closed) == ({}, ["a"])
    free.close_failed(0, "b", stuck)
    free.close_failed(0, "c", stuck)
    assert quarantined == {0: ["b", "c"]}
    with pytest.raises(KeyboardInterrupt):
        free.close_failed(1, "d", lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert quarantined == {0: ["b", "c"], 1: ["d"]}


def test_the_door_counts_the_seconds_in_which_anybody_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(staging_slots, "time", SimpleNamespace(monotonic=lambda: clock.now))
    lock = SharedLock()
    with lock.writing():
        clock.now += 1
        with lock.writing():  # two at once count once
            clock.now += 2
        clock.now += 4
    clock.now += 8
    with pytest.raises(RuntimeError), lock.writing():
        clock.now += 16
        raise RuntimeError("a write that fails ends, too")
    with lock.alone():
        clock.now += 32
    assert lock.busy_s == 1 + 2 + 4 + 16


def test_waits_say_how_long_they_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, impatience: logging.Filter
) -> None:
    """For a slot, and for the end of the writes under way; each goes on when there is something."""
    staging_slots.logger.removeFilter(impatience)
    monkeypatch.setattr(staging_slots, "WAIT_LOG_S", 0.01)
    free, lock = FreeSlots({}), SharedLock()

    def said(num_times: int) -> None:
        for _ in range(10_000):
            if len(caplog.messages) >= num_times:
                waited_s = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
                assert waited_s[:2] == [0.01, 0.02]
                return
            time.sleep(0.001)
        raise AssertionError("nothing is said")

    taken: list[int | None] = []
    taker = threading.Thread(target=lambda: taken.append(free.take({(0, 1): 2.5})), daemon=True)
    taker.start()
    said(2)
    free.give_back(1)
    taker.join(timeout=120)
    assert taken == [1]
    assert "writes so far: {(0, 1): 2.5} s" in caplog.text
    caplog.clear()

    def close() -> None:
        with lock.alone():
            pass

    closer = threading.Thread(target=close, daemon=True)
    with lock.writing():
        closer.start()
        said(2)
    closer.join(timeout=120)
    assert not closer.is_alive() and "1 still running" in caplog.text


def test_a_slot_whose_failed_write_is_being_closed_is_not_lost() -> None:
    """One slot is lost, and its last lane ends while a failed write from the other one is being closed."""
    free = FreeSlots({0: ["lost"]})
    free.close_failed(1, "session", lambda _: free.give_back(0))
    free.give_back(1)
    assert free.take({}) == 1


@pytest.mark.parametrize(
    ("hold", "enter"),
    [
        (SharedLock.alone, SharedLock.writing),
        (SharedLock.alone, SharedLock.alone),
        (SharedLock.writing, SharedLock.alone),
    ],
)
def test_whoever_closes_a_failed_write_is_alone_and_the_next_one_enters_at_once(
    hold: Callable[[SharedLock], Any], enter: Callable[[SharedLock], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_slots, "WAIT_LOG_S", 3600.0)
    lock, has_entered = SharedLock(), threading.Event()

    def work() -> None:
        with enter(lock):
            has_entered.set()

    other = threading.Thread(target=work, daemon=True)
    with hold(lock):
        with hold(lock) if hold is SharedLock.writing else nullcontext():  # of two writes one ends before the other
            other.start()
        assert not has_entered.wait(timeout=0.2)
    assert has_entered.wait(timeout=60)
    other.join()
