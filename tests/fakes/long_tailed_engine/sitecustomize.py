"""Workers whose responses have the lengths of bench/loops/lengths.py's long-tailed kind instead of sampling.max_tokens.

For every process whose PYTHONPATH begins with this folder. A response is a request of its own with its own max_tokens;
nothing else of the worker changes. For runs that sample without an end (rollout.sampling.stop_at_eos=false).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import ModuleType
from typing import Any

from bench.loops.lengths import LONG_TAILED, lengths
from tests.fakes.on_import import patch_on_import


def patch(module: ModuleType) -> None:
    """For rollout.worker."""
    worker: Any = module.RolloutWorker
    plain = worker.generate_group

    async def generate_group(
        self: Any, prompt: Any, n: int, sampling: Any = None, version: int | None = None, *, seed: int | None = None
    ) -> Any:
        sampling = sampling or self._sampling
        if not hasattr(self, "drawn"):
            self.drawn = lengths(LONG_TAILED, sampling.max_tokens)
        own = [replace(sampling, max_tokens=next(self.drawn)) for _ in range(n)]
        seeds = [None if seed is None else seed + index for index in range(n)]
        calls = [plain(self, prompt, 1, one, version, seed=its) for one, its in zip(own, seeds, strict=True)]
        return [rollout for group in await asyncio.gather(*calls) for rollout in group]

    worker.generate_group = generate_group


patch_on_import("rollout.worker", patch)
