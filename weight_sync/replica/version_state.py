"""Which version a replica holds and whether it may serve it: a pure state machine.

    DIRTY --verified--> VERIFIED --committed--> CLEAN(v)     begin(v', epoch') leads from any phase to DIRTY, and only
      ^                    |                      |          with a larger epoch; invalidate() leads from any phase to
      +----- failed -------+----- begin ----------+          DIRTY. A replica serves in CLEAN and in no other phase.

A replica starts DIRTY at epoch 0 (its weights are dummies). Versions may repeat or go back (a trainer resumed from an
older checkpoint); epochs only grow. The replica's endpoint (endpoint.py) owns the state of the whole replica;
every engine rank owns one more in its own process (receiver.py), which no other process can change.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

from slipstream.weight_sync.errors import ProtocolError, StaleEpoch


class Phase(StrEnum):
    dirty = "dirty"
    """Some bytes may be of one version and some of another. Must not serve."""
    verified = "verified"
    """Every byte of the version was counted and hashed. Must not serve yet: caches and derived parameters are older."""
    clean = "clean"
    """Serves `version`."""


@dataclass(frozen=True, slots=True)
class VersionState:
    """A replica's (or one engine rank's) state in the protocol. Immutable; each transition returns the next state.

    Example: VersionState(Phase.clean, version=3, epoch=4, digest="9f..") serves version 3, which epoch 4 published.
    """

    phase: Phase = Phase.dirty
    version: int = -1
    """The version being written (dirty, verified) or served (clean); -1 before the first begin."""
    epoch: int = 0
    digest: str = ""
    """The plan's."""

    @property
    def is_serving(self) -> bool:
        return self.phase is Phase.clean

    def begin(self, version: int, epoch: int, digest: str) -> VersionState:
        """Start a publish: what was here must not be served any more. The epoch must be larger than all before."""
        if version < 0:
            raise ProtocolError(f"begin of version {version}: versions start at 0")
        if epoch <= self.epoch:
            raise StaleEpoch(f"begin(version {version}, epoch {epoch}) is stale: epoch {self.epoch} has begun")
        return VersionState(Phase.dirty, version, epoch, digest)

    def verified(self, version: int, epoch: int, digest: str) -> VersionState:
        self._require("verify", Phase.dirty, version, epoch)
        if digest != self.digest:
            raise ProtocolError(
                f"verify of epoch {epoch} names plan {digest[:12]}, its begin named plan {self.digest[:12]}"
            )
        return dataclasses.replace(self, phase=Phase.verified)

    def committed(self, version: int, epoch: int) -> VersionState:
        self._require("commit", Phase.verified, version, epoch)
        return dataclasses.replace(self, phase=Phase.clean)

    def failed(self, epoch: int) -> VersionState:
        """The transaction `epoch` failed. No effect if it has committed, or if the present one is another."""
        if epoch != self.epoch or self.phase is Phase.clean:
            return self
        return dataclasses.replace(self, phase=Phase.dirty)

    def invalidate(self) -> VersionState:
        """The bytes in memory are no longer known (addresses moved, memory was released)."""
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
