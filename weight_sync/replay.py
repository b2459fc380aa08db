"""One publish of one trainer rank under way: slots in turn, packed by the caller's thread, written by another.

Owns the overlap of packing with writing, the time that each replica has, what becomes of one whose link fails, and the
count of what was sent. Does not own: staging and schedule, which outlive it (`pipeline.py`, its only caller; the
picture is there).

Invariant: a slot is packed again only when every write from it is over; a replica that failed gets no further write.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from weight_sync.columns import Ints
from weight_sync.errors import TransportError
from weight_sync.integrity import RangeHashes
from weight_sync.layout import Binding
from weight_sync.packing import FillSlot, Packet
from weight_sync.plan import Task
from weight_sync.staging import NUM_SLOTS
from weight_sync.sums import Sums
from weight_sync.trace import Span, Tracer

if TYPE_CHECKING:
    from weight_sync.pipeline import Pipeline

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
class Load:
    """What one slot carries at once, how it is filled, and the packets' hashes in either slot."""

    number: int
    packets: tuple[Packet, ...]
    fill: FillSlot
    hashes: tuple[RangeHashes, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one destination gets of a load: packets by number, and the arguments of one write."""

    packets: list[int]
    columns: list[int]
    """Where their parameters stand in the sums."""
    sources: list[int]
    destinations: list[int]
    sizes: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """All batches of a load, one behind the other, as what is added to the sums when they are written."""

    spans: dict[Destination, slice]
    columns: Ints
    sizes: Ints
    packets: Ints

    @classmethod
    def of(cls, batches: Mapping[Destination, Batch]) -> Entries:
        """Made by the caller's thread, while the load before is written."""
        stops = list(itertools.accumulate(len(batch.sizes) for batch in batches.values()))

        def joined(lists: Iterable[list[int]]) -> Ints:
            return np.array(list(itertools.chain.from_iterable(lists)), np.int64)

        return cls(
            dict(zip(batches, map(slice, [0, *stops], stops))),
            joined(batch.columns for batch in batches.values()),
            joined(batch.sizes for batch in batches.values()),
            joined(batch.packets for batch in batches.values()),
        )

    def where(self, written: Collection[Destination]) -> slice | Ints:
        """The entries of those batches."""
        if len(written) == len(self.spans):
            return slice(None)
        return np.concatenate([np.arange(self.spans[dest].start, self.spans[dest].stop) for dest in written])


@dataclass(frozen=True, slots=True)
class Filled:
    """A packed slot; the device may still be at work on it."""

    slot: int
    load: Load
    ready: torch.cuda.Event | None


@dataclass(slots=True)
class Prepared:
    """What stands ready before a byte may be written."""

    version: int
    tracer: Tracer
    filled: list[Filled] = field(default_factory=list)
    peak_bytes: int = 0
    prepare_s: float = 0.0
    error: Exception | None = None


class Replay:
    """The state of one Pipeline.run: the slots in turn, the writer thread, who is out, what was sent."""

    def __init__(
        self,
        owner: Pipeline,
        bindings: Mapping[Destination, Binding],
        budgets_s: Mapping[int, float],
        prepared: Prepared,
    ) -> None:
        self._owner = owner
        self._bindings = bindings
        self._budgets_s = budgets_s
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[tuple[Filled, dict[Destination, Batch], Entries] | None] = queue.SimpleQueue()
        self._prepared = prepared
        self._tracer = prepared.tracer
        self._writer_error: BaseException | None = None
        self._written: deque[tuple[Entries, list[Destination], Ints]] = deque()
        """Per load: its batches, whom they reached, and the hashes of its packets."""
        self.result = PipelineResult(Sums(owner._places), peak_bytes=prepared.peak_bytes, prepare_s=prepared.prepare_s)

    def replay(self, loads: Sequence[Load]) -> None:
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
                batches = self._batches(filled)
                self._filled.put((filled, batches, Entries.of(batches)))
                self._count()
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

    def _batches(self, filled: Filled) -> dict[Destination, Batch]:
        """The writes of a load. Made by the caller's thread, so that the link waits for nothing but bytes."""
        first_address = self._owner._slot(filled.slot).data_ptr()
        batches: dict[Destination, Batch] = {}
        for number, packet in enumerate(filled.load.packets):
            for task in self._wanted(packet.tasks):
                dest = (task.replica, task.dest_rank)
                batch = batches.get(dest)
                if batch is None:
                    batch = batches[dest] = Batch([], [], [], [], [])
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
                filled, batches, entries = item
                self._write_load(filled, batches, entries)
                if filled.slot not in self._owner._quarantined:
                    self._free.put(filled.slot)
                elif len(self._owner._quarantined) == NUM_SLOTS:
                    raise TransportError("no staging slot is left: earlier failed writes cannot be closed yet")
        except BaseException as e:  # handed to the caller's thread by replay()
            self._writer_error = e
            self._free.put(None)

    def _write_load(self, filled: Filled, batches: Mapping[Destination, Batch], entries: Entries) -> None:
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
        spent: dict[int, float] = {}
        for dest, (seconds, error) in outcomes.items():
            spent[dest[0]] = max(seconds, spent.get(dest[0], 0.0))
            if error is not None:
                self.result.errors.setdefault(dest[0], f"{type(error).__name__}: {error}")
                self._close_failed(filled.slot, self._bindings[dest].session)
        written = [dest for dest, (_, error) in outcomes.items() if error is None]
        if written:
            hashes = self._owner._host_sums[filled.slot, : len(filled.load.packets)].numpy().copy()
            self._written.append((entries, written, hashes))
        for replica, seconds in spent.items():
            self.result.write_s[replica] = self.result.write_s.get(replica, 0.0) + seconds

    def _write_destinations(
        self, batches: Mapping[Destination, Batch]
    ) -> dict[Destination, tuple[float, TransportError | None]]:
        """All sessions at once; one alone needs no other thread."""
        if len(batches) == 1:
            return {dest: self._write_destination(dest, batch) for dest, batch in batches.items()}
        links = self._owner._links
        assert links is not None
        futures = {dest: links.submit(self._write_destination, dest, batch) for dest, batch in batches.items()}
        return {dest: future.result() for dest, future in futures.items()}

    def _write_destination(self, dest: Destination, batch: Batch) -> tuple[float, TransportError | None]:
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
        """Add up what has been written so far. Load by load: at the end of a publish every rank waits for it."""
        while self._written:
            entries, written, hashes = self._written.popleft()
            at = entries.where(written)
            sizes = entries.sizes[at]
            self.result.sums.add(entries.columns[at], sizes, hashes[entries.packets[at]])
            self.result.num_bytes += int(sizes.sum())

    def _close_failed(self, slot: int, session: str) -> None:
        """No write is running now. Make sure that none of the failed one ever reads this slot again."""
        try:
            self._owner._transport.reset(session)
        except TransportError as e:
            logger.error("slot %d stays quarantined: %s", slot, e)
            self._owner._quarantined.setdefault(slot, []).append(session)
