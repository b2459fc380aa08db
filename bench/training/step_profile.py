"""Where the time of a trainer's step goes on the device, by kinds of kernels, and what of it exchanges take alone."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.trainer import kind_of

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpyAsync")
SHORT_WAIT_US = 20


def profile(step: Callable[[], object]) -> dict[str, Any]:
    """Where the device's time of one step goes, in seconds, and how often the host waits. The step ends on the host."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - began
    events = [
        (event.name, event.device_type == DeviceType.CUDA, event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
    ]
    return {"wall_s": wall_s, **read_profile(events, wall_s)}


def read_profile(events: Sequence[tuple[str, bool, float, float]], wall_s: float) -> dict[str, Any]:
    """Sum up a step's events: name, whether it is the device's, start and end in microseconds."""
    kinds: dict[str, float] = {}
    busy: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    waits: dict[str, list[float]] = {}
    for name, is_device, start, stop in events:
        if is_device and not name.startswith(("nccl:", "ProfilerStep")):
            kind = "exchange" if name.startswith("nccl") else kind_of(name)
            kinds[kind] = kinds.get(kind, 0.0) + (stop - start) / 1e6
            busy.append((start, stop))
            if kind != "exchange":
                others.append((start, stop))
        elif name in WAITS and stop - start > SHORT_WAIT_US:
            waits.setdefault(name, []).append((stop - start) / 1e6)
    busy_s, others_s = covered(busy) / 1e6, covered(others) / 1e6
    return {
        "kinds_s": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "exchange_alone_s": busy_s - others_s,
        "idle_s": wall_s - busy_s,
        "host_waits": {name: {"count": len(times), "total_s": sum(times)} for name, times in waits.items()},
    }


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union."""
    total, until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total
