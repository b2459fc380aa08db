"""What one engine rank must hold after a publish, in columns of integers that both sides derive from its layout.

The publisher sends a replica its part of the sums in these columns: without names, and without byte counts if they are
the planned ones, as they are unless something failed. Owns the columns and their check. Does not own the message that
carries them (messages.Expected) or the sums that fill them (pipeline/sums.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from slipstream.weight_sync.errors import PlanMismatch, ProtocolError
from slipstream.weight_sync.plan.columns import Ints
from slipstream.weight_sync.replica.messages import Expected
from slipstream.weight_sync.typed_msgpack import pack


@dataclass(frozen=True, eq=False)
class Planned:
    """What a publish writes into the parameters of one engine rank. Both sides derive it from the rank's layout."""

    digest: str
    """sha256, hex, of the parameters in their order and the bytes of each."""
    num_bytes: Ints

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Planned:
        """Args: `sizes`, the parameters and their bytes, in the layout's order."""
        return cls(hashlib.sha256(pack(dict(sizes))).hexdigest(), np.array(list(sizes.values()), np.int64))

    def write(self, num_bytes: Ints, hashes: Ints | None) -> Expected:
        """Encode what was sent for a message.

        Args:
            num_bytes: Bytes sent, per parameter in their order.
            hashes: Hash sums, in the same order, as int64; None if hashes are off.
        """
        counts = b"" if (num_bytes == self.num_bytes).all() else num_bytes.astype("<i8", copy=False).tobytes()
        return Expected(self.digest, counts, b"" if hashes is None else hashes.astype("<i8", copy=False).tobytes())

    def read(self, expected: Expected) -> tuple[list[int], list[int] | None]:
        """Bytes sent, and hash sums modulo 2^64 or None, per parameter.

        Raises:
            PlanMismatch: The sender plans for other parameters, in another order or of other sizes.
            ProtocolError: There is not one entry per parameter.
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
