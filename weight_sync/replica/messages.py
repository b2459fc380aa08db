"""What a publisher asks of a replica, declared once: endpoint.py serves it, clients.py asks many replicas at once.

Does not own the order of verbs (endpoint.py draws it), how calls travel (weight_sync/calls), what a verb does
(receiver.py), or the sums that fill Expected (pipeline/sums.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slipstream.weight_sync.errors import PlanMismatch, ProtocolError
from slipstream.weight_sync.layout import Binding, DestLayout
from slipstream.weight_sync.plan.columns import Ints
from slipstream.weight_sync.typed_msgpack import Sent, pack

Addresses = dict[str, int]
"""Parameter -> device pointer."""


@dataclass(frozen=True, slots=True)
class EngineRank:
    """What one engine rank tells a publisher: what it must receive, where, and its link."""

    sent: Sent[DestLayout]
    binding: Binding
    """Present session; addresses, of the first adapter slot if there are slots. Addresses stay (receiver.py)."""
    link: str
    others: tuple[Addresses, ...] = ()
    """Addresses of further slots."""

    @property
    def layout(self) -> DestLayout:
        return self.sent.layout

    @property
    def slots(self) -> tuple[Addresses, ...]:
        return self.binding.addresses, *self.others


@dataclass(frozen=True, slots=True)
class Bound:
    """Where to write in one publish: at which of the addresses that the rank has described, under which session."""

    session: str
    slot: int = 0
    holds: str = ""
    """Binding.holds."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What one engine rank must hold, in columns, which Planned writes and reads.

    The parameters are those of its layout that are sent, in the layout's order. Both sides agreed on them when the
    publisher planned, and `planned` proves it. Names would be most of a message: 171,392 at 128 ranks of Kimi-K2.
    """

    planned: str
    """Planned.digest."""
    num_bytes: bytes
    """Bytes sent, little-endian int64; empty if they are the planned ones."""
    hashes: bytes
    """Sums of their hashes, little-endian uint64; empty if hashes are off."""
    base: str = ""
    """Binding.holds of what `changes` were computed against; "" if every byte was sent."""
    changes: bytes = b""
    """What lies in the rank's landing zone; see replica/landing.py."""


@dataclass(frozen=True, eq=False)
class Planned:
    """What a publish writes into the parameters of one engine rank. Both sides derive it from the rank's layout."""

    digest: str
    """sha256, hex, of the parameters in their order and the bytes of each."""
    num_bytes: Ints

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Planned:
        """What is written into parameters of these bytes, in the layout's order."""
        return cls(hashlib.sha256(pack(dict(sizes))).hexdigest(), np.array(list(sizes.values()), np.int64))

    def write(self, num_bytes: Ints, hashes: Ints | None) -> Expected:
        """What was sent, per parameter in their order: bytes, and hash sums as int64 (None if hashes are off)."""
        counts = b"" if (num_bytes == self.num_bytes).all() else num_bytes.astype("<i8", copy=False).tobytes()
        return Expected(self.digest, counts, b"" if hashes is None else hashes.astype("<i8", copy=False).tobytes())

    def read(self, expected: Expected) -> tuple[list[int], list[int] | None]:
        """Bytes sent, and hash sums modulo 2^64 or None, per parameter.

        Raises PlanMismatch if the sender plans for other parameters, another order or other sizes, ProtocolError if
        there is not one entry per parameter.
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


@dataclass(frozen=True, slots=True)
class PublishId:
    """Example: PublishId("5e..", version=3, epoch=4, digest="9f..")."""

    publisher: str
    """Random name of whoever publishes, which it gave in describe()."""
    version: int
    epoch: int
    digest: str
    """The plan's."""


@dataclass(frozen=True, slots=True)
class Described:
    """What a replica's ranks must receive, and its epoch, so that a publisher continues from there."""

    ranks: tuple[EngineRank, ...]
    own_epoch: int


@dataclass(frozen=True, slots=True)
class Begun:
    """Every rank is idle and DIRTY."""

    bindings: tuple[Bound, ...]
    """Where to write, one per rank. (Sessions change after a failed epoch.)"""
    idle_s: float
    """Until the engine had paused."""
    mark_s: float
    """From then until every rank had marked itself DIRTY."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Every rank serves the version. Seconds: for the proof, for the rest of the commit, and from begin until now."""

    verify_s: float
    commit_s: float
    pause_s: float


class ReplicaVerbs(Protocol):
    """What a publisher asks. Several may follow one another and share no clock: the one that called describe() last
    takes the replica at its first begin(), and from then on earlier ones get StaleEpoch until they describe again."""

    async def describe(self, publisher: str) -> Described:
        """What must be received, and where. Changes nothing."""
        ...

    async def begin(self, publish: PublishId) -> Begun:
        """Stop serving: bytes will be written."""
        ...

    async def commit(self, publish: PublishId, expected: Sequence[Expected]) -> Committed:
        """All bytes were written. Prove them against `expected` (one per rank), then serve them."""
        ...

    async def abort(self, publish: PublishId, reason: str) -> None:
        """The publish is over and failed. Stay DIRTY."""
        ...
