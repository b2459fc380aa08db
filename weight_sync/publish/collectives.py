"""Where the trainer's ranks meet: collectives in which whatever fails on one rank is raised on all of them.

Owns: how a value, an error or a sum gets from rank to rank. Does not own what they say (its callers), nor the group.

    on_rank0    rank 0 --> all      its value, or its error
    deal        rank 0 --> all      the same, and a part of its own for each rank
    gather      all --> rank 0      every rank's value
    everywhere  all --> all         every rank's value, or the first rank's error
    add_up      all --> rank 0      one sum of arrays

Invariants. All ranks call the same methods in the same order. What raises on one rank travels as a value (`attempt`),
because the others are waiting in a collective, and is raised where it arrives (`values`). A rank that died, or stopped
for longer than the group's timeout, is RankLost on those that wait for it. A rank alone has no group and meets nobody:
every method is then a plain call.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from conf.errors import ConfigError, SlipstreamError
from weight_sync.errors import RankLost, WeightSyncError
from weight_sync.plan.columns import Ints

logger = logging.getLogger(__name__)

T = TypeVar("T")
Part = TypeVar("Part")
Outcome: TypeAlias = tuple[T | None, SlipstreamError | None]
"""What a rank made, or why it could not. Examples: (layout, None), (None, PlanError("no such tensor"))."""


class Meeting:
    """One trainer rank among the others.

    Args:
        rank, world_size: This rank and the number of trainer ranks.
        group: A gloo process group over all trainer ranks (object collectives on the CPU); None when there is one rank.
    """

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        if group is None and world_size != 1:
            raise ValueError(f"{world_size} trainer ranks need a process group")
        self.rank = rank
        self._world_size = world_size
        self._group = group

    def on_rank0(self, make: Callable[[], T]) -> T:
        """make() on rank 0, its result or its error on every rank."""
        box: list[Any] = [attempt(make) if self.rank == 0 else None]
        if self._group is not None:
            with self._waiting("a broadcast"):
                dist.broadcast_object_list(box, group=self._group, group_src=0)
        value, error = box[0]
        if error is not None:
            raise error
        return value

    def deal(self, make: Callable[[], tuple[T, Sequence[Part]]]) -> tuple[T, Part]:
        """make() on rank 0: what every rank gets, and one part for each, which nobody else gets. Its error on all."""
        parts: list[Part] = []

        def make_shared() -> T:
            shared, own = make()
            parts.extend(own)
            return shared

        shared = self.on_rank0(make_shared)
        if self._group is None:
            return shared, parts[0]
        box: list[Any] = [None]
        with self._waiting("a scatter"):
            dist.scatter_object_list(box, parts if self.rank == 0 else None, group=self._group, group_src=0)
        return shared, box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on rank 0; the others get nothing."""
        if self._group is None:
            return [value]
        gathered: list[Any] = [None] * self._world_size if self.rank == 0 else []
        with self._waiting("a gather"):
            dist.gather_object(value, gathered if self.rank == 0 else None, group=self._group, group_dst=0)
        return gathered

    def everywhere(self, make: Callable[[], T]) -> list[T]:
        """make() on every rank, all results on every rank; the first rank's error on all of them."""
        outcome = attempt(make)
        if self._group is None:
            if outcome[1] is not None:
                raise outcome[1]
            return values([outcome])
        gathered: list[Any] = [None] * self._world_size
        with self._waiting("a gather"):
            dist.all_gather_object(gathered, outcome, group=self._group)
        return values(gathered)

    def add_up(self, table: Ints) -> None:
        """From here on, rank 0's table holds the sum of all ranks'; the others' are undefined."""
        if self._group is not None:
            with self._waiting("a sum"):
                dist.reduce(torch.from_numpy(table), group_dst=0, group=self._group)

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Names what a collective raises when a peer is gone, or stopped for longer than the group's timeout."""
        try:
            yield
        except RuntimeError as e:
            raise RankLost(f"trainer rank {self.rank} of {self._world_size} met nobody in {what}: {e}") from e


def attempt(make: Callable[[], T]) -> Outcome[T]:
    """What it makes, or its error: a value for now, because the other ranks are waiting in a collective."""
    try:
        return make(), None
    except Exception as e:
        return None, _ours(e)


def values(outcomes: Sequence[Outcome[T]]) -> list[T]:
    """What every rank made; the first rank's error is raised."""
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            raise type(error)(f"trainer rank {rank}: {error}")
    return [value for value, _ in outcomes]  # type: ignore[misc]


def _ours(error: Exception) -> SlipstreamError:
    """An error that unpickles on every rank."""
    if isinstance(error, WeightSyncError | ConfigError):
        return error
    logger.error("unexpected error", exc_info=error)
    return WeightSyncError(f"{type(error).__name__}: {error}")
