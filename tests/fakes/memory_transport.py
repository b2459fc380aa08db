"""A link inside one process: sessions are entries of a `MemoryFabric`, a transfer is a memmove. CPU memory only.

Unit tests run whole publishes over it, and its faults (delay, drop, corrupt, stall, refuse) happen every day there,
while a real link shows them once a month. It obeys `weight_sync/transport/base.py`, late writes included: what a
stalled write had not copied lands when the fabric is told so, unless the source was reset or the destination renewed
first. `tests/contract/test_transport.py` holds it to the same promises as Mooncake's link.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from slipstream.weight_sync.errors import LinkMismatch, TransferFailed, TransferTimeout
from slipstream.weight_sync.transport.base import MemoryRange, check_registered, merge_ranges, range_of


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one transfer. Fault(corrupt=True) flips the lowest bit of the first byte that lands."""

    delay_s: float = 0.0
    drop: bool = False
    """Report success and copy nothing."""
    corrupt: bool = False
    stall: bool = False
    """Copy nothing, block until the deadline, raise TransferTimeout; the bytes land at land_late_writes()."""
    refuse: bool = False
    """Raise TransferFailed at once."""


@dataclass(frozen=True, slots=True)
class _LateWrite:
    source: MemoryTransport
    session: str
    copy: Callable[[], None]


class MemoryFabric:
    """The sessions that can reach each other, and the faults planted between them."""

    def __init__(self) -> None:
        self.sessions: dict[str, MemoryTransport] = {}
        self._names = (f"memory:{index}" for index in itertools.count())
        self._faults: dict[str, list[Fault]] = {}
        self._late: list[_LateWrite] = []
        self._lock = threading.Lock()

    def inject(self, session: str, *faults: Fault) -> None:
        """The next writes to `session` meet these faults, one each, in order; Fault() is none."""
        with self._lock:
            self._faults.setdefault(session, []).extend(faults)

    def take_back(self, session: str) -> bool:
        """Plant no fault for `session` any more. Returns whether one was left that nothing had met."""
        with self._lock:
            return bool(self._faults.pop(session, []))

    def land_late_writes(self) -> int:
        """Let stalled writes finish unless source or destination started afresh. Returns how many landed."""
        with self._lock:
            late, self._late = self._late, []
        landed = [write for write in late if write.session in self.sessions]
        for write in landed:
            write.copy()
        return len(landed)

    def attach(self, transport: MemoryTransport) -> str:
        """Give a transport a session name that was never used before."""
        with self._lock:
            name = next(self._names)
            self.sessions[name] = transport
        return name

    def detach(self, session: str) -> None:
        """Forget a session: later writes to it fail."""
        with self._lock:
            self.sessions.pop(session, None)

    def next_fault(self, session: str) -> Fault:
        """The fault that the next write to `session` meets."""
        with self._lock:
            queue = self._faults.get(session)
            return queue.pop(0) if queue else Fault()

    def add_late_write(self, write: _LateWrite) -> None:
        """Remember what a stalled write had not copied."""
        with self._lock:
            self._late.append(write)

    def drop_late_writes(self, source: MemoryTransport, session: str) -> None:
        """Forget what stalled writes of one source to one session had not copied."""
        with self._lock:
            self._late = [w for w in self._late if w.source is not source or w.session != session]


class MemoryTransport:
    """One end of a MemoryFabric. See Transport."""

    def __init__(self, fabric: MemoryFabric) -> None:
        self._fabric = fabric
        self._session = fabric.attach(self)
        self._failed: set[str] = set()
        self._held: set[MemoryRange] = set()
        self.registered: list[MemoryRange] = []
        self.closed: list[str] = []
        """Sessions that were reset, in order."""

    @property
    def link(self) -> str:
        return "memory"

    @property
    def session(self) -> str:
        return self._session

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allow these tensors' bytes as source and as destination."""
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise LinkMismatch(f"the memory link reaches CPU memory only, got a tensor on {tensor.device}")
        self._held |= {range_of(tensor) for tensor in tensors}
        self.registered = merge_ranges(list(self._held))

    def unregister(self, tensors: Sequence[torch.Tensor]) -> None:
        self._held -= {range_of(tensor) for tensor in tensors}
        self.registered = merge_ranges(list(self._held))

    def write(
        self, session: str, src_ptrs: Sequence[int], dst_ptrs: Sequence[int], sizes: Sequence[int], *, timeout_s: float
    ) -> None:
        """Memmove, after whatever fault the fabric has planted for this session."""
        with self._failing(session) as peer:
            check_registered(self.registered, src_ptrs, sizes, f"source of a write to {session}")
            check_registered(peer.registered, dst_ptrs, sizes, f"destination at {session}")
            self._copy(session, list(zip(src_ptrs, dst_ptrs, sizes, strict=True)), timeout_s)

    def read(
        self, session: str, dst_ptrs: Sequence[int], src_ptrs: Sequence[int], sizes: Sequence[int], *, timeout_s: float
    ) -> None:
        """Memmove the other way, past the same faults."""
        with self._failing(session) as peer:
            check_registered(self.registered, dst_ptrs, sizes, f"destination of a read from {session}")
            check_registered(peer.registered, src_ptrs, sizes, f"source at {session}")
            self._copy(session, list(zip(src_ptrs, dst_ptrs, sizes, strict=True)), timeout_s)

    @contextmanager
    def _failing(self, session: str) -> Iterator[MemoryTransport]:
        """The peer of one transfer. A session that fails a transfer is refused until it is reset."""
        if session in self._failed:
            raise TransferFailed(f"a transfer with {session} failed earlier: reset the session first")
        try:
            peer = self._fabric.sessions.get(session)
            if peer is None:
                raise TransferFailed(f"no session {session}")
            yield peer
        except (TransferFailed, TransferTimeout):
            self._failed.add(session)
            raise

    def _copy(self, session: str, pieces: list[tuple[int, int, int]], timeout_s: float) -> None:
        def copy() -> None:
            for src, dst, size in pieces:
                ctypes.memmove(dst, src, size)

        fault = self._fabric.next_fault(session)
        if fault.delay_s:
            time.sleep(fault.delay_s)
        if fault.refuse:
            raise TransferFailed(f"{session} refused a transfer of {sum(p[2] for p in pieces)} bytes")
        if fault.stall:
            self._fabric.add_late_write(_LateWrite(self, session, copy))
            time.sleep(timeout_s)
            raise TransferTimeout(
                f"a transfer of {sum(p[2] for p in pieces)} bytes with {session} made no progress for {timeout_s:g} s"
            )
        if fault.drop:
            return
        copy()
        if fault.corrupt:
            first_byte = ctypes.c_uint8.from_address(pieces[0][1])
            first_byte.value ^= 1

    def reset(self, session: str) -> None:
        """Forget late writes to `session`."""
        self.closed.append(session)
        self._fabric.drop_late_writes(self, session)
        self._failed.discard(session)

    def renew(self) -> None:
        """Take a new name; writes to the old one fail."""
        self._fabric.detach(self._session)
        self._session = self._fabric.attach(self)

    def close(self) -> None:
        self._fabric.detach(self._session)
