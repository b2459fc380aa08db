"""The trainer's end of the weight sync: connect once, then publish a version after every optimizer step.

Owns the transaction: epochs, who is in and who is out, the order of phases, the expected sums, the report. Every
trainer rank has a Publisher and calls the same methods at the same time; rank 0 alone speaks to the replicas. Does
not own bytes (`pipeline.py`), how ranks meet (`meeting.py`), sockets (`endpoint.py`), or the fence (the caller must not
change weights until publish() returns).

    rank 0                                    every rank                              replica (each on its own)
    ------                                    ----------                              -------------------------
    Begin to all, wait for acks        ->     pipeline: gather, pack first loads      pause, DIRTY
                                       bcast  who is alive, and where
                                              pipeline: pack, hash, write  =====>     live parameters change
                                       gather sums and errors
    Commit(sums) to those without error ->                                            verify, commit, CLEAN, resume
    Abort to the others                 ->                                            stay DIRTY
                                       bcast  report; links of failed replicas are closed

A replica that the caller excludes is not asked, not written to and not waited for; what the links still hold of it is
closed, as for one that failed. With weight_sync.publish_waves > 1 all of this is done for one group of replicas after
the other, each wave an epoch of its own. A replica that was started again rejoins by reconnect(), under the same plan.

Invariants. All ranks run the same collectives in the same order whatever fails. A replica's failure is an entry in
the report, never an exception, and costs the others at most the time spent waiting for it: every replica has
`timeout_s` for Begin, for the writes to it and for Commit together, and only time spent waiting for *it* counts. Each
attempt is a new epoch, larger than any that a replica has seen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conf.schema import WeightSyncConfig
from weight_sync.addresses import AddressBook, Addresses
from weight_sync.columns import Ints
from weight_sync.endpoint import ReplicaClients
from weight_sync.errors import LinkMismatch, PlanMismatch, ProtocolError, TransportError, WeightSyncError
from weight_sync.heap import freeze_heap
from weight_sync.layout import DestLayout, SourceLayout
from weight_sync.meeting import Meeting, attempt, values
from weight_sync.pipeline import Pipeline
from weight_sync.plan import PlanSummary, build_plan, rank_plan_from_wire
from weight_sync.protocol import Abort, Begin, Begun, Commit, Committed, Describe, Described, Expected, addresses_digest
from weight_sync.publish_report import EXCLUDED, PublishReport, ReplicaReport, joined
from weight_sync.replay import Destination, PipelineResult
from weight_sync.source import WeightSource
from weight_sync.sums import Places, Planned, Sums
from weight_sync.trace import ReplicaTimes, write_trace
from weight_sync.transport.base import Transport
from weight_sync.waves import assign_waves

logger = logging.getLogger(__name__)

MIN_COMMIT_S = 1.0
"""Time that a replica gets for its commit even if its writes used up its deadline."""


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What rank 0 tells all ranks in connect()."""

    summary: PlanSummary
    params: dict[Destination, tuple[str, ...]]
    """Per engine rank the names of its parameters; ranks of several replicas share one tuple."""
    addresses: list[dict[str, Addresses]]
    """Per replica, by their digest."""


@dataclass(slots=True)
class _Alive:
    """What rank 0 tells all ranks after Begin."""

    epoch: int
    bound: dict[Destination, tuple[str, str]]
    """Session, and digest of the addresses, of every engine rank that is written to."""
    fresh: dict[int, dict[str, Addresses]]
    """Per replica: addresses that were not known, by their digest."""
    forgotten: list[int]
    """Replicas that contradicted what was known of them."""
    budgets_s: dict[int, float]
    begin_s: float = 0.0


@dataclass(slots=True)
class _Replica:
    """Rank 0's notes on one replica during one publish."""

    endpoint: str
    spent_s: float = 0.0
    times: ReplicaTimes | None = None
    """None before it answered Begin."""
    error: str | None = None
    committed: Committed | None = None


class Publisher:
    """One trainer rank's part in every publish.

    Args:
        source: This rank's weights.
        transport: This rank's link.
        rank, world_size: This rank and the number of trainer ranks.
        group: A gloo process group over all trainer ranks (object collectives on the CPU); None when there is one rank.
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
        self._pipeline = Pipeline(
            source, transport, device=device, watermark_bytes=config.watermark_bytes, verify_hashes=config.verify_hashes
        )
        self._endpoints: list[str] = []
        self._digest = ""
        self._places = Places({})
        """Of every parameter of every replica, the same on all ranks."""
        self._epoch = 0
        self._clients: ReplicaClients | None = None
        # Asks replicas to begin while this rank packs. One call at a time: their sockets are no thread's own.
        self._asking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-sync-begin")
        self._layouts: list[tuple[DestLayout, ...]] = []
        """Per replica, on rank 0: the layouts that the plan is made for."""
        self._planned: dict[Destination, Planned] = {}
        """Per engine rank, on rank 0: what it must hold after any publish, but for the hashes."""
        self._last_sums: dict[Destination, Ints] = {}
        """Per engine rank that committed: its part of the sums."""
        self._book = AddressBook()
        self._open_sessions: dict[Destination, str] = {}
        """Links of this rank that may be open: to replicas that committed, whether or not they live still."""

    def connect(self, endpoints: Sequence[str]) -> PlanSummary:
        """Learn every replica's layout, plan once, take this rank's tasks. Collective.

        Raises:
            WeightSyncError: The same on every rank: a replica does not answer, links differ, or no plan exists.
        """
        meeting = self._meeting
        facts = meeting.gather(
            attempt(lambda: (self._source.layout(), self._pipeline.max_task_bytes, self._transport.link))
        )
        agreed, own_part = meeting.deal(lambda: self._make_plan(endpoints, values(facts)))
        summary = agreed.summary
        self._endpoints = list(endpoints)
        self._digest = summary.digest
        self._last_sums, self._open_sessions, self._book = {}, {}, AddressBook()
        for replica, own in enumerate(agreed.addresses):
            self._book.learn(replica, own)
        self._places = Places(agreed.params)
        meeting.everywhere(lambda: self._pipeline.load(rank_plan_from_wire(own_part).tasks, self._places))
        if meeting.rank == 0:
            logger.info(
                "weight sync: %d tasks, %d bytes a publish, plan %s",
                summary.num_tasks,
                summary.num_bytes,
                summary.digest[:12],
            )
        freeze_heap()
        return summary

    def publish(self, version: int, *, exclude: Collection[int] = (), trace: Path | None = None) -> PublishReport:
        """Bring `version` to every replica. Collective. Replicas' failures are in the report.

        Args:
            version: Policy version of the source's weights.
            exclude: Replicas (positions among the endpoints) that are known to be out of service; the same on every
                rank. Each one that hangs would cost all others a pause of `timeout_s`, publish after publish.
            trace: Where rank 0 writes the timeline of all ranks and replicas (see trace.py); None on all ranks or none.

        Raises:
            ProtocolError: connect() was not called, or `exclude` names a replica that does not exist.
        """
        if not self._digest:
            raise ProtocolError("publish() before connect()")
        unknown = sorted(set(exclude) - set(range(len(self._endpoints))))
        if unknown:
            raise ProtocolError(f"publish() excludes replicas {unknown}; there are {len(self._endpoints)}")
        self.disconnect(exclude)
        included = [number for number in range(len(self._endpoints)) if number not in exclude]
        waves = assign_waves(included, self._config.publish_waves) or [[]]
        reports = [
            self._publish_wave(version, wave, trace.with_stem(f"{trace.stem}-wave{i}") if trace and i else trace)
            for i, wave in enumerate(waves)
        ]
        return joined(reports, waves)

    def _publish_wave(self, version: int, included: Sequence[int], trace: Path | None) -> PublishReport:
        """One transaction with the included replicas; the others are reported as excluded."""
        began = time.monotonic()
        replicas = [
            _Replica(endpoint, error=None if number in included else EXCLUDED)
            for number, endpoint in enumerate(self._endpoints)
        ]
        asked = self._asking.submit(self._begin_all, version, replicas) if self._meeting.rank == 0 else None
        self._pipeline.prepare(version, trace=trace is not None)
        try:
            alive = self._meeting.on_rank0(lambda: _answer(asked))
        except BaseException:
            self._pipeline.cancel()
            raise
        for replica in alive.forgotten:
            self._book.forget(replica)
        for replica, fresh in alive.fresh.items():
            self._book.learn(replica, fresh)
        bindings = {dest: self._book.binding(dest[0], *bound) for dest, bound in alive.bound.items()}
        result = self._pipeline.run(version, bindings, alive.budgets_s)
        self._meeting.add_up(result.sums.table)
        results = self._meeting.gather_to_all(replace(result, sums=Sums(Places({}))))
        report = self._meeting.on_rank0(
            lambda: self._finish(version, alive, replicas, results, result.sums, began, trace)
        )
        self._open_sessions |= {destination: binding.session for destination, binding in bindings.items()}
        self.disconnect([number for number in included if not report.replicas[number].committed])
        return report

    def disconnect(self, replicas: Collection[int]) -> None:
        """Close this rank's links to replicas that are dead: open ones keep their memory pinned. Not collective.

        One that dies between two publishes would stay mapped until the next, and its successor would find no memory.
        """
        for destination, session in list(self._open_sessions.items()):
            if destination[0] not in replicas:
                continue
            try:
                self._pipeline.forget(session)
                del self._open_sessions[destination]
            except TransportError as e:  # kept, and tried again at the next occasion
                logger.error("the link to %s cannot be closed yet: %s", self._endpoints[destination[0]], e)

    def reconnect(self, replica: int, endpoint: str) -> None:
        """A replica was started again: write to it from the next publish on. Collective; the others notice nothing.

        Raises:
            WeightSyncError: The same on every rank: it does not answer, or its layout is not the planned one. It gets
                no further publish.
        """
        if not 0 <= replica < len(self._endpoints):
            raise ProtocolError(f"reconnect() names replica {replica}; there are {len(self._endpoints)}")
        self.disconnect([replica])
        self._book.forget(replica)
        self._book.learn(replica, self._meeting.on_rank0(lambda: self._rejoin(replica, endpoint)))
        self._endpoints[replica] = endpoint

    def release(self) -> None:
        """Give back temporary memory until the next publish, for another publisher of these ranks. Collective.

        Raises:
            WeightSyncError: The same on every rank: a failed write out of it cannot be closed yet.
        """
        self._everywhere(self._pipeline.release)

    def close(self) -> None:
        """Close sockets and staging. Not collective; the transport and the group stay the caller's."""
        if self._clients is not None:
            self._clients.close()
            self._clients = None
        self._asking.shutdown()
        self._pipeline.close()

    # ---- rank 0 ----

    def _make_plan(
        self, endpoints: Sequence[str], facts: Sequence[tuple[SourceLayout, int, str]]
    ) -> tuple[_Agreed, list[dict[str, Any]]]:
        """Plan. Returns what all ranks must know, and each rank's own part: a plan for a cluster is large."""
        if self._clients is not None:
            self._clients.close()
        self._clients = ReplicaClients(endpoints, self._key)
        described = self._describe(dict(enumerate(endpoints)), {link for _, _, link in facts})
        self._layouts = [tuple(item.layout for item in reply.ranks) for reply in described]
        self._epoch = max([self._epoch, *(reply.own_epoch for reply in described)])
        plan = build_plan(
            [layout for layout, _, _ in facts],
            self._layouts,
            max_task_bytes=min(limit for _, limit, _ in facts),
        )
        distinct = {id(sizes): sizes for sizes in plan.expected.values()}  # ranks of several replicas share one
        names = {number: tuple(sizes) for number, sizes in distinct.items()}
        planned = {number: Planned.of(sizes) for number, sizes in distinct.items()}
        self._planned = {dest: planned[id(sizes)] for dest, sizes in plan.expected.items()}
        params = {dest: names[id(sizes)] for dest, sizes in plan.expected.items()}
        agreed = _Agreed(plan.summary(), params, [_addresses_of(reply) for reply in described])
        return agreed, [plan.to_wire(rank) for rank in range(len(facts))]

    def _describe(self, endpoints: Mapping[int, str], links: Collection[str]) -> list[Described]:
        """Ask these replicas what they are; refuse one that cannot be written to over `links`."""
        assert self._clients is not None
        replies = self._clients.call(
            Describe, {number: {} for number in endpoints}, dict.fromkeys(endpoints, self._config.timeout_s)
        )
        described: list[Described] = []
        for number, endpoint in endpoints.items():
            reply = replies[number]
            if isinstance(reply, WeightSyncError):
                raise reply
            if not isinstance(reply, Described):
                raise ProtocolError(f"{endpoint} answered Describe with {type(reply).__name__}")
            if [item.layout.rank for item in reply.ranks] != list(range(len(reply.ranks))):
                raise ProtocolError(f"{endpoint} described ranks {[item.layout.rank for item in reply.ranks]}")
            described.append(reply)
        for endpoint, reply in zip(endpoints.values(), described, strict=True):
            for item in reply.ranks:
                if any(link != item.link for link in links):
                    raise LinkMismatch(
                        f"{endpoint} receives over {item.link}, the trainer's ranks send over"
                        f" {', '.join(sorted(links))}"
                    )
        return described

    def _rejoin(self, replica: int, endpoint: str) -> dict[str, Addresses]:
        """Meet a replica's successor, and make sure that the plan is for it too. Returns its addresses by digest."""
        assert self._clients is not None
        self._clients.replace(replica, endpoint)
        try:
            (described,) = self._describe({replica: endpoint}, {self._transport.link})
            if tuple(item.layout for item in described.ranks) != self._layouts[replica]:
                raise PlanMismatch(
                    f"replica {replica} came back at {endpoint} with another layout than the plan was made for; give"
                    " it the options that it had before"
                )
        except WeightSyncError as e:
            self._clients.give_up(replica, str(e))
            raise
        self._epoch = max(self._epoch, described.own_epoch)
        self._last_sums = {dest: sums for dest, sums in self._last_sums.items() if dest[0] != replica}
        return _addresses_of(described)

    def _begin_all(self, version: int, replicas: list[_Replica]) -> _Alive:
        assert self._clients is not None
        self._epoch += 1
        began = time.monotonic()
        numbers = [number for number, replica in enumerate(replicas) if replica.error is None]
        replies = self._clients.call(
            Begin,
            {number: {"known": self._book.known(number)} for number in numbers},
            dict.fromkeys(numbers, self._config.timeout_s),
            version=version,
            epoch=self._epoch,
            digest=self._digest,
        )
        alive = _Alive(self._epoch, {}, {}, [], {})
        for number in numbers:
            reply, replica = replies[number], replicas[number]
            if not isinstance(reply, Begun):
                replica.error = _text(reply)
                continue
            replica.spent_s = self._clients.answer_s[number]
            replica.times = ReplicaTimes(began, reply.idle_s, reply.mark_s)
            alive.budgets_s[number] = max(0.0, self._config.timeout_s - replica.spent_s)
            params = [self._places.params[number, rank] for rank in range(len(self._layouts[number]))]
            try:
                alive.fresh[number] = self._book.check(number, reply.bindings, params)
            except ProtocolError as e:  # nothing is written to it; it is told, and says everything at its next Begin
                replica.error = _text(e)
                alive.forgotten.append(number)
                continue
            alive.bound.update({(number, rank): (b.session, b.digest) for rank, b in enumerate(reply.bindings)})
        logger.debug(
            "version %d, epoch %d: %d of %d replicas began in %.3f s",
            version,
            self._epoch,
            len(alive.budgets_s) - len(alive.forgotten),
            len(numbers),
            time.monotonic() - began,
        )
        alive.begin_s = time.monotonic() - began
        return alive

    def _finish(
        self,
        version: int,
        alive: _Alive,
        replicas: list[_Replica],
        results: Sequence[PipelineResult],
        sums: Sums,
        began: float,
        trace: Path | None,
    ) -> PublishReport:
        """Add up what the ranks did, commit who was served in full, abort the others."""
        for number in alive.budgets_s:
            replica = replicas[number]
            failures = [
                f"trainer rank {rank}: {r.errors[number]}" for rank, r in enumerate(results) if number in r.errors
            ]
            if failures:
                replica.error = "; ".join(failures)
            replica.spent_s += max(r.write_s.get(number, 0.0) for r in results)
        unserved = {number: {"reason": replicas[number].error} for number in alive.budgets_s if replicas[number].error}
        self._commit_all(version, alive, replicas, sums)
        self._abort(version, alive, unserved)
        done = [r.committed for r in replicas if r.committed is not None]
        for replica in replicas:
            if replica.error is not None and replica.error != EXCLUDED:
                logger.error(
                    "version %d, epoch %d: %s did not commit: %s", version, alive.epoch, replica.endpoint, replica.error
                )
        num_changed = self._count_changed(
            {dest: sums.part(dest) for dest in sums.places.params if replicas[dest[0]].committed}
        )
        times = [replica.times for replica in replicas if replica.times is not None]
        report = PublishReport(
            version=version,
            epoch=alive.epoch,
            replicas=tuple(
                ReplicaReport(r.endpoint, r.committed is not None, r.error, r.committed.pause_s if r.committed else 0.0)
                for r in replicas
            ),
            pause_s=max((c.pause_s for c in done), default=0.0),
            begin_s=alive.begin_s,
            idle_s=max((one.idle_s for one in times), default=0.0),
            mark_s=max((one.mark_s for one in times), default=0.0),
            prepare_s=max(r.prepare_s for r in results),
            write_s=max(r.busy_write_s for r in results),
            verify_s=max((c.verify_s for c in done), default=0.0),
            commit_s=max((c.commit_s for c in done), default=0.0),
            total_s=time.monotonic() - began,
            num_bytes=sum(r.num_bytes for r in results),
            peak_bytes=max(r.peak_bytes for r in results),
            watermark_bytes=self._config.watermark_bytes,
            num_changed_params=num_changed,
        )
        if trace is not None:
            ranks = {f"trainer rank {rank}": result.spans for rank, result in enumerate(results)}
            write_trace(trace, ranks | {f"replica {r.endpoint}": r.times.spans() for r in replicas if r.times})
        return report

    def _commit_all(
        self,
        version: int,
        alive: _Alive,
        replicas: list[_Replica],
        sums: Sums,
    ) -> None:
        assert self._clients is not None
        ready = [number for number in alive.budgets_s if replicas[number].error is None]
        fields = {
            number: {
                "expected": tuple(self._expected((number, rank), sums) for rank in range(len(self._layouts[number])))
            }
            for number in ready
        }
        timeouts_s = {number: max(MIN_COMMIT_S, self._config.timeout_s - replicas[number].spent_s) for number in ready}
        told = time.monotonic()
        replies = self._clients.call(
            Commit, fields, timeouts_s, version=version, epoch=alive.epoch, digest=self._digest
        )
        for number, reply in replies.items():
            if isinstance(reply, Committed):
                replicas[number].committed, times = reply, replicas[number].times
                if times is not None:
                    times.told_s, times.verify_s, times.commit_s = told, reply.verify_s, reply.commit_s
            else:
                replicas[number].error = _text(reply)

    def _expected(self, dest: Destination, sums: Sums) -> Expected:
        num_bytes, hashes = sums.part(dest)
        return self._planned[dest].write(num_bytes, hashes if self._config.verify_hashes else None)

    def _abort(self, version: int, alive: _Alive, unserved: Mapping[int, Mapping[str, object]]) -> None:
        """Tell replicas that wait for a commit that will not come. They are DIRTY, whatever they answer.

        A replica whose own Begin or Commit failed knows; one that did not answer in time is not waited for again.
        """
        assert self._clients is not None
        if unserved:
            self._clients.call(
                Abort,
                unserved,
                dict.fromkeys(unserved, MIN_COMMIT_S),
                version=version,
                epoch=alive.epoch,
                digest=self._digest,
            )

    def _count_changed(self, sums: Mapping[Destination, Ints]) -> int | None:
        """Parameters of replicas that committed, now and before, whose bytes are others than before."""
        known = [(part, self._last_sums[dest]) for dest, part in sums.items() if dest in self._last_sums]
        self._last_sums |= sums
        if not known or not self._config.verify_hashes:
            return None
        return sum(int((part != last).any(axis=0).sum()) for part, last in known)


def _answer(asked: Future[_Alive] | None) -> _Alive:
    assert asked is not None, "rank 0 asks"
    return asked.result()


def _addresses_of(described: Described) -> dict[str, Addresses]:
    """What a replica says of its addresses before any publish, by digest."""
    return {addresses_digest(one.binding.addresses): one.binding.addresses for one in described.ranks}


def _text(reply: object) -> str:
    return f"{type(reply).__name__}: {reply}" if isinstance(reply, Exception) else f"unexpected {type(reply).__name__}"
