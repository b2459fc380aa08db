"""One trainer rank's part of a publish: pack, hash, write, with temporary memory under the watermark.

Owns the account of the watermark, and when staging is allocated and freed. Does not own: staging and its loads
(`staging_slots.py`), the overlap of packing with writing and what happens to a replica whose link fails (`lanes.py`),
how a schedule is cut and a slot filled (`packing.py`), or agreement with replicas (`publisher.py`, its only caller).

    schedule:  [t0 t1 t2 | t3 t4 | t5 t6 t7 ...]          a load = consecutive tasks that fit one slot; static, cut once

    send_ahead(), while engines serve: goes through all loads, as below, and writes changes into landing zones; what is
    left of them goes through what follows
                      prepare(): while engines pause            run(): once they have paused
    caller's thread   pack+hash load 0 -> slot 0 | load 1 -> slot 1 | (slot 0 free?) load 2 -> slot 0 | ...
    lane 0                                                          | its part of load 0   | of load 1 | ...
    lane 1                                                          | of load 0 | of load 1    | ...
                                                                      a lane: a thread, one batched write per session

Watermark. Everything temporary counts, and all of it is known before a byte moves:

    staging buffer (two slots) + hash sums and scratch + source.temporary_bytes  <=  watermark_bytes
    (with weight_sync.delta_bytes, marks and streams of changes beside it, as large as a third slot)

A rank with two pipelines (adapters, and a base that is sent again) has one watermark, so the idle pipeline is released.

Writing from a slot starts after the device has finished packing it, because links do not order with torch streams. The
slot is free again when every write from it is over. "Over" means that write() returned, or that it failed and
transport.reset() returned. A slot whose failed write cannot be closed is quarantined: it is not packed again until a
later reset succeeds. A replica whose write failed gets no further task; the others go on.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from slipstream.weight_sync.errors import PlanError, WatermarkError
from slipstream.weight_sync.integrity import compile_kernels
from slipstream.weight_sync.layout import Binding, Destination
from slipstream.weight_sync.pipeline.landings import Landing
from slipstream.weight_sync.pipeline.lanes import PipelineResult, Prepared, Replay
from slipstream.weight_sync.pipeline.packing import MarkingSource, Packet, compile_reads, cut_into_packets, packed_reads
from slipstream.weight_sync.pipeline.staging_slots import Compiled, Slots
from slipstream.weight_sync.pipeline.sums import Places, Sums
from slipstream.weight_sync.pipeline.trace import Tracer
from slipstream.weight_sync.plan.budget import NUM_SLOTS, Staging, reserved_bytes
from slipstream.weight_sync.plan.columns import Flags
from slipstream.weight_sync.plan.transfer_plan import Task
from slipstream.weight_sync.source import WeightSource
from slipstream.weight_sync.transport.base import Transport

logger = logging.getLogger(__name__)


class Pipeline:
    """One rank's staging memory and schedule.

    Args:
        transport: Carries the bytes; staging is registered with it.
        device: Where staging lives: the device of the trainer's weights.
        watermark_bytes: Bound on all temporary memory on this rank.
        has_changes: Be ready to send changes alone, if the source is a MarkingSource.
    """

    def __init__(
        self,
        source: WeightSource,
        transport: Transport,
        *,
        device: torch.device | str,
        watermark_bytes: int,
        has_changes: bool = False,
    ) -> None:
        self._source = source
        self._marking = source if has_changes and isinstance(source, MarkingSource) else None
        self._takes_changes: Flags | None = None
        self._transport = transport
        self._device = torch.device(device)
        if str(self._device) == "cuda":  # without a number
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._watermark_bytes = watermark_bytes
        self.tasks: Sequence[Task] = ()
        """This rank's schedule; after compile()."""
        self._compiled: list[Compiled] = []
        """Per load; kept while staging is freed."""
        self.places = Places({})
        """Where the sums in results are."""
        self._slot_bytes = 0
        self._slots: Slots | None = None
        self._quarantined: dict[int, list[str]] = {}
        self._is_released = False
        self._prepared: Prepared | None = None

    @property
    def loads(self) -> list[tuple[Packet, ...]]:
        """What goes through the slots, load by load; after compile()."""
        return [one.packets for one in self._compiled]

    @property
    def max_task_bytes(self) -> int:
        """Largest task that a plan for this rank should contain."""
        return self._limits.max_task_bytes

    @property
    def _limits(self) -> Staging:
        """What the watermark leaves for staging. Computed anew, because the source may need more than at first."""
        return Staging(
            watermark_bytes=self._watermark_bytes,
            reserved_bytes=self._reserved_bytes(),
            has_changes=self._marking is not None,
        )

    def _reserved_bytes(self) -> int:
        sizes = self._watermark_bytes, self._source.temporary_bytes
        return reserved_bytes(self._device.type, *sizes, has_changes=self._marking is not None)

    def load(self, tasks: Sequence[Task], places: Places | None = None, takes_changes: Flags | None = None) -> None:
        """compile(), then allocate()."""
        self.compile(tasks, places, takes_changes)
        self.allocate()

    def compile(self, tasks: Sequence[Task], places: Places | None = None, takes_changes: Flags | None = None) -> None:
        """Take this rank's schedule, and compile what fills its slots and the hash kernels. Call it once per plan;
        allocates no staging.

        Args:
            places: Places of the sums in results: the same on all ranks, so that sums add up. None: the tasks' own.
            takes_changes: Per place, whether changes alone may be sent for that parameter. None: never.

        Raises:
            PlanError: A task is larger than a slot.
            TransportError: A failed write out of an earlier plan's staging cannot be closed yet.
        """
        loads, self._slot_bytes = cut_into_packets(tasks, self._limits)
        self._recover_slots()
        self._drop_staging()  # frees an earlier plan's
        self.tasks, self.places = tasks, Places.of_tasks(tasks) if places is None else places
        compiled: list[Compiled] = []  # while there are those of before: a source may keep what equal loads held
        for packets in loads:
            reads, marks = packed_reads(packets), None
            if self._marking is not None and takes_changes is not None:
                marks = self._marking.compile_marked_reads(reads)
            compiled.append(Compiled(packets, compile_reads(self._source, reads), marks))
        self._takes_changes, self._compiled = takes_changes, compiled
        compile_kernels(self._device)

    def allocate(self) -> None:
        """Allocate staging and register it, after compile()."""
        self._drop_staging()
        self._slots = Slots(
            self._compiled, slot_bytes=self._slot_bytes, places=self.places, transport=self._transport,
            device=self._device, watermark_bytes=self._watermark_bytes,
            quarantined=self._quarantined, takes_changes=self._takes_changes,
        )  # fmt: skip
        self._is_released = False

    def add_replicas(self, more: Sequence[int]) -> None:
        """Have tasks for further replicas, too: those of replica 0, which are packed and hashed once for all of them.
        Raises as compile()."""
        tasks = [
            one
            for task in self.tasks
            for one in (task, *(replace(task, replica=replica) for replica in more if task.replica == 0))
        ]
        flags = self._takes_changes
        if flags is not None:
            first = [flags[self.places.columns(dest)] for dest in self.places.params if dest[0] == 0]
            flags = np.concatenate([flags, *(first * len(more))])
        self.load(tasks, self.places.with_replicas(more), flags)

    def release(self) -> None:
        """Free all device memory for another pipeline of this rank. The next prepare() allocates it again. Raises
        TransportError, and frees nothing, if a failed write out of staging cannot be closed yet."""
        self._recover_slots()
        self._drop_staging()
        self._compiled = []
        self._is_released = True

    @torch.no_grad()
    def send_ahead(
        self, version: int, bindings: Mapping[Destination, Binding], landings: Mapping[Destination, Landing],
        timeout_s: float, *, trace: bool = False,
    ) -> dict[int, str]:  # fmt: skip
        """Write changes into the zones of engines that go on serving. What must go whole is left for run(), and so is
        all for an engine rank that proves to hold something else. As prepare(), which must follow.

        Args:
            bindings: Where these engine ranks were at the last publish.
            timeout_s: The longest that the writes to one replica may take.

        Returns:
            The replicas that could not be written to, and why.
        """

        def send(prepared: Prepared, slots: Slots) -> None:
            budgets_s = dict.fromkeys((replica for replica, _ in bindings), timeout_s)
            Replay(slots, self._transport, bindings, budgets_s, prepared, landings, is_ahead=True).replay()

        self._attempt(send, version, trace=trace)
        return {} if self._prepared is None else self._prepared.result.report.errors

    @torch.no_grad()
    def prepare(self, version: int, *, trace: bool = False, with_changes: bool = False) -> None:
        """Begin the source, and pack the first loads of which anything was not sent ahead, one per slot, before it is
        known which replicas will receive them.

        Collective in source.begin(). Errors are kept for run(). Either run() or cancel() must follow.

        Args:
            with_changes: Pack changes, too; the source has kept what was published last.
        """

        def pack(prepared: Prepared, slots: Slots) -> None:
            began = time.monotonic()
            slots.begin()
            left = [one for one in slots.loads if not all(prepared.is_there(*part) for part in one.batches.items())]
            for slot, load in zip((n for n in range(NUM_SLOTS) if n not in self._quarantined), left):
                is_marked = with_changes and not prepared.there
                prepared.filled.append(slots.pack(slot, load, prepared.tracer, with_streams=is_marked))
            prepared.result.report.prepare_s += time.monotonic() - began

        self._attempt(pack, version, trace=trace)

    def _attempt(self, step: Callable[[Prepared, Slots], None], version: int, *, trace: bool) -> None:
        """Begin a publish, unless it has begun, and take a step of it. Its first error is kept, and is its end."""
        has_begun = self._prepared is not None
        if self._prepared is None:
            tracer = Tracer(self._device, is_on=trace)
            self._prepared = Prepared(version, tracer, PipelineResult(Sums(self.places)))
        prepared = self._prepared
        if prepared.error is not None:
            return
        try:
            if not has_begun:
                self._begin(prepared)
            assert self._slots is not None  # as _begin() found
            step(prepared, self._slots)
        except Exception as e:  # noqa: BLE001 - a value for now: the other ranks go on to a collective
            prepared.error = e

    def _begin(self, prepared: Prepared) -> None:
        with prepared.tracer.host("gather", "source.begin"):
            held = self._source.begin(prepared.version)
        if self._is_released:
            self.load(self.tasks, self.places, self._takes_changes)
        if self._slots is None:
            raise PlanError("a publish before there is a plan")
        prepared.result.report.peak_bytes = self._account(held, self._slots)
        self._recover_slots()
        if self._slots.changes is not None:
            self._slots.changes.begin()

    @torch.no_grad()
    def survey(self) -> Sums:
        """What a publish of the present values would send to every destination; nothing is sent. Collective in
        source.begin(). The source sees every load filled."""
        if self._slots is None:
            raise PlanError("a survey before there is a plan")
        sums, slots, tracer = Sums(self.places), self._slots, Tracer(self._device, is_on=False)
        self._recover_slots()
        try:
            self._source.begin(0)
            slots.begin()
            for load in slots.loads:
                slots.pack(0, load, tracer).wait_until_packed()
            slots.take_sums()
            hashes = slots.sums_of_packets()
            for entries in slots.entries.values():
                sums.add(entries.columns, entries.sizes, hashes[entries.packets])
        finally:
            self._source.end()
        return sums

    def cancel(self) -> None:
        """Drop what prepare() made. Rank-local; harmless if nothing is prepared."""
        if self._prepared is not None:
            self._prepared.tracer.finish()
            self._prepared = None
            self._source.end()

    def run(
        self,
        version: int,
        bindings: Mapping[Destination, Binding],
        budgets_s: Mapping[int, float],
        landings: Mapping[Destination, Landing] | None = None,
        merging: Collection[Destination] = (),
    ) -> PipelineResult:
        """Send `version` to every destination in `bindings`, after prepare(version).

        Args:
            bindings: Where the live replicas' ranks are; those without an entry are sent nothing.
            budgets_s: Per replica: the longest that writes to it may take in all.
            landings: This rank's part of the zones of engine ranks that get changes alone, if not ahead.
            merging: Engine ranks that get factors alone, and merge for themselves. The rest is packed and hashed.

        Returns:
            What was done. A replica's failure is in the result and not raised. If the source raises, every replica gets
            that error.
        """
        if self._prepared is None or self._prepared.version != version:
            raise PlanError(f"run(version {version}) without prepare(version {version})")
        prepared, self._prepared = self._prepared, None
        result, landings = prepared.result, landings or {}
        alive = {replica for replica, _ in bindings}
        try:
            try:
                if prepared.error is not None:
                    raise prepared.error
                assert self._slots is not None  # as prepare() found
                if void := prepared.there.keys() - landings.keys():
                    prepared.take_back(void)
                    self._slots.begin()
                streams = {} if prepared.there else landings
                Replay(self._slots, self._transport, bindings, budgets_s, prepared, streams, merging).replay()
            finally:
                result.report.spans = prepared.tracer.finish()
                self._source.end()
        except Exception as e:  # the boundary of this rank's part: peers wait in a collective for its result
            logger.exception("version %d: this rank's part of the publish failed", version)
            for replica in alive:
                result.report.errors.setdefault(replica, f"{type(e).__name__}: {e}")
        return result

    def close(self) -> None:
        """Free staging, not the transport."""
        self.cancel()
        self._drop_staging()

    def _drop_staging(self) -> None:
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def _recover_slots(self) -> None:
        """Try again to close writes that failed earlier. Raises TransportError if one still is open."""
        for slot, sessions in list(self._quarantined.items()):
            for session in sessions:
                self._transport.reset(session)
            del self._quarantined[slot]

    def _account(self, held_bytes: int, slots: Slots) -> int:
        declared = self._source.temporary_bytes
        if held_bytes > declared:
            raise WatermarkError(
                f"the weight source holds {held_bytes} temporary bytes, it declared at most {declared}"
            )
        peak = slots.num_bytes + self._reserved_bytes()
        if peak > self._watermark_bytes:
            raise WatermarkError(
                f"a publish would hold {peak} temporary bytes, weight_sync.watermark_bytes={self._watermark_bytes}"
            )
        return peak
