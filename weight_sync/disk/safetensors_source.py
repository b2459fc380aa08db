"""Holds this rank's share of a checkpoint in host memory: the ranks together read it once, and publish from there.

    files, sorted     |======== 1 ========|==== 2 ====|======= 3 =======|
    bytes, n ranks    |   rank 0   |   rank 1   |   rank 2   |  rank 3  |     cut between rows: shares differ by a row
    a rank's share    blocks of at most 1 GiB, each one run of a file and one allocation; tensors lie in it as on disk,
                      so that neighbours are copied to the device in one copy

Several threads read blocks in chunks (pread, without another copy) and page-lock each block as soon as it is full,
while the next one is read. Page-locking needs pages that exist; the read itself touches them.

Invariant: after read() returned, every byte of the share is the file's, and the files did not change meanwhile.
"""

import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.conf.errors import ConfigError
from slipstream.conf.failures import undone_by
from slipstream.weight_sync.disk.copies import Held
from slipstream.weight_sync.disk.safetensors_files import DTYPES, StoredTensor, read_index, tensor_metas
from slipstream.weight_sync.disk.tensor_source import SCRATCH_BYTES, TensorSource
from slipstream.weight_sync.layout import DTYPE_BYTES, Region, TensorMeta, first_difference
from slipstream.weight_sync.page_lock import page_lock, pages

BLOCK_BYTES = 1 << 30
"""Bytes that are allocated and page-locked at once; also the most that one copy to a device can be."""
CHUNK_BYTES = 16 << 20
"""Bytes that one thread reads at once."""
NUM_THREADS = 8
_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a tensor on disk (all of a scalar). `region` is in elements of the tensor."""

    tensor: str
    stored: StoredTensor
    region: Region

    @property
    def num_bytes(self) -> int:
        return self.region.num_elements * DTYPE_BYTES[DTYPES[self.stored.dtype]]

    @property
    def offset(self) -> int:
        """Position of the first byte in the file."""
        if not self.region.start:
            return self.stored.offset
        row = DTYPE_BYTES[DTYPES[self.stored.dtype]] * prod(self.stored.shape[1:])
        return self.stored.offset + self.region.start[0] * row


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Rows that are one run of bytes of a file, and are read into one allocation."""

    path: Path
    start: int
    stop: int
    rows: tuple[Rows, ...]

    def placed(self) -> Iterator[tuple[Rows, int]]:
        """The rows, and where each begins in the block."""
        return ((rows, rows.offset - self.start) for rows in self.rows)


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What one rank did in one read()."""

    num_bytes: int
    seconds: float
    pinned_bytes: int
    """How many of those bytes are page-locked; 0 without CUDA."""


class Checkpoint:
    """One rank's share of a checkpoint. Use `api.register_checkpoint`. Raises ConfigError if the folder holds no
    complete one."""

    def __init__(
        self,
        folder: Path | str,
        *,
        rank: int = 0,
        world_size: int = 1,
        num_threads: int = NUM_THREADS,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        self._rank, self._world_size, self._num_threads = rank, world_size, num_threads
        self._folder = Path(folder)
        index = read_index(self._folder, "CHECKPOINT")
        self.tensors: tuple[TensorMeta, ...] = tensor_metas(index)
        """Every tensor of the checkpoint, the same on all ranks."""
        self._plans = plan_blocks(index, rank, world_size)
        self._index: Mapping[str, StoredTensor] = index
        """Where the bytes are read; refresh() may name other files."""
        self._memory: list[mmap.mmap] = []
        self._blocks: list[Tensor] = []
        self._pinned: set[int] = set()
        self._source: TensorSource | None = None
        self._scratch_bytes = scratch_bytes
        self._lock = threading.Lock()
        self.num_bytes = sum(rows.num_bytes for plan in self._plans for rows in plan.rows)
        """Bytes of this rank's share."""
        self.num_bytes_read = 0
        """Bytes read so far by the present or the last read(); any thread may look at it."""

    @property
    def source(self) -> TensorSource:
        """The source for a Publisher. Plans may be made before read() has ended; publishes are refused until then."""
        if self._source is None:
            # a block begins at the same offset in a page as in the file
            self._memory = [pages(plan.start % _PAGE_BYTES + plan.stop - plan.start) for plan in self._plans]
            self._blocks = [
                torch.frombuffer(memory, dtype=torch.uint8)[plan.start % _PAGE_BYTES :]
                for memory, plan in zip(self._memory, self._plans, strict=True)
            ]
            self._source = TensorSource(self._rank, self.tensors, self._held(), scratch_bytes=self._scratch_bytes)
            self._source.missing = f"CHECKPOINT={self._folder} was not read yet: call read() first"
        return self._source

    def read(self) -> ReadReport:
        """Read the share into memory and, the first time, page-lock it. Not collective. Call it in any thread, but one
        at a time. Raises ConfigError if a file is gone, was cut short or changed while it was read."""
        began = time.monotonic()
        source = self.source
        source.missing = f"CHECKPOINT={self._folder} was not read whole: call read() again"
        before = self._stamps()
        self.num_bytes_read = 0
        jobs = [job for number in range(len(self._plans)) for job in self._jobs(number)]
        has_failed = threading.Event()

        def run(job: Callable[[], None]) -> None:
            if has_failed.is_set():  # the checkpoint is refused, so do not read the rest
                return
            with undone_by(lambda _: has_failed.set()):
                job()

        with ThreadPoolExecutor(self._num_threads, "weight-sync-read") as pool:
            for future in [pool.submit(run, job) for job in jobs]:
                future.result()
        if self._stamps() != before:
            raise ConfigError(f"CHECKPOINT={self._folder} changed while it was read; read it again")
        source.missing = ""
        pinned = sum(self._blocks[number].numel() for number in self._pinned)
        return ReadReport(self.num_bytes, time.monotonic() - began, pinned)

    def refresh(self, folder: Path | str | None = None) -> ReadReport:
        """Read other weights of the same model into the same memory: those of `folder`, which may lie in other files,
        or the present ones.

        Publishers of `source` stay connected; publish again to send the weights. Do not call it during a publish.
        Raises ConfigError if the tensors differ in name, shape or format.
        """
        where = self._folder if folder is None else Path(folder)
        index = read_index(where, "CHECKPOINT")
        if difference := first_difference(tensor_metas(index), self.tensors):
            raise ConfigError(
                f"CHECKPOINT={where} has other tensors, shapes or formats than the one that was registered "
                f"({difference}); register it anew"
            )
        self._folder, self._index = where, index
        return self.read()

    def _jobs(self, number: int) -> list[Callable[[], None]]:
        """One job per chunk; the job that completes the block page-locks it."""
        # A file, where the block would begin in it, and what is read of it, by its place in the block. What is together
        # in both is one run: a read for each of 100,000 small tensors would take seconds.
        runs: list[tuple[Path, int, int, int]] = []
        for rows, place in self._plans[number].placed():
            there = replace(rows, stored=self._index[rows.tensor])
            where, first = (there.stored.path, there.offset - place), place
            if runs and runs[-1][:2] == where:
                first = runs.pop()[2]
            runs.append((*where, first, place + rows.num_bytes))
        chunks = [
            (path, start + first, self._blocks[number][first:stop][:CHUNK_BYTES])
            for path, start, begin, stop in runs
            for first in range(begin, stop, CHUNK_BYTES)
        ]
        left = [len(chunks)]

        def job(path: Path, offset: int, out: Tensor) -> None:
            _read_into(path, offset, out)
            with self._lock:
                self.num_bytes_read += out.numel()
                left[0] -= 1
                is_last = left[0] == 0
            if is_last and number not in self._pinned and torch.cuda.is_available() and page_lock(self._memory[number]):
                self._pinned.add(number)

        return [functools.partial(job, *chunk) for chunk in chunks]

    def _held(self) -> list[Held]:
        return [
            Held(rows.tensor, rows.region, DTYPES[rows.stored.dtype], block[place : place + rows.num_bytes])
            for plan, block in zip(self._plans, self._blocks, strict=True)
            for rows, place in plan.placed()
        ]

    def _stamps(self) -> list[tuple[int, int]]:
        paths = {self._index[rows.tensor].path for plan in self._plans for rows in plan.rows}
        try:
            stats = [path.stat() for path in sorted(paths)]
        except OSError as error:
            raise ConfigError(f"the checkpoint cannot be read: {error}") from error
        return [(stat.st_size, stat.st_mtime_ns) for stat in stats]


def plan_blocks(
    index: dict[str, StoredTensor], rank: int, world_size: int, *, block_bytes: int = BLOCK_BYTES
) -> list[BlockPlan]:
    """The share of one rank. Pure. The shares of all ranks together are every row of every tensor, once."""
    tensors = sorted(index.items(), key=lambda item: (item[1].path.name, item[1].offset))
    sizes = [DTYPE_BYTES[DTYPES[stored.dtype]] * prod(stored.shape) for _, stored in tensors]
    total = sum(sizes)
    first, last = rank * total // world_size, (rank + 1) * total // world_size
    plans: list[BlockPlan] = []
    position = 0
    for (name, stored), size in zip(tensors, sizes, strict=True):
        num_rows = stored.shape[0] if stored.shape else 1
        row = size // num_rows if num_rows else 0
        if row:
            # A row belongs to the rank whose bytes contain its first byte.
            begin = min(max(-(-(first - position) // row), 0), num_rows)
            end = min(max(-(-(last - position) // row), 0), num_rows)
            step = max(1, block_bytes // row)
            for at in range(begin, end, step):
                _append(plans, name, stored, at, min(at + step, end), block_bytes)
        position += size
    return plans


def _append(plans: list[BlockPlan], name: str, stored: StoredTensor, begin: int, end: int, block_bytes: int) -> None:
    """Add rows to the last block if they follow it in the file and there is room; else open another one."""
    region = (
        Region((begin,) + (0,) * (len(stored.shape) - 1), (end - begin, *stored.shape[1:]))
        if stored.shape
        else Region((), ())
    )
    rows = Rows(name, stored, region)
    last = plans[-1] if plans else None
    stop = rows.offset + rows.num_bytes
    if (
        last is not None
        and last.path == stored.path
        and last.stop <= rows.offset < last.stop + _PAGE_BYTES
        and stop - last.start <= block_bytes
    ):
        plans[-1] = BlockPlan(last.path, last.start, stop, (*last.rows, rows))
    else:
        plans.append(BlockPlan(stored.path, rows.offset, stop, (rows,)))


def _read_into(path: Path, offset: int, out: Tensor) -> None:
    """Call pread until `out` is full, with the interpreter's lock released."""
    view = memoryview(cast(Any, out.numpy()))
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        while view:
            num_bytes = os.preadv(file, [view], offset)
            if num_bytes == 0:
                raise ConfigError(f"{path} was cut short while it was read; read it again")
            view, offset = view[num_bytes:], offset + num_bytes
    except OSError as error:
        raise ConfigError(f"{path} cannot be read at byte {offset}: {error}") from error
    finally:
        os.close(file)
