"""Remembers the addresses of every replica's parameters, so that a replica need not send them at every publish.

Owns: the known addresses, by their digest, and the check of a replica's answer. Does not own: how they reach all ranks
(publisher.py broadcasts what `check` finds, and every rank learns it), nor the digest (messages.py).

    rank 0                                          replica
    begin(known digests of this replica)     ->     Receiver.begin on every engine rank
    check  <-  Begun(session, digest, addresses where the digest is not among those)
    broadcast of the fresh ones; learn() on every rank

Invariant: the book is the same on all ranks. A Binding is made from a session and an addresses' digest that the replica
sent in this epoch. An answer is refused if it names unknown addresses, or sends addresses that do not match its digest.
The replica's next begin then names none as known, so it sends all of them again. A replica that was started again is
forgotten first. The book stays small: a replica's parameters do not move (receiver.py refuses that), so there is one
entry per engine rank or, in adapter mode, per slot.
"""

from collections.abc import Collection, Mapping, Sequence

from slipstream.weight_sync.errors import ProtocolError
from slipstream.weight_sync.layout import Binding
from slipstream.weight_sync.replica.messages import Bound, addresses_digest

Addresses = dict[str, int]
"""Parameter -> device pointer."""


class AddressBook:
    """Known addresses, per replica by their digest."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, Addresses]] = {}
        self._checked: dict[int, set[tuple[int, str]]] = {}
        """On rank 0, per replica: (engine rank, digest) of addresses that were found to cover all its parameters."""

    def known(self, replica: int) -> tuple[str, ...]:
        """The digests that a begin of this replica names as known."""
        return tuple(self._known.get(replica, ()))

    def learn(self, replica: int, fresh: Mapping[str, Addresses]) -> None:
        """Keep addresses from `check` or from a description."""
        self._known.setdefault(replica, {}).update(fresh)

    def forget(self, replica: int) -> None:
        """Forget a replica's addresses: another one took its place, or it contradicted itself."""
        self._known.pop(replica, None)
        self._checked.pop(replica, None)

    def binding(self, replica: int, session: str, digest: str) -> Binding:
        """The Binding to write to. Raises KeyError for addresses that were not learnt."""
        return Binding(session, self._known[replica][digest])

    def check(self, replica: int, bounds: Sequence[Bound], params: Sequence[Collection[str]]) -> dict[str, Addresses]:
        """Check a replica's answer to begin. Returns the addresses in it that were not known.

        Args:
            bounds: Its answer, one per engine rank.
            params: Per engine rank: the parameters that will be written.

        Raises:
            ProtocolError: The answer is for other ranks or parameters, or contradicts itself or known addresses.
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
