"""The sender's side of a publish that sends only changes: what is packed beside a slot, and where it goes.

    slot      | packet 0 | packet 1 ...                  the values, whole and hashed, as in every publish
    marks     | a byte per two bytes of a slot           filled with the slot; used up before the next slot is filled
    streams   | a quarter of a slot, one for each slot   packed from both; written from instead of the slot

    landing zone of an engine rank:  | trainer rank 0's part | rank 1's part | ...       streams one after the other

A packet goes as a stream if its engine rank holds what was published last (publisher.py knows), if its parameter lies
in the engine as it arrives, and if the stream fits its room here and what is left of the part there; else it goes
whole, into the live parameter. That is decided per packet and engine rank, when its number of records is known, and
noted in a row, which the engine rank gets with the commit. A load of which every packet went whole, because too much of
it changed, is marked again at the SKIPPED-th publish after that.

Does not own: streams' form (weight_sync/changes.py), slots (staging_slots.py), writes (lanes.py), what an engine rank
does with rows (replica/landing.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from slipstream.weight_sync.changes import DTYPES, ELEMENT_BYTES, STREAM_SHARE, Chunk, Packer, max_records
from slipstream.weight_sync.pipeline.packing import CompiledMarks, FillSlot, Packet
from slipstream.weight_sync.plan.budget import NUM_SLOTS
from slipstream.weight_sync.plan.columns import Flags
from slipstream.weight_sync.transport.base import Transport

ALIGNMENT_BYTES = 16
SKIPPED = 7
"""Shares that fall come below what fits within some steps, and marks that are of no use cost as much as a merge."""


@dataclass(slots=True)
class Landing:
    """This rank's part of an engine rank's zone, in one publish."""

    address: int
    """Where the whole zone begins."""
    first: int
    stop: int
    """This rank's part, in bytes from the address."""
    rows: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    """The columns of replica/landing.py. A packet without any record has none."""

    def take(self, num_bytes: int) -> int | None:
        """The next place for so many bytes; None if there is no room."""
        place = self.first
        stop = place + -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if stop > self.stop:
            return None
        self.first = stop
        return place

    def to_bytes(self) -> bytes:
        """The rows, as little-endian int64."""
        return np.array(self.rows, "<i8").tobytes()


def part_of_zone(num_bytes: int, rank: int, world_size: int) -> tuple[int, int]:
    """Where a trainer rank's part of a zone begins and ends."""
    first, stop = (num_bytes * index // world_size // ALIGNMENT_BYTES * ALIGNMENT_BYTES for index in (rank, rank + 1))
    return first, stop


class ChangeSlots:
    """Marks and streams beside the slots of a rank.

    Args:
        loads: Per load, its packets and the source's function that fills a slot and marks.
        takes_changes: Per column of the sums, whether an engine rank can put changes into that parameter.
        transport: Streams are registered with it until close().
    """

    def __init__(
        self,
        loads: Sequence[tuple[Sequence[Packet], CompiledMarks]],
        slots: Sequence[torch.Tensor],
        takes_changes: Flags,
        transport: Transport,
    ) -> None:
        device, slot_bytes = slots[0].device, slots[0].numel()
        self.takes_changes = takes_changes
        self._transport = transport
        self._marks = torch.zeros(slot_bytes // ELEMENT_BYTES, dtype=torch.uint8, device=device)
        self._streams = torch.zeros(NUM_SLOTS, slot_bytes // STREAM_SHARE // 4, dtype=torch.int32, device=device)
        most = max((len(packets) for packets, _ in loads), default=0)
        self._counts = torch.zeros(NUM_SLOTS, most, dtype=torch.int32, device=device)
        self._host_counts = torch.zeros(NUM_SLOTS, most, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._fills: list[tuple[FillSlot, ...]] = []
        self._packers: list[tuple[Packer, ...]] = []
        for packets, filling in loads:
            self._fills.append(tuple(filling(slot, self._marks) for slot in slots))
            self._packers.append(tuple(self._packer(packets, slot, n) for n, slot in enumerate(slots)))
        self._numbers = [_number_of_chunk(packets) for packets, _ in loads]
        self._elements = [
            sum(packets[index].tasks[0].num_bytes // ELEMENT_BYTES for index in numbers)
            for (packets, _), numbers in zip(loads, self._numbers, strict=True)
        ]
        self._num_changed = torch.zeros((), dtype=torch.int64, device=device)
        self._num_compared = 0
        self.was_asked, self._has_fitted = [False] * len(loads), [False] * len(loads)
        """Per load, whether an engine rank could have taken streams in this publish, and whether one fitted."""
        self._num_skipped = [0] * len(loads)
        if slot_bytes:
            transport.register([self._streams])

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory; counts are reserved beside hash sums (plan/budget.py)."""
        return sum(t.numel() * t.element_size() for t in (self._marks, self._streams))

    def begin(self) -> None:
        """A publish begins."""
        self._num_changed.zero_()
        self._num_compared = 0
        for load, (was_asked, has_fitted) in enumerate(zip(self.was_asked, self._has_fitted)):
            left = SKIPPED if was_asked and not has_fitted else self._num_skipped[load]
            self._num_skipped[load] = max(0, left - 1)
            self.was_asked[load] = self._has_fitted[load] = False

    def found(self) -> tuple[int, int]:
        """Elements that changed, and that were compared, in this publish. Waits for the device."""
        return int(self._num_changed), self._num_compared

    def is_worth_it(self, load: int) -> bool:
        """Whether to pack changes of a load in this publish."""
        return bool(self._numbers[load]) and self._num_skipped[load] == 0

    def fill(self, slot: int, load: int) -> None:
        """Fill a slot, and the marks."""
        self._fills[load][slot]()

    def pack(self, slot: int, load: int) -> None:
        """Pack the streams of a slot that was just filled. Does not wait for the device."""
        counts = self._counts[slot][: len(self._numbers[load])]
        self._packers[load][slot].pack_to(counts)
        self._host_counts[slot][: len(counts)].copy_(counts, non_blocking=True)
        self._num_changed += counts.sum()
        self._num_compared += self._elements[load]

    def stream_of(self, slot: int, load: int, index: int, packet: Packet) -> tuple[int, int] | None:
        """(address, records) of the stream of a load's packet, once the device has packed it; None: it goes whole."""
        number = self._numbers[load].get(index)
        if number is None:
            return None
        num_records = int(self._host_counts[slot][number])
        if num_records > max_records(packet.tasks[0].num_bytes):
            return None
        self._has_fitted[load] = True
        return self._streams[slot].data_ptr() + packet.offset_bytes // STREAM_SHARE, num_records

    def close(self) -> None:
        """Free all memory."""
        if self._streams.numel():
            self._transport.unregister([self._streams])
        self._fills, self._packers = [], []
        self._marks, self._streams = self._marks.new_empty(0), self._streams.new_empty(0)

    def _packer(self, packets: Sequence[Packet], slot: torch.Tensor, number: int) -> Packer:
        chunks: list[Chunk] = []
        for packet in (packets[index] for index in _number_of_chunk(packets)):
            first, size = packet.offset_bytes, packet.tasks[0].num_bytes
            values = slot[first : first + size].view(torch.int16)
            marks = self._marks[first // ELEMENT_BYTES :][: size // ELEMENT_BYTES]
            stream = self._streams[number][first // STREAM_SHARE // 4 :][: size // STREAM_SHARE // 4]
            chunks.append(Chunk(values, marks, stream))
        return Packer(chunks)


def _number_of_chunk(packets: Sequence[Packet]) -> dict[int, int]:
    """Per packet that may go as a stream, its number among them."""
    firsts = [packet.tasks[0] for packet in packets]
    able = [
        index
        for index, task in enumerate(firsts)
        if task.dtype in DTYPES
        and task.num_bytes % ELEMENT_BYTES == task.dest_offset_bytes % ELEMENT_BYTES == 0
        and max_records(task.num_bytes) > 0
    ]
    return {index: number for number, index in enumerate(able)}
