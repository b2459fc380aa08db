"""One trainer rank's part of a publish: pack, hash, write, with temporary memory under the watermark.

Owns the staging buffer, the cutting of a schedule into slot loads, the packing of a slot. Does not own: the overlap of
packing with writing and what becomes of a replica whose link fails (`replay.py`), which bytes go where (`plan.py`), how
a slot is filled (`packing.py`), the values (`source.py`), links (`transport/`), or agreement with replicas
(`publisher.py`, its only caller).

    schedule:  [t0 t1 t2 | t3 t4 | t5 t6 t7 ...]          a load = consecutive tasks that fit one slot; static, cut once

                      prepare(): while engines pause            run(): once they stand still
    caller's thread   pack+hash load 0 -> slot 0 | load 1 -> slot 1 | (slot 0 free?) load 2 -> slot 0 | ...
    writer thread                                                   | write load 0    | write load 1  | ...
    link threads                                     one batched write a session, all sessions of a load at once

Watermark. Everything temporary counts, and all of it is known before a byte moves:

    staging buffer (two slots) + hash sums and scratch + source.temporary_bytes  <=  watermark_bytes

A rank with two pipelines (adapters, and a base that is sent again) has one watermark: the one at rest is released.

A slot is handed to the writer after the device finished packing it (links do not order with torch streams) and comes
back when every write from it is over. "Over" means that write() returned, or that it failed and transport.reset()
returned; a slot whose failed write cannot be closed is quarantined: it is never packed again until a later reset
succeeds. A replica whose write failed gets no further task; the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from weight_sync.columns import Ints
from weight_sync.errors import PlanError, WatermarkError
from weight_sync.integrity import RangeHashes, compile_kernels
from weight_sync.layout import Binding
from weight_sync.packing import FillSlot, Packet, compile_reads, packed_reads, same_bytes
from weight_sync.plan import Task
from weight_sync.replay import (
    Destination,
    Entries,
    Filled,
    Load,
    PipelineResult,
    Prepared,
    Replay,
    compile_writes,
)
from weight_sync.source import WeightSource
from weight_sync.staging import (
    MAX_LINK_THREADS,
    NUM_SLOTS,
    Staging,
    aligned,
    max_packets,
    reserved_bytes,
    scratch_bytes,
)
from weight_sync.sums import Places
from weight_sync.trace import Tracer
from weight_sync.transport.base import Transport

logger = logging.getLogger(__name__)


class Pipeline:
    """One rank's staging memory and schedule.

    Args:
        source: Gives the values.
        transport: Carries the bytes; staging is registered with it.
        device: Where staging lives: the device of the trainer's weights.
        watermark_bytes: Bound on all temporary memory on this rank.
        verify_hashes: Hash every packed byte.
    """

    def __init__(
        self,
        source: WeightSource,
        transport: Transport,
        *,
        device: torch.device | str,
        watermark_bytes: int,
        verify_hashes: bool,
    ) -> None:
        self._source = source
        self._transport = transport
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._watermark_bytes = watermark_bytes
        self._verify_hashes = verify_hashes
        self._scratch_bytes = scratch_bytes(self._device.type, watermark_bytes) if verify_hashes else 0
        self._max_sums = NUM_SLOTS * max_packets(watermark_bytes)
        self._tasks: Sequence[Task] = ()
        self._fills: list[tuple[tuple[Packet, ...], FillSlot]] = []
        """What a load holds and what fills it, staging or not."""
        self._loads: list[Load] = []
        self._places = Places({})
        self._entries: dict[Destination, Entries] = {}
        self._slots: list[torch.Tensor] = []
        self._ready: list[torch.cuda.Event | None] = [None] * NUM_SLOTS
        """Of each slot: its packing is done. Recorded again only when every write from the slot is over."""
        self._slot_bytes = 0
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._sums = torch.empty(0, dtype=torch.int64, device=self._device)
        self._host_sums = torch.empty(0, dtype=torch.int64)
        self._windows: list[slice] = []
        """The packets whose sums are on the device at a time: sums go to the host window by window, not load by load.
        While a link polls the device, each call to the driver waits for it."""
        self._window = 0
        self._is_released = False
        self._quarantined: dict[int, list[str]] = {}
        self._prepared: Prepared | None = None
        self._links: ThreadPoolExecutor | None = None

    @property
    def max_task_bytes(self) -> int:
        """Largest task that a plan for this rank should contain: a part of a slot."""
        return self._limits.max_task_bytes

    @property
    def _limits(self) -> Staging:
        """What the watermark leaves; the source may have learnt since what it needs."""
        return Staging(
            watermark_bytes=self._watermark_bytes,
            reserved_bytes=self._reserved_bytes(self._source.temporary_bytes),
        )

    def _reserved_bytes(self, source_bytes: int) -> int:
        return reserved_bytes(self._device.type, self._watermark_bytes, source_bytes, verify_hashes=self._verify_hashes)

    def load(self, tasks: Sequence[Task], places: Places | None = None) -> None:
        """compile(), then allocate()."""
        self.compile(tasks, places)
        self.allocate()

    def compile(self, tasks: Sequence[Task], places: Places | None = None) -> None:
        """Take this rank's schedule and compile what fills its slots, and the hash kernels. No staging. Once a plan.

        Args:
            tasks: In schedule order.
            places: Of the results' sums: those that all ranks have, whose sums then add up. None: the tasks' own.

        Raises:
            PlanError: A task is larger than a slot.
        """
        limits = self._limits
        limit = limits.max_slot_bytes
        for task in tasks:
            if task.num_bytes > limit:
                raise PlanError(
                    f"a task of {task.num_bytes} bytes for {task.param} does not fit a staging slot of {limit} bytes"
                )
        total = sum(aligned(group[0].num_bytes) for group in same_bytes(tasks))
        largest = max((aligned(task.num_bytes) for task in tasks), default=0)
        self._slot_bytes = limits.slot_bytes(total, largest)
        self._drop_staging()  # of an earlier plan
        self._tasks, self._places = tasks, Places.of_tasks(tasks) if places is None else places
        self._fills = [
            (packets, compile_reads(self._source, packed_reads(packets)))
            for packets in _cut(tasks, self._slot_bytes, limits)
        ]
        if self._verify_hashes:
            compile_kernels(self._device)

    def allocate(self) -> None:
        """Take staging, register it, and open a thread a link. After compile()."""
        self._drop_staging()
        self._sums = torch.zeros(self._max_sums, dtype=torch.int64, device=self._device)
        self._staging = torch.empty(NUM_SLOTS * self._slot_bytes, dtype=torch.uint8, device=self._device)
        self._slots = list(self._staging.view(NUM_SLOTS, self._slot_bytes))
        if self._slot_bytes:
            self._transport.register([self._staging])
        if self._device.type == "cuda":
            self._ready = [torch.cuda.Event() for _ in range(NUM_SLOTS)]
        self._make_loads()
        self._close_links()
        num_destinations = len({(task.replica, task.dest_rank) for task in self._tasks})
        self._links = ThreadPoolExecutor(
            max_workers=max(1, min(num_destinations, MAX_LINK_THREADS)),
            thread_name_prefix="weight-sync-link",
            initializer=self._enter_thread,
        )
        self._is_released = False

    def release(self) -> None:
        """Give back all device memory to another pipeline of this rank, until the next prepare() takes it again.

        Raises:
            TransportError: A failed write out of staging cannot be closed yet. Nothing is given back.
        """
        self._recover_slots()
        self._drop_staging()
        self._fills = []
        self._is_released = True

    @torch.no_grad()
    def prepare(self, version: int, *, trace: bool = False) -> None:
        """Begin the source and pack the first loads, one a slot, before it is known who will receive them.

        Collective in source.begin(). What goes wrong is kept for run(); either that or cancel() must follow.
        """
        self._prepared = prepared = Prepared(version, Tracer(self._device, is_on=trace))
        try:
            with prepared.tracer.host("gather", "source.begin"):
                held = self._source.begin(version)
            if self._is_released:
                self.load(self._tasks, self._places)
            prepared.peak_bytes = self._account(held)
            self._recover_slots()
            began = time.monotonic()
            self._window = 0
            self._sums.zero_()
            for slot, load in enumerate(self._loads[:NUM_SLOTS]):
                prepared.filled.append(self._pack(slot, load, prepared.tracer))
            prepared.prepare_s = time.monotonic() - began
        except Exception as e:  # a value for now: the other ranks go on to a collective
            prepared.error = e

    def cancel(self) -> None:
        """Drop what prepare() made, where run() will not follow. Rank-local; harmless when nothing is prepared."""
        if self._prepared is not None:
            self._prepared.tracer.finish()
            self._prepared = None
            self._source.end()

    def run(
        self, version: int, bindings: Mapping[Destination, Binding], budgets_s: Mapping[int, float]
    ) -> PipelineResult:
        """Send `version` to every destination in `bindings`, after prepare(version).

        Args:
            bindings: Where the live replicas' ranks are. Tasks for replicas without an entry are skipped.
            budgets_s: Per replica: the longest that writes to it may take in all.

        Returns:
            What was done. It does not raise for what can be blamed on a replica, nor for a source that raises: then
            every replica gets that error.
        """
        if self._prepared is None or self._prepared.version != version:
            raise PlanError(f"run(version {version}) without prepare(version {version})")
        prepared, self._prepared = self._prepared, None
        run = Replay(self, bindings, budgets_s, prepared)
        alive = {replica for replica, _ in bindings}
        try:
            try:
                if prepared.error is not None:
                    raise prepared.error
                run.replay(self._loads)
            finally:
                run.result.spans = prepared.tracer.finish()
                self._source.end()
        except Exception as e:  # the boundary of this rank's part: peers wait in a collective for its result
            logger.exception("version %d: this rank's part of the publish failed", version)
            for replica in alive:
                run.result.errors.setdefault(replica, f"{type(e).__name__}: {e}")
        return run.result

    def forget(self, session: str) -> None:
        """A replica failed outside this pipeline (died, refused): close what the link still holds of it."""
        self._transport.reset(session)

    def close(self) -> None:
        """Stop the link threads and drop staging. The transport stays the caller's."""
        self.cancel()
        self._close_links()
        self._drop_staging()

    def _drop_staging(self) -> None:
        """Staging, and the loads that refer to it. The link forgets it: it outlives this pipeline."""
        self._loads, self._slots = [], []
        had_staging = self._staging.numel() > 0
        if had_staging:
            self._transport.unregister([self._staging])
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._sums = torch.empty(0, dtype=torch.int64, device=self._device)
        if had_staging and self._device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep it, and what is taken next may come on top of that

    def _make_loads(self) -> None:
        """What compile() knows and what depends on where staging is."""
        addresses = [slot.data_ptr() for slot in self._slots]
        cut = [packets for packets, _ in self._fills]
        batches, self._entries = compile_writes(cut, addresses, self._places)
        first = num_packets = 0
        self._windows = []
        for number, (packets, fill) in enumerate(self._fills):
            if num_packets + len(packets) - first > self._max_sums:
                self._windows.append(slice(first, num_packets))
                first = num_packets
            place = num_packets - first
            self._loads.append(
                Load(
                    number,
                    packets,
                    fill,
                    self._hashes(packets),
                    len(self._windows),
                    self._sums[place : place + len(packets)],
                    batches[number],
                )
            )
            num_packets += len(packets)
        self._windows.append(slice(first, num_packets))
        if len(self._host_sums) != num_packets:
            is_cuda = self._device.type == "cuda"
            self._host_sums = torch.zeros(num_packets, dtype=torch.int64, pin_memory=is_cuda)

    def _hashes(self, packets: Sequence[Packet]) -> tuple[RangeHashes, ...]:
        """The hashes of a load's packets, for each slot that it may be in."""
        if not self._verify_hashes:
            return ()
        offsets = [packet.tasks[0].dest_offset_bytes for packet in packets]
        return tuple(
            RangeHashes([self._view(slot, p) for p in packets], offsets, scratch_bytes=self._scratch_bytes)
            for slot in range(NUM_SLOTS)
        )

    def _view(self, slot: int, packet: Packet) -> torch.Tensor:
        return self._slots[slot][packet.offset_bytes : packet.offset_bytes + packet.tasks[0].num_bytes]

    def _pack(self, slot: int, load: Load, tracer: Tracer) -> Filled:
        """Fill a slot from the source and hash it; the device may still be at work on return."""
        began = time.monotonic()
        if load.window != self._window:
            self._take_sums()
            self._window = load.window
        start = tracer.mark()
        load.fill(self._slots[slot])
        packed = tracer.mark()
        tracer.device(f"pack slot {slot}", f"load {load.number}", start, packed)
        if load.hashes:
            load.hashes[slot].add_to(load.sums)
            tracer.device(f"hash slot {slot}", f"load {load.number}", packed, tracer.mark())
        ready = self._ready[slot]
        if ready is not None:
            ready.record()
        tracer.add("prepare (host)", f"load {load.number}", began, time.monotonic())
        return Filled(slot, load, ready)

    def _take_sums(self) -> None:
        """The window's sums go to the host, in stream order; then the device has room for the next window's."""
        window = self._windows[self._window]
        self._host_sums[window].copy_(self._sums[: window.stop - window.start], non_blocking=True)
        self._sums.zero_()

    def _sums_of_packets(self) -> Ints:
        """Hash sums of all packets that were packed, after the last _take_sums()."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return self._host_sums.numpy()

    def _account(self, held_bytes: int) -> int:
        declared = self._source.temporary_bytes
        if held_bytes > declared:
            raise WatermarkError(
                f"the weight source holds {held_bytes} temporary bytes, it declared at most {declared}"
            )
        peak = self._staging.numel() + self._reserved_bytes(declared)
        if peak > self._watermark_bytes:
            raise WatermarkError(
                f"a publish would hold {peak} temporary bytes, weight_sync.watermark_bytes={self._watermark_bytes}"
            )
        return peak

    def _recover_slots(self) -> None:
        """Try again to close failed writes that an earlier publish could not close."""
        for slot, sessions in list(self._quarantined.items()):
            for session in sessions:
                self._transport.reset(session)
            del self._quarantined[slot]

    def _enter_thread(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _close_links(self) -> None:
        if self._links is not None:
            self._links.shutdown(wait=True)
            self._links = None


def _cut(tasks: Sequence[Task], slot_bytes: int, limits: Staging) -> list[tuple[Packet, ...]]:
    """Slot loads in schedule order: each as many packets as fit and may be, aligned."""
    loads: list[list[Packet]] = []
    used = slot_bytes
    for group in same_bytes(tasks):
        if used + group[0].num_bytes > slot_bytes or len(loads[-1]) == limits.max_load_packets(len(loads) - 1):
            loads.append([])
            used = 0
        loads[-1].append(Packet(used, tuple(group)))
        used += aligned(group[0].num_bytes)
    return [tuple(packets) for packets in loads]
