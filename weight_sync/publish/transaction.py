"""One publish as rank 0 conducts it: which replicas began, which may commit, which must abort, and the report.

Owns: the notes on every replica, their deadlines, and the order of the messages. Does not own: what is planned and
expected, nor the epoch's number (rank0.py); connections (replica/clients.py).

    begin     asks all replicas that take part to begin; returns which are alive, where to write, and their time left
              (every rank writes)
    finish    asks those to which every rank sent everything to commit, the others that began to abort
    report    the result for every replica

Invariants. A replica's failure is a note, never an exception. A replica has `timeout_s` for begin, the writes to it and
commit together; only time spent waiting for *it* counts. Every replica that began is asked to commit or to abort.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.conf.failures import in_words
from slipstream.weight_sync.errors import ProtocolError, WeightSyncError
from slipstream.weight_sync.layout import Destination
from slipstream.weight_sync.pipeline.lanes import RankPublishReport
from slipstream.weight_sync.pipeline.trace import Span
from slipstream.weight_sync.publish.report import EXCLUDED, PublishReport, ReplicaReport
from slipstream.weight_sync.replica.clients import ReplicaClients
from slipstream.weight_sync.replica.messages import (
    Addresses,
    Begun,
    Bound,
    Committed,
    Expected,
    PublishId,
    ReplicaVerbs,
)

logger = logging.getLogger(__name__)

MIN_COMMIT_S = 1.0
"""Time that a replica gets for its commit even if its writes used up its deadline."""

Slots = tuple[Addresses, ...]
"""Where an engine rank's parameters are, by adapter slot."""


@dataclass(slots=True)
class Alive:
    """What rank 0 sends to all ranks after begin()."""

    bound: dict[Destination, Bound] = field(default_factory=dict)
    """Per engine rank that is written to: where."""
    budgets_s: dict[int, float] = field(default_factory=dict)
    """Per replica that began: seconds left for the writes to it."""
    take_changes: list[Destination] = field(default_factory=list[Destination])
    """Engine ranks that hold what was published last."""


@dataclass(slots=True)
class Notes:
    endpoint: str
    error: str | None
    spent_s: float = 0.0
    begun: Begun | None = None
    committed: Committed | None = None


class Transaction:
    """See the module's docstring.

    Args:
        included: Replicas that take part, by their position.
        timeout_s: A replica's deadline.
        held: Per engine rank that committed the last publish: the held_digest of it.
        failed: Replicas that could not be sent changes ahead, and why. They are not asked.
        ahead_s: Seconds that this took, and that the report counts.
    """

    def __init__(
        self,
        clients: ReplicaClients,
        endpoints: Sequence[str],
        included: Collection[int],
        publish: PublishId,
        *,
        timeout_s: float,
        held: Mapping[Destination, str],
        failed: Mapping[int, str],
        ahead_s: float,
    ) -> None:
        self._held = held
        self.replicas = [
            Notes(endpoint, failed.get(number) if number in included else EXCLUDED)
            for number, endpoint in enumerate(endpoints)
        ]
        self._ahead_s = ahead_s
        self._clients = clients
        self._publish = publish
        self._name = f"version {publish.version}, epoch {publish.epoch}"
        self._timeout_s = timeout_s
        self._began = self._told = time.monotonic()
        self._begin_s = 0.0
        self.bases: dict[Destination, str] = {}
        """Per engine rank that takes changes: what they are computed against."""

    async def begin(self, slots: Sequence[Sequence[Slots]]) -> Alive:
        """Ask all replicas that take part to begin, and wait for their answers.

        Args:
            slots: Per replica and engine rank: the slots that it has described.
        """
        numbers = [number for number, replica in enumerate(self.replicas) if replica.error is None]
        replies = await self._clients.ask(
            ReplicaVerbs.begin,
            dict.fromkeys(numbers, (self._publish,)),
            dict.fromkeys(numbers, self._timeout_s),
        )
        alive = Alive()
        for number in numbers:
            reply, replica = replies[number], self.replicas[number]
            if isinstance(reply, WeightSyncError):
                replica.error = in_words(reply)
                continue
            replica.begun, replica.spent_s = reply, self._clients.answer_s[number]
            alive.budgets_s[number] = max(0.0, self._timeout_s - replica.spent_s)
            named, described = [bound.slot for bound in reply.bindings], list(map(len, slots[number]))
            if len(named) != len(described) or any(not 0 <= a < n for a, n in zip(named, described, strict=True)):
                error = ProtocolError(f"it begins in slots {named} of its ranks, which have {described}")
                replica.error = in_words(error)  # it is not written to, and is aborted
                continue
            for rank, bound in enumerate(reply.bindings):
                alive.bound[number, rank] = bound
                if bound.holds and self._held.get((number, rank)) == bound.holds:
                    alive.take_changes.append((number, rank))
        self.bases = {dest: self._held[dest] for dest in alive.take_changes}
        self._begin_s = time.monotonic() - self._began
        num_begun = len({number for number, _ in alive.bound})
        logger.debug("%s: %d of %d replicas began in %.3f s", self._name, num_begun, len(numbers), self._begin_s)
        return alive

    def finish(self, results: Sequence[RankPublishReport], expected_of: Callable[[int], tuple[Expected, ...]]) -> None:
        """Add up what the ranks did. Let replicas commit that got everything, and abort the others.

        Args:
            expected_of: Replica -> per engine rank, what it must hold.
        """
        begun = {number: replica for number, replica in enumerate(self.replicas) if replica.begun is not None}
        for number, replica in begun.items():
            failures = [
                f"trainer rank {rank}: {r.errors[number]}" for rank, r in enumerate(results) if number in r.errors
            ]
            if failures:
                replica.error = "; ".join(failures)
            replica.spent_s += max(r.write_s.get(number, 0.0) for r in results)
        unserved = {number: replica.error for number, replica in begun.items() if replica.error}
        self._commit([number for number in begun if number not in unserved], expected_of)
        if unserved:  # they are DIRTY, whatever they answer; those whose own begin or commit failed know it
            asked = {number: (self._publish, reason) for number, reason in unserved.items()}
            self._clients.call(ReplicaVerbs.abort, asked, dict.fromkeys(unserved, MIN_COMMIT_S))
        for replica in self.replicas:
            if replica.error is not None and replica.error != EXCLUDED:
                said = self._publish.version, self._publish.epoch, replica.endpoint, replica.error
                logger.error("version %d, epoch %d: %s did not commit: %s", *said)

    def _commit(self, ready: Sequence[int], expected_of: Callable[[int], tuple[Expected, ...]]) -> None:
        asked = {number: (self._publish, expected_of(number)) for number in ready}
        timeouts_s = {number: max(MIN_COMMIT_S, self._timeout_s - self.replicas[number].spent_s) for number in ready}
        self._told = time.monotonic()
        for number, reply in self._clients.call(ReplicaVerbs.commit, asked, timeouts_s).items():
            if isinstance(reply, WeightSyncError):
                self.replicas[number].error = in_words(reply)
            else:
                self.replicas[number].committed = reply

    def report(
        self, results: Sequence[RankPublishReport], *, watermark_bytes: int, num_changed_params: int | None
    ) -> PublishReport:
        """The result for every replica. Call it after `finish`."""
        done = [replica.committed for replica in self.replicas if replica.committed is not None]
        begun = [replica.begun for replica in self.replicas if replica.begun is not None]
        num_changed, num_compared = (sum(r.num_changed for r in results), sum(r.num_compared for r in results))
        return PublishReport(
            version=self._publish.version,
            epoch=self._publish.epoch,
            replicas=tuple(
                ReplicaReport(r.endpoint, r.committed is not None, r.error, r.committed.pause_s if r.committed else 0.0)
                for r in self.replicas
            ),
            pause_s=max((c.pause_s for c in done), default=0.0),
            begin_s=self._begin_s,
            idle_s=max((one.idle_s for one in begun), default=0.0),
            mark_s=max((one.mark_s for one in begun), default=0.0),
            prepare_s=max(r.prepare_s for r in results),
            write_s=max(r.busy_write_s for r in results),
            verify_s=max((c.verify_s for c in done), default=0.0),
            commit_s=max((c.commit_s for c in done), default=0.0),
            total_s=self._ahead_s + time.monotonic() - self._began,
            num_bytes=sum(r.num_bytes for r in results),
            peak_bytes=max(r.peak_bytes for r in results),
            watermark_bytes=watermark_bytes,
            num_changed_params=num_changed_params,
            num_takers=len(self.bases),
            changed_fraction=num_changed / num_compared if num_compared else None,
        )

    def spans(self, results: Sequence[RankPublishReport]) -> dict[str, list[Span]]:
        """The timeline of every trainer rank and of every replica that began, for trace.write_trace."""
        found = {f"trainer rank {rank}": result.spans for rank, result in enumerate(results)}
        for replica in self.replicas:
            if replica.begun is not None:
                found[f"replica {replica.endpoint}"] = self._phases(replica.begun, replica.committed)
        return found

    def _phases(self, begun: Begun, committed: Committed | None) -> list[Span]:
        """A replica's phases, one after the other from when it was asked: it says how long they took, not when."""
        lasted_s = {"pause": begun.idle_s, "mark dirty": begun.mark_s}
        if committed is not None:
            lasted_s["writes arrive"] = self._told - self._began - begun.idle_s - begun.mark_s
            lasted_s |= {"verify": committed.verify_s, "commit": committed.commit_s}
        start_s, spans = self._began + time.time() - time.monotonic(), list[Span]()
        for name, seconds in lasted_s.items():
            spans.append(Span("phases", name, start_s, start_s + seconds))
            start_s += seconds
        return spans
