"""The trainer's end of the weight sync: connect once, then publish a version after every optimizer step.

Owns: how the plan reaches every rank, epochs, which replicas take part, the order of phases, the expected sums. Every
trainer rank has a Publisher and calls the same methods at the same time; only rank 0 speaks to the replicas. Does not
own bytes (`pipeline.py`), the ranks' collectives (`collectives.py`), a publish's messages to replicas and the judgement
of their answers (`transaction.py`), sockets (`control_client.py`), or the fence (the caller must not change weights
until publish() returns).

    rank 0                                    every rank                              replica (each on its own)
    ------                                    ----------                              -------------------------
    Begin to all, wait for acks        ->     pipeline: gather, pack first loads      pause, DIRTY
                                       bcast  who is alive, and where
                                              pipeline: pack, hash, write  =====>     live parameters change
                                       gather sums and errors
    Commit(sums) to those without error ->                                            verify, commit, CLEAN, resume
    Abort to the others                 ->                                            stay DIRTY
                                       bcast  report; links of failed replicas are closed

A replica that the caller excludes is not asked, not written to and not waited for; its open links are closed, as for
one that failed. With weight_sync.publish_waves > 1 all of this is done for one group of replicas after the other, and
each wave is an epoch of its own. A replica that was started again rejoins by reconnect(), under the same plan. So does
a further one: it gets what replica 0 gets, from the same ranks, and is refused where its layout is another one.

Invariants. All ranks run the same collectives in the same order, whatever fails. A replica's failure is an entry in the
report, never an exception, and delays the others at most by the wait for it. Each attempt is a new epoch, larger than
any that a replica has seen.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slipstream.conf.schema import WeightSyncConfig
from slipstream.weight_sync.errors import LinkMismatch, PlanMismatch, ProtocolError, TransportError, WeightSyncError
from slipstream.weight_sync.layout import Destination, DestLayout, SourceLayout
from slipstream.weight_sync.plan.columns import Flags, Ints
from slipstream.weight_sync.plan.plan import build_plan
from slipstream.weight_sync.plan.transfer_plan import PlanSummary, rank_plan_from_wire
from slipstream.weight_sync.publish.address_book import AddressBook, Addresses
from slipstream.weight_sync.publish.bases import Bases, flags_of, joined_flags, with_changes
from slipstream.weight_sync.publish.collectives import Meeting, values
from slipstream.weight_sync.publish.lanes import RankPublishReport
from slipstream.weight_sync.publish.pipeline import Pipeline
from slipstream.weight_sync.publish.report import PublishReport, joined
from slipstream.weight_sync.publish.sums import Places, Sums
from slipstream.weight_sync.publish.trace import write_trace
from slipstream.weight_sync.publish.transaction import Alive, Transaction
from slipstream.weight_sync.publish.waves import assign_waves
from slipstream.weight_sync.replica.control_client import ReplicaClients
from slipstream.weight_sync.replica.expected import Planned
from slipstream.weight_sync.replica.messages import Describe, Described, Expected, addresses_digest
from slipstream.weight_sync.source import WeightSource
from slipstream.weight_sync.transport.base import Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What rank 0 sends to all ranks in plan_for()."""

    summary: PlanSummary
    names: tuple[tuple[str, ...], ...]
    """Lists of parameters. The same ranks of several replicas share one list."""
    takes_changes: tuple[tuple[bool, ...], ...]
    """Per name, whether changes alone may be sent for the parameter; empty if changes are never sent."""
    names_of: dict[Destination, int]
    """Per engine rank, the index of its list."""

    def places(self) -> Places:
        """The place of every parameter of every engine rank."""
        return Places({dest: self.names[number] for dest, number in self.names_of.items()})

    def flags(self) -> Flags:
        """`takes_changes` of all places."""
        return joined_flags(self.takes_changes[number] for number in self.names_of.values())


class Publisher:
    """One trainer rank's part in every publish.

    Args:
        source: This rank's weights.
        transport: This rank's link.
        rank, world_size: This rank and the number of trainer ranks.
        group: A gloo process group over all trainer ranks; None if there is only one rank.
        config: Watermark, deadline, hashes.
        key: The run's key.
        device: Device of the trainer's weights, where staging lives.
    """

    def __init__(
        self,
        source: WeightSource,
        transport: Transport,
        *,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
        config: WeightSyncConfig,
        key: bytes,
        device: torch.device | str = "cpu",
    ) -> None:
        self._source = source
        self._transport = transport
        self._meeting = Meeting(rank, world_size, group)
        self._config = config
        self._key = key
        self._bases = Bases(source, config.delta_bytes, rank, world_size)
        self._pipeline = Pipeline(
            source,
            transport,
            device=device,
            watermark_bytes=config.watermark_bytes,
            verify_hashes=config.verify_hashes,
            has_changes=self._bases.is_on,
        )
        self._endpoints: list[str] = []
        self._digest = ""
        """The plan's digest; empty before there is a plan."""
        self._summary: PlanSummary | None = None
        self._is_connected = False
        self._places = Places({})
        """The place of every parameter of every replica, the same on all ranks."""
        self._epoch = 0
        self._clients: ReplicaClients | None = None
        # Asks replicas to begin while this rank packs. Only one call runs at a time, because their sockets are shared.
        self._asking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-sync-begin")
        self._layouts: list[tuple[DestLayout, ...]] = []
        """Per replica, on rank 0: the layouts that the plan is made for."""
        self._met: list[tuple[DestLayout, ...]] = []
        """Per replica, on rank 0: the layouts that it described in connect()."""
        self._planned: dict[Destination, Planned] = {}
        """Per engine rank, on rank 0: what it must hold after any publish, except for the hashes."""
        self._last_sums: dict[Destination, Ints] = {}
        """Per engine rank that committed: its part of the sums of the last publish."""
        self._book = AddressBook()
        self._open_sessions: dict[Destination, str] = {}
        """Links of this rank that may be open: to replicas that have committed, even if they have died since."""

    def connect(self, endpoints: Sequence[str], absent: Collection[int] | None = None) -> PlanSummary:
        """Learn every replica's layout, plan unless there is a plan for these layouts, and take this rank's tasks.
        Collective.

        Args:
            endpoints: Of all replicas.
            absent: Replicas (positions) that are out of service: they get nothing until they reconnect(), and an
                endpoint may be "". If it is given, whoever does not answer counts among them, as long as one does:
                their layouts are taken to be those of the first that answers, and are compared when they reconnect().

        Raises:
            WeightSyncError: A replica does not answer, links differ, or no plan is possible. Raised alike on every
            rank.
        """
        meeting = self._meeting
        self._is_connected = False
        links = meeting.gather(str, self._transport.link)
        addresses, is_planned = meeting.on_rank0(
            tuple[list[dict[str, Addresses]], bool], lambda: self._meet(endpoints, set(links), absent)
        )
        self._endpoints = list(endpoints)
        self._last_sums, self._open_sessions, self._book = {}, {}, AddressBook()
        self._bases.forget()
        for replica, own in enumerate(addresses):
            self._book.learn(replica, own)
        if not is_planned:
            self.plan_for(self._met)
        meeting.everywhere(None, self._pipeline.allocate)
        self._is_connected = True
        assert self._summary is not None
        return self._summary

    def plan_for(self, layouts: Sequence[tuple[DestLayout, ...]]) -> None:
        """Plan for replicas that do not run yet. connect() plans anew if their layouts are others. Collective.

        Allocates no device memory, because engines that start meanwhile count on all that is free.

        Args:
            layouts: Per replica, by rank. Only trainer rank 0's are used.

        Raises:
            WeightSyncError: No plan is possible. Raised alike on every rank.
        """
        meeting = self._meeting
        self._digest, self._is_connected = "", False
        facts = meeting.attempts(
            tuple[SourceLayout, int], lambda: (self._source.layout(), self._pipeline.max_task_bytes)
        )
        agreed, own_part = meeting.deal(_Agreed, dict[str, Any], lambda: self._make_plan(layouts, values(facts)))
        summary = agreed.summary
        self._places = agreed.places()
        tasks = rank_plan_from_wire(own_part).tasks
        flags = agreed.flags() if self._bases.is_on else None
        meeting.everywhere(None, lambda: self._pipeline.compile(tasks, self._places, flags))
        self._digest, self._summary = summary.digest, summary
        if meeting.rank == 0:
            logger.info(
                "weight sync: %d tasks, %d bytes per publish, plan %s",
                summary.num_tasks,
                summary.num_bytes,
                summary.digest[:12],
            )

    def publish(self, version: int, *, exclude: Collection[int] = (), trace: Path | None = None) -> PublishReport:
        """Send `version` to every replica. Collective. Replicas' failures are in the report.

        Args:
            version: Policy version of the source's weights.
            exclude: Replicas (positions among the endpoints) that are known to be out of service, or that were never
                met; the same on every rank. If one hangs and is not excluded, all others pause for `timeout_s` at every
                publish.
            trace: File for the timeline of all ranks and replicas (see trace.py), written by rank 0; None: no timeline.
                Either all ranks give one or none does.

        Raises:
            ProtocolError: connect() was not called.
        """
        if not self._is_connected:
            raise ProtocolError("publish() before connect()")
        self.disconnect(exclude)
        included = [number for number in range(len(self._endpoints)) if number not in exclude]
        waves = assign_waves(included, self._config.publish_waves) or [[]]
        self._bases.begin()
        reports = [
            self._publish_wave(version, wave, trace.with_stem(f"{trace.stem}-wave{i}") if trace and i else trace)
            for i, wave in enumerate(waves)
        ]
        self._bases.end()
        return joined(reports, waves)

    def _publish_wave(self, version: int, included: Sequence[int], trace: Path | None) -> PublishReport:
        """One transaction with the included replicas; the others are reported as excluded."""
        transaction = self._transaction(version, included) if self._meeting.rank == 0 else None
        asked = self._asking.submit(transaction.begin, self._params) if transaction is not None else None
        self._pipeline.prepare(version, trace=trace is not None, with_changes=self._bases.has_kept)
        try:
            alive = self._meeting.on_rank0(Alive, lambda: _of_rank0(asked).result())
        except BaseException:
            self._pipeline.cancel()
            raise
        for replica in alive.forgotten:
            self._book.forget(replica)
        for replica, fresh in alive.fresh.items():
            self._book.learn(replica, fresh)
        bindings = {dest: self._book.binding(dest[0], *bound) for dest, bound in alive.bound.items()}
        landings = self._bases.landings(alive.take_changes, bindings)
        result = self._pipeline.run(version, bindings, alive.budgets_s, landings)
        self._open_sessions |= {destination: binding.session for destination, binding in bindings.items()}
        self._meeting.add_up(result.sums.table)
        results = self._meeting.gather(RankPublishReport, result.report)
        report = self._meeting.on_rank0(
            PublishReport, lambda: self._finish(_of_rank0(transaction), results, result.sums, trace)
        )
        self.disconnect([number for number in included if not report.replicas[number].committed])
        return report

    def disconnect(self, replicas: Collection[int]) -> None:
        """Close this rank's links to dead replicas, because open links keep their memory pinned. Not collective.

        Without this, a replica that dies between two publishes stays mapped until the next one, and the replica that
        replaces it finds no memory.
        """
        for destination, session in list(self._open_sessions.items()):
            if destination[0] not in replicas:
                continue
            try:
                self._pipeline.forget(session)
                del self._open_sessions[destination]
            except TransportError as e:  # the link is kept, and closing is tried again next time
                logger.error("the link to %s cannot be closed yet: %s", self._endpoints[destination[0]], e)

    def reconnect(self, replica: int, endpoint: str) -> None:
        """Write to a replica that was started again, or to a further one, from the next publish on. Collective; other
        replicas are not affected.

        Raises:
            WeightSyncError: It does not answer, or its layout is not the planned one; it gets no further publish.
            Raised
                alike on every rank.
        """
        if not self._is_connected:
            raise ProtocolError("reconnect() before connect()")
        if replica >= len(self._endpoints):
            self._grow(replica + 1)
        self.disconnect([replica])
        self._book.forget(replica)
        fresh = self._meeting.on_rank0(dict[str, Addresses], lambda: self._rejoin(replica, endpoint))
        self._book.learn(replica, fresh)
        self._endpoints[replica] = endpoint

    def _grow(self, num_replicas: int) -> None:
        """Have a place in the plan for further replicas. Collective. Nothing is sent to them before reconnect()."""
        more = range(len(self._endpoints), num_replicas)
        self._is_connected = False  # until all ranks have the same places
        self._meeting.everywhere(None, lambda: self._pipeline.add_replicas(more))
        self._places, self._is_connected = self._pipeline.places, True
        self._bases.forget()
        self._endpoints += [""] * len(more)
        if self._meeting.rank == 0:
            self._layouts += [self._layouts[0]] * len(more)
            first = [(rank, self._planned[0, rank]) for _, rank in self._engine_ranks(0)]
            self._planned |= {(replica, rank): planned for replica in more for rank, planned in first}
            logger.info("weight sync: room for %d replicas", num_replicas)

    def release(self) -> None:
        """Free temporary memory until the next publish, for another publisher of these ranks. Collective.

        Raises:
            WeightSyncError: A failed write out of it cannot be closed yet. Raised alike on every rank.
        """
        self._meeting.everywhere(None, self._pipeline.release)

    def close(self) -> None:
        """Close sockets and staging. Not collective; the caller closes the transport and the group."""
        if self._clients is not None:
            self._clients.close()
            self._clients = None
        self._asking.shutdown()
        self._pipeline.close()

    # ---- rank 0 ----

    def _meet(
        self, endpoints: Sequence[str], links: Collection[str], absent: Collection[int] | None
    ) -> tuple[list[dict[str, Addresses]], bool]:
        """Ask the replicas. Returns, per replica, its addresses by their digest, and whether the plan is for them."""
        if self._clients is not None:
            self._clients.close()
        self._clients = ReplicaClients(endpoints, self._key)
        out = {number for number, endpoint in enumerate(endpoints) if not endpoint} | set(absent or ())
        asked = {number: endpoint for number, endpoint in enumerate(endpoints) if number not in out}
        described = self._describe(asked, links, may_be_gone=absent is not None)
        layouts = {number: tuple(item.layout for item in reply.ranks) for number, reply in described.items()}
        first = next(iter(layouts.values()), ())
        self._met = [layouts.get(number, first) for number in range(len(endpoints))]
        self._epoch = max([self._epoch, *(reply.own_epoch for reply in described.values())])
        addresses = {number: _addresses_of(reply) for number, reply in described.items()}
        for number in set(range(len(endpoints))) - set(described):
            self._clients.give_up(number, f"replica {number} was out of service when the trainer connected")
        is_planned = bool(self._digest) and self._met == self._layouts
        return [addresses.get(number, {}) for number in range(len(endpoints))], is_planned

    def _make_plan(
        self, layouts: Sequence[tuple[DestLayout, ...]], facts: Sequence[tuple[SourceLayout, int]]
    ) -> tuple[_Agreed, list[dict[str, Any]]]:
        """Plan. Returns what all ranks need, and each rank's own part, because a plan for a cluster is large."""
        self._layouts = list(layouts)
        plan = build_plan(
            [layout for layout, _ in facts],
            self._layouts,
            max_task_bytes=min(limit for _, limit in facts),
        )
        distinct = {id(sizes): sizes for sizes in plan.expected.values()}  # ranks of several replicas share one
        first_of: dict[int, Destination] = {}
        for dest, sizes in plan.expected.items():
            first_of.setdefault(id(sizes), dest)
        planned = {number: Planned.of(sizes) for number, sizes in distinct.items()}
        self._planned = {dest: planned[id(sizes)] for dest, sizes in plan.expected.items()}
        positions = {number: position for position, number in enumerate(distinct)}
        names_of = {dest: positions[id(sizes)] for dest, sizes in plan.expected.items()}
        names = tuple(tuple(sizes) for sizes in distinct.values())
        firsts = zip(names, first_of.values(), strict=True) if self._bases.is_on else ()
        flags = tuple(flags_of(own, self._layouts[dest[0]][dest[1]]) for own, dest in firsts)
        return _Agreed(plan.summary(), names, flags, names_of), [plan.to_wire(rank) for rank in range(len(facts))]

    def _describe(
        self, endpoints: Mapping[int, str], links: Collection[str], *, may_be_gone: bool = False
    ) -> dict[int, Described]:
        """Ask these replicas for their descriptions. Refuse one that cannot be written to over `links`.

        Args:
            may_be_gone: Leave out those that do not answer; raise what the last one failed with if none does.
        """
        assert self._clients is not None
        replies = self._clients.call(
            Describe, {number: {} for number in endpoints}, dict.fromkeys(endpoints, self._config.timeout_s)
        )
        described: dict[int, Described] = {}
        for number, endpoint in endpoints.items():
            reply = replies[number]
            if isinstance(reply, WeightSyncError):
                if not may_be_gone or (not described and number == max(endpoints)):
                    raise reply
                logger.warning("%s is left out: %s", endpoint, reply)
                continue
            if not isinstance(reply, Described):
                raise ProtocolError(f"{endpoint} answered Describe with {type(reply).__name__}")
            if [item.layout.rank for item in reply.ranks] != list(range(len(reply.ranks))):
                raise ProtocolError(f"{endpoint} described ranks {[item.layout.rank for item in reply.ranks]}")
            described[number] = reply
        for number, reply in described.items():
            for item in reply.ranks:
                if any(link != item.link for link in links):
                    raise LinkMismatch(
                        f"{endpoints[number]} receives over {item.link}, the trainer's ranks send over"
                        f" {', '.join(sorted(links))}"
                    )
        return described

    def _rejoin(self, replica: int, endpoint: str) -> dict[str, Addresses]:
        """Meet the replica that replaces another, and check that the plan fits it. Returns its addresses by digest."""
        assert self._clients is not None
        self._clients.replace(replica, endpoint)
        try:
            described = self._describe({replica: endpoint}, {self._transport.link})[replica]
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
        return _addresses_of(described)

    def _transaction(self, version: int, included: Collection[int]) -> Transaction:
        """A transaction in a new epoch."""
        assert self._clients is not None
        self._epoch += 1
        return Transaction(
            self._clients,
            self._book,
            self._endpoints,
            included,
            version=version,
            epoch=self._epoch,
            digest=self._digest,
            timeout_s=self._config.timeout_s,
            held=self._bases.held,
        )

    def _finish(
        self, transaction: Transaction, results: Sequence[RankPublishReport], sums: Sums, trace: Path | None
    ) -> PublishReport:
        """Tell every replica that began to commit or to abort. Returns the report."""
        expected: dict[Destination, Expected] = {}

        def expected_of(number: int) -> tuple[Expected, ...]:
            for dest in self._engine_ranks(number):
                expected[dest] = self._expected(dest, sums)
                if (base := transaction.bases.get(dest)) is not None:
                    parts = (result.changes.get(dest, b"") for result in results)
                    expected[dest] = with_changes(expected[dest], base, parts)
            return tuple(expected[dest] for dest in self._engine_ranks(number))

        transaction.finish(results, expected_of)
        committed = {number for number, replica in enumerate(transaction.replicas) if replica.committed}
        self._bases.note({dest: one for dest, one in expected.items() if dest[0] in committed})
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

    def _engine_ranks(self, replica: int) -> list[Destination]:
        return [(replica, rank) for rank in range(len(self._layouts[replica]))]

    def _params(self, replica: int) -> list[Sequence[str]]:
        """Per engine rank, the parameters that are written."""
        return [self._places.params[dest] for dest in self._engine_ranks(replica)]

    def _expected(self, dest: Destination, sums: Sums) -> Expected:
        """What an engine rank must hold before it may commit."""
        num_bytes, hashes = sums.part(dest)
        return self._planned[dest].write(num_bytes, hashes if self._config.verify_hashes else None)

    def _count_changed(self, sums: Mapping[Destination, Ints]) -> int | None:
        """Parameters whose bytes changed, of replicas that committed both now and before."""
        known = [(part, self._last_sums[dest]) for dest, part in sums.items() if dest in self._last_sums]
        self._last_sums |= sums
        if not known or not self._config.verify_hashes:
            return None
        return sum(int((part != last).any(axis=0).sum()) for part, last in known)


def _of_rank0(value: T | None) -> T:
    assert value is not None, "rank 0 has it"
    return value


def _addresses_of(described: Described) -> dict[str, Addresses]:
    """The addresses in a replica's description, by digest."""
    return {addresses_digest(one.binding.addresses): one.binding.addresses for one in described.ranks}
