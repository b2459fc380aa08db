"""Device memory in use, sampled every millisecond by a separate process, so that no measured process waits for it.

Owns the sampling and the figures from the samples. Reads NVML through ctypes, which counts all memory of a GPU, of all
processes, and needs no CUDA context there. Times are time.monotonic(), which all processes of a host share. Memory that
an allocator reuses does not show as growth here; bench/sync/engine_extension.py asks the engine's allocator for that.
"""

import ctypes
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

PERIOD_S = 0.001


@dataclass(frozen=True)
class Samples:
    """Bytes in use since the sampler was told to start. Example: Samples([1.0, 1.001], [[5, 7], [5, 9]]), two GPUs."""

    times_s: list[float]
    used: list[list[int]]
    """One entry per sample, with one number per GPU."""

    def growth(self, gpus: Sequence[int], windows: Sequence[tuple[float, float]], *, over_start: bool) -> int | None:
        """Largest growth in bytes on any of these GPUs inside any window (start, stop); None if nothing was sampled.

        Args:
            over_start: Growth over the very first sample; otherwise over the last sample before the window.
        """
        found = []
        for start, stop in windows:
            before = [used for when, used in zip(self.times_s, self.used, strict=True) if when < start]
            inside = [used for when, used in zip(self.times_s, self.used, strict=True) if start <= when <= stop]
            if before and inside:
                base = before[0] if over_start else before[-1]
                found += [max(used[gpu] for used in inside) - base[gpu] for gpu in gpus if gpu < len(base)]
        return max(found, default=None)

    @property
    def mean_period_s(self) -> float | None:
        """Mean seconds from one sample to the next."""
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1) if len(self.times_s) > 1 else None


class MemorySampler:
    """Memory in use on every GPU of the host."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_sample, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def start(self) -> None:
        """Forget all samples and take the first one of a new series."""
        self._pipe.send("start")
        self._pipe.recv()

    def samples(self) -> Samples:
        self._pipe.send("samples")
        return Samples(*self._pipe.recv())

    def close(self) -> None:
        self._process.kill()


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _handles() -> tuple[ctypes.CDLL | None, list[ctypes.c_void_p]]:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None, []
    except OSError:
        return None, []
    handles = [ctypes.c_void_p() for _ in range(count.value)]
    for index, handle in enumerate(handles):
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    return nvml, handles


def _sample(pipe: Connection) -> None:
    nvml, handles = _handles()
    times_s: list[float] = []
    series: list[list[int]] = []

    def look() -> None:
        memory, used = _Memory(), []
        for handle in handles:
            assert nvml is not None
            nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
            used.append(memory.used)
        times_s.append(time.monotonic())
        series.append(used)

    while True:
        if pipe.poll(PERIOD_S if handles else None):
            if pipe.recv() == "start":
                times_s, series = [], []
                look()
                pipe.send(None)
            else:
                pipe.send((times_s, series))
        if handles:
            look()
