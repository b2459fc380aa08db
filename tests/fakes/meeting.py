"""Trainer ranks that are threads of one process, for tests of what all ranks do together."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from slipstream.weight_sync.publish.collectives import values

T = TypeVar("T")


class Room:
    """Where the ranks meet. A rank that comes alone, because another one called something else or failed, is an error
    after a while.
    """

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._said: dict[int, Any] = {}
        self.calls: list[str] = []
        """What rank 0 called, in order."""

    def exchange(self, rank: int, call: str, value: object) -> list[Any]:
        """Every rank's value. All ranks must have made the same call."""
        if rank == 0:
            self.calls.append(call)
        self._said[rank] = (call, value)
        self._barrier.wait()
        said = [self._said[number] for number in range(self._barrier.parties)]
        self._barrier.wait()
        if len({call for call, _ in said}) != 1:
            self._barrier.abort()
            raise AssertionError(f"ranks met in different calls: {[call for call, _ in said]}")
        return [value for _, value in said]


class ThreadMeeting:
    """See collectives.Meeting; the group is a Room."""

    def __init__(self, rank: int, world_size: int, group: Room) -> None:
        self.rank = rank
        self._room = group

    def on_rank0(self, kind: object, make: Callable[[], T]) -> T:
        outcome = _attempt(make) if self.rank == 0 else None
        return _result(self._room.exchange(self.rank, "on_rank0", outcome)[0])

    def deal(self, kind: object, part_kind: object, make: Callable[[], tuple[T, Sequence[Any]]]) -> tuple[T, Any]:
        outcome = _attempt(make) if self.rank == 0 else None
        shared, parts = _result(self._room.exchange(self.rank, "deal", outcome)[0])
        return shared, parts[self.rank]

    def gather(self, kind: object, value: T) -> list[T]:
        said = self._room.exchange(self.rank, "gather", value)
        return said if self.rank == 0 else []

    def attempts(self, kind: object, make: Callable[[], T]) -> list[tuple[T | None, Any]]:
        said = self._room.exchange(self.rank, "attempts", _attempt(make))
        return said if self.rank == 0 else []

    def everywhere(self, kind: object, make: Callable[[], T]) -> list[T]:
        return values(self._room.exchange(self.rank, "everywhere", _attempt(make)))

    def add_up(self, table: np.ndarray) -> None:
        said = self._room.exchange(self.rank, "add_up", table.copy())
        table[...] = np.sum(said, axis=0) if self.rank == 0 else -1


def on_all_ranks(world_size: int, call: Callable[[int], T]) -> list[T]:
    """Every rank's result of a call, each in a thread of its own. Raises the first rank's error."""
    with ThreadPoolExecutor(world_size) as pool:
        return [future.result() for future in [pool.submit(call, rank) for rank in range(world_size)]]


def _attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as e:  # noqa: BLE001 - raised on every rank
        return None, e


def _result(outcome: tuple[Any, Exception | None]) -> Any:
    value, error = outcome
    if error is not None:
        raise error
    return value
