"""Staging slots and the lock of writes, each by itself: whose turn it is, who is waited for, and what is lost."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.weight_sync.errors import TransferTimeout, TransportError
from slipstream.weight_sync.pipeline import staging_slots
from slipstream.weight_sync.pipeline.staging_slots import Filled, FreeSlots, SharedLock
from slipstream.weight_sync.plan.budget import NUM_SLOTS


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


def test_waits_say_how_long_they_last(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """For a slot, and for the end of the writes under way; each goes on when there is something."""
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
