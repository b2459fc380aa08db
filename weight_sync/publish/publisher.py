"""The trainer's end of the weight sync: connect once, then publish a version after every optimizer step.

Owns: how the plan reaches every rank, which replicas take part, and the order of phases. Every trainer rank has a
Publisher and calls the same methods at the same time; only rank 0 speaks to the replicas (`rank0.py`,
`transaction.py`). Does not own bytes (`pipeline.py`), the ranks' collectives (`collectives.py`), or the fence (the
caller must not change weights until publish() returns).

    rank 0                                    every rank                              replica (each on its own)
    ------                                    ----------                              -------------------------
                                              pipeline: changes, if engines are
                                              known to take them           =====>     serves; its landing zone changes
                                       gather errors
    begin at all, wait for answers      ->     pipeline: gather, pack first loads      pause, DIRTY
                                       bcast  who is alive, and where
                                              pipeline: pack, hash, write  =====>     live parameters change
                                       gather sums and errors
    commit(sums) at those without error ->                                            verify, commit, CLEAN, resume
    abort at the others                 ->                                            stay DIRTY
                                       bcast  report; links of failed replicas are closed

A replica that the caller excludes is not asked, not written to and not waited for; its open links are closed, as for
one that failed. A replica that was started again rejoins by reconnect(), under the same plan. So does a further one: it
gets what replica 0 gets, from the same ranks, and is refused where its layout is another one.

Invariants. All ranks run the same collectives in the same order, whatever fails. A replica's failure is an entry in the
report, never an exception, and delays the others at most by the wait for it. Each attempt is a new epoch, larger than
any that a replica has seen.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slipstream.conf.failures import undone_by
from slipstream.conf.schema import WeightSyncConfig
from slipstream.weight_sync.errors import ProtocolError, TransportError, WeightSyncError
from slipstream.weight_sync.layout import Binding, Destination, DestLayout, SourceLayout
from slipstream.weight_sync.pipeline.lanes import RankPublishReport
from slipstream.weight_sync.pipeline.pipeline import Pipeline
from slipstream.weight_sync.pipeline.sums import Places, Sums
from slipstream.weight_sync.plan.transfer_plan import PlanSummary, rank_tasks_from_wire
from slipstream.weight_sync.publish.bases import Bases
from slipstream.weight_sync.publish.collectives import Meeting, values
from slipstream.weight_sync.publish.rank0 import Agreed, Rank0
from slipstream.weight_sync.publish.report import PublishReport, to_nobody
from slipstream.weight_sync.publish.transaction import Alive, Slots
from slipstream.weight_sync.source import WeightSource
from slipstream.weight_sync.transport.base import Transport
from slipstream.weight_sync.typed_msgpack import Sent

logger = logging.getLogger(__name__)


class Publisher:
    """One trainer rank's part in every publish.

    Args:
        group: A gloo process group over all trainer ranks; None if there is only one rank.
        device: Device of the trainer's weights, where staging lives.
        base: What engines that merge for themselves merge from, with the layout of `source`; None: none does.
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
        base: WeightSource | None = None,
    ) -> None:
        self._source = source
        self._base, self._device = base, device
        self._transport = transport
        self._meeting = Meeting(rank, world_size, group)
        self._config = config
        self._bases = Bases(source, config.delta_bytes, rank, world_size)
        watermark_bytes, has_changes = config.watermark_bytes, self._bases.is_on
        self._pipeline = Pipeline(
            source, transport, device=device, watermark_bytes=watermark_bytes, has_changes=has_changes
        )
        self._endpoints: list[str] = []
        self._digest = ""
        """The plan's digest; empty before there is a plan."""
        self._summary: PlanSummary | None = None
        self._is_connected = False
        self._is_base_known = False
        """Whether rank 0 has the digests of the base for this plan."""
        self._places = Places({})
        """The place of every parameter of every replica, the same on all ranks."""
        self._rank0 = Rank0(config, key, self._bases)
        """Used on trainer rank 0 alone."""
        self._slots: list[list[Slots]] = []
        """Per replica and rank, as it described them; the same on all ranks."""
        self._open_sessions: dict[Destination, str] = {}
        """Links of this rank that may be open: to replicas that have committed, even if they have died since."""

    def connect(self, endpoints: Sequence[str], absent: Collection[int] | None = None) -> PlanSummary:
        """Learn every replica's layout, plan unless there is a plan for these layouts, and take this rank's tasks.
        Collective.

        Args:
            absent: Replicas (positions) that are out of service: they get nothing until they reconnect(), and an
                endpoint may be "". If it is given, whoever does not answer counts among them. Their layouts are taken
                to be those of the first that answers, and are compared when they reconnect(). If nobody does, there
                is no plan, and a publish reaches nobody, before one of them has reconnected.

        Raises:
            WeightSyncError: A replica does not answer, links differ, or no plan is possible; alike on every rank.
        """
        meeting = self._meeting
        self._is_connected = False
        links = meeting.gather(str, self._transport.link)
        has_plan = bool(self._digest)
        self._slots, is_planned = meeting.on_rank0(
            tuple[list[list[Slots]], bool],
            lambda: self._rank0.meet(endpoints, set(links), absent, has_plan=has_plan),
        )
        self._endpoints = list(endpoints)
        self._open_sessions = {}
        self._bases.forget()
        if absent is not None and not any(self._slots):
            self._digest, self._is_connected = "", True
            return PlanSummary("", 0, 0, 0, {}, {}, {}, 1.0, 1.0)
        if not is_planned:
            self.plan_for(self._rank0.met)
        if self._base is not None and not self._is_base_known:
            self._learn_base(self._base)
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
            WeightSyncError: No plan is possible; alike on every rank.
        """
        meeting = self._meeting
        self._digest, self._is_connected, self._is_base_known = "", False, False
        facts = meeting.attempts(
            tuple[Sent[SourceLayout], int], lambda: (Sent(self._source.layout()), self._pipeline.max_task_bytes)
        )
        agreed, own_part = meeting.deal(Agreed, dict[str, Any], lambda: self._rank0.make_plan(layouts, values(facts)))
        summary = agreed.summary
        self._places = agreed.places()
        tasks = rank_tasks_from_wire(own_part)
        flags = agreed.flags() if self._bases.is_on else None
        meeting.everywhere(None, lambda: self._pipeline.compile(tasks, self._places, flags))
        self._digest, self._summary = summary.digest, summary
        if meeting.rank == 0:
            facts_of = summary.num_tasks, summary.num_bytes, summary.digest[:12]
            logger.info("weight sync: %d tasks, %d bytes per publish, plan %s", *facts_of)

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
        self._require_connected("publish")
        self.disconnect(exclude)
        if not self._digest:
            return to_nobody(version, self._endpoints, exclude)
        included = [number for number in range(len(self._endpoints)) if number not in exclude]
        self._bases.begin()
        report = self._publish_to(version, included, trace)
        self._bases.end()
        return report

    def _require_connected(self, verb: str) -> None:
        if not self._is_connected:
            raise ProtocolError(f"{verb}() before connect()")

    def note_base(self) -> None:
        """Take the source's present values for what engine ranks may hold, and send nothing: those that prove to hold
        them are sent only what differs, by the next publish. Collective.

        Raises:
            WeightSyncError: The source cannot be read; alike on every rank.
        """
        self._require_connected("note_base")
        self._bases.begin()
        self._survey(self._pipeline.survey, self._rank0.note_base)
        self._bases.end()

    def _learn_base(self, base: WeightSource) -> None:
        """Have every engine rank's digest of the base, from one pass over it that sends nothing. Collective."""

        def survey() -> Sums:
            watermark_bytes = self._config.watermark_bytes
            pipeline = Pipeline(base, self._transport, device=self._device, watermark_bytes=watermark_bytes)
            with contextlib.closing(pipeline):
                pipeline.load(self._pipeline.tasks, self._places)
                return pipeline.survey()

        self._survey(survey, self._rank0.freeze_base)
        self._is_base_known = True

    def _survey(self, survey: Callable[[], Sums], learn: Callable[[Sums], None]) -> None:
        """Have rank 0 learn what all ranks' sources add up to. Collective."""
        found: list[Sums] = []
        self._meeting.everywhere(None, lambda: found.append(survey()))
        self._meeting.add_up(found[0].table)
        if self._meeting.rank == 0:
            learn(found[0])

    def _publish_to(self, version: int, included: Sequence[int], trace: Path | None) -> PublishReport:
        """One transaction with the included replicas; the others are reported as excluded."""
        began = time.monotonic()
        with undone_by(lambda _: self._pipeline.cancel()):
            failed = self._send_ahead(version, included, is_traced=trace is not None)
            if self._meeting.rank == 0:
                self._rank0.begin(
                    version, included, endpoints=self._endpoints, digest=self._digest, slots=self._slots,
                    failed=failed, ahead_s=time.monotonic() - began,
                )  # fmt: skip
            self._pipeline.prepare(version, trace=trace is not None, with_changes=self._bases.sends_changes)
            alive = self._meeting.on_rank0(Alive, self._rank0.alive)
        bindings = {
            (replica, rank): Binding(bound.session, self._slots[replica][rank][bound.slot])
            for (replica, rank), bound in alive.bound.items()
        }
        landings = self._bases.landings(alive.take_changes, bindings)
        merging = () if self._base is None else frozenset(alive.take_changes)
        num_whole = 0 if self._base is None else len(bindings) - len(merging)
        if num_whole > 0 and self._meeting.rank == 0:
            why = "their base is not the trainer's, or their last merge was not proven"
            numbers = version, num_whole, len(bindings)
            logger.warning("version %d: %d of %d engine ranks get every byte: %s", *numbers, why)
        result = self._pipeline.run(version, bindings, alive.budgets_s, landings, merging)
        self._open_sessions |= {destination: binding.session for destination, binding in bindings.items()}
        self._meeting.add_up(result.sums.table)
        results = self._meeting.gather(RankPublishReport, result.report)
        report = self._meeting.on_rank0(PublishReport, lambda: self._rank0.finish(results, result.sums, trace))
        self.disconnect([number for number in included if not report.replicas[number].committed])
        self._bases.note_served({dest: b for dest, b in bindings.items() if report.replicas[dest[0]].committed})
        if self._bases.is_on and report.num_committed == len(included):
            was_whole = self._bases.costs.is_whole_cheaper
            self._bases.costs.note(report, len(bindings))
            if self._meeting.rank == 0 and self._bases.costs.is_whole_cheaper > was_whole:
                logger.info("version %d: changes cost more than everything does: the next publish is whole", version)
        return report

    def _send_ahead(self, version: int, included: Sequence[int], *, is_traced: bool) -> dict[int, str]:
        """Write changes into the zones of all replicas, while they serve, if all committed the last publish.
        Collective. Returns, on rank 0, those that could not be written to."""
        ahead = {dest: binding for dest, binding in self._bases.ahead.items() if dest[0] in included}
        landings = self._bases.landings(ahead, ahead)
        if not landings or len({replica for replica, _ in ahead}) < len(included):
            return {}
        bindings = {dest: ahead[dest] for dest in landings}
        errors = self._pipeline.send_ahead(version, bindings, landings, self._config.timeout_s, trace=is_traced)
        everyone = self._meeting.gather(dict[int, str], errors)  # all is there before an engine is asked to pause
        return {
            replica: f"trainer rank {rank}: {error}"
            for rank, own in reversed(list(enumerate(everyone)))
            for replica, error in own.items()
        }

    def disconnect(self, replicas: Collection[int]) -> None:
        """Close this rank's links to dead replicas, because open links keep their memory pinned. Not collective.

        Without this, a replica that dies between two publishes stays mapped until the next one, and the replica that
        replaces it finds no memory.
        """
        for destination, session in list(self._open_sessions.items()):
            if destination[0] not in replicas:
                continue
            try:
                self._transport.reset(session)
                del self._open_sessions[destination]
            except TransportError as e:  # the link is kept, and closing is tried again next time
                logger.error("the link to %s cannot be closed yet: %s", self._endpoints[destination[0]], e)

    def reconnect(self, replica: int, endpoint: str) -> None:
        """Write to a replica that was started again, or to a further one, from the next publish on. Collective; other
        replicas are not affected.

        Raises:
            WeightSyncError: It does not answer, or its layout is not the planned one; alike on every rank. It gets no
                further publish.
        """
        self._require_connected("reconnect")
        if not self._digest:
            self._connect_first(replica, endpoint)
            return
        if replica >= len(self._endpoints):
            self._grow(replica + 1)
        self.disconnect([replica])
        self._bases.forget_place(replica)
        link = self._transport.link
        self._slots[replica] = self._meeting.on_rank0(list[Slots], lambda: self._rank0.rejoin(replica, endpoint, link))
        self._endpoints[replica] = endpoint

    def _connect_first(self, replica: int, endpoint: str) -> None:
        """Meet the first replica after all were out of service: plan for it, and for others like it. Collective."""
        known = [*self._endpoints, *[""] * (replica + 1 - len(self._endpoints))]
        known[replica] = endpoint
        try:
            self.connect([endpoint if number == replica else "" for number in range(len(known))])
        except WeightSyncError:
            self._digest = ""  # also if there is a plan by now: staging may be missing
            raise
        finally:
            self._endpoints, self._is_connected = known, True

    def _grow(self, num_replicas: int) -> None:
        """Have a place in the plan for further replicas. Collective. Nothing is sent to them before reconnect()."""
        more = range(len(self._endpoints), num_replicas)
        self._is_connected = False  # until all ranks have the same places
        self._meeting.everywhere(None, lambda: self._pipeline.add_replicas(more))
        self._places, self._is_connected = self._pipeline.places, True
        self._bases.forget()
        self._endpoints += [""] * len(more)
        self._slots += [[] for _ in more]
        if self._meeting.rank == 0:
            self._rank0.add_replicas(more)
            logger.info("weight sync: room for %d replicas", num_replicas)

    def release(self) -> None:
        """Free temporary memory until the next publish, for another publisher of these ranks. Collective. Raises as
        Pipeline.release(), alike on every rank."""
        self._meeting.everywhere(None, self._pipeline.release)

    def close(self) -> None:
        """Close sockets and staging. Not collective; the caller closes the transport and the group."""
        self._rank0.close()
        self._pipeline.close()
