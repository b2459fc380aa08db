"""vLLM engines whose responses have the lengths of bench/loops/lengths.py's long-tailed kind instead of max_tokens.

For every process whose PYTHONPATH begins with this folder, whichever trainer the engine belongs to. Each response, of
several to one prompt too, gets a max_tokens of its own where vLLM registers it; nothing else of the engine changes. For
requests that sample without an end (ignore_eos).
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from bench.loops.lengths import LONG_TAILED, lengths
from tests.fakes.on_import import patch_on_import


def patch(module: ModuleType) -> None:
    """For vllm.v1.engine.output_processor, which sees a request before the engine's core does."""
    processor: Any = module.OutputProcessor
    plain = processor.add_request
    drawn: dict[int, Iterator[int]] = {}

    def add_request(self: Any, request: Any, *others: Any, **named: Any) -> None:
        params = request.sampling_params
        if params is not None and params.max_tokens is not None:
            of_longest = drawn.setdefault(params.max_tokens, lengths(LONG_TAILED, params.max_tokens))
            request.sampling_params = params.clone()  # siblings share theirs
            request.sampling_params.max_tokens = next(of_longest)
        plain(self, request, *others, **named)

    processor.add_request = add_request


patch_on_import("vllm.v1.engine.output_processor", patch)
