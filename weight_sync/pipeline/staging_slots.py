"""The two staging slots of a trainer rank: their memory, the loads that go through them, the sums of what was packed,
and who may touch a slot when, between the thread that packs and the lanes that write.

Owns: staging and its registration, what each load holds and how it is filled and hashed, and the threads that write.
All of this is made once per plan: a small watermark makes thousands of loads, and the link waits for the Python code of
each. The threads are kept because links have streams and events per thread. Of each publish: the wait for a packed
load, the slots that are free or quarantined, the lock under which a failed write is closed. Does not own: how a
schedule is cut (`pipeline.py`, which makes this), the arguments of its writes (`writes.py`), who writes (`lanes.py`).

    sums     packets' hash sums are added up on the device and copied to the host per window of packets, not per load:
             while a link polls the device, each call to the driver waits for it
    ready    one event per slot; recorded again only when every write from the slot is over
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from slipstream.conf.failures import undone_by
from slipstream.weight_sync.errors import TransportError
from slipstream.weight_sync.integrity import RangeHashes
from slipstream.weight_sync.layout import Destination
from slipstream.weight_sync.pipeline.landings import ChangeSlots
from slipstream.weight_sync.pipeline.packing import CompiledMarks, CompiledReads, FillSlot, Packet
from slipstream.weight_sync.pipeline.sums import Places
from slipstream.weight_sync.pipeline.trace import Tracer
from slipstream.weight_sync.pipeline.writes import Batch, compile_writes
from slipstream.weight_sync.plan.budget import MAX_LINK_THREADS, NUM_SLOTS, max_packets, scratch_bytes
from slipstream.weight_sync.plan.columns import Flags, Ints
from slipstream.weight_sync.transport.base import Transport

logger = logging.getLogger(__name__)

WAIT_LOG_S = 30.0
"""How often a wait says what it waits for."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A load before it has staging: what fills any slot with it, and, if changes are sent, marks what changed."""

    packets: tuple[Packet, ...]
    reads: CompiledReads
    marks: CompiledMarks | None


@dataclass(frozen=True, slots=True)
class Load:
    """What one slot carries at once, the functions that fill and hash it in either slot, and its writes."""

    number: int
    packets: tuple[Packet, ...]
    fills: tuple[FillSlot, ...]
    hashes: tuple[RangeHashes, ...]
    window: int
    sums: torch.Tensor
    """Sums of the packets' hashes. The memory belongs to this load while its window is on the device."""
    batches: dict[Destination, Batch]


@dataclass(slots=True, eq=False)
class Filled:
    """A load in its slot: packed once the device has finished, over once every lane has written its part."""

    slot: int
    load: Load
    ready: torch.cuda.Event | None
    """None once the device is known to have finished."""
    has_streams: bool = False
    """Whether changes were packed beside the slot."""
    num_lanes: int = 0
    """How many have not written their part yet."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait_until_packed(self) -> float:
        """Wait until the device has packed the load: one lane asks the device, the others wait for that lane. Returns
        the seconds for which this lane asked."""
        with self._lock:
            if self.ready is None:
                return 0.0
            began = time.monotonic()
            self.ready.synchronize()
            self.ready = None
            return time.monotonic() - began

    def part_is_over(self) -> bool:
        """Note that a lane has written its part. Returns whether it was the last."""
        with self._lock:
            self.num_lanes -= 1
            return self.num_lanes == 0


class Slots:
    """See the module's docstring.

    Args:
        compiled: Loads in schedule order.
        transport: Staging is registered with it until close().
        watermark_bytes: Bounds the sums that are on the device at a time, and the scratch of hashing.
        quarantined: Slots that a failed write may still read, with its sessions. Empty at first; outlives a plan.
        takes_changes: See ChangeSlots.
    """

    def __init__(
        self,
        compiled: Sequence[Compiled],
        *,
        slot_bytes: int,
        places: Places,
        transport: Transport,
        device: torch.device,
        watermark_bytes: int,
        quarantined: dict[int, list[str]],
        takes_changes: Flags | None = None,
    ) -> None:
        self.quarantined = quarantined
        self._device = device
        self._transport = transport
        self._hash_scratch_bytes = scratch_bytes(device.type, watermark_bytes)
        self._max_sums = NUM_SLOTS * max_packets(watermark_bytes)
        self._sums = torch.zeros(self._max_sums, dtype=torch.int64, device=device)
        self._staging = torch.empty(NUM_SLOTS * slot_bytes, dtype=torch.uint8, device=device)
        self._slots = list(self._staging.view(NUM_SLOTS, slot_bytes))
        is_cuda = device.type == "cuda"
        self._ready = [torch.cuda.Event() if is_cuda else None for _ in range(NUM_SLOTS)]
        self._windows: list[slice] = []
        """The packets of each window."""
        self._window = 0
        """The window whose sums are on the device."""
        addresses = [slot.data_ptr() for slot in self._slots]
        batches, self.entries = compile_writes([one.packets for one in compiled], addresses, places)
        self.threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"weight-sync-lane-{lane}")
            for lane in range(min(len(self.entries), MAX_LINK_THREADS))
        ]
        """One per lane. All run at once, so none may wait in a pool's queue. Started at first use, ended in close()."""
        self.loads = self._make_loads(compiled, batches)
        num_packets = sum(len(one.packets) for one in compiled)
        self._host_sums = torch.zeros(num_packets, dtype=torch.int64, pin_memory=is_cuda)
        if slot_bytes:
            transport.register([self._staging])  # last, because nothing would undo it if a later step failed
        self.changes: ChangeSlots | None = None
        marked = [(one.packets, one.marks) for one in compiled if one.marks is not None]
        if marked and slot_bytes and takes_changes is not None:
            self.changes = ChangeSlots(marked, self._slots, takes_changes, transport)

    @property
    def num_bytes(self) -> int:
        """Bytes of staging memory."""
        return self._staging.numel() + (0 if self.changes is None else self.changes.num_bytes)

    def enter_thread(self) -> None:
        """Prepare the calling thread to write from slots."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def begin(self) -> None:
        """Begin to go through the loads."""
        self._window = 0
        self._sums.zero_()

    def pack(self, slot: int, load: Load, tracer: Tracer, *, with_streams: bool = False) -> Filled:
        """Fill a slot from the source and hash it, and pack its changes if asked to. The device may not be done yet."""
        began = time.monotonic()
        if load.window != self._window:
            self.take_sums()
            self._window = load.window
        start = tracer.mark()
        changes = self.changes if with_streams else None
        if changes is not None and not changes.is_worth_it(load.number):
            changes = None
        if changes is None:
            load.fills[slot]()
        else:
            changes.fill(slot, load.number)
            changes.pack(slot, load.number)
        packed = tracer.mark()
        tracer.device(f"pack slot {slot}", f"load {load.number}", start, packed)
        if load.hashes:
            load.hashes[slot].add_to(load.sums)
            tracer.device(f"hash slot {slot}", f"load {load.number}", packed, tracer.mark())
        ready = self._ready[slot]
        if ready is not None:
            ready.record()
        tracer.add("prepare (host)", f"load {load.number}", began, time.monotonic())
        return Filled(slot, load, ready, has_streams=changes is not None)

    def take_sums(self) -> None:
        """Copy the window's sums to the host, in stream order, to make room for the next window's on the device."""
        window = self._windows[self._window]
        self._host_sums[window].copy_(self._sums[: window.stop - window.start], non_blocking=True)
        self._sums.zero_()

    def sums_of_packets(self) -> Ints:
        """Hash sums of all packets, after the last take_sums()."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return self._host_sums.numpy()

    def close(self) -> None:
        """End the threads and free all memory. Unregisters staging, because the link outlives this. Idempotent."""
        for thread in self.threads:
            thread.shutdown()
        self.loads = []
        if self.changes is not None:
            self.changes.close()
            self.changes = None
        if self._staging.numel():
            self._transport.unregister([self._staging])
            self._slots, self._ready = [], []
            self._staging = self._staging.new_empty(0)
            self._sums = self._sums.new_empty(0)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # otherwise torch keeps it, and the next allocation may come on top of it

    def _make_loads(self, compiled: Sequence[Compiled], batches: Sequence[dict[Destination, Batch]]) -> list[Load]:
        loads: list[Load] = []
        first = num_packets = 0
        for one, batch in zip(compiled, batches, strict=True):
            packets = one.packets
            if num_packets + len(packets) - first > self._max_sums:
                self._windows.append(slice(first, num_packets))
                first = num_packets
            sums = self._sums[num_packets - first :][: len(packets)]
            fills = tuple(map(one.reads, self._slots))
            loads.append(Load(len(loads), packets, fills, self._hashes(packets), len(self._windows), sums, batch))
            num_packets += len(packets)
        self._windows.append(slice(first, num_packets))
        return loads

    def _hashes(self, packets: Sequence[Packet]) -> tuple[RangeHashes, ...]:
        """The hashes of a load's packets, for each slot that it may be in."""
        offsets = [packet.tasks[0].dest_offset_bytes for packet in packets]
        return tuple(
            RangeHashes(
                [slot[packet.offset_bytes :][: packet.tasks[0].num_bytes] for packet in packets],
                offsets,
                scratch_bytes=self._hash_scratch_bytes,
            )
            for slot in self._slots
        )


class FreeSlots:
    """Slots that may be packed. A slot that a failed write may still read is quarantined, and is not among them."""

    def __init__(self, quarantined: dict[int, list[str]]) -> None:
        self._quarantined = quarantined
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        """None: no more slots will come."""

    def take(self, seconds: Mapping[Destination, float]) -> int | None:
        """Wait for a slot; None when a lane failed, whose error is raised later.

        Args:
            seconds: Of writing so far, for the log.

        Raises:
            TransportError: Every slot is quarantined.
        """
        waited_s = 0.0
        while True:
            try:
                slot = self._free.get(timeout=WAIT_LOG_S)
                if slot is None and len(self._quarantined) == NUM_SLOTS:
                    raise TransportError("no staging slot is left: earlier failed writes cannot be closed yet")
                return slot
            except queue.Empty:
                waited_s += WAIT_LOG_S
                logger.warning("packing waits %.0f s for a staging slot; writes so far: %s s", waited_s, seconds)

    def give_back(self, slot: int) -> None:
        """Every write from a slot is over."""
        if slot not in self._quarantined:
            self._free.put(slot)
        elif len(self._quarantined) == NUM_SLOTS:
            self._free.put(None)

    def end(self) -> None:
        """A lane failed: take() waits no longer."""
        self._free.put(None)

    def close_failed(self, slot: int, session: str, reset: Callable[[str], None]) -> None:
        """Make sure that nothing of a failed write ever reads its slot again.

        The slot is in nobody's hands meanwhile: this lane's part of its load is not over. It is quarantined only where
        `reset` failed, since lanes of other slots ask how many are left.
        """
        try:
            with undone_by(lambda _: self._quarantined.setdefault(slot, []).append(session)):
                reset(session)
        except TransportError as e:
            logger.error("slot %d is quarantined: %s", slot, e)


class SharedLock:
    """A lock that writes hold together, and the end of a failed write holds alone. Counts the seconds of writing."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_writing = 0
        self._is_closing = False
        self._began = 0.0
        self.busy_s = 0.0

    @contextmanager
    def writing(self) -> Generator[None]:
        """Hold the lock for a write."""
        with self._changed:
            self._wait_until(lambda: not self._is_closing)
            if self._num_writing == 0:
                self._began = time.monotonic()
            self._num_writing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_writing -= 1
                if self._num_writing == 0:
                    self.busy_s += time.monotonic() - self._began
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Generator[None]:
        """Hold the lock alone: wait for all running writes, and let none begin."""
        with self._changed:
            self._wait_until(lambda: not self._is_closing)
            self._is_closing = True
            self._wait_until(lambda: self._num_writing == 0)
        try:
            yield
        finally:
            with self._changed:
                self._is_closing = False
                self._changed.notify_all()

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        waited_s = 0.0
        while not self._changed.wait_for(is_so, timeout=WAIT_LOG_S):
            waited_s += WAIT_LOG_S
            logger.warning("waited %.0f s to close a failed write; %d still running", waited_s, self._num_writing)
