"""What was sent to whom: bytes and hash sums of every parameter of every engine rank, in two rows of integers.

Owns: the places in those rows, adding up, and the form that messages have. Does not own: the hashes (integrity.py), the
writes (lanes.py), or the meeting of the ranks (collectives.py).

    places   (replica, dest_rank) -> a stretch of columns, one a parameter
    table    2 x columns, int64:   bytes written | sum of hashes, modulo 2^64

Two tables of the same places add up as integers do, so that ranks need no dictionaries of each other's: 256 ranks of
Kimi-K2 send 80,000 different (engine rank, parameter) pairs each, which took rank 0 nine seconds to unpack and add. A
replica is told its part in the same columns (protocol.Expected): without names, and without counts where they are those
planned, as they are whenever nothing went wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weight_sync.errors import PlanMismatch, ProtocolError
from weight_sync.layout import Destination
from weight_sync.plan.columns import Ints
from weight_sync.plan.tasks import Task
from weight_sync.replica.protocol import Expected, pack


@dataclass(frozen=True, eq=False)
class Planned:
    """What a publish writes into the parameters of one engine rank, as both sides know it from the rank's layout."""

    digest: str
    """sha256, hex, of the parameters in their order and the bytes of each."""
    num_bytes: Ints

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Planned:
        """Of parameters and their bytes, in the layout's order."""
        return cls(hashlib.sha256(pack(dict(sizes))).hexdigest(), np.array(list(sizes.values()), np.int64))

    def write(self, num_bytes: Ints, hashes: Ints | None) -> Expected:
        """The form that messages have.

        Args:
            num_bytes: Sent, per parameter in their order.
            hashes: Likewise, as int64; None where they are off.
        """
        counts = b"" if (num_bytes == self.num_bytes).all() else num_bytes.astype("<i8", copy=False).tobytes()
        return Expected(self.digest, counts, b"" if hashes is None else hashes.astype("<i8", copy=False).tobytes())

    def read(self, expected: Expected) -> tuple[list[int], list[int] | None]:
        """Bytes sent, and hash sums modulo 2^64 or None, per parameter.

        Raises:
            PlanMismatch: The sender plans for other parameters, in another order or of other sizes.
            ProtocolError: There is not one entry a parameter.
        """
        if expected.planned != self.digest:
            raise PlanMismatch(
                f"the publisher planned for parameters {expected.planned[:12]}, here are {self.digest[:12]}: connect"
                " again"
            )
        whole = self.num_bytes.nbytes
        for what, column in (("counts", expected.num_bytes), ("hashes", expected.hashes)):
            if column and len(column) != whole:
                raise ProtocolError(f"{len(column)} bytes of {what} for {len(self.num_bytes)} parameters of 8 each")
        counts = np.frombuffer(expected.num_bytes, "<i8") if expected.num_bytes else self.num_bytes
        return counts.tolist(), np.frombuffer(expected.hashes, "<u8").tolist() if expected.hashes else None


class Places:
    """Where each parameter of each engine rank stands.

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
        """Of those parameters alone that the tasks write."""
        params: dict[Destination, dict[str, None]] = {}
        for task in tasks:
            params.setdefault((task.replica, task.dest_rank), {})[task.param] = None
        return cls({dest: tuple(names) for dest, names in params.items()})

    def column(self, dest: Destination, param: str) -> int:
        """The place of one parameter. Raises KeyError where it has none."""
        return self.first[dest] + self._within[dest][param]


class Sums(Mapping[Destination, dict[str, tuple[int, int]]]):
    """Bytes and hash sums, and their form by names: {(0, 3): {"lm_head.weight": (2048, 9127364)}}.

    Engine ranks and parameters to which nothing was written are absent.
    """

    def __init__(self, places: Places, table: Ints | None = None) -> None:
        self.places = places
        self.table = np.zeros((2, places.size), np.int64) if table is None else table

    def add(self, columns: Ints, sizes: Ints, hashes: Ints) -> None:
        """Count writes: each one's place, its bytes, and the hash of its bytes."""
        np.add.at(self.table[0], columns, sizes)
        np.add.at(self.table[1], columns, hashes)

    def part(self, dest: Destination) -> Ints:
        """The columns of one engine rank, zeros included: a view."""
        first = self.places.first[dest]
        return self.table[:, first : first + len(self.places.params[dest])]

    def __getitem__(self, dest: Destination) -> dict[str, tuple[int, int]]:
        sizes, hashes = self.part(dest)
        found = zip(self.places.params[dest], sizes.tolist(), hashes.view(np.uint64).tolist())
        by_name = {name: (size, total) for name, size, total in found if size}
        if not by_name:
            raise KeyError(dest)
        return by_name

    def __iter__(self) -> Iterator[Destination]:
        return (dest for dest in self.places.params if self.part(dest)[0].any())

    def __len__(self) -> int:
        return sum(1 for _ in self)
