"""Who may touch a staging slot when, between the thread that packs slots and the lanes that write from them.

Owns: the wait for a packed load, the slots that are free or quarantined, and the lock under which a failed write is
closed. Does not own: what is packed or written (`lanes.py`, its only caller).
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from slipstream.conf.failures import undone_by
from slipstream.weight_sync.errors import TransportError
from slipstream.weight_sync.layout import Destination
from slipstream.weight_sync.pipeline.staging_slots import Filled
from slipstream.weight_sync.plan.budget import NUM_SLOTS

logger = logging.getLogger(__name__)

WAIT_LOG_S = 30.0
"""How often a wait says what it waits for."""


class OnItsWay:
    """A load in its slot: packed once the device has finished, over once every lane has written its part."""

    def __init__(self, filled: Filled, num_lanes: int) -> None:
        self.filled = filled
        self._num_lanes = num_lanes
        self._is_packed = filled.ready is None
        self._lock = threading.Lock()

    def wait_until_packed(self) -> float:
        """Wait until the device has packed the load: one lane asks the device, the others wait for that lane. Returns
        the seconds for which this lane asked."""
        with self._lock:
            if self._is_packed:
                return 0.0
            began = time.monotonic()
            assert self.filled.ready is not None
            self.filled.ready.synchronize()
            self._is_packed = True
            return time.monotonic() - began

    def part_is_over(self) -> bool:
        """Note that a lane has written its part. Returns whether it was the last."""
        with self._lock:
            self._num_lanes -= 1
            return self._num_lanes == 0


class FreeSlots:
    """Slots that may be packed. A slot that a failed write may still read is quarantined, and is not among them."""

    def __init__(self, quarantined: dict[int, list[str]]) -> None:
        self._quarantined = quarantined
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        """None: no more slots will come."""

    def take(self, seconds: Mapping[Destination, float]) -> int | None:
        """Wait for a slot; None when a lane failed, whose error is raised later.

        Args:
            seconds: Of writing so far, for the log.

        Raises:
            TransportError: Every slot is quarantined.
        """
        waited_s = 0.0
        while True:
            try:
                slot = self._free.get(timeout=WAIT_LOG_S)
                if slot is None and len(self._quarantined) == NUM_SLOTS:
                    raise TransportError("no staging slot is left: earlier failed writes cannot be closed yet")
                return slot
            except queue.Empty:
                waited_s += WAIT_LOG_S
                logger.warning("packing waits %.0f s for a staging slot; writes so far: %s s", waited_s, seconds)

    def give_back(self, slot: int) -> None:
        """Every write from a slot is over."""
        if slot not in self._quarantined:
            self._free.put(slot)
        elif len(self._quarantined) == NUM_SLOTS:
            self._free.put(None)

    def end(self) -> None:
        """A lane failed: take() waits no longer."""
        self._free.put(None)

    def close_failed(self, slot: int, session: str, reset: Callable[[str], None]) -> None:
        """Make sure that nothing of a failed write ever reads its slot again.

        The slot is in nobody's hands meanwhile: this lane's part of its load is not over. It is quarantined only where
        `reset` failed, since lanes of other slots ask how many are left.
        """
        try:
            with undone_by(lambda _: self._quarantined.setdefault(slot, []).append(session)):
                reset(session)
        except TransportError as e:
            logger.error("slot %d is quarantined: %s", slot, e)


class SharedLock:
    """A lock that writes hold together, and the end of a failed write holds alone. Counts the seconds of writing."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_writing = 0
        self._is_closing = False
        self._began = 0.0
        self.busy_s = 0.0

    @contextmanager
    def writing(self) -> Generator[None]:
        """Hold the lock for a write."""
        with self._changed:
            self._wait_until(lambda: not self._is_closing)
            if self._num_writing == 0:
                self._began = time.monotonic()
            self._num_writing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_writing -= 1
                if self._num_writing == 0:
                    self.busy_s += time.monotonic() - self._began
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Generator[None]:
        """Hold the lock alone: wait for all running writes, and let none begin."""
        with self._changed:
            self._wait_until(lambda: not self._is_closing)
            self._is_closing = True
            self._wait_until(lambda: self._num_writing == 0)
        try:
            yield
        finally:
            with self._changed:
                self._is_closing = False
                self._changed.notify_all()

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        waited_s = 0.0
        while not self._changed.wait_for(is_so, timeout=WAIT_LOG_S):
            waited_s += WAIT_LOG_S
            logger.warning("waited %.0f s to close a failed write; %d still running", waited_s, self._num_writing)
