"""The product's engine with ranks that tests can read (engine_reader.py)."""

from typing import Any

from slipstream.rollout.engine.vllm_engine import VllmEngine

READER = "fakes.engine_reader.WeightReceiver"
"""worker_extension_cls of such an engine."""


class ReadableEngine(VllmEngine):
    """`call_ranks` also knows the methods of engine_reader.py."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.process.arguments["worker_extension_cls"] = READER
