"""Whether a publish that could send changes alone sends everything, because that was cheaper lately.

    changes   changes   dearer than half of a whole publish's writes?   no: changes, as before
                        yes: one whole, and compared with that:
                             changes are cheaper: changes, until they are dearer than that
                             dearer: PAUSE more whole ones, then changes again; each time twice as many

A publish costs every trainer rank its seconds, and every engine rank those in which it stands still; changes take the
trainer longer and stop engines for less. The cheaper of the last two with changes counts, since a first one waits for
kernels to be compiled. A whole publish is never made to compare where a link is slow: half of its writes alone, of the
first publish, took longer than the changes do. Half, because first writes are slow (61 GB over NVLink: 0.37 s, later
0.17).

Owns: these sums of seconds. Every trainer rank decides alike, because all have the same report.
"""

from collections import deque

from slipstream.weight_sync.publish.report import PublishReport

MIN_BYTES = 1 << 30
"""A smaller publish takes milliseconds either way, of which most are waits."""
PAUSE, LONGEST_PAUSE = 8, 64
"""Publishes."""


class Costs:
    """See the module's docstring."""

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
        """A publish to so many engine ranks came to its end.

        Args:
            report: The same on all ranks where it is read here.
        """
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
