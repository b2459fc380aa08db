"""What a publisher asks of a replica, declared once: endpoint.py serves it, clients.py asks many replicas at once.

Owns the verbs and their messages. Does not own their order (endpoint.py draws it), how calls travel
(weight_sync/calls), or what a verb does (`receiver.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.weight_sync.layout import Binding, DestLayout
from slipstream.weight_sync.typed_msgpack import Sent

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
        """What it must receive."""
        return self.sent.layout

    @property
    def slots(self) -> tuple[Addresses, ...]:
        """Addresses by slot."""
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
    """What one engine rank must hold, in columns: `sums.py` writes and reads them.

    The parameters are those of its layout that are sent, in the layout's order. Both sides agreed on them when the
    publisher planned, and `planned` proves it. Names would be most of a message: 171,392 at 128 ranks of Kimi-K2.
    """

    planned: str
    """Planned.digest (expected.py), over the parameters and the number of bytes that a publish writes into each."""
    num_bytes: bytes
    """Bytes sent, little-endian int64; empty if they are the planned ones."""
    hashes: bytes
    """Sums of their hashes, little-endian uint64; empty if hashes are off."""
    base: str = ""
    """Binding.holds of what `changes` were computed against; "" if every byte was sent."""
    changes: bytes = b""
    """What lies in the rank's landing zone; see replica/landing.py."""


@dataclass(frozen=True, slots=True)
class PublishId:
    """Names one publish. Example: PublishId("5e..", version=3, epoch=4, digest="9f..")."""

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
