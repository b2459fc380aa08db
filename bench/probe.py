"""What may hold up a process while an engine pauses: garbage collections, kernels compiled then, a busy event loop.

Owns the note-taking, in this process (Probe) and inside an engine's ranks (ProbedReceiver, which bench/weight_sync.py
gives to vLLM instead of the product's extension). Times are time.monotonic(), which all processes of a host share.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import torch

from rollout.in_vllm.worker_extension import WeightReceiver

try:
    from checkpoint_engine.worker import VllmColocateWorkerExtension as Colocated
except ImportError:  # only the peer needs it
    Colocated = object  # type: ignore[assignment,misc]

STALL_S = 0.02


class Probe:
    """Notes (kind, when, seconds) of collections of the oldest generation, kernel compilations and stalls."""

    def __init__(self) -> None:
        self.events: list[tuple[str, float, float]] = []
        self._began = 0.0
        gc.callbacks.append(self._note_collection)
        try:
            from triton import knobs

            knobs.compilation.listener = self._note_compilation
        except (ImportError, AttributeError):  # no Triton, or one without the hook
            pass

    async def watch_loop(self) -> None:
        """Note how late a task of the running loop gets its turn."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.002)
            late = time.monotonic() - began - 0.002
            if late > STALL_S:
                self.events.append(("stall", began, late))

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.monotonic()
        elif info["generation"] == 2:
            self.events.append(("gc", self._began, time.monotonic() - self._began))

    def _note_compilation(self, *, metadata: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        seconds = times.total / 1e6
        name = metadata.get("name", "?") if isinstance(metadata, dict) else "?"
        what = f"{'loading' if cache_hit else 'compiling'} {name}"
        self.events.append((what, time.monotonic() - seconds, seconds))


class ProbedReceiver(WeightReceiver, Colocated):
    """The product's worker extension, a probe beside it, and what checkpoint-engine asks of a worker."""

    _probe: Probe

    def probe_start(self) -> None:
        """Take notes from here on."""
        self._probe = Probe()
        self._allocated: list[int] = []

    def slipstream_begin(self, version: int, epoch: int, digest: str, known: Any) -> Any:
        """The product's, and from here on the allocator's peak counts."""
        reply = super().slipstream_begin(version, epoch, digest, known)
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        return reply

    def slipstream_commit(self, version: int, epoch: int) -> Any:
        """The product's, and what was allocated at most since begin, over what is left."""
        reply = super().slipstream_commit(version, epoch)
        if torch.cuda.is_initialized():
            self._allocated.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
        return reply

    def probe_allocated(self) -> list[int]:
        """Bytes that torch handed out during each publish since the last call, new from the device or reused."""
        found, self._allocated = self._allocated, []
        return found

    def probe_events(self) -> list[tuple[str, float, float]]:
        """All notes."""
        return self._probe.events
