"""The product's engine with ranks that tests can read (engine_reader.py)."""

from typing import Any

from slipstream.rollout.engine.vllm_engine import VllmEngine

READER = "fakes.engine_reader.WeightReceiver"
"""worker_extension_cls of such an engine."""
SLOW_S = 0.02
"""Before a step of an engine that is slow: what it samples is under way for seconds, on whatever machine."""


class ReadableEngine(VllmEngine):
    """`call_ranks` also knows the methods of engine_reader.py."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.process.arguments["worker_extension_cls"] = READER

    async def be_slow(self, is_slow: bool = True) -> None:
        """Wait before each step from now on, or no more."""
        await self.call_ranks("wait_before_steps", SLOW_S if is_slow else 0.0)
