"""The signed messages between a publisher and a replica.

Owns the wire messages and their signature. Does not own their encoding (`typed_msgpack.py`), the sockets
(`control_server.py`, `control_client.py`) or what a request does (`receiver.py`).

Publishers may follow one another and share no clock: the publisher that called Describe last takes ownership at its
first Begin, and earlier ones get StaleEpoch until they call Describe again.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from slipstream.weight_sync.errors import AuthenticationError, ProtocolError
from slipstream.weight_sync.layout import Binding, DestLayout
from slipstream.weight_sync.typed_msgpack import Sent, pack, unpack


@dataclass(frozen=True, slots=True)
class EngineRank:
    """What one engine rank tells a publisher: what it must receive, its present addresses, and its link."""

    sent: Sent[DestLayout]
    binding: Binding
    link: str

    @property
    def layout(self) -> DestLayout:
        """What it must receive."""
        return self.sent.layout


@dataclass(frozen=True, slots=True)
class Bound:
    """A Binding for a publisher that may know its addresses already: there are many, and they rarely change.

    A digest names them by their content, so neither side must remember what it last sent to the other.
    """

    session: str
    digest: str
    """addresses_digest of the addresses."""
    addresses: dict[str, int] | None
    """None if the publisher named `digest` as known."""
    holds: str = ""
    """Binding.holds."""

    @classmethod
    def of(cls, binding: Binding, known: Collection[str] = ()) -> Bound:
        """Args: `known`, digests of addresses that the publisher knows."""
        digest = addresses_digest(binding.addresses)
        return cls(binding.session, digest, None if digest in known else binding.addresses, binding.holds)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Fields of every message. A reply repeats its request's."""

    run_id: str
    """Fingerprint of the run's key."""
    client: str
    """Random name of a publisher's end, chosen when it is made. A reply with another name is ignored."""
    incarnation: str = ""
    """Random name of a replica's endpoint, chosen at its start. Empty in Describe, which asks for it."""
    request_id: int
    """Starts at 1 and grows with every request of a client. A request whose id does not grow is a replay. No clocks."""
    epoch: int = 0
    version: int = -1
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe(Message):
    """Asks what a replica's ranks must receive, and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described(Message):
    """Answers Describe. `own_epoch` and `own_version` are the replica's, so that a publisher continues from there."""

    ranks: tuple[EngineRank, ...]
    own_epoch: int
    own_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Message):
    """Stop serving: bytes of `version` will be written. `known`: digests of the replica's addresses that it need not
    send again."""

    known: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun(Message):
    """Every rank is idle and DIRTY. `bindings`: where to write, one per rank. (Sessions change after a failed epoch,
    and each adapter slot has other addresses.)

    Seconds: until the engine had paused, and from then until every rank had marked itself DIRTY.
    """

    bindings: tuple[Bound, ...]
    idle_s: float
    mark_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(Message):
    """All bytes were written. Prove them against `expected` (one per rank), then serve `version`."""

    expected: tuple[Expected, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Message):
    """Every rank serves `version`. Seconds: for the proof, for the rest of the commit, and from Begin until now."""

    verify_s: float
    commit_s: float
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Message):
    """The transaction is over and failed. Stay DIRTY."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted(Message):
    """Answers Abort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Message):
    """The request raised `error` (a class name) with `text`."""

    error: str
    text: str


REQUESTS: tuple[type[Message], ...] = (Describe, Begin, Commit, Abort)
REPLIES: tuple[type[Message], ...] = (Described, Begun, Committed, Aborted, Failed)
_MAC_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs and checks messages with the run's key (HMAC-SHA256 over direction and body, compared in constant time).

    The signed body holds the client, its request id and the endpoint's incarnation, so that a recorded message is
    refused when it is sent again, sent to another replica or to the same one after a restart. Only Describe names no
    incarnation: another endpoint of the run answers a recorded Describe once. That is harmless, because it changes
    nothing and the answer names a client that is gone. The direction is signed, too, so a request cannot be sent back
    to its sender as a reply.
    """

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < 16:
            raise ProtocolError(f"the run's key must have at least 16 bytes, got {len(self.key)}")

    @property
    def run_id(self) -> str:
        """Name of the run that is safe to show: a fingerprint of its key."""
        return hmac.new(self.key, b"slipstream run id", hashlib.sha256).hexdigest()[:16]

    def seal(self, message: Message) -> bytes:
        """Encode and sign."""
        body = pack([type(message).__name__, message])
        return self._mac(type(message) in REQUESTS, body) + body

    def open_request(self, data: bytes) -> Message:
        """Check and decode what an endpoint received. Raises AuthenticationError or ProtocolError."""
        return self._open(data, REQUESTS)

    def open_reply(self, data: bytes) -> Message:
        """Check and decode what a publisher received. Raises AuthenticationError or ProtocolError."""
        return self._open(data, REPLIES)

    def _open(self, data: bytes, kinds: tuple[type[Message], ...]) -> Message:
        mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(kinds is REQUESTS, body)):
            raise AuthenticationError(f"a control message of {len(data)} bytes is not signed with this run's key")
        kind, fields = unpack(tuple[str, msgspec.Raw], body)
        cls = next((cls for cls in kinds if cls.__name__ == kind), None)
        if cls is None:
            raise ProtocolError(f"control message kind {kind!r} is none of {', '.join(k.__name__ for k in kinds)}")
        message = unpack(cls, fields)
        if message.run_id != self.run_id:
            raise AuthenticationError(f"a control message names run {message.run_id}, this is run {self.run_id}")
        return message

    def _mac(self, is_request: bool, body: bytes) -> bytes:
        direction = b"slipstream/3 request\0" if is_request else b"slipstream/3 reply\0"
        return hmac.digest(self.key, direction + body, "sha256")


def addresses_digest(addresses: Mapping[str, int]) -> str:
    """sha256, hex, of parameters and their addresses."""
    return hashlib.sha256(pack(dict(addresses))).hexdigest()
