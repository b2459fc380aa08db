"""What trainer rank 0 does in a publish beside its part of the bytes: it plans for all ranks, and speaks to replicas.

Owns: the connections to replicas, epochs, the layouts that a plan is for, what every engine rank must hold, and how
many parameters changed. Does not own: what all ranks do together (publisher.py), or the messages of one publish
(transaction.py).
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.conf.schema import WeightSyncConfig
from slipstream.weight_sync.errors import LinkMismatch, PlanMismatch, ProtocolError, WeightSyncError
from slipstream.weight_sync.layout import Destination, DestLayout, PostLoad, SourceLayout
from slipstream.weight_sync.merging.factors import is_factor
from slipstream.weight_sync.pipeline.lanes import RankPublishReport
from slipstream.weight_sync.pipeline.sums import Places, Sums
from slipstream.weight_sync.pipeline.trace import write_trace
from slipstream.weight_sync.plan.columns import Flags, Ints
from slipstream.weight_sync.plan.plan import build_plan
from slipstream.weight_sync.plan.transfer_plan import PlanSummary
from slipstream.weight_sync.publish.bases import Bases
from slipstream.weight_sync.publish.report import NOT_MET, PublishReport
from slipstream.weight_sync.publish.transaction import Alive, Slots, Transaction
from slipstream.weight_sync.replica.clients import ReplicaClients
from slipstream.weight_sync.replica.landing import flags_of, held_digest
from slipstream.weight_sync.replica.messages import Described, EngineRank, Expected, Planned, PublishId, ReplicaVerbs
from slipstream.weight_sync.typed_msgpack import Sent

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What rank 0 sends to all ranks in Publisher.plan_for()."""

    summary: PlanSummary
    names: tuple[tuple[str, ...], ...]
    """Lists of parameters. The same ranks of several replicas share one list."""
    takes_changes: tuple[tuple[bool, ...], ...]
    """Per name, whether changes alone may be sent for the parameter; empty if changes are never sent."""
    names_of: dict[Destination, int]
    """Per engine rank, the index of its list."""

    def places(self) -> Places:
        return Places({dest: self.names[number] for dest, number in self.names_of.items()})

    def flags(self) -> Flags:
        """`takes_changes` of all places."""
        return np.array([flag for number in self.names_of.values() for flag in self.takes_changes[number]], np.bool_)


class Rank0:
    """See the module's docstring."""

    def __init__(self, config: WeightSyncConfig, key: bytes, bases: Bases) -> None:
        self.met: list[tuple[DestLayout, ...]] = []
        """Per replica: the layouts that it described in meet()."""
        self._config = config
        self._key = key
        self._bases = bases
        self._epoch = 0
        self._clients: ReplicaClients | None = None
        self._layouts: list[tuple[DestLayout, ...]] = []
        """Per replica: the layouts that the plan is made for."""
        self._planned: dict[Destination, Planned] = {}
        """Per engine rank: what it must hold after any publish, except for the hashes."""
        self._flags: dict[Destination, tuple[bool, ...]] = {}
        """Per engine rank and parameter, whether changes alone may be sent; empty if they never are."""
        self._last_sums: dict[Destination, Ints] = {}
        """Per engine rank that committed: its part of the sums of the last publish."""
        self._begun: tuple[Transaction, Future[Alive]] | None = None
        """The publish under way, and who will be alive."""

    def meet(
        self, endpoints: Sequence[str], links: Collection[str], absent: Collection[int] | None, *, has_plan: bool
    ) -> tuple[list[list[Slots]], bool]:
        """Ask the replicas. Returns, per replica and rank, the addresses of its slots, and whether the plan is for
        them."""
        self.close()
        self._clients = ReplicaClients(endpoints, self._key)
        out = {number for number, endpoint in enumerate(endpoints) if not endpoint} | set(absent or ())
        asked = {number: endpoint for number, endpoint in enumerate(endpoints) if number not in out}
        described = self._describe(asked, links, may_be_gone=absent is not None)
        layouts = {number: tuple(item.layout for item in reply.ranks) for number, reply in described.items()}
        first = next(iter(layouts.values()), ())
        self.met = [layouts.get(number, first) for number in range(len(endpoints))]
        self._epoch = max([self._epoch, *(reply.own_epoch for reply in described.values())])
        slots = {number: [item.slots for item in reply.ranks] for number, reply in described.items()}
        for number in set(range(len(endpoints))) - set(described):
            self._clients.give_up(number, f"replica {number} was {NOT_MET}")
        self._last_sums = {}
        return [slots.get(number, []) for number in range(len(endpoints))], has_plan and self.met == self._layouts

    def make_plan(
        self, layouts: Sequence[tuple[DestLayout, ...]], facts: Sequence[tuple[Sent[SourceLayout], int]]
    ) -> tuple[Agreed, list[dict[str, Any]]]:
        """Plan. Returns what all ranks need, and each rank's own part, because a plan for a cluster is large."""
        self._layouts = list(layouts)
        plan = build_plan(
            [sent.layout for sent, _ in facts], self._layouts, max_task_bytes=min(limit for _, limit in facts)
        )
        names: list[tuple[str, ...]] = []
        planned: list[Planned] = []
        flags: list[tuple[bool, ...]] = []
        numbers: dict[int, int] = {}
        names_of: dict[Destination, int] = {}
        for (replica, rank), sizes in plan.expected.items():
            if id(sizes) not in numbers:  # ranks of several replicas share one
                numbers[id(sizes)] = len(names)
                names.append(tuple(sizes))
                planned.append(Planned.of(sizes))
                if self._bases.is_on:
                    flags.append(flags_of(names[-1], self._layouts[replica][rank]))
            names_of[replica, rank] = numbers[id(sizes)]
        self._planned = {dest: planned[number] for dest, number in names_of.items()}
        self._flags = {dest: flags[number] for dest, number in names_of.items()} if flags else {}
        agreed = Agreed(plan.summary(), tuple(names), tuple(flags), names_of)
        return agreed, [plan.to_wire(rank) for rank in range(len(facts))]

    def _describe(
        self, endpoints: Mapping[int, str], links: Collection[str], *, may_be_gone: bool = False
    ) -> dict[int, Described]:
        """Ask these replicas for their descriptions. Refuse one that cannot be written to over `links`.

        Args:
            may_be_gone: Leave out those that do not answer.
        """
        assert self._clients is not None
        replies = self._clients.call(
            ReplicaVerbs.describe,
            dict.fromkeys(endpoints, (self._clients.publisher,)),
            dict.fromkeys(endpoints, self._config.timeout_s),
        )
        described: dict[int, Described] = {}
        for number, endpoint in endpoints.items():
            reply = replies[number]
            if isinstance(reply, WeightSyncError):
                if not may_be_gone:
                    raise reply
                logger.warning("%s is left out: %s", endpoint, reply)
                continue
            if [item.layout.rank for item in reply.ranks] != list(range(len(reply.ranks))):
                raise ProtocolError(f"{endpoint} described ranks {[item.layout.rank for item in reply.ranks]}")
            for item in reply.ranks:
                _check_addresses(endpoint, item)
                if any(link != item.link for link in links):
                    raise LinkMismatch(
                        f"{endpoint} receives over {item.link}, the trainer's ranks send over"
                        f" {', '.join(sorted(links))}"
                    )
            described[number] = reply
        return described

    def add_replicas(self, more: Sequence[int]) -> None:
        """Count on further replicas with the layouts of replica 0."""
        self._layouts += [self._layouts[0]] * len(more)
        tables: tuple[dict[Destination, Any], ...] = (self._planned, self._flags, self._bases.frozen)
        for table in filter(None, tables):
            table |= {(replica, rank): table[0, rank] for replica in more for _, rank in self._engine_ranks(0)}

    def rejoin(self, replica: int, endpoint: str, link: str) -> list[Slots]:
        """Meet the replica that replaces another, and check that the plan fits it. Returns, per rank, the addresses of
        its slots."""
        assert self._clients is not None
        self._clients.replace(replica, endpoint)
        try:
            described = self._describe({replica: endpoint}, {link})[replica]
            if tuple(item.layout for item in described.ranks) != self._layouts[replica]:
                raise PlanMismatch(
                    f"replica {replica} came to {endpoint} with another layout than the plan was made for; give it the"
                    " options, and the kind of machine, that it had before, or that the others have"
                )
        except WeightSyncError as e:
            self._clients.give_up(replica, str(e))
            raise
        self._epoch = max(self._epoch, described.own_epoch)
        self._last_sums = {dest: sums for dest, sums in self._last_sums.items() if dest[0] != replica}
        return [item.slots for item in described.ranks]

    def begin(
        self,
        version: int,
        included: Collection[int],
        *,
        endpoints: Sequence[str],
        digest: str,
        slots: Sequence[Sequence[Slots]],
        failed: Mapping[int, str],
        ahead_s: float,
    ) -> None:
        """Ask these replicas to begin, in a new epoch, while this rank packs. Those that `failed` ahead, for so many
        seconds, are not asked. `slots`: as meet() returned them."""
        assert self._clients is not None
        self._epoch += 1
        transaction = Transaction(
            self._clients,
            endpoints,
            included,
            PublishId(self._clients.publisher, version, self._epoch, digest),
            timeout_s=self._config.timeout_s,
            held=self._bases.held,
            failed=failed,
            ahead_s=ahead_s,
        )
        self._begun = transaction, self._clients.start(transaction.begin(slots))

    def alive(self) -> Alive:
        """Who has begun. Waits for it."""
        assert self._begun is not None
        return self._begun[1].result()

    def finish(self, results: Sequence[RankPublishReport], sums: Sums, trace: Path | None) -> PublishReport:
        """Tell every replica that began to commit or to abort. Returns the report."""
        assert self._begun is not None
        transaction, _ = self._begun
        expected: dict[Destination, Expected] = {}

        def expected_of(number: int) -> tuple[Expected, ...]:
            for dest in self._engine_ranks(number):
                expected[dest] = self._expected(dest, sums)
                if (base := transaction.bases.get(dest)) is not None:
                    changes = b"".join(result.changes.get(dest, b"") for result in results)
                    expected[dest] = replace(expected[dest], base=base, changes=changes)
            return tuple(expected[dest] for dest in self._engine_ranks(number))

        transaction.finish(results, expected_of)
        committed = {number for number, replica in enumerate(transaction.replicas) if replica.committed}
        proven = {dest: one for dest, one in expected.items() if dest[0] in committed}
        self._bases.note(self._with_peers(proven), self._flags)
        num_changed = self._count_changed({d: sums.part(d) for d in sums.places.params if d[0] in committed})
        report = transaction.report(
            results, watermark_bytes=self._config.watermark_bytes, num_changed_params=num_changed
        )
        if trace is not None:
            try:
                write_trace(trace, transaction.spans(results))
            except OSError:  # replicas serve the version even without a timeline
                logger.exception("version %d: the timeline cannot be written to %s", report.version, trace)
        return report

    def _with_peers(self, proven: Mapping[Destination, Expected]) -> dict[Destination, Expected]:
        """What was proven, and for the same rank of every other replica the same: it may read it from a peer."""
        at_rank = {(rank, one.planned): one for (_, rank), one in proven.items()}
        all_ranks = {dest: at_rank.get((dest[1], planned.digest)) for dest, planned in self._planned.items()}
        return {dest: one for dest, one in all_ranks.items() if one is not None} | dict(proven)

    def note_base(self, sums: Sums) -> None:
        """Engine ranks may hold what adds up to these sums."""
        self._bases.note({dest: self._expected(dest, sums) for dest in sums.places.params}, self._flags)

    def freeze_base(self, sums: Sums) -> None:
        """Engine ranks that merge for themselves must do so from what adds up to these sums."""
        self._bases.frozen = {
            dest: held_digest(self._expected(dest, sums), [not is_factor(name) for name in names])
            for dest, names in sums.places.params.items()
        }

    def close(self) -> None:
        if self._clients is not None:
            self._clients.close()
        self._clients = None

    def _engine_ranks(self, replica: int) -> list[Destination]:
        return [(replica, rank) for rank in range(len(self._layouts[replica]))]

    def _expected(self, dest: Destination, sums: Sums) -> Expected:
        num_bytes, hashes = sums.part(dest)
        return self._planned[dest].write(num_bytes, hashes if self._config.verify_hashes else None)

    def _count_changed(self, sums: Mapping[Destination, Ints]) -> int | None:
        """Parameters whose bytes changed, of replicas that committed both now and before."""
        known = [(part, self._last_sums[dest]) for dest, part in sums.items() if dest in self._last_sums]
        self._last_sums |= sums
        if not known or not self._config.verify_hashes:
            return None
        return sum(int((part != last).any(axis=0).sum()) for part, last in known)


def _check_addresses(endpoint: str, rank: EngineRank) -> None:
    """Refuse a description that lacks the address of a parameter."""
    sent = [param.name for param in rank.layout.params if param.post_load is not PostLoad.derived]
    for slot, addresses in enumerate(rank.slots):
        if missing := [name for name in sent if name not in addresses]:
            raise ProtocolError(
                f"{endpoint}, rank {rank.layout.rank}, says no address of {len(missing)} parameters of slot {slot}, the"
                f" first is {missing[0]}"
            )
