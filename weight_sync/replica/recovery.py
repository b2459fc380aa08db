"""Recovery of a restarted engine rank: the current weights, read one-sided from the same rank of a healthy replica.

Owns what a peer must tell about itself (`Offer`), when two ranks may share bytes, and the order of a pull. The
orchestrator chooses the peer, carries offers and decides what serves.

    restarted rank                                    healthy peer: same rank of another replica, serving
    --------------                                    ---------------------------------------------------
                                    offer      <---   make_offer: version, epoch, addresses, hashes at rest
    pull: DIRTY, READ one-sided     <==============   live parameters in kernel format; the peer goes on sampling
          recompute derived, compare hashes
          VERIFIED
                                    offer      <---   make_offer once more, compared by the caller
    Receiver.adopt: CLEAN
    then Receivers.release: closes the link

The bytes are those that kernels read, including fills and repacking: nothing is loaded, sent or packed again, and no
trainer rank takes part. If a publish begins on the peer meanwhile, it changes the epoch before it changes a byte. So
equal offers before and after a read mean that every byte is of one version. If hashes are on, they prove it again. An
adapter slot is a Receiver, too, so a restarted engine in adapter mode does this twice: for its base, which no publish
changes again, and for the peer's newest slot.
Invariant: a pull that fails in any way leaves the rank DIRTY, and the next publish starts on a fresh connection.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.weight_sync.errors import LinkMismatch, PlanMismatch, ReplicaDirty, TransportError
from slipstream.weight_sync.layout import Binding
from slipstream.weight_sync.record.layout_wire import layouts_digest

if TYPE_CHECKING:
    from slipstream.weight_sync.replica.receiver import (
        Receiver,  # imports torch; offers pass through the controller, which has none
    )


NUM_READS = 2
"""Transfers at once. At the first read of an allocation the link maps it and copies nothing; the other one copies."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one engine rank lets the same rank of another replica read."""

    version: int
    epoch: int
    plan: str
    """Digest of the plan that brought the version."""
    layout: str
    """layouts_digest of the rank. Bytes have the same meaning only if it is equal."""
    link: str
    binding: Binding
    hashes: dict[str, int]
    """Every parameter's hash at rest; empty if weight_sync.verify_hashes is off."""


@dataclass(frozen=True, slots=True)
class Pulled:
    num_bytes: int
    read_s: float
    verify_s: float

    def then(self, other: Pulled) -> Pulled:
        """Both pulls as one: this one, then the other."""
        return Pulled(self.num_bytes + other.num_bytes, self.read_s + other.read_s, self.verify_s + other.verify_s)


def slowest(ranks: Sequence[Pulled]) -> Pulled:
    """Join the pulls of all ranks, which run at the same time: all ranks' bytes, the slowest rank's seconds."""
    return Pulled(
        sum(rank.num_bytes for rank in ranks), max(rank.read_s for rank in ranks), max(rank.verify_s for rank in ranks)
    )


def make_offer(receiver: Receiver) -> Offer:
    """This rank's offer. Raises ReplicaDirty unless it serves one committed version."""
    state = receiver.state
    if not state.is_serving:
        raise ReplicaDirty(
            f"rank {receiver.layout.rank} is {state.phase} (version {state.version}, epoch {state.epoch}): it has no"
            " committed version that a peer could read"
        )
    described = receiver.describe()
    return Offer(
        state.version,
        state.epoch,
        state.digest,
        layouts_digest((described.layout,)),
        described.link,
        described.binding,
        dict(receiver.committed_hashes),
    )


def pull(receiver: Receiver, offer: Offer, *, timeout_s: float) -> Pulled:
    """Read every parameter of the offer into this rank, and prove it: it is VERIFIED, and Receiver.adopt makes it
    CLEAN. The engine must be paused.

    Raises:
        PlanMismatch: The peer holds another layout. Nothing was read.
        TransportError: The bytes did not arrive. The rank is DIRTY.
        IntegrityError: They are not what the peer committed. The rank is DIRTY.
    """
    mine = layouts_digest((receiver.layout,))
    if mine != offer.layout:
        raise PlanMismatch(
            f"rank {receiver.layout.rank} has layout {mine[:12]}, its peer {offer.layout[:12]}: their bytes are not"
            " interchangeable; the next publish fills this rank"
        )
    link = receiver.transport.link
    if link != offer.link:
        raise LinkMismatch(f"this rank reads over {link}, its peer offers {offer.link}")
    binding = receiver.begin(offer.version, offer.epoch, offer.plan)
    sizes = {param.name: param.num_bytes for param in receiver.sent_params}
    addresses = [(binding.addresses[name], offer.binding.addresses[name]) for name in sizes]
    began = time.monotonic()
    try:
        _read(receiver, offer.binding.session, addresses, list(sizes.values()), timeout_s)
    except TransportError:
        receiver.transport.reset(offer.binding.session)  # nothing of it may land after this
        raise
    read = time.monotonic()
    receiver.verify_at_rest(offer.version, offer.epoch, offer.plan, offer.hashes)
    return Pulled(sum(sizes.values()), read - began, time.monotonic() - read)


def _read(
    receiver: Receiver, session: str, addresses: Sequence[tuple[int, int]], sizes: Sequence[int], timeout_s: float
) -> None:
    with ThreadPoolExecutor(NUM_READS, initializer=receiver.enter_thread) as pool:
        reads = [
            pool.submit(
                receiver.transport.read,
                session,
                [here for here, _ in addresses[part]],
                [there for _, there in addresses[part]],
                sizes[part],
                timeout_s=timeout_s,
            )
            for part in parts_of(sizes, NUM_READS)
        ]
    for read in reads:
        read.result()


def parts_of(sizes: Sequence[int], count: int) -> list[slice]:
    """Cut pieces, in their order, into at most `count` parts of about as many bytes each; none is empty."""
    total = sum(sizes)
    starts = itertools.accumulate(sizes, initial=0)
    part_of = [min(start * count // max(total, 1), count - 1) for start, _ in zip(starts, sizes, strict=False)]
    cuts = [0, *(index for index in range(1, len(part_of)) if part_of[index] != part_of[index - 1]), len(sizes)]
    return [slice(first, stop) for first, stop in itertools.pairwise(cuts) if first < stop]
