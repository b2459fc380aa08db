"""What a trainer rank's temporary memory is made of, and how much of a schedule goes into one slot. Integers, no torch.

Does not own: the buffer and the loads themselves (staging_slots.py), or their times (predict.py); both take every
figure from here.

    watermark_bytes  =  slot 0 | slot 1 | hash sums | hash scratch | what the source declares

A slot load is at most a slot of bytes and `max_packets` packets. Packets are allowed in growing numbers: a link
waits for the first load to be described entry by entry, so that one is short; and a rank's small dense tensors (7,000
packets of Kimi-K2 on each of 256 ranks) must not take so many loads that one rank is at its experts, which fill a
receiver's port for long, while another still has dense bytes for that receiver.

Invariant: what is reckoned here is what staging_slots.py allocates, and is never above the watermark.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from slipstream.weight_sync.errors import PlanError, WatermarkError
from slipstream.weight_sync.plan.columns import Ints, first_true

_Size = TypeVar("_Size", int, Ints)
NUM_SLOTS = 2
"""One is packed while the other is written; a third measured slower elsewhere and would shrink the loads."""
SLOT_ALIGNMENT_BYTES = 64
"""Each packet starts at a multiple of this, which suits every dtype and link."""
MAX_SLOT_BYTES = 1 << 30
"""A larger watermark is left unused: between two H200, slots of 1 GiB were written at 387 GB/s, of 2 GiB at 331."""
TASKS_A_SLOT = 4
"""Tasks of a plan are no longer than this part of a slot, so that loads are nearly full and alike."""
MAX_LINK_THREADS = 8
"""Sessions that a rank writes to at once."""
MIN_PACKETS, MAX_PACKETS = 1024, 16384
"""Most packets of a load, by watermark: a bound on the hash sums in flight."""
FIRST_PACKETS = 512
"""... and of the first load."""
_CPU_SCRATCH_BYTES = 4 << 20
_MIN_SCRATCH_BYTES = 16 << 10
"""Hash scratch, as in integrity.py, which needs torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The temporary memory of a trainer rank."""

    watermark_bytes: int
    reserved_bytes: int = 0
    """Part of it that is no staging: gathered adapters, merge and hash scratch."""
    has_changes: bool = False
    """Whether marks and streams of changes take as much as another slot (pipeline/landings.py)."""

    @property
    def max_slot_bytes(self) -> int:
        """Half of what the watermark leaves for staging (a third with changes), aligned, up to a bound. Raises
        WatermarkError where nothing is left."""
        room = self.watermark_bytes - self.reserved_bytes
        slot_bytes = room // (NUM_SLOTS + self.has_changes) // SLOT_ALIGNMENT_BYTES * SLOT_ALIGNMENT_BYTES
        if slot_bytes < SLOT_ALIGNMENT_BYTES:
            raise WatermarkError(
                f"weight_sync.watermark_bytes={self.watermark_bytes} leaves no room for staging beside "
                f"{self.reserved_bytes} other temporary bytes; raise the watermark"
            )
        return min(slot_bytes, MAX_SLOT_BYTES)

    @property
    def max_task_bytes(self) -> int:
        """Largest task that a plan for this rank should contain."""
        return max(SLOT_ALIGNMENT_BYTES, self.max_slot_bytes // TASKS_A_SLOT)

    def cut(self, sizes: Ints, param_of: Callable[[int], str]) -> tuple[list[int], int]:
        """Cut packets of these sizes, in schedule order, into slot loads, each of as many as fit and are allowed.

        Returns:
            Where loads begin and, at last, end; and the size of a slot: a quarter of all, so that stages overlap.

        Raises:
            PlanError: A packet is larger than a slot; it is of param_of(its number).
        """
        most = self.max_slot_bytes
        for number in first_true(sizes > most):
            what = f"a task of {sizes[number]} bytes for {param_of(number)}"
            raise PlanError(f"{what} does not fit a staging slot of {most} bytes")
        padded = aligned(sizes)
        slot_bytes = min(most, max(int(padded.max(initial=0)), aligned(-(-int(padded.sum()) // 4))))
        before = np.cumsum(padded) - padded
        reach = before + sizes  # where each packet ends, if all were in one slot
        edges = [0]
        while (first := edges[-1]) < len(sizes):
            allowed = min(max_packets(self.watermark_bytes), FIRST_PACKETS << min(len(edges) - 1, 16))
            fitting = int(reach.searchsorted(int(before[first]) + slot_bytes, side="right"))
            edges.append(min(fitting, first + allowed))
        return edges, slot_bytes


def max_packets(watermark_bytes: int) -> int:
    """Most packets of any load: a sum for each, in either slot, is at most a 4096th of the watermark or 16 KiB."""
    return max(MIN_PACKETS, min(MAX_PACKETS, watermark_bytes >> 16))


def sums_bytes(watermark_bytes: int) -> int:
    return 8 * NUM_SLOTS * max_packets(watermark_bytes)


def scratch_bytes(device_type: str, watermark_bytes: int) -> int:
    """Hash scratch: what suits the device, at most an eighth of the watermark, at least what one block needs."""
    wanted = _CPU_SCRATCH_BYTES if device_type == "cpu" else _MIN_SCRATCH_BYTES
    return max(_MIN_SCRATCH_BYTES, min(wanted, watermark_bytes // 8))


def reserved_bytes(
    device_type: str,
    watermark_bytes: int,
    source_temporary_bytes: int,
    *,
    verify_hashes: bool = True,
    has_changes: bool = False,
) -> int:
    """What a rank's pipeline holds beside its slots: hash sums and scratch, counts of changes (four bytes where a sum
    has eight), and what the source declares."""
    scratch = scratch_bytes(device_type, watermark_bytes) if verify_hashes else 0
    counts = sums_bytes(watermark_bytes) // 2 if has_changes else 0
    return sums_bytes(watermark_bytes) + counts + scratch + source_temporary_bytes


def aligned(num_bytes: _Size) -> _Size:
    """Up to the next multiple of SLOT_ALIGNMENT_BYTES: of one size, or of each in a column."""
    return -(-num_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
