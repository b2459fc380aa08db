"""What was sent: bytes and hash sums of every parameter of every engine rank, in two rows of integers.

Does not own: the hashes (integrity.py), the writes (lanes.py), or what a replica is told (replica/messages.py).

    places   (replica, dest_rank) -> a stretch of columns, one per parameter
    table    2 x columns, int64:   bytes written | sum of hashes, modulo 2^64

Two tables with the same places are added as integers, so ranks exchange no dictionaries: each of 256 ranks of Kimi-K2
sends 80,000 different (engine rank, parameter) pairs, and rank 0 took nine seconds to unpack and add dictionaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from slipstream.weight_sync.layout import Destination
from slipstream.weight_sync.plan.columns import Ints
from slipstream.weight_sync.plan.transfer_plan import Task


class Places:
    """The column of each parameter of each engine rank.

    Args:
        params: Per engine rank the names of its parameters; equal ones may be one object.
    """

    def __init__(self, params: Mapping[Destination, Sequence[str]]) -> None:
        self.params = params
        self.first: dict[Destination, int] = {}
        self.size = 0
        known: dict[int, dict[str, int]] = {}
        self._within: dict[Destination, dict[str, int]] = {}
        for dest, names in params.items():
            self.first[dest] = self.size
            if id(names) not in known:
                known[id(names)] = {name: place for place, name in enumerate(names)}
            self._within[dest] = known[id(names)]
            self.size += len(names)

    @classmethod
    def of_tasks(cls, tasks: Iterable[Task]) -> Places:
        """Places only for the parameters that the tasks write."""
        params: dict[Destination, dict[str, None]] = {}
        for task in tasks:
            params.setdefault((task.replica, task.dest_rank), {})[task.param] = None
        return cls({dest: tuple(names) for dest, names in params.items()})

    def with_replicas(self, more: Iterable[int]) -> Places:
        """These places, and behind them those of further replicas, each with the parameters of replica 0."""
        first = {rank: names for (replica, rank), names in self.params.items() if replica == 0}
        return Places({**self.params, **{(replica, rank): names for replica in more for rank, names in first.items()}})

    def columns(self, dest: Destination) -> slice:
        """The columns of one engine rank's parameters."""
        return slice(self.first[dest], self.first[dest] + len(self.params[dest]))

    def column(self, dest: Destination, param: str) -> int:
        """The column of one parameter. Raises KeyError if it has none."""
        return self.first[dest] + self._within[dest][param]


class Sums:
    """Bytes and hash sums, each in its place."""

    def __init__(self, places: Places, table: Ints | None = None) -> None:
        self.places = places
        self.table = np.zeros((2, places.size), np.int64) if table is None else table

    def add(self, columns: Ints, sizes: Ints, hashes: Ints) -> None:
        """Count writes. Args, per write: its place, its bytes, and the hash of its bytes."""
        np.add.at(self.table[0], columns, sizes)
        np.add.at(self.table[1], columns, hashes)

    def part(self, dest: Destination) -> Ints:
        """The columns of one engine rank, zeros included: a view."""
        return self.table[:, self.places.columns(dest)]
