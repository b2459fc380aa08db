"""Runs one trainer rank's part of one publish: the caller's thread packs slots in turn, and lanes write them.

A lane is a thread (of `staging_slots.py`, which keeps them ready) and the destinations that it writes to, one after
the other. Lanes do not wait for each other: one sends the next load while another still sends its part of this one.

Owns the overlap of packing with writing, the time that each replica has, what happens to a replica whose link fails,
and the count of what was sent. Does not own: staging, loads and whose turn a slot is (`staging_slots.py`), nor the
schedule (`pipeline.py`, its only caller, which has a diagram).

Invariants: a slot is packed again only when every write from it is over; a replica that failed gets no further write;
a failed write is closed while no other write is running.
"""

import logging
import queue
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
import torch

from slipstream.conf.failures import undone_by
from slipstream.weight_sync.changes import stream_bytes
from slipstream.weight_sync.errors import TransportError
from slipstream.weight_sync.layout import Binding, Destination
from slipstream.weight_sync.pipeline.landings import ChangeSlots, Landing
from slipstream.weight_sync.pipeline.staging_slots import Filled, FreeSlots, Load, SharedLock, Slots
from slipstream.weight_sync.pipeline.sums import Sums
from slipstream.weight_sync.pipeline.trace import Span, Tracer
from slipstream.weight_sync.pipeline.writes import Batch
from slipstream.weight_sync.plan.budget import MAX_LINK_THREADS, NUM_SLOTS
from slipstream.weight_sync.plan.columns import Flags
from slipstream.weight_sync.transport.base import Transport

logger = logging.getLogger(__name__)

_Part = tuple[Filled, Sequence[Destination]]
"""The part of a load that one lane writes."""


@dataclass(slots=True)
class RankPublishReport:
    """What one rank did in one publish; it sends this to rank 0."""

    errors: dict[int, str] = field(default_factory=dict)
    """Per replica that this rank could not send everything to: why."""
    write_s: dict[int, float] = field(default_factory=dict)
    """Per replica: seconds of writing to the one of its ranks that took longest."""
    num_bytes: int = 0
    """Sent, to all replicas together."""
    prepare_s: float = 0.0
    """Seconds of packing and hashing, including the wait for the device."""
    busy_write_s: float = 0.0
    """Seconds during which something was being written."""
    peak_bytes: int = 0
    """The most temporary memory that was held at once."""
    spans: list[Span] = field(default_factory=list)
    """Empty unless asked for."""
    changes: dict[Destination, bytes] = field(default_factory=dict[Destination, bytes])
    """Per engine rank that got changes alone: what lies in its zone (landings.py)."""
    num_changed: int = 0
    num_compared: int = 0
    """Elements of this rank's that changed since the publish before, and that were compared."""


@dataclass(slots=True)
class PipelineResult:
    """What one rank did in one publish, and what it wrote."""

    sums: Sums
    """Per destination and parameter: bytes written, and the sum of their hashes (0 if hashes are off)."""
    report: RankPublishReport = field(default_factory=RankPublishReport)


@dataclass(slots=True)
class Prepared:
    """A publish before its engines have paused: nothing of them is written yet but their zones."""

    version: int
    tracer: Tracer
    result: PipelineResult
    filled: list[Filled] = field(default_factory=list)
    there: dict[Destination, Flags] = field(default_factory=dict[Destination, Flags])
    """Per engine rank that was sent changes ahead: which of the writes to it are not needed any more."""
    error: Exception | None = None

    def is_there(self, dest: Destination, batch: Batch) -> bool:
        """Whether nothing of a load has to be written to this engine rank any more."""
        return dest in self.there and bool(self.there[dest][batch.span].all())

    def take_back(self, destinations: Collection[Destination]) -> None:
        """Send these all loads after all, packed anew and in order: they hold something else than was believed."""
        for dest in destinations:
            del self.there[dest]
            self.result.sums.part(dest)[:] = 0
        self.filled.clear()


class Replay:
    """The state of one Pipeline.run: slots, lanes, failed replicas, and what was sent.

    Args:
        bindings: Where the live replicas' ranks are.
        budgets_s: Per replica: the longest that writes to one of its ranks may take in all.
        prepared: The first loads, what was sent ahead, and the result, which is filled in here.
        landings: This rank's part of the zones of engine ranks that get changes alone.
        merging: Engine ranks that get factors alone, and merge for themselves.
        is_ahead: The engines serve: what would go whole is left for another replay.
    """

    def __init__(
        self,
        slots: Slots,
        transport: Transport,
        bindings: Mapping[Destination, Binding],
        budgets_s: Mapping[int, float],
        prepared: Prepared,
        landings: Mapping[Destination, Landing],
        merging: Collection[Destination] = (),
        *,
        is_ahead: bool = False,
    ) -> None:
        self._slots, self._transport = slots, transport
        self._bindings, self._budgets_s, self._landings = bindings, budgets_s, landings
        self._merging, self._is_ahead = merging, is_ahead
        self._prepared, self._tracer = prepared, prepared.tracer
        self._result = result = prepared.result
        served = [dest for dest in slots.entries if dest in bindings]
        self._addresses = {dest: slots.entries[dest].addresses(bindings[dest]) for dest in served}
        self._lane_of = {dest: number % MAX_LINK_THREADS for number, dest in enumerate(served)}
        self._lanes = [queue.SimpleQueue[_Part | None]() for _ in range(min(len(served), MAX_LINK_THREADS))]
        """Per lane, the parts that it has to write."""
        self._write_lock = SharedLock()
        self._free = FreeSlots(slots.quarantined)
        self._seconds = {dest: result.report.write_s.get(dest[0], 0.0) for dest in served}
        """How long writes to each destination took."""
        self._written = {dest: np.zeros(len(slots.entries[dest].sizes), np.bool_) for dest in served}
        """The entries that reached each destination."""
        self._sent_bytes = dict.fromkeys(served, 0)

    @torch.no_grad()
    def replay(self) -> None:
        """Send the prepared loads, and pack the others in order while the lanes send earlier ones."""
        ready = {filled.load.number: filled for filled in self._prepared.filled}
        loads = [load for load in self._slots.loads if self._wanted(load)]
        if not loads:
            return
        sent = {load.number for load in loads}
        taken = {filled.slot for number, filled in ready.items() if number in sent}
        for slot in set(range(NUM_SLOTS)) - taken:
            self._free.give_back(slot)
        lanes: list[Future[float]] = []
        try:
            lanes += [thread.submit(self._run_lane, parts) for thread, parts in zip(self._slots.threads, self._lanes)]
            self._pack_all(loads, ready)
            self._slots.take_sums()
        finally:
            for parts in self._lanes:
                parts.put(None)
            wait(lanes)
            self._count()
        self._result.report.prepare_s += sum(lane.result() for lane in lanes)  # or raises what a lane raised

    def _pack_all(self, loads: Sequence[Load], ready: Mapping[int, Filled]) -> None:
        """Pack loads and give them to lanes as slots come back, until no slot or no replica is left."""
        for load in loads:
            filled = ready.get(load.number)
            if filled is None:
                if not self._wanted(load):  # all replicas that need it have failed
                    continue
                slot = self._free.take(self._seconds)
                if slot is None:
                    return
                began = time.monotonic()
                filled = self._slots.pack(slot, load, self._tracer, with_streams=bool(self._landings))
                self._result.report.prepare_s += time.monotonic() - began
            self._hand_over(filled)

    def _wanted(self, load: Load) -> list[Destination]:
        """Who has to be written a part of a load."""
        changes, errors = self._slots.changes, self._result.report.errors
        if self._is_ahead and (changes is None or not changes.is_worth_it(load.number)):
            return []
        return [
            dest
            for dest, batch in load.batches.items()
            if dest in self._bindings and dest[0] not in errors and not self._prepared.is_there(dest, batch)
        ]

    def _hand_over(self, filled: Filled) -> None:
        """Give a packed load to every lane that writes a part of it."""
        parts: dict[int, list[Destination]] = {}
        for dest in self._wanted(filled.load):
            parts.setdefault(self._lane_of[dest], []).append(dest)
        if not parts:
            self._free.give_back(filled.slot)
        filled.num_lanes = len(parts)
        for lane, destinations in parts.items():
            self._lanes[lane].put((filled, destinations))

    def _run_lane(self, parts: queue.SimpleQueue[_Part | None]) -> float:
        """In a lane's thread: write its parts in order. Returns its wait for the device. If it fails, it wakes the
        packing thread, which would otherwise wait for a slot forever."""
        waited_s = 0.0
        with undone_by(lambda _: self._free.end()):  # the error reaches the caller's thread through the future
            self._slots.enter_thread()
            while (part := parts.get()) is not None:
                filled, destinations = part
                waited_s += filled.wait_until_packed()
                for dest in destinations:
                    self._write(filled, dest)
                if filled.part_is_over():
                    self._free.give_back(filled.slot)
        return waited_s

    def _write(self, filled: Filled, dest: Destination) -> None:
        """Write one destination's part of a load, unless its replica has failed."""
        replica, binding, batch = dest[0], self._bindings[dest], filled.load.batches[dest]
        sources, addresses, sizes, are_there = self._pieces(filled, dest)
        error: TransportError | None = None
        with self._write_lock.writing():
            if replica in self._result.report.errors:
                return
            began = time.monotonic()
            left_s = max(self._budgets_s[replica] - self._seconds[dest], 0.0)
            try:
                if sizes:
                    self._transport.write(binding.session, sources, addresses, sizes, timeout_s=left_s)
            except TransportError as e:
                error = e
            stopped = time.monotonic()
        self._seconds[dest] += stopped - began
        if self._tracer.is_on:
            track = f"write replica {replica} rank {dest[1]}"
            self._tracer.add(track, f"load {filled.load.number}", began, stopped, bytes=sum(sizes))
        if error is None:
            self._written[dest][batch.span] = are_there
            self._sent_bytes[dest] += sum(sizes)
            return
        logger.warning("replica %d, rank %d: %s", *dest, error)
        self._result.report.errors.setdefault(replica, f"{type(error).__name__}: {error}")
        with self._write_lock.alone():
            self._free.close_failed(filled.slot, binding.session, self._transport.reset)

    def _pieces(self, filled: Filled, dest: Destination) -> tuple[Sequence[int], Sequence[int], Sequence[int], Flags]:
        """Source addresses, destination addresses and sizes of one destination's part of a load, and which of its
        entries are there once these are written: packets that changed little as streams into its zone, if it takes
        changes, the others whole into its parameters, if it has paused. Nothing that it merges for itself or that was
        sent ahead."""
        load, slot = filled.load, filled.slot
        batch = load.batches[dest]
        whole = batch.sources[slot], self._addresses[dest][batch.span], batch.sizes
        if dest in self._merging:
            return *_only(whole, self._slots.entries[dest].is_factor[batch.span]), np.ones(len(batch.sizes), np.bool_)
        if dest in self._prepared.there:
            is_left = ~self._prepared.there[dest][batch.span]
            return *_only(whole, is_left), is_left
        landing, changes = self._landings.get(dest), self._slots.changes
        if landing is None or changes is None or not filled.has_streams:
            return *whole, np.ones(len(batch.sizes), np.bool_)
        changes.was_asked[load.number] = True
        are_there = np.zeros(len(batch.sizes), np.bool_)
        pieces: list[tuple[int, int, int]] = []
        for place, (index, piece) in enumerate(zip(batch.packets, zip(*whole))):
            stream = self._stream(filled, dest, index, batch.span.start + place, landing, changes)
            are_there[place] = stream is not None or not self._is_ahead
            if stream is None and not self._is_ahead:
                pieces.append(piece)
            elif stream:
                pieces.append(stream)
        return [a for a, _, _ in pieces], [b for _, b, _ in pieces], [c for _, _, c in pieces], are_there

    def _stream(
        self, filled: Filled, dest: Destination, index: int, number: int, landing: Landing, changes: ChangeSlots
    ) -> tuple[int, int, int] | tuple[()] | None:
        """Source address, destination address and size of the stream of a load's packet, which gets a row; empty if
        nothing of it changed, None if it goes whole."""
        entries, load = self._slots.entries[dest], filled.load
        column, size = int(entries.columns[number]), int(entries.sizes[number])
        if not changes.takes_changes[column]:
            return None
        stream = changes.stream_of(filled.slot, load.number, index, load.packets[index])
        if stream is None:
            return None
        address, num_records = stream
        if num_records == 0:
            return ()
        num_bytes = stream_bytes(size, num_records)
        if (place := landing.take(num_bytes)) is None:
            return None
        first_column = self._result.sums.places.first[dest]
        landing.rows.append((column - first_column, int(entries.offset[number]), size, place, num_records))
        return address, landing.address + place, num_bytes

    def _count(self) -> None:
        """Add up what was written, after the lanes have ended."""
        report, hashes = self._result.report, self._slots.sums_of_packets()
        report.busy_write_s += self._write_lock.busy_s
        for (replica, _), seconds in self._seconds.items():
            report.write_s[replica] = max(seconds, report.write_s.get(replica, 0.0))
        if self._landings and self._slots.changes is not None:
            report.num_changed, report.num_compared = self._slots.changes.found()
        for dest, written in self._written.items():
            entries = self._slots.entries[dest]
            self._result.sums.add(entries.columns[written], entries.sizes[written], hashes[entries.packets[written]])
            report.num_bytes += self._sent_bytes[dest]
            if dest in self._landings:
                report.changes[dest] = self._landings[dest].to_bytes()
        if self._is_ahead:
            self._prepared.there = self._written


def _only(columns: Sequence[Sequence[int]], flags: Flags) -> tuple[list[int], list[int], list[int]]:
    """The rows of three columns that are flagged."""
    sources, addresses, sizes = (list(compress(column, flags.tolist())) for column in columns)
    return sources, addresses, sizes
