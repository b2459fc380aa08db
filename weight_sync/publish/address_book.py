"""Which addresses of which replica the trainer's ranks know, so that a replica need not say them at every publish.

Owns: what is known, by digest of what it is, and the check of an answer. Does not own: how it reaches all ranks
(publisher.py broadcasts what `check` finds, and every rank learns it), nor the digest (messages.py).

    rank 0                                          replica
    Begin(known digests of this replica)     ->     Receiver.begin on every engine rank
    check  <-  Begun(session, digest, addresses where the digest is not among those)
    broadcast of the fresh ones; learn() on every rank

Invariant: the same on all ranks; a Binding is made of a session that the replica said in this very epoch, and of
addresses whose digest it said in this very epoch. An answer that names addresses which nobody said, or says others than
its digest is of, is refused, and the replica's next Begin names none as known: it says them all again. A replica that
was started again is forgotten first. What is known stays small: a replica's parameters do not move (receiver.py refuses
that), so there is one entry per engine rank, and one per slot in adapter mode.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from weight_sync.errors import ProtocolError
from weight_sync.layout import Binding
from weight_sync.replica.messages import Bound, addresses_digest

Addresses = dict[str, int]
"""Parameter -> device pointer."""


class AddressBook:
    """Known addresses, per replica by their digest."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, Addresses]] = {}
        self._checked: dict[int, set[tuple[int, str]]] = {}
        """On rank 0, per replica: engine ranks and the digests of addresses that name all their parameters."""

    def known(self, replica: int) -> tuple[str, ...]:
        """What a Begin to this replica says."""
        return tuple(self._known.get(replica, ()))

    def learn(self, replica: int, fresh: Mapping[str, Addresses]) -> None:
        """Keep what `check` or a description said."""
        self._known.setdefault(replica, {}).update(fresh)

    def forget(self, replica: int) -> None:
        """Know nothing of a replica: another one came in its place, or it contradicted itself."""
        self._known.pop(replica, None)
        self._checked.pop(replica, None)

    def binding(self, replica: int, session: str, digest: str) -> Binding:
        """Where to write. Raises KeyError for addresses that were not learnt."""
        return Binding(session, self._known[replica][digest])

    def check(self, replica: int, bounds: Sequence[Bound], params: Sequence[Collection[str]]) -> dict[str, Addresses]:
        """What is fresh in a replica's answer to Begin.

        Args:
            replica: Who answered.
            bounds: Its answer, one per engine rank.
            params: Per engine rank: the parameters that will be written.

        Raises:
            ProtocolError: The answer is not of these ranks and parameters, or contradicts itself or what is known.
        """
        if len(bounds) != len(params):
            raise ProtocolError(f"replica {replica} has {len(params)} ranks and says where {len(bounds)} are")
        known, checked = self._known.get(replica, {}), self._checked.setdefault(replica, set())
        fresh: dict[str, Addresses] = {}
        for rank, (bound, names) in enumerate(zip(bounds, params, strict=True)):
            who = f"replica {replica} rank {rank}"
            if bound.addresses is None:
                addresses = known.get(bound.digest)
                if addresses is None:
                    raise ProtocolError(f"{who} is bound to addresses {bound.digest[:12]}, which it never said")
            else:
                addresses = fresh[bound.digest] = bound.addresses
                if addresses_digest(addresses) != bound.digest:
                    raise ProtocolError(f"{who} says other addresses than those of its digest {bound.digest[:12]}")
            if (rank, bound.digest) in checked:
                continue
            missing = [name for name in names if name not in addresses]
            if missing:
                raise ProtocolError(f"{who} says no address of {len(missing)} parameters, the first is {missing[0]}")
            checked.add((rank, bound.digest))
        return fresh
