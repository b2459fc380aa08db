"""One trainer rank's part of a publish: pack, hash, write, with temporary memory under the watermark.

Owns the staging buffer, the cutting of a schedule into slot loads, the overlap of packing with writing, and what
becomes of a replica whose link fails. Does not own: which bytes go where (`plan.py`), how a slot is filled
(`packing.py`), the values (`source.py`), links (`transport/`), or agreement with replicas (`publisher.py`, its only
caller).

    schedule:  [t0 t1 t2 | t3 t4 | t5 t6 t7 ...]          a load = consecutive tasks that fit one slot; static, cut once

                      prepare(): while engines pause            run(): once they stand still
    caller's thread   pack+hash load 0 -> slot 0 | load 1 -> slot 1 | (slot 0 free?) load 2 -> slot 0 | ...
    writer thread                                                   | write load 0    | write load 1  | ...
    link threads                                     one batched write a session, all sessions of a load at once

Watermark. Everything temporary counts, and all of it is known before a byte moves:

    staging buffer (two slots) + hash sums and scratch + source.temporary_bytes  <=  watermark_bytes

A slot is handed to the writer after the device finished packing it (links do not order with torch streams) and comes
back when every write from it is over. "Over" means that write() returned, or that it failed and transport.reset()
returned; a slot whose failed write cannot be closed is quarantined: it is never packed again until a later reset
succeeds. A replica whose write failed gets no further task; the others go on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from weight_sync.errors import PlanError, TransportError, WatermarkError
from weight_sync.integrity import RangeHashes
from weight_sync.layout import Binding
from weight_sync.packing import FillSlot, Packet, compile_reads, packed_reads, same_bytes
from weight_sync.plan import Task
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
from weight_sync.sums import Places, Sums
from weight_sync.trace import Span, Tracer
from weight_sync.transport.base import Transport

logger = logging.getLogger(__name__)

WAIT_LOG_S = 30.0
"""How often a wait says what it waits for."""

Destination = tuple[int, int]
"""(replica, destination rank)."""


@dataclass(slots=True)
class PipelineResult:
    """What one rank did in one publish."""

    sums: Sums
    """Per destination and parameter: bytes written, and the sum of their hashes (0 where hashes are off)."""
    errors: dict[int, str] = field(default_factory=dict)
    """Per replica that this rank could not serve in full: why."""
    write_s: dict[int, float] = field(default_factory=dict)
    """Per replica: seconds that writes to it took."""
    num_bytes: int = 0
    """Bytes that crossed, over all replicas."""
    prepare_s: float = 0.0
    """Seconds of packing and hashing, the wait for the device included."""
    busy_write_s: float = 0.0
    """Seconds during which something was being written."""
    peak_bytes: int = 0
    """Most temporary memory held at once."""
    spans: list[Span] = field(default_factory=list)
    """What it spent its time on; empty unless asked for."""


@dataclass(frozen=True, slots=True)
class _Load:
    """What one slot carries at once, how it is filled, and the packets' hashes in either slot."""

    number: int
    packets: tuple[Packet, ...]
    fill: FillSlot
    hashes: tuple[RangeHashes, ...]


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one destination gets of a load: packets by number, and the arguments of one write."""

    packets: list[int]
    columns: list[int]
    """Where their parameters stand in the sums."""
    sources: list[int]
    destinations: list[int]
    sizes: list[int]


@dataclass(frozen=True, slots=True)
class _Filled:
    """A packed slot; the device may still be at work on it."""

    slot: int
    load: _Load
    ready: torch.cuda.Event | None


@dataclass(slots=True)
class _Prepared:
    """What stands ready before a byte may be written."""

    version: int
    tracer: Tracer
    filled: list[_Filled] = field(default_factory=list)
    peak_bytes: int = 0
    prepare_s: float = 0.0
    error: Exception | None = None


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
        # Sums go to the host in stream order: asking the device for them would wait for the packing of the next load.
        self._sums = torch.zeros(NUM_SLOTS, max_packets(watermark_bytes), dtype=torch.int64, device=self._device)
        self._host_sums = torch.zeros(self._sums.shape, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._loads: list[_Load] = []
        self._places = Places({})
        self._slot_bytes = 0
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._quarantined: dict[int, list[str]] = {}
        self._prepared: _Prepared | None = None
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

    @property
    def places(self) -> Places:
        """Of every parameter that this rank writes to; the places of its results' sums."""
        return self._places

    def load(self, tasks: Sequence[Task]) -> None:
        """Take this rank's schedule: cut it into slot loads, compile them, allocate and register staging. Once a plan.

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
        self._loads = []  # they refer to the staging of an earlier plan
        self._places = Places.of_tasks(tasks)
        self._staging = torch.empty(NUM_SLOTS * self._slot_bytes, dtype=torch.uint8, device=self._device)
        if self._slot_bytes:
            self._transport.register([self._staging])
        self._loads = [
            _Load(number, packets, compile_reads(self._source, packed_reads(packets)), self._hashes(packets))
            for number, packets in enumerate(_cut(tasks, self._slot_bytes, limits))
        ]
        self._close_links()
        num_destinations = len({(task.replica, task.dest_rank) for task in tasks})
        self._links = ThreadPoolExecutor(
            max_workers=max(1, min(num_destinations, MAX_LINK_THREADS)),
            thread_name_prefix="weight-sync-link",
            initializer=self._enter_thread,
        )

    def prepare(self, version: int, *, trace: bool = False) -> None:
        """Begin the source and pack the first loads, one a slot, before it is known who will receive them.

        Collective in source.begin(). What goes wrong is kept for run(); either that or cancel() must follow.
        """
        self._prepared = prepared = _Prepared(version, Tracer(self._device, is_on=trace))
        try:
            with prepared.tracer.host("gather", "source.begin"):
                held = self._source.begin(version)
            prepared.peak_bytes = self._account(held)
            self._recover_slots()
            began = time.monotonic()
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
        run = _Run(self, bindings, budgets_s, prepared)
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
        self._loads = []
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._device)

    def _slot(self, slot: int) -> torch.Tensor:
        return self._staging[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

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
        return self._slot(slot)[packet.offset_bytes : packet.offset_bytes + packet.tasks[0].num_bytes]

    def _pack(self, slot: int, load: _Load, tracer: Tracer) -> _Filled:
        """Fill a slot from the source and hash it; the device may still be at work on return."""
        began = time.monotonic()
        start = tracer.mark()
        with torch.no_grad():
            load.fill(self._slot(slot))
        packed = tracer.mark()
        tracer.device(f"pack slot {slot}", f"load {load.number}", start, packed)
        if load.hashes:
            sums = self._sums[slot, : len(load.packets)]
            sums.zero_()
            load.hashes[slot].add_to(sums)
            self._host_sums[slot, : len(load.packets)].copy_(sums, non_blocking=True)
            tracer.device(f"hash slot {slot}", f"load {load.number}", packed, tracer.mark())
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        tracer.add("prepare (host)", f"load {load.number}", began, time.monotonic())
        return _Filled(slot, load, ready)

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


class _Run:
    """The state of one Pipeline.run: the slots in turn, the writer thread, who is out, what was sent."""

    def __init__(
        self,
        owner: Pipeline,
        bindings: Mapping[Destination, Binding],
        budgets_s: Mapping[int, float],
        prepared: _Prepared,
    ) -> None:
        self._owner = owner
        self._bindings = bindings
        self._budgets_s = budgets_s
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[tuple[_Filled, dict[Destination, _Batch]] | None] = queue.SimpleQueue()
        self._prepared = prepared
        self._tracer = prepared.tracer
        self._writer_error: BaseException | None = None
        self._written: list[tuple[_Batch, list[int]]] = []
        self.result = PipelineResult(Sums(owner._places), peak_bytes=prepared.peak_bytes, prepare_s=prepared.prepare_s)

    def replay(self, loads: Sequence[_Load]) -> None:
        """Send what is prepared, and pack every other load in order while the writer thread sends the one before."""
        ready = {filled.load.number: filled for filled in self._prepared.filled}
        loads = [load for load in loads if any(self._wanted(packet.tasks) for packet in load.packets)]
        if not loads:
            return
        sent = {load.number for load in loads}
        taken = {filled.slot for number, filled in ready.items() if number in sent}
        for slot in set(range(NUM_SLOTS)) - taken:
            self._free.put(slot)
        writer = threading.Thread(target=self._write_all, name="weight-sync-writer", daemon=True)
        writer.start()
        try:
            for load in loads:
                filled = ready.get(load.number)
                if filled is None:
                    if not any(self._wanted(packet.tasks) for packet in load.packets):  # who wanted it has failed
                        continue
                    slot = self._next_slot()
                    if slot is None:
                        break
                    began = time.monotonic()
                    filled = self._owner._pack(slot, load, self._tracer)
                    self.result.prepare_s += time.monotonic() - began
                self._filled.put((filled, self._batches(filled)))
        finally:
            self._filled.put(None)
            writer.join()
            self._count()
        if self._writer_error is not None:
            raise self._writer_error

    def _wanted(self, tasks: Sequence[Task]) -> tuple[Task, ...]:
        return tuple(
            t for t in tasks if (t.replica, t.dest_rank) in self._bindings and t.replica not in self.result.errors
        )

    def _next_slot(self) -> int | None:
        """A slot that may be packed; None when the writer stopped or every slot is quarantined."""
        waited_s = 0.0
        while True:
            try:
                return self._free.get(timeout=WAIT_LOG_S)
            except queue.Empty:
                waited_s += WAIT_LOG_S
                logger.warning(
                    "packing waits %.0f s for a staging slot; writes so far: %s s", waited_s, self.result.write_s
                )

    def _batches(self, filled: _Filled) -> dict[Destination, _Batch]:
        """The writes of a load. Made by the caller's thread, so that the link waits for nothing but bytes."""
        first_address = self._owner._slot(filled.slot).data_ptr()
        batches: dict[Destination, _Batch] = {}
        for number, packet in enumerate(filled.load.packets):
            for task in self._wanted(packet.tasks):
                dest = (task.replica, task.dest_rank)
                batch = batches.get(dest)
                if batch is None:
                    batch = batches[dest] = _Batch([], [], [], [], [])
                batch.packets.append(number)
                batch.columns.append(self._owner._places.column(dest, task.param))
                batch.sources.append(first_address + packet.offset_bytes)
                batch.destinations.append(self._bindings[dest].addresses[task.param] + task.dest_offset_bytes)
                batch.sizes.append(task.num_bytes)
        return batches

    def _write_all(self) -> None:
        """The writer thread: loads in order, each to all its sessions at once. Never leaves packing waiting."""
        try:
            self._owner._enter_thread()
            while (item := self._filled.get()) is not None:
                filled, batches = item
                self._write_load(filled, batches)
                if filled.slot not in self._owner._quarantined:
                    self._free.put(filled.slot)
                elif len(self._owner._quarantined) == NUM_SLOTS:
                    raise TransportError("no staging slot is left: earlier failed writes cannot be closed yet")
        except BaseException as e:  # handed to the caller's thread by replay()
            self._writer_error = e
            self._free.put(None)

    def _write_load(self, filled: _Filled, batches: Mapping[Destination, _Batch]) -> None:
        if filled.ready is not None:
            began = time.monotonic()
            filled.ready.synchronize()
            self.result.prepare_s += time.monotonic() - began
        batches = {dest: batch for dest, batch in batches.items() if dest[0] not in self.result.errors}
        began = time.monotonic()
        outcomes = self._write_destinations(batches)
        self.result.busy_write_s += time.monotonic() - began
        for dest, (seconds, _) in outcomes.items() if self._tracer.is_on else ():
            self._tracer.add(
                f"write replica {dest[0]} rank {dest[1]}",
                f"load {filled.load.number}",
                began,
                began + seconds,
                bytes=sum(batches[dest].sizes),
            )
        hashes: list[int] = self._owner._host_sums[filled.slot, : len(filled.load.packets)].tolist()
        spent: dict[int, float] = {}
        for dest, (seconds, error) in outcomes.items():
            spent[dest[0]] = max(seconds, spent.get(dest[0], 0.0))
            if error is None:
                self._written.append((batches[dest], hashes))
            else:
                self.result.errors.setdefault(dest[0], f"{type(error).__name__}: {error}")
                self._close_failed(filled.slot, self._bindings[dest].session)
        for replica, seconds in spent.items():
            self.result.write_s[replica] = self.result.write_s.get(replica, 0.0) + seconds

    def _write_destinations(
        self, batches: Mapping[Destination, _Batch]
    ) -> dict[Destination, tuple[float, TransportError | None]]:
        """All sessions at once; one alone needs no other thread."""
        if len(batches) == 1:
            return {dest: self._write_destination(dest, batch) for dest, batch in batches.items()}
        links = self._owner._links
        assert links is not None
        futures = {dest: links.submit(self._write_destination, dest, batch) for dest, batch in batches.items()}
        return {dest: future.result() for dest, future in futures.items()}

    def _write_destination(self, dest: Destination, batch: _Batch) -> tuple[float, TransportError | None]:
        """One session's part of a load. Returns its seconds and what went wrong."""
        binding = self._bindings[dest]
        remaining_s = self._budgets_s[dest[0]] - self.result.write_s.get(dest[0], 0.0)
        began = time.monotonic()
        try:
            self._owner._transport.write(
                binding.session,
                batch.sources,
                batch.destinations,
                batch.sizes,
                timeout_s=max(remaining_s, 0.0),
            )
        except TransportError as e:
            logger.warning("replica %d, rank %d: %s", dest[0], dest[1], e)
            return time.monotonic() - began, e
        return time.monotonic() - began, None

    def _count(self) -> None:
        """Add up what was written. At the end: between two writes the link would stand still for it."""
        columns: list[int] = []
        sizes: list[int] = []
        hashes: list[int] = []
        for batch, packet_hashes in self._written:
            columns += batch.columns
            sizes += batch.sizes
            hashes += map(packet_hashes.__getitem__, batch.packets)
        self.result.sums.add(columns, sizes, hashes)
        self.result.num_bytes = sum(sizes)

    def _close_failed(self, slot: int, session: str) -> None:
        """No write is running now. Make sure that none of the failed one ever reads this slot again."""
        try:
            self._owner._transport.reset(session)
        except TransportError as e:
            logger.error("slot %d stays quarantined: %s", slot, e)
            self._owner._quarantined.setdefault(slot, []).append(session)


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
