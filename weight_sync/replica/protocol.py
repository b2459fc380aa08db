"""The agreement between a publisher and a replica: which version is where, and the signed messages that change it.

Owns the version state machine (pure), the wire messages, and their encoding and signature. Does not own sockets
(`endpoint.py`), memory (`receiver.py`) or time. No pickle: a message is msgpack of plain values, checked against its
dataclass on arrival; a layout in it is the bytes of `layout_wire.py`.

    DIRTY --verified--> VERIFIED --committed--> CLEAN(v)     begin(v', epoch') leads from any phase to DIRTY, and only
      ^                    |                      |          with a larger epoch; invalidate() leads from any phase to
      +----- failed -------+----- begin ----------+          DIRTY. A replica serves in CLEAN and in no other phase.

A replica starts DIRTY at epoch 0 (its weights are dummies). Versions may repeat or go back (a trainer resumed from an
older checkpoint); epochs only grow. Publishers may follow one another, with no clock in common: whose Describe came
later takes a replica over with its first Begin, and those before are StaleEpoch there until they describe it again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

import msgpack

from weight_sync.errors import AuthenticationError, ProtocolError, StaleEpoch
from weight_sync.layout import Binding, DestLayout
from weight_sync.record.layout_wire import layouts_from_bytes, layouts_to_bytes

T = TypeVar("T")


class Phase(StrEnum):
    """Where a replica stands in a transaction."""

    dirty = "dirty"
    """Some bytes may be of one version and some of another. Must not serve."""
    verified = "verified"
    """Every byte of the version was counted and hashed. Must not serve yet: caches and derived parameters are older."""
    clean = "clean"
    """Serves `version`."""


@dataclass(frozen=True, slots=True)
class VersionState:
    """A replica's (or one engine rank's) place in the protocol. Immutable; each transition returns the next state.

    Example: VersionState(Phase.clean, version=3, epoch=4, digest="9f..") serves version 3, which epoch 4 brought.
    """

    phase: Phase = Phase.dirty
    version: int = -1
    """The version being written (dirty, verified) or served (clean); -1 before the first begin."""
    epoch: int = 0
    digest: str = ""
    """Digest of the plan that the transaction follows."""

    @property
    def is_serving(self) -> bool:
        """Whether this replica may sample."""
        return self.phase is Phase.clean

    def begin(self, version: int, epoch: int, digest: str) -> VersionState:
        """A publish starts: whatever was here stops being servable. The epoch must be larger than every earlier one."""
        if version < 0:
            raise ProtocolError(f"begin of version {version}: versions start at 0")
        if epoch <= self.epoch:
            raise StaleEpoch(f"begin(version {version}, epoch {epoch}) is stale: epoch {self.epoch} has begun")
        return VersionState(Phase.dirty, version, epoch, digest)

    def verified(self, version: int, epoch: int, digest: str) -> VersionState:
        """All bytes of the transaction that is under way were proven."""
        self._require("verify", Phase.dirty, version, epoch)
        if digest != self.digest:
            raise ProtocolError(
                f"verify of epoch {epoch} names plan {digest[:12]}, its begin named plan {self.digest[:12]}"
            )
        return dataclasses.replace(self, phase=Phase.verified)

    def committed(self, version: int, epoch: int) -> VersionState:
        """The verified version goes into service."""
        self._require("commit", Phase.verified, version, epoch)
        return dataclasses.replace(self, phase=Phase.clean)

    def failed(self, epoch: int) -> VersionState:
        """The transaction `epoch` failed. Without effect on a transaction that is committed or is another one."""
        if epoch != self.epoch or self.phase is Phase.clean:
            return self
        return dataclasses.replace(self, phase=Phase.dirty)

    def invalidate(self) -> VersionState:
        """The bytes in memory can no longer be vouched for (addresses moved, memory was released)."""
        return dataclasses.replace(self, phase=Phase.dirty)

    def _require(self, verb: str, phase: Phase, version: int, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpoch(f"{verb}(version {version}, epoch {epoch}) is stale: epoch {self.epoch} has begun")
        if version != self.version:
            raise ProtocolError(f"{verb} names version {version}, epoch {epoch} began version {self.version}")
        if self.phase is not phase:
            raise ProtocolError(
                f"{verb}(version {version}, epoch {epoch}) needs phase {phase}, the phase is {self.phase}"
            )


@dataclass(frozen=True, slots=True)
class EngineRank:
    """What one engine rank tells a publisher: what it must receive, where that is now, and over which link."""

    layout: DestLayout
    binding: Binding
    link: str


@dataclass(frozen=True, slots=True)
class Bound:
    """A Binding, said to a publisher that may know its addresses: they hardly ever change, and there are many.

    They are named by what they are, not by when they were said: nobody has to remember what the other one heard last.
    """

    session: str
    digest: str
    """addresses_digest of the addresses."""
    addresses: dict[str, int] | None
    """None where the publisher named `digest` among those that it knows."""

    @classmethod
    def of(cls, binding: Binding, known: Collection[str] = ()) -> Bound:
        """For a publisher that knows the addresses of these digests."""
        digest = addresses_digest(binding.addresses)
        return cls(binding.session, digest, None if digest in known else binding.addresses)


@dataclass(frozen=True, slots=True)
class Expected:
    """What one engine rank must hold, in columns: `sums.py` writes and reads them.

    The parameters are those of its layout that are sent, in the layout's order, on which both sides agreed when the
    publisher planned; `planned` proves it. Names would be most of a message: 171,392 of them at 128 ranks of Kimi-K2.
    """

    planned: str
    """sums.Planned.digest: of the parameters, and of the bytes that a publish writes into each."""
    num_bytes: bytes
    """Bytes sent, little-endian int64; empty where they are those planned."""
    hashes: bytes
    """Sums of their hashes, little-endian uint64; empty where hashes are off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What every message says. A reply repeats its request's fields."""

    run_id: str
    """Fingerprint of the run's key."""
    client: str
    """Random name that a publisher's end takes when it is made; a reply to another one is no reply."""
    incarnation: str = ""
    """Random name that a replica's endpoint takes at its start; empty in Describe, which asks for it."""
    request_id: int
    """Starts at 1 and grows with every request of one client; one that does not is a replay. No clock has a say."""
    epoch: int = 0
    version: int = -1
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe(Message):
    """What must your ranks receive, and where?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described(Message):
    """Answer to Describe. `own_epoch` and `own_version` are the replica's, so that a publisher goes on from there."""

    ranks: tuple[EngineRank, ...]
    own_epoch: int
    own_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin(Message):
    """Stop serving; bytes of `version` will be written. `known`: digests of the replica's addresses that need not be
    said again."""

    known: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun(Message):
    """Every rank is idle and DIRTY. `bindings`: where to write, one per rank (sessions change after a failed epoch, and
    addresses from one adapter slot to another).

    Seconds: until the engine stood still, and until every rank had marked itself DIRTY after that.
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
    """Every rank serves `version`. Seconds: of the proof, of the rest of the commit, and from Begin until now."""

    verify_s: float
    commit_s: float
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Message):
    """The transaction is over and failed. Stay DIRTY."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted(Message):
    """The replica knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Message):
    """The request raised `error` (a class name) with `text`."""

    error: str
    text: str


REQUESTS: tuple[type[Message], ...] = (Describe, Begin, Commit, Abort)
REPLIES: tuple[type[Message], ...] = (Described, Begun, Committed, Aborted, Failed)
_KINDS = {cls.__name__: cls for cls in (*REQUESTS, *REPLIES)}
_MAC_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs and checks messages with the run's key (HMAC-SHA256 over direction and body, compared in constant time).

    The signed body holds the client, its request id and the endpoint's incarnation, so that a recorded message is
    refused when it is sent again, sent to another replica or to the same one after a restart. Describe alone names no
    incarnation: another endpoint of the run answers a recorded one, once, to nobody's harm, because it changes nothing
    and its answer names a client that is gone. The direction is signed too: a request cannot be played back to its
    sender as a reply.
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
        body = _packb([type(message).__name__, message])
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
        try:
            kind, plain = msgpack.unpackb(body)
        except (ValueError, TypeError) as e:
            raise ProtocolError(
                f"a signed control message of {len(data)} bytes is not msgpack of [kind, fields]: {e}"
            ) from e
        cls = _KINDS.get(kind) if isinstance(kind, str) else None
        if cls not in kinds:
            raise ProtocolError(f"control message kind {kind!r} is none of {', '.join(k.__name__ for k in kinds)}")
        message = from_plain(cls, plain)
        if message.run_id != self.run_id:
            raise AuthenticationError(f"a control message names run {message.run_id}, this is run {self.run_id}")
        return message

    def _mac(self, is_request: bool, body: bytes) -> bytes:
        direction = b"slipstream/3 request\0" if is_request else b"slipstream/3 reply\0"
        return hmac.digest(self.key, direction + body, "sha256")


def pack(value: Any) -> bytes:
    """Dataclasses of plain values (layouts, bindings, tuples and lists of them) as msgpack, for other channels."""
    return _packb(value)


def unpack(cls: type[T], data: bytes) -> T:
    """Inverse of pack, for a known type, e.g. unpack(EngineRank, data)."""
    return from_plain(cls, msgpack.unpackb(data))


def addresses_digest(addresses: Mapping[str, int]) -> str:
    """sha256, hex, of parameters and their addresses."""
    return hashlib.sha256(_packb(dict(addresses))).hexdigest()


def from_plain(cls: Any, value: Any) -> Any:
    """What msgpack read, as the type `cls`, by which it is checked. Raises ProtocolError where it does not fit."""
    return _decoder(cls)(value)


@functools.cache
def _decoder(cls: Any) -> Callable[[Any], Any]:
    """from_plain for one type, looked at once."""
    origin, args = typing.get_origin(cls), typing.get_args(cls)
    if cls is DestLayout:
        return _layout_of
    if dataclasses.is_dataclass(cls):
        return _dataclass_decoder(typing.cast(type, cls))
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        item = _decoder(args[0])
        return lambda value: tuple([item(one) for one in _checked(value, list, cls)])
    if origin is tuple:
        items = [_decoder(kind) for kind in args]

        def decode_tuple(value: Any) -> Any:
            if type(value) is not list or len(value) != len(items):
                raise ProtocolError(f"expected {cls}, got {_brief(value)}")
            return tuple([decode(one) for decode, one in zip(items, value, strict=True)])

        return decode_tuple
    if origin is list:
        item = _decoder(args[0])
        return lambda value: [item(one) for one in _checked(value, list, cls)]
    if origin is dict:
        key, item = (_decoder(kind) for kind in args)
        return lambda value: {key(k): item(one) for k, one in _checked(value, dict, cls).items()}
    if origin is types.UnionType:
        some = _decoder(next(kind for kind in args if kind is not types.NoneType))
        return lambda value: None if value is None and types.NoneType in args else some(value)
    if isinstance(cls, type) and issubclass(cls, StrEnum):
        return lambda value: cls(value if value in cls._value2member_map_ else _refuse(value, cls))
    if cls is float:
        return lambda value: float(value if type(value) in (int, float) else _refuse(value, cls))
    return lambda value: value if type(value) is cls else _refuse(value, cls)


def _dataclass_decoder(cls: type) -> Callable[[Any], Any]:
    fields = [(name, _decoder(kind)) for name, kind in _fields(cls)]

    def decode(value: Any) -> Any:
        if type(value) is not list or len(value) != len(fields):
            raise ProtocolError(f"expected the {len(fields)} fields of {cls.__name__}, got {_brief(value)}")
        return cls(**{name: decode_field(one) for (name, decode_field), one in zip(fields, value, strict=True)})

    return decode


def _layout_of(value: Any) -> DestLayout:
    """Quick: a layout has 20,000 loads, which are read as columns."""
    try:
        (layout,) = layouts_from_bytes(_checked(value, bytes, DestLayout))
    except ProtocolError:
        raise
    except Exception as e:  # whatever bytes that are no layout make of themselves
        raise ProtocolError(f"expected a layout, got {len(value)} bytes that are none: {e}") from e
    return layout


def _checked(value: Any, kind: type[T], cls: Any) -> T:
    if type(value) is not kind:
        _refuse(value, cls)
    return value


def _refuse(value: Any, cls: Any) -> NoReturn:
    raise ProtocolError(f"expected {cls}, got {_brief(value)}")


def _packb(value: Any) -> bytes:
    """A layout becomes its own bytes, another dataclass the list of its fields; all else is left to msgpack."""
    return typing.cast(bytes, msgpack.packb(value, default=_fields_of))


def _fields_of(value: Any) -> list[Any] | bytes:
    if isinstance(value, DestLayout):
        return layouts_to_bytes((value,))
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"a message cannot hold {_brief(value)}")
    return [getattr(value, name) for name, _ in _fields(type(value))]


@functools.cache
def _fields(cls: type) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((item.name, hints[item.name]) for item in dataclasses.fields(cls))


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
