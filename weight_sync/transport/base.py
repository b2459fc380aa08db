"""What a link must do: move bytes one-sided between registered memory here and registered memory of another process.

Owns the protocol that `mooncake.py` implements (tests/contract/test_transport.py), and ranges of memory. Does not know
plans, versions or parameters.

Failure model, the same for every link and for both directions:

    write() returned          every byte is in the destination's memory
    write() raised            any part of the bytes may be there, and *more may still arrive*. The session is refused
                              (TransferFailed) until reset(session) returned: from then on the failed write cannot
                              touch this process's memory again.
    renew()                   the same for the destination: drops every incoming connection, so that nothing in flight
                              towards the old session name can still arrive. The session gets a new name.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.weight_sync.errors import TransferFailed

MAX_BATCH_ENTRIES = 1024
"""The most pieces in one native batch: Mooncake's TCP lanes refuse 2500; others report the same bound for RDMA."""
MAX_BATCH_BYTES = 1 << 30
"""The most bytes in one native batch. A batch has one deadline, which larger synchronous ones exceeded. A single piece
may be larger, and is then a batch of its own: Mooncake's TCP link read 1.5, 2.5 and 4.5 GiB correctly. NVLink and RDMA
were not tried with such pieces."""


class Transport(Protocol):
    """One process's end of a link. Thread-safe: transfers may run at the same time, also with one session."""

    @property
    def link(self) -> str:
        """The link that is really in use: "memory", "tcp", "nvlink" or "rdma". Both ends of a sync must agree."""
        ...

    @property
    def session(self) -> str:
        """The name under which other processes write to this one. Changes with renew()."""
        ...

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make the memory of contiguous tensors readable and writable by the link. Overlaps are merged."""
        ...

    def unregister(self, tensors: Sequence[torch.Tensor]) -> None:
        """Forget registered tensors before they are freed: otherwise a link that starts again would register memory
        that is gone. Call it while nothing is being written from them. Harmless for tensors that are not registered."""
        ...

    def write(
        self, session: str, src_ptrs: Sequence[int], dst_ptrs: Sequence[int], sizes: Sequence[int], *, timeout_s: float
    ) -> None:
        """Copy `sizes[i]` bytes from local `src_ptrs[i]` to `dst_ptrs[i]` of `session`; returns when all have arrived.

        Device work that produces the source bytes must be complete: no link orders with torch streams.

        Raises:
            TransferTimeout: The deadline passed.
            TransferFailed: The peer refused, broke or is not there, or the session needs reset() first.
        """
        ...

    def read(
        self, session: str, dst_ptrs: Sequence[int], src_ptrs: Sequence[int], sizes: Sequence[int], *, timeout_s: float
    ) -> None:
        """Copy `sizes[i]` bytes from `src_ptrs[i]` of `session` to local `dst_ptrs[i]`; returns when all are here.

        The peer may change the bytes meanwhile, so what was read must be proven. Raises as write() does.
        """
        ...

    def reset(self, session: str) -> None:
        """Close this end's connection to `session`, with all that a failed transfer left in flight on it and all maps
        of its memory, and allow the session again. No transfer may be running.

        Raises:
            TransferTimeout: It cannot be closed yet; its source memory must stay untouched.
            TransportError: The link is down. The session stays refused until another reset() returned.
        """
        ...

    def renew(self) -> None:
        """Drop all connections and take a new session name. Registered memory stays registered.

        Raises:
            TransportError: The link is down; its next use tries again.
        """
        ...

    def close(self) -> None:
        """Leave the link. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class MemoryRange:
    """Bytes of one allocation: MemoryRange(0x7f00, 4096)."""

    address: int
    num_bytes: int

    @property
    def stop(self) -> int:
        return self.address + self.num_bytes


def range_of(tensor: torch.Tensor) -> MemoryRange:
    """The bytes of a contiguous tensor."""
    return MemoryRange(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def merge_ranges(ranges: Sequence[MemoryRange]) -> list[MemoryRange]:
    """Sorted, disjoint ranges covering the same bytes; overlapping ones are joined, merely adjacent ones are not.

    Adjacent ranges may be two allocations, and a registration must not span two.
    """
    merged: list[MemoryRange] = []
    for item in sorted(ranges):
        if merged and item.address < merged[-1].stop:
            last = merged.pop()
            item = MemoryRange(last.address, max(last.stop, item.stop) - last.address)
        merged.append(item)
    return merged


def check_registered(
    registered: Sequence[MemoryRange], addresses: Sequence[int], sizes: Sequence[int], what: str
) -> None:
    """Raise TransferFailed unless every piece lies inside one of the registered (sorted, disjoint) ranges.

    Checked here because Mooncake's TCP link accepts unregistered source memory that RDMA would refuse.
    """
    starts = [item.address for item in registered]
    for address, size in zip(addresses, sizes, strict=True):
        index = bisect.bisect_right(starts, address) - 1
        if index < 0 or address + size > registered[index].stop:
            raise TransferFailed(
                f"{what}: {size} bytes at {address:#x} are not in registered memory ({len(registered)} ranges)"
            )


def batches(sizes: Sequence[int]) -> list[range]:
    """Cut pieces into runs of at most MAX_BATCH_ENTRIES pieces and MAX_BATCH_BYTES bytes; a larger piece goes alone."""
    runs: list[range] = []
    first = run_bytes = 0
    for index, size in enumerate(sizes):
        if index > first and (index - first >= MAX_BATCH_ENTRIES or run_bytes + size > MAX_BATCH_BYTES):
            runs.append(range(first, index))
            first, run_bytes = index, 0
        run_bytes += size
    if first < len(sizes):
        runs.append(range(first, len(sizes)))
    return runs
