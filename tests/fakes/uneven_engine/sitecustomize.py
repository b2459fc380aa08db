"""Engines whose groups take as long as long responses do, unevenly: 0.5 s at the median, 2 s or more for one in twelve.

In every process whose PYTHONPATH begins with this folder, a sampled group is held back for a time drawn from a
log-normal distribution (median MEDIAN_S, sigma SIGMA, at most LONGEST_S), which costs no CPU time. Its tokens are of
the version that sampled them before, as those of a long response are.
"""

import asyncio
import math
import random
from types import ModuleType
from typing import Any

from tests.fakes.on_import import patch_on_import

MEDIAN_S, SIGMA, LONGEST_S = 0.5, 1.0, 4.0


def patch(module: ModuleType) -> None:
    """For rollout.engine.vllm_engine."""
    engine: Any = module.VllmEngine
    plain = engine.generate_group
    draw = random.Random(0)

    async def generate_group(self: Any, *arguments: Any, **named: Any) -> Any:
        group = await plain(self, *arguments, **named)
        await asyncio.sleep(min(LONGEST_S, draw.lognormvariate(math.log(MEDIAN_S), SIGMA)))
        return group

    engine.generate_group = generate_group


patch_on_import("slipstream.rollout.engine.vllm_engine", patch)
