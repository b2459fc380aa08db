"""What engine ranks are known to hold, so that a publish sends only what changed since; and whether that is cheaper.

    begin()         the engine ranks that committed the publish before are the ones that may take changes; those that
                    were written to in it are sent them ahead
    note()          on rank 0: who committed this one, and the digest of what was proven there
    note_served()   on every rank: who committed this one, and where it is
    end()           the source keeps what it sent, against which the next publish's changes are computed

Owns: these digests, whether the source has kept what they stand for, which part of a landing zone is this rank's, and
sums of seconds. Does not own who takes changes (transaction.py asks every engine rank what it holds), nor what is sent
(landings.py). Invariant: after a publish that did not come to its end nobody takes changes.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from slipstream.weight_sync.layout import Binding, Destination
from slipstream.weight_sync.pipeline.landings import Landing, part_of_zone
from slipstream.weight_sync.pipeline.packing import MarkingSource
from slipstream.weight_sync.publish.report import PublishReport
from slipstream.weight_sync.replica.landing import held_digest, zone_name
from slipstream.weight_sync.replica.messages import Expected
from slipstream.weight_sync.source import WeightSource

MIN_BYTES = 1 << 30
"""A smaller publish takes milliseconds either way, of which most are waits."""
PAUSE, LONGEST_PAUSE = 8, 64
"""Publishes."""


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
        sends_changes = self._is_whole and self.sends_changes
        self.held = self.frozen or (self._committed if sends_changes else {})
        self.ahead = self._served if sends_changes else {}
        self._committed, self._served, self._is_whole = {}, {}, False

    def note(self, expected: Mapping[Destination, Expected], flags: Mapping[Destination, Sequence[bool]]) -> None:
        """Engine ranks committed, having proven this. `flags`: flags_of the parameters of each."""
        if self.is_on:
            self._committed |= {dest: held_digest(one, flags[dest]) for dest, one in expected.items()}

    def note_served(self, bindings: Mapping[Destination, Binding]) -> None:
        """Engine ranks that serve what was published; the same on all ranks."""
        self._served = bindings

    def end(self) -> None:
        if self._source is not None:
            self._source.keep()
            self.has_kept = self._is_whole = True

    def forget(self) -> None:
        """Know nothing of any replica: others take part from now on."""
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


class Costs:
    """Whether a publish that could send changes alone sends everything, because that was cheaper lately.

        changes   changes   dearer than half of a whole publish's writes?   no: changes, as before
                            yes: one whole, and compared with that:
                                 changes are cheaper: changes, until they are dearer than that
                                 dearer: PAUSE more whole ones, then changes again; each time twice as many

    A publish costs every trainer rank its seconds, and every engine rank those in which it stands still; changes take
    the trainer longer and stop engines for less. The cheaper of the last two with changes counts, since a first one
    waits for kernels to be compiled. A whole publish is never made to compare where a link is slow: half of its writes
    alone, of the first publish, took longer than the changes do. Half, because first writes are slow (61 GB over
    NVLink: 0.37 s, later 0.17). Every trainer rank decides alike, because all have the same report.
    """

    def __init__(self, num_trainer_ranks: int) -> None:
        self._num_trainer_ranks = num_trainer_ranks
        self._forget(0)

    def _forget(self, num_ranks: int) -> None:
        self._changes_s: deque[float] = deque(maxlen=2)
        self._whole_s: float | None = None
        """What changes must not take longer than: a whole publish, or at first half of its writes."""
        self._num_whole, self._pause = 0, PAUSE
        self._num_ranks = num_ranks

    @property
    def is_whole_cheaper(self) -> bool:
        """Whether the next publish sends everything."""
        return self._num_whole > 0

    def note(self, report: PublishReport, num_ranks: int) -> None:
        """A publish to so many engine ranks came to its end."""
        if num_ranks != self._num_ranks:  # others take part
            self._forget(num_ranks)
        waiting, still = report.total_s - report.idle_s, report.pause_s - report.idle_s
        seconds = self._num_trainer_ranks * waiting + num_ranks * still
        if report.num_takers == num_ranks:
            self._changes_s.append(seconds)
            is_slow = self._whole_s is not None and len(self._changes_s) == 2 and min(self._changes_s) > self._whole_s
            self._num_whole = int(is_slow)
        elif report.num_takers == 0 and report.num_bytes >= MIN_BYTES * num_ranks:
            self._note_whole(seconds, (self._num_trainer_ranks + num_ranks) * report.write_s / 2)

    def _note_whole(self, seconds: float, least_s: float) -> None:
        if len(self._changes_s) < 2:  # there is nothing to compare with
            self._whole_s = seconds if self._num_whole else least_s
            self._num_whole = max(0, self._num_whole - 1)
            return
        self._whole_s, self._num_whole = seconds, 0
        if min(self._changes_s) > seconds:
            self._num_whole, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._changes_s.clear()
