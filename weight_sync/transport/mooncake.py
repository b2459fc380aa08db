"""Mooncake's TransferEngine as a Transport: one-sided transfers over TCP, NVLink (CUDA IPC inside one host) or RDMA.

Owns: proving that the chosen link is the one in use, registration, batch limits, translation of return codes. Does not
own the choice of the link, nor finding allocations (`this_machine.py`). The only importer of mooncake. Its traps, and
what this file does about each:

* The `protocol` argument does not choose the link (CUDA wheel), and Mooncake silently replaces a link that is not
  available. Environment variables choose the link: they are set from the requested kind before the engine exists, and
  what can be checked is checked, before and after. If a link is not available, LinkMismatch is raised.
* A transfer that returned -1 is not over. Its session is refused until reset(), which destroys the whole engine
  (nothing smaller can be closed) and registers everything again on a fresh one. That takes about 1 s, and only happens
  after a failure.
* A fresh engine may fail to start: its ports are drawn at random, and one may be taken. It is tried a few times. Then
  the link is down, a use of it raises TransportError, and the next use tries again.
* NVLink does not order with torch streams. The caller synchronizes before write(); reset() waits for the device.
* NVLink exports whole cudaMalloc allocations. CUDA tensors register as the caching allocator's segments that hold them;
  expandable segments are refused with their cure.
* Registering an overlap fails with -7. Ranges are merged first.
* More than 2048 pieces in one batch fail, and batches of several GiB may run into their deadline: base.batches().
* Deadlines come from the environment, per process. MC_TRANSFER_TIMEOUT (at least 5 s) and MC_TCP_PROGRESS_TIMEOUT_SEC
  are set from timeout_s. A native call cannot be interrupted, so a smaller timeout_s of one write() is checked only
  between batches.
* It listens on every interface (two TCP ports), whatever host and MC_TCP_BIND_ADDRESS say, and does not authenticate:
  anyone who reaches the ports can read and write registered memory (not the rest of the process's memory). A run on one
  host binds the ports to the loopback device (this_machine.py); a run on several hosts needs a firewall.
* A fresh engine's first contact with a stopped process blocks for a fixed 60 s. In a publish the replica acknowledges
  Begin first, or was written to in the publish before, so this happens only if a process stops between that and its
  first byte.
"""

import contextlib
import json
import logging
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import torch

from slipstream.conf.failures import undone_by
from slipstream.conf.schema import TransportKind
from slipstream.weight_sync.errors import LinkMismatch, TransferFailed, TransferTimeout
from slipstream.weight_sync.transport.base import MemoryRange, batches, check_registered, merge_ranges, range_of
from slipstream.weight_sync.transport.this_machine import (
    LOOPBACK,
    allocations_of,
    choose_link,
    has_hca,
    new_listeners_on_loopback,
)

logger = logging.getLogger(__name__)

_OVERLAP = -7
_MIN_TRANSFER_TIMEOUT_S = 5
"""Smallest MC_TRANSFER_TIMEOUT that Mooncake accepts."""
RETRY_S = 0.3
"""Longest pause before another try to start an engine."""
NUM_TRIES = 3
DOWN_S = 2.0
"""After all tries failed, uses of the link are refused for so long without another try: many lanes may ask at once."""


class MooncakeTransport:
    """One TransferEngine and the memory registered with it. See Transport, for what its methods promise.

    Args:
        kind: Requested link. Any kind except `auto` is provided exactly, or refused.
        device: "cpu" or "cuda": where the memory at *both* ends of the link is.
        host: Address at which other processes reach this one; loopback if all peers are on this host.
        timeout_s: Longest that one native transfer may take without progress.
        retry_s, down_s: See RETRY_S and DOWN_S.
        module: Has TransferEngine; by default `engine_module`.
    """

    def __init__(
        self,
        kind: TransportKind = TransportKind.auto,
        *,
        device: str = "cpu",
        host: str = LOOPBACK,
        timeout_s: float = 60.0,
        retry_s: float = RETRY_S,
        down_s: float = DOWN_S,
        module: Any = None,
    ) -> None:
        self._module = engine_module() if module is None else module
        self._kind, self._retry_s, self._down_s = kind, retry_s, down_s
        self.link = choose_link(
            kind,
            device=device,
            host=host,
            has_hca=has_hca(),
            has_nvlink=bool(getattr(self._module, "SUPPORT_INTRA_NVLINK", False)),
            has_cuda=bool(getattr(self._module, "SUPPORT_CUDA", False)),
        )
        """Link really in use: "tcp", "nvlink" or "rdma"."""
        self._host = host
        self._native_timeout_s = max(1, math.ceil(timeout_s))
        self._held: dict[MemoryRange, MemoryRange] = {}
        """The bytes of every registered tensor -> the allocation that contains them."""
        self._registered: list[MemoryRange] = []
        """The allocations that the engine knows."""
        self._failed: set[str] = set()
        self._contacted: set[str] = set()
        """Sessions that the engine may hold a connection to, or a map of their memory."""
        self._lock = threading.Condition()
        self._num_running = 0
        self._engine: Any = None
        """None: the link is down, or closed."""
        self._session = ""
        self._is_closed = False
        self._down: tuple[float, str] | None = None
        """When the last start failed, and why; None after a start that succeeded."""
        self._start()

    @property
    def session(self) -> str:
        """host:port of this process's engine. Raises TransportError if none starts."""
        with self._lock:
            self._ensure_started()
            return self._session

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register the allocations that hold these tensors. Idempotent; call while nothing is being written."""
        for tensor in tensors:
            if self.link == "nvlink" and not tensor.is_cuda:
                raise LinkMismatch(f"the nvlink link moves device memory only, got a tensor on {tensor.device}")
        if cuda := [tensor.device for tensor in tensors if tensor.is_cuda]:
            torch.cuda.synchronize(cuda[0])  # Mooncake calls the driver: a thread without CUDA's context fails (201)
        self._hold(self._held | allocations_of(tensors))

    def unregister(self, tensors: Sequence[torch.Tensor]) -> None:
        """Forget these tensors, and unregister allocations without other registered tensors."""
        gone = {range_of(tensor) for tensor in tensors}
        kept = {tensor: allocation for tensor, allocation in self._held.items() if tensor not in gone}
        if len(kept) == len(self._held):
            return
        if self._engine is None:  # the next engine must not register memory that is freed
            self._held = kept
            return
        try:
            self._hold(kept)
        except TransferFailed as e:
            logger.warning("memory that is about to be freed stays registered: %s", e)
            self._held = kept  # it is freed anyway, and the next use of the link must not fail

    def _hold(self, held: dict[MemoryRange, MemoryRange]) -> None:
        """Register and unregister what differs from `held`."""
        merged = merge_ranges(list(set(held.values())))
        with self._lock:
            self._ensure_started()
            gone = [item for item in self._registered if item not in merged]
            added = [item for item in merged if item not in self._registered]
            if gone:
                code = self._engine.batch_unregister_memory([item.address for item in gone])
                self._check(code, f"unregistering {len(gone)} ranges")
                self._registered = [item for item in self._registered if item in merged]
            self._register_ranges(added)
            self._held, self._registered = held, merged

    def write(
        self, session: str, src_ptrs: Sequence[int], dst_ptrs: Sequence[int], sizes: Sequence[int], *, timeout_s: float
    ) -> None:
        self._transfer("write", session, src_ptrs, dst_ptrs, sizes, timeout_s)

    def read(
        self, session: str, dst_ptrs: Sequence[int], src_ptrs: Sequence[int], sizes: Sequence[int], *, timeout_s: float
    ) -> None:
        self._transfer("read", session, dst_ptrs, src_ptrs, sizes, timeout_s)

    def _transfer(
        self, verb: str, session: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int],
        timeout_s: float,
    ) -> None:  # fmt: skip
        """One transfer in native batches; `verb` is "write" or "read"."""
        with self._lock:
            if session in self._failed:
                raise TransferFailed(f"a transfer with {session} failed earlier: reset the session first")
            self._ensure_started()
            self._num_running += 1
            self._contacted.add(session)
        try:
            check_registered(self._registered, local, sizes, f"this end of a {verb} with {session}")
            self._run_batches(verb, session, local, remote, sizes, time.monotonic() + timeout_s)
        except (TransferFailed, TransferTimeout):
            self._failed.add(session)
            raise
        finally:
            with self._lock:
                self._num_running -= 1
                self._lock.notify_all()

    def _run_batches(
        self, verb: str, session: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int],
        deadline: float,
    ) -> None:  # fmt: skip
        native = self._engine.batch_transfer_sync_write if verb == "write" else self._engine.batch_transfer_sync_read
        for run in batches(sizes):
            pieces = slice(run.start, run.stop)
            what = f"{self.link} {verb} of {sum(sizes[pieces])} bytes in {len(run)} pieces with {session}"
            begin = time.monotonic()
            if begin >= deadline:
                raise TransferTimeout(f"{what}: the deadline passed before it began")
            code = native(session, list(local[pieces]), list(remote[pieces]), list(sizes[pieces]))
            spent_s = time.monotonic() - begin
            if code != 0 and spent_s >= 0.9 * self._native_timeout_s:
                raise TransferTimeout(f"{what} made no progress: code {code} after {spent_s:.1f} s")
            if code != 0:
                raise TransferFailed(
                    f"{what} failed: code {code} after {spent_s:.2f} s (peer gone, or its memory not registered)"
                )

    def reset(self, session: str) -> None:
        """Destroy the engine and start a fresh one with the same memory. Other sessions continue on it. No effect on a
        session that this engine never contacted, so several ranks of one dead replica cost one restart."""
        with self._lock:
            if self._is_closed:
                return
            if self._engine is None:
                self._ensure_started()
            if session not in self._contacted:
                return
            if not self._lock.wait_for(
                lambda: self._num_running == 0, timeout=self._native_timeout_s + _MIN_TRANSFER_TIMEOUT_S
            ):
                raise TransferTimeout(
                    f"{self._num_running} transfers are still running; the engine cannot be closed to reset {session}"
                )
            logger.warning("restarting the %s engine to close the link to %s", self.link, session)
            self._restart()

    def renew(self) -> None:
        with self._lock:
            self._restart()

    def close(self) -> None:
        self._engine, self._is_closed = None, True
        self._held, self._registered = {}, []

    def _restart(self) -> None:
        if self.link == "nvlink":
            torch.cuda.synchronize()  # wait for kernels that use the maps; gives this thread a context, see register()
        self._engine = None
        self._start()

    def _ensure_started(self) -> None:
        """Start an engine if there is none, unless that failed a moment ago. Raises TransportError."""
        if self._engine is not None:
            return
        if self._down is not None and time.monotonic() < self._down[0] + self._down_s:
            raise TransferFailed(f"the {self.link} link is down since its engine did not start: {self._down[1]}")
        self._restart()

    def _start(self) -> None:
        """Make an engine and register all held memory. If either fails there is no engine, and nothing is forgotten."""
        if self._is_closed:
            raise TransferFailed(f"the {self.link} link was closed")
        ranges = merge_ranges(list(set(self._held.values())))

        def go_down(error: BaseException) -> None:
            self._engine, self._down = None, (time.monotonic(), str(error))

        with undone_by(go_down):
            self._engine = self._make_engine()
            self._register_ranges(ranges)
        self._registered, self._down = ranges, None
        self._session = f"{self._host}:{self._engine.get_rpc_port()}"
        self._failed.clear()
        self._contacted.clear()

    def _make_engine(self) -> Any:
        """Make an engine in an environment that allows only the wanted link, and check what it found."""
        for name, value in _environment(self.link, self._native_timeout_s).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        engine: Any = None
        for num_left in reversed(range(NUM_TRIES)):
            engine = self._module.TransferEngine()
            with new_listeners_on_loopback() if self._host == LOOPBACK else contextlib.nullcontext():
                code = engine.initialize(self._host, "P2PHANDSHAKE", "rdma" if self.link == "rdma" else "tcp", "")
            if code == 0:
                break
            if num_left == 0:
                raise TransferFailed(f"Mooncake did not start on {self._host} over {self.link}: code {code}")
            time.sleep(random.uniform(0.2, 1.0) * self._retry_s)  # random: processes that drew the same port also retry
        if self.link == "rdma" and not _has_devices(engine.get_local_topology()):
            raise LinkMismatch(
                f"weight_sync.transport={self._kind}: /dev/infiniband has an RDMA device, and Mooncake finds none that "
                "it can use (its port is down, or its driver's library is missing); choose weight_sync.transport=tcp"
            )
        return engine

    def _register_ranges(self, ranges: Sequence[MemoryRange]) -> None:
        if ranges:
            code = self._engine.batch_register_memory(
                [item.address for item in ranges], [item.num_bytes for item in ranges]
            )
            self._check(code, f"registering {len(ranges)} ranges of {sum(item.num_bytes for item in ranges)} bytes")

    def _check(self, code: int, what: str) -> None:
        if code != 0:
            hint = " (a range overlaps one that is registered)" if code == _OVERLAP else ""
            raise TransferFailed(f"Mooncake ({self.link}): {what} failed with code {code}{hint}")


def _environment(link: str, native_timeout_s: int) -> dict[str, str | None]:
    """Variables that Mooncake reads from the environment when an engine is made; None removes one."""
    return {
        "MC_FORCE_TCP": "1" if link == "tcp" else None,
        "MC_INTRANODE_NVLINK": "1" if link == "nvlink" else None,
        "MC_USE_TENT": None,
        "MC_TRANSFER_TIMEOUT": str(max(_MIN_TRANSFER_TIMEOUT_S, native_timeout_s)),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(native_timeout_s),
    }


def engine_module() -> Any:
    """mooncake.engine, imported late, because it links what may be absent where this file is imported: on GPUs, their
    driver. It reads how much it logs when it is loaded; at INFO that is a line for every connection. And where: unless
    that is a folder in which it can write, its process ends at once."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    if (folder := os.environ.get("MC_LOG_DIR")) is not None:
        try:
            os.stat(folder)  # "" is the working folder to tempfile, and none to Mooncake
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as e:
            del os.environ["MC_LOG_DIR"]
            logger.warning("MC_LOG_DIR=%s is not used: nothing can be written there: %s", folder, e)
    try:
        import mooncake.engine
    except ImportError as e:
        raise TransferFailed(
            f"Mooncake cannot be loaded ({e}); `make setup` installs what it links, but for the driver of GPUs"
        ) from e
    return cast(Any, mooncake.engine)  # pyright: ignore[reportUnknownMemberType]


def _has_devices(topology: str) -> bool:
    """Whether there are HCAs in Mooncake's topology: {"cpu:0": [[preferred], [others]], ...}."""
    try:
        return any(devices for lists in json.loads(topology).values() for devices in lists)
    except ValueError:
        return False
