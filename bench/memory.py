"""Device memory in use, sampled every millisecond by a process of its own, so that nobody who is measured waits for it.

Owns the sampling and the growth over a baseline. Callers: bench/weight_sync.py. Reads NVML through ctypes: it counts
all memory of a GPU, whoever allocated it, and needs no CUDA context there.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from multiprocessing.connection import Connection

PERIOD_S = 0.001


class MemorySampler:
    """Growth of the memory in use on every GPU since the last baseline."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_sample, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.num_gpus: int = self._pipe.recv()

    def baseline(self) -> None:
        """Growth counts from here."""
        self._pipe.send("baseline")
        self._pipe.recv()

    def growth(self) -> dict[str, object]:
        """Per GPU: the largest growth in bytes since the baseline; and how often it was looked at."""
        self._pipe.send("growth")
        return self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._process.kill()


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _sample(pipe: Connection) -> None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            raise OSError("NVML does not start")
    except OSError:
        pipe.send(0)
        nvml, count = None, ctypes.c_uint(0)
    else:
        pipe.send(count.value)
    handles = [ctypes.c_void_p() for _ in range(count.value)]
    for index, handle in enumerate(handles):
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))

    def used() -> list[int]:
        memory, found = _Memory(), []
        for handle in handles:
            nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
            found.append(memory.used)
        return found

    first, peak, samples, began = used(), used(), 0, time.monotonic()
    while True:
        if pipe.poll(PERIOD_S if handles else None):
            if pipe.recv() == "baseline":
                first = peak = used()
                samples, began = 0, time.monotonic()
                pipe.send(None)
            else:
                growth = [top - base for top, base in zip(peak, first, strict=True)]
                period_s = (time.monotonic() - began) / max(1, samples)
                pipe.send({"growth_bytes": growth, "num_samples": samples, "mean_period_s": period_s})
        peak = [max(pair) for pair in zip(peak, used(), strict=True)]
        samples += 1
