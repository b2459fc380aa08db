"""Where changes land in an engine rank, and how they get into the live parameters.

    trainer ranks    streams, one-sided      -->  the zone: memory of this rank that nothing else reads, so that this
                                                  rank may serve meanwhile
                     rows, with the commit   -->  check every row, then every stream, then write elements

The form of streams and the check of their positions are changes.py's, the sender's side is pipeline/landings.py.

Invariant: no element is written unless all rows of a commit, all counts and all positions are in bounds.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from slipstream.weight_sync.changes import DTYPES, ELEMENT_BYTES, RECORD_BYTES, Landed, apply, stream_bytes
from slipstream.weight_sync.errors import ProtocolError, WatermarkError
from slipstream.weight_sync.layout import DestLayout, Param, PostLoad
from slipstream.weight_sync.replica.messages import Expected
from slipstream.weight_sync.transport.base import Transport

COLUMNS = 5
"""Numbers of a row: parameter, offset in it, bytes, offset in the zone, records."""


def zone_name(num_bytes: int) -> str:
    """Under which name a Binding has the address of a zone of so many bytes."""
    return f"<landing zone of {num_bytes} bytes>"


def takes_changes(layout: DestLayout) -> frozenset[str]:
    """Parameters for which the bytes that arrive are those that are held afterwards, in whole elements."""
    return frozenset(
        p.name
        for p in layout.params
        if p.post_load is PostLoad.identity and p.dtype in DTYPES and p.num_bytes % ELEMENT_BYTES == 0
    )


def flags_of(names: Iterable[str], layout: DestLayout) -> tuple[bool, ...]:
    """Per name, whether changes alone may be sent for that parameter."""
    able = takes_changes(layout)
    return tuple(name in able for name in names)


def held_digest(expected: Expected, flags: Sequence[bool]) -> str:
    """What an engine rank holds once it has proven this, of the parameters that changes may be sent for (`flags`): the
    others, which always go whole, may hold other bytes at rest. "" if hashes are off."""
    if not expected.hashes:
        return ""
    hashes = np.frombuffer(expected.hashes, "<u8")[np.array(flags, np.bool_)]
    return hashlib.sha256(expected.planned.encode() + hashes.tobytes()).hexdigest()


class LandingZone:
    """Memory of `num_bytes` beside one rank's parameters, which the link registers. WatermarkError: there is no
    room."""

    def __init__(
        self, num_bytes: int, layout: DestLayout, params: Mapping[str, torch.Tensor], transport: Transport
    ) -> None:
        self._rank = layout.rank
        self._sent: list[Param] = [param for param in layout.params if param.post_load is not PostLoad.derived]
        self._covered = layout.written_ranges()
        self._able = takes_changes(layout)
        self._values = {name: params[name].detach().view(-1).view(torch.int16) for name in self._able}
        device = params[self._sent[0].name].device
        try:
            self._zone = torch.zeros(num_bytes // RECORD_BYTES, dtype=torch.int32, device=device)
        except RuntimeError as e:  # torch.OutOfMemoryError is one
            raise WatermarkError(
                f"rank {self._rank}: {device} has no room for weight_sync.delta_bytes={num_bytes} beside the engine; "
                "lower it (of a push: --delta-mib), or what the engine takes (rollout.kv_cache_bytes, "
                "rollout.gpu_memory_utilization)"
            ) from e
        self.num_bytes = num_bytes
        self._transport = transport
        transport.register([self._zone])

    @property
    def address(self) -> int:
        return self._zone.data_ptr()

    def close(self) -> None:
        self._transport.unregister([self._zone])
        self._zone = self._zone.new_empty(0)

    def apply(self, changes: bytes) -> None:
        """Put changes, rows of COLUMNS little-endian int64, into the parameters.

        Raises ProtocolError if a row, a count or a position is out of bounds; then nothing was written.
        """
        row_bytes = 8 * COLUMNS
        if len(changes) % row_bytes:
            raise ProtocolError(f"{len(changes)} bytes of changes are not rows of {row_bytes}")
        rows: list[list[int]] = np.frombuffer(changes, "<i8").reshape(-1, COLUMNS).tolist()
        landed = [self._landed(*row) for row in rows]
        wrong = apply(landed)
        if wrong is not None:
            param, offset = self._sent[rows[wrong][0]], rows[wrong][1]
            raise ProtocolError(
                f"rank {self._rank}: the changes of {param.name} from byte {offset} name "
                "elements outside them, or are not as many as was said; nothing was written"
            )

    def _landed(self, number: int, offset: int, num_bytes: int, place: int, num_records: int) -> Landed:
        if not 0 <= number < len(self._sent):
            raise ProtocolError(f"rank {self._rank} has no parameter {number}, for which changes were sent")
        param = self._sent[number]
        who = f"rank {self._rank}: changes of {param.name}"
        stop = offset + num_bytes
        is_covered = any(first <= offset < stop <= first + size for first, size in self._covered[param.name])
        if param.name not in self._able or not is_covered or offset % ELEMENT_BYTES or num_bytes % ELEMENT_BYTES:
            raise ProtocolError(f"{who} in bytes {offset} to {stop} cannot be written there")
        size = stream_bytes(num_bytes, num_records)
        if num_records < 0 or place < 0 or place % RECORD_BYTES or place + size > self.num_bytes:
            raise ProtocolError(f"{who}: {num_records} records at {place} are not in a zone of {self.num_bytes} bytes")
        return Landed(
            self._zone[place // RECORD_BYTES : (place + size) // RECORD_BYTES],
            self._values[param.name][offset // ELEMENT_BYTES : (offset + num_bytes) // ELEMENT_BYTES],
        )
