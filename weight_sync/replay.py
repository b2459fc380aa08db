"""One publish of one trainer rank under way: slots in turn, packed by the caller's thread, written by another.

Owns the overlap of packing with writing, the time that each replica has, what becomes of one whose link fails, and the
count of what was sent. Does not own: staging and schedule, which outlive it (`pipeline.py`, its only caller; the
picture is there).

Invariant: a slot is packed again only when every write from it is over; a replica that failed gets no further write.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from weight_sync.columns import Ints
from weight_sync.errors import TransportError
from weight_sync.integrity import RangeHashes
from weight_sync.layout import Binding
from weight_sync.packing import FillSlot, Packet
from weight_sync.staging import NUM_SLOTS
from weight_sync.sums import Places, Sums
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
class Batch:
    """What one destination gets of a load: the arguments of one write, all but where the engine is."""

    span: slice
    """Its part of the destination's entries."""
    sources: tuple[list[int], ...]
    """Addresses, by the slot that the load is in."""
    sizes: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """All writes to one destination in schedule order, in columns."""

    params: tuple[str, ...]
    param: Ints
    """Number in `params`."""
    offset: Ints
    """Of the first byte in the parameter."""
    sizes: Ints
    packets: Ints
    """Number in the schedule."""
    columns: Ints
    """Where the parameter stands in the sums."""

    def addresses(self, binding: Binding) -> list[int]:
        """Where each write goes."""
        starts = np.array([binding.addresses[param] for param in self.params], np.int64)
        return (starts[self.param] + self.offset).tolist()


@dataclass(frozen=True, slots=True)
class Load:
    """What one slot carries at once, how it is filled, its packets' hashes in either slot, and its writes. All made
    once a plan: a small watermark makes thousands of loads, and the link waits for what one costs in Python."""

    number: int
    packets: tuple[Packet, ...]
    fill: FillSlot
    hashes: tuple[RangeHashes, ...]
    window: int
    sums: torch.Tensor
    """Of the hashes; the place is the load's while its window is on the device."""
    batches: dict[Destination, Batch]


def compile_writes(
    cut: Sequence[Sequence[Packet]], slot_addresses: Sequence[int], places: Places
) -> tuple[list[dict[Destination, Batch]], dict[Destination, Entries]]:
    """The writes of a schedule: by load and destination, and all of each destination."""
    rows: dict[Destination, list[tuple[str, int, int, int]]] = {}
    batches: list[dict[Destination, Batch]] = []
    number = 0
    for packets in cut:
        starts: dict[Destination, list[int]] = {}
        for packet in packets:
            for task in packet.tasks:
                dest = (task.replica, task.dest_rank)
                starts.setdefault(dest, []).append(packet.offset_bytes)
                rows.setdefault(dest, []).append((task.param, task.dest_offset_bytes, task.num_bytes, number))
            number += 1
        load: dict[Destination, Batch] = {}
        for dest, offsets in starts.items():
            span = slice(len(rows[dest]) - len(offsets), len(rows[dest]))
            sources = tuple([address + offset for offset in offsets] for address in slot_addresses)
            load[dest] = Batch(span, sources, [size for _, _, size, _ in rows[dest][span]])
        batches.append(load)
    entries: dict[Destination, Entries] = {}
    for dest, own in rows.items():
        names = [name for name, _, _, _ in own]
        known = {name: place for place, name in enumerate(dict.fromkeys(names))}
        param = np.array([known[name] for name in names], np.int64)
        columns = np.array([places.column(dest, name) for name in known], np.int64)
        offset, sizes, packets = np.array([numbers for _, *numbers in own], np.int64).T
        entries[dest] = Entries(tuple(known), param, offset, sizes, packets, columns[param])
    return batches, entries


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
        self._filled: queue.SimpleQueue[tuple[Filled, list[Destination]] | None] = queue.SimpleQueue()
        self._addresses = {
            dest: entries.addresses(bindings[dest]) for dest, entries in owner._entries.items() if dest in bindings
        }
        self._prepared = prepared
        self._tracer = prepared.tracer
        self._writer_error: BaseException | None = None
        self._written: dict[Destination, list[slice]] = {}
        """The entries that reached each destination."""
        self.result = PipelineResult(Sums(owner._places), peak_bytes=prepared.peak_bytes, prepare_s=prepared.prepare_s)

    @torch.no_grad()
    def replay(self, loads: Sequence[Load]) -> None:
        """Send what is prepared, and pack every other load in order while the writer thread sends the one before."""
        ready = {filled.load.number: filled for filled in self._prepared.filled}
        loads = [load for load in loads if self._wanted(load)]
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
                    if not self._wanted(load):  # who wanted it has failed
                        continue
                    slot = self._next_slot()
                    if slot is None:
                        break
                    began = time.monotonic()
                    filled = self._owner._pack(slot, load, self._tracer)
                    self.result.prepare_s += time.monotonic() - began
                self._filled.put((filled, self._wanted(load)))
        finally:
            self._filled.put(None)
            self._owner._take_sums()
            writer.join()
            self._count()
        if self._writer_error is not None:
            raise self._writer_error

    def _wanted(self, load: Load) -> list[Destination]:
        return [dest for dest in load.batches if dest in self._bindings and dest[0] not in self.result.errors]

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

    def _write_all(self) -> None:
        """The writer thread: loads in order, each to all its sessions at once. Never leaves packing waiting."""
        try:
            self._owner._enter_thread()
            while (item := self._filled.get()) is not None:
                filled, wanted = item
                self._write_load(filled, wanted)
                if filled.slot not in self._owner._quarantined:
                    self._free.put(filled.slot)
                elif len(self._owner._quarantined) == NUM_SLOTS:
                    raise TransportError("no staging slot is left: earlier failed writes cannot be closed yet")
        except BaseException as e:  # handed to the caller's thread by replay()
            self._writer_error = e
            self._free.put(None)

    def _write_load(self, filled: Filled, wanted: Sequence[Destination]) -> None:
        if filled.ready is not None:
            began = time.monotonic()
            filled.ready.synchronize()
            self.result.prepare_s += time.monotonic() - began
        batches = {dest: filled.load.batches[dest] for dest in wanted if dest[0] not in self.result.errors}
        began = time.monotonic()
        outcomes = self._write_destinations(filled.slot, batches)
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
            else:
                self._written.setdefault(dest, []).append(batches[dest].span)
        for replica, seconds in spent.items():
            self.result.write_s[replica] = self.result.write_s.get(replica, 0.0) + seconds

    def _write_destinations(
        self, slot: int, batches: Mapping[Destination, Batch]
    ) -> dict[Destination, tuple[float, TransportError | None]]:
        """All sessions at once; one alone needs no other thread."""
        if len(batches) == 1:
            return {dest: self._write_destination(dest, slot, batch) for dest, batch in batches.items()}
        links = self._owner._links
        assert links is not None
        futures = {dest: links.submit(self._write_destination, dest, slot, batch) for dest, batch in batches.items()}
        return {dest: future.result() for dest, future in futures.items()}

    def _write_destination(self, dest: Destination, slot: int, batch: Batch) -> tuple[float, TransportError | None]:
        """One session's part of a load. Returns its seconds and what went wrong."""
        binding = self._bindings[dest]
        remaining_s = self._budgets_s[dest[0]] - self.result.write_s.get(dest[0], 0.0)
        began = time.monotonic()
        try:
            self._owner._transport.write(
                binding.session,
                batch.sources[slot],
                self._addresses[dest][batch.span],
                batch.sizes,
                timeout_s=max(remaining_s, 0.0),
            )
        except TransportError as e:
            logger.warning("replica %d, rank %d: %s", dest[0], dest[1], e)
            return time.monotonic() - began, e
        return time.monotonic() - began, None

    def _count(self) -> None:
        """Add up what was written. The writer has ended."""
        hashes = self._owner._sums_of_packets()
        for dest, spans in self._written.items():
            entries, num_written = self._owner._entries[dest], sum(span.stop - span.start for span in spans)
            at: slice | Ints = slice(None)
            if num_written < len(entries.sizes):
                at = np.concatenate([np.arange(span.start, span.stop) for span in spans])
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
