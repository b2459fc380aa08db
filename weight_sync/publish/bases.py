"""What engine ranks are known to hold, so that a publish sends them only what changed since.

    begin()         the engine ranks that committed the publish before are the ones that may take changes; those that
                    were written to in it are sent them ahead
    note()          on rank 0: who committed this one, and the digest of what was proven there
    note_served()   on every rank: who committed this one, and where it is
    end()           the source keeps what it sent, against which the next publish's changes are computed

Owns: these digests, whether the source has kept what they stand for, and which part of a landing zone is this rank's.
Nobody takes changes, either, in a publish that is quicker whole (costs.py).
Does not own who takes changes (transaction.py asks every engine rank what it holds), nor what is sent (landings.py).
Invariant: after a publish that did not come to its end nobody takes changes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from slipstream.weight_sync.layout import Binding, Destination
from slipstream.weight_sync.pipeline.landings import Landing, part_of_zone
from slipstream.weight_sync.pipeline.packing import MarkingSource
from slipstream.weight_sync.plan.columns import Flags
from slipstream.weight_sync.publish.costs import Costs
from slipstream.weight_sync.replica.landing import held_digest, zone_name
from slipstream.weight_sync.replica.messages import Expected
from slipstream.weight_sync.source import WeightSource


class Bases:
    """See the module's docstring.

    Args:
        zone_bytes: weight_sync.delta_bytes; 0: nobody ever takes changes.
    """

    def __init__(self, source: WeightSource, zone_bytes: int, rank: int, num_ranks: int) -> None:
        self._source = source if zone_bytes and isinstance(source, MarkingSource) else None
        self._zone = zone_name(zone_bytes)
        self._part = part_of_zone(zone_bytes, rank, num_ranks)
        self.costs = Costs(num_ranks)
        self.has_kept = False
        """Whether the source has kept what was published last."""
        self.held: Mapping[Destination, str] = {}
        """On rank 0, during a publish: per engine rank that committed the one before, the held_digest of it."""
        self.frozen: dict[Destination, str] = {}
        """On rank 0: per engine rank, the held_digest of the base from which it may merge for itself; empty if none
        does. Then this, and no version, is what a publish asks for."""
        self._committed: dict[Destination, str] = {}
        self._is_whole = False
        """Whether the last publish came to its end."""
        self.ahead: Mapping[Destination, Binding] = {}
        """During a publish: the engine ranks that are sent changes before they are asked what they hold."""
        self._served: Mapping[Destination, Binding] = {}

    @property
    def sends_changes(self) -> bool:
        """Whether this publish may send changes alone."""
        return self.has_kept and not self.costs.is_whole_cheaper

    @property
    def is_on(self) -> bool:
        """Whether changes are sent at all."""
        return self._source is not None

    def begin(self) -> None:
        """A publish begins."""
        sends_changes = self._is_whole and self.sends_changes
        self.held = self.frozen or (self._committed if sends_changes else {})
        self.ahead = self._served if sends_changes else {}
        self._committed, self._served, self._is_whole = {}, {}, False

    def note(self, expected: Mapping[Destination, Expected], flags: Mapping[Destination, Sequence[bool]]) -> None:
        """Engine ranks committed, having proven this.

        Args:
            flags: flags_of the parameters of each.
        """
        if self.is_on:
            self._committed |= {dest: held_digest(one, flags[dest]) for dest, one in expected.items()}

    def note_served(self, bindings: Mapping[Destination, Binding]) -> None:
        """These engine ranks serve what was published. The same on all ranks."""
        self._served = bindings

    def end(self) -> None:
        """The publish came to its end."""
        if self._source is not None:
            self._source.keep()
            self.has_kept = self._is_whole = True

    def forget(self) -> None:
        """Other replicas take part from now on."""
        self._committed, self._served = {}, {}

    def forget_place(self, replica: int) -> None:
        """A replica was started again: what it holds may be known, from a peer, but not where it is."""
        self._served = {dest: binding for dest, binding in self._served.items() if dest[0] != replica}

    def landings(
        self, takers: Iterable[Destination], bindings: Mapping[Destination, Binding]
    ) -> dict[Destination, Landing]:
        """This rank's part of the zones of engine ranks that hold what was published last."""
        return {
            dest: Landing(bindings[dest].addresses[self._zone], *self._part)
            for dest in takers
            if self._zone in bindings[dest].addresses
        }


def with_changes(expected: Expected, base: str, parts: Iterable[bytes]) -> Expected:
    """What an engine rank that takes changes must hold, and what lies in its zone, part by part."""
    return replace(expected, base=base, changes=b"".join(parts))


def joined_flags(parts: Iterable[tuple[bool, ...]]) -> Flags:
    """The flags of all engine ranks, one after the other."""
    return np.array([flag for part in parts for flag in part], np.bool_)
