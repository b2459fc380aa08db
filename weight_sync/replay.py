"""One publish of one trainer rank under way: slots in turn, packed by the caller's thread, written by another.

Owns the overlap of packing with writing, the time that each replica has, what becomes of one whose link fails, and the
count of what was sent. Does not own: staging and loads (`slots.py`), which outlive it, nor the schedule (`pipeline.py`,
its only caller; the picture is there).

Invariant: a slot is packed again only when every write from it is over; a replica that failed gets no further write.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from weight_sync.columns import Ints
from weight_sync.errors import TransportError
from weight_sync.layout import Binding
from weight_sync.slots import Batch, Destination, Filled, Load, Slots
from weight_sync.staging import NUM_SLOTS
from weight_sync.sums import Sums
from weight_sync.trace import Span, Tracer
from weight_sync.transport.base import Transport

logger = logging.getLogger(__name__)

WAIT_LOG_S = 30.0
"""How often a wait says what it waits for."""


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
    """The state of one Pipeline.run: the slots in turn, the writer thread, who is out, what was sent.

    Args:
        slots: What is packed and written.
        transport: Writes.
        links: Threads for the sessions of a load.
        bindings: Where the live replicas' ranks are.
        budgets_s: Per replica: the longest that writes to it may take in all.
        prepared: The first loads.
        result: Filled.
    """

    def __init__(
        self,
        slots: Slots,
        transport: Transport,
        links: ThreadPoolExecutor,
        bindings: Mapping[Destination, Binding],
        budgets_s: Mapping[int, float],
        prepared: Prepared,
        result: PipelineResult,
    ) -> None:
        self._slots = slots
        self._transport = transport
        self._links = links
        self._bindings = bindings
        self._budgets_s = budgets_s
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[tuple[Filled, list[Destination]] | None] = queue.SimpleQueue()
        self._addresses = {
            dest: entries.addresses(bindings[dest]) for dest, entries in slots.entries.items() if dest in bindings
        }
        self._prepared = prepared
        self._tracer = prepared.tracer
        self._writer_error: BaseException | None = None
        self._written: dict[Destination, list[slice]] = {}
        """The entries that reached each destination."""
        self._result = result

    @torch.no_grad()
    def replay(self) -> None:
        """Send what is prepared, and pack every other load in order while the writer thread sends the one before."""
        ready = {filled.load.number: filled for filled in self._prepared.filled}
        loads = [load for load in self._slots.loads if self._wanted(load)]
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
                    filled = self._slots.pack(slot, load, self._tracer)
                    self._result.prepare_s += time.monotonic() - began
                self._filled.put((filled, self._wanted(load)))
            self._slots.take_sums()
        finally:
            self._filled.put(None)
            writer.join()
            self._count()
        if self._writer_error is not None:
            raise self._writer_error

    def _wanted(self, load: Load) -> list[Destination]:
        return [dest for dest in load.batches if dest in self._bindings and dest[0] not in self._result.errors]

    def _next_slot(self) -> int | None:
        """A slot that may be packed; None when the writer stopped or every slot is quarantined."""
        waited_s = 0.0
        while True:
            try:
                return self._free.get(timeout=WAIT_LOG_S)
            except queue.Empty:
                waited_s += WAIT_LOG_S
                logger.warning(
                    "packing waits %.0f s for a staging slot; writes so far: %s s", waited_s, self._result.write_s
                )

    def _write_all(self) -> None:
        """The writer thread: loads in order, each to all its sessions at once. Never leaves packing waiting."""
        try:
            self._slots.enter_thread()
            while (item := self._filled.get()) is not None:
                filled, wanted = item
                self._write_load(filled, wanted)
                if filled.slot not in self._slots.quarantined:
                    self._free.put(filled.slot)
                elif len(self._slots.quarantined) == NUM_SLOTS:
                    raise TransportError("no staging slot is left: earlier failed writes cannot be closed yet")
        except BaseException as e:  # handed to the caller's thread by replay()
            self._writer_error = e
            self._free.put(None)

    def _write_load(self, filled: Filled, wanted: Sequence[Destination]) -> None:
        if filled.ready is not None:
            began = time.monotonic()
            filled.ready.synchronize()
            self._result.prepare_s += time.monotonic() - began
        batches = {dest: filled.load.batches[dest] for dest in wanted if dest[0] not in self._result.errors}
        began = time.monotonic()
        outcomes = self._write_destinations(filled.slot, batches)
        self._result.busy_write_s += time.monotonic() - began
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
                self._result.errors.setdefault(dest[0], f"{type(error).__name__}: {error}")
                self._close_failed(filled.slot, self._bindings[dest].session)
            else:
                self._written.setdefault(dest, []).append(batches[dest].span)
        for replica, seconds in spent.items():
            self._result.write_s[replica] = self._result.write_s.get(replica, 0.0) + seconds

    def _write_destinations(
        self, slot: int, batches: Mapping[Destination, Batch]
    ) -> dict[Destination, tuple[float, TransportError | None]]:
        """All sessions at once; one alone needs no other thread."""
        if len(batches) == 1:
            return {dest: self._write_destination(dest, slot, batch) for dest, batch in batches.items()}
        futures = {
            dest: self._links.submit(self._write_destination, dest, slot, batch) for dest, batch in batches.items()
        }
        return {dest: future.result() for dest, future in futures.items()}

    def _write_destination(self, dest: Destination, slot: int, batch: Batch) -> tuple[float, TransportError | None]:
        """One session's part of a load. Returns its seconds and what went wrong."""
        binding = self._bindings[dest]
        remaining_s = self._budgets_s[dest[0]] - self._result.write_s.get(dest[0], 0.0)
        began = time.monotonic()
        try:
            self._transport.write(
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
        hashes = self._slots.sums_of_packets()
        for dest, spans in self._written.items():
            entries, num_written = self._slots.entries[dest], sum(span.stop - span.start for span in spans)
            at: slice | Ints = slice(None)
            if num_written < len(entries.sizes):
                at = np.concatenate([np.arange(span.start, span.stop) for span in spans])
            sizes = entries.sizes[at]
            self._result.sums.add(entries.columns[at], sizes, hashes[entries.packets[at]])
            self._result.num_bytes += int(sizes.sum())

    def _close_failed(self, slot: int, session: str) -> None:
        """No write is running now. Make sure that none of the failed one ever reads this slot again."""
        try:
            self._transport.reset(session)
        except TransportError as e:
            logger.error("slot %d stays quarantined: %s", slot, e)
            self._slots.quarantined.setdefault(slot, []).append(session)
