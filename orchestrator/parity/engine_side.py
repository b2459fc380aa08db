"""What the engine does for a comparison: it samples, prefills what it sampled, and records one forward pass.

    checkpoint --vLLM--> sample(prompts) --> prefill(sequences) --> record(sequences) --> end

Owns: the order, and which log-probability belongs to which token. Does not own: the engine (rollout.engine), what is
recorded (rollout/in_vllm/activations.py). The engine's processes, and with them its GPU memory, are gone afterwards.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.conf.json_files import JsonMapping
from slipstream.conf.schema import SamplingConfig
from slipstream.orchestrator.parity.progress import Count, Say, telling
from slipstream.rollout.engine.vllm_engine import VllmEngine
from slipstream.rollout.engine.vllm_process import make_llm
from slipstream.rollout.types import EngineOptions, Routes

WITH_WEIGHTS: JsonMapping = {"load_format": "auto"}
"""The engine reads the checkpoint itself, instead of waiting for a publish."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled sequence. The lists of log-probabilities have one entry per sampled token."""

    num_prompt: int
    token_ids: tuple[int, ...]
    """Prompt and response."""
    decoded: tuple[float, ...]
    """As the engine sampled them, token by token."""
    prefilled: tuple[float, ...]
    """As the engine computes them in one prefill of the whole sequence."""
    routes: Routes | None = None
    """The experts that the engine chose while it sampled, where it was asked to record them."""

    def response_of(self, values: Sequence[float]) -> Sequence[float]:
        """Those of `values`, one per token but the first, that belong to the response."""
        return values[self.num_prompt - 1 :]


def sample_and_record(
    options: EngineOptions,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int,
    max_tokens: int,
    num_recorded: int,
    activations: Path,
    say: Say,
    engine_arguments: JsonMapping = WITH_WEIGHTS,
) -> list[Sampled]:
    """Sample one response to each prompt at temperature 1, score it again by prefill, and record activations.

    Args:
        options: The engine's; its folder is a checkpoint, its length is set here, and it runs eagerly where activations
            are recorded.
        max_tokens: Of each response, exactly.
        num_recorded: The first so many sequences are prefilled once more, one by one, while activations are recorded
            into the file `activations` (safetensors). 0: none.
        say: Told what begins, and how far it is.
        engine_arguments: Of vLLM, over the product's: how the engine comes to its weights.
    """
    sampling = SamplingConfig(max_tokens=max_tokens, stop_at_eos=False)
    longest = max(map(len, prompts)) + max_tokens + 1
    is_eager = options.config.enforce_eager or num_recorded > 0
    config = replace(options.config, max_model_len=longest, sampling=sampling, enforce_eager=is_eager)

    async def run() -> list[Sampled]:
        engine = VllmEngine(
            replace(options, config=config), seed, make_llm=lambda own: make_llm({**own, **engine_arguments})
        )
        with telling(say, "engine: start", lambda: engine.start_phase):
            await engine.prepare()
            await engine.start()
        try:
            engine.version = 0
            total, scored, recorded = len(prompts) * max_tokens, Count(len(prompts)), Count(num_recorded)

            async def score(sequence: Sequence[int], count: Count) -> list[float]:
                found = await engine.score(sequence)
                count.done += 1
                return found

            sampled = f"engine: sample {len(prompts)} x {max_tokens} tokens"
            with telling(say, sampled, lambda: f"{engine.num_generated_tokens} of {total}"):
                groups = await asyncio.gather(*(engine.generate_group(prompt, 1, sampling) for prompt in prompts))
            sequences = [(*prompt, *rollouts[0].token_ids) for prompt, rollouts in zip(prompts, groups, strict=True)]
            with telling(say, "engine: prefill what it sampled", lambda: f"{scored} sequences"):
                scores = await asyncio.gather(*(score(sequence, scored) for sequence in sequences))
            if num_recorded:
                with telling(say, f"engine: record {num_recorded} sequences", lambda: str(recorded)):
                    await engine.call_ranks("slipstream_record_activations")
                    for sequence in sequences[:num_recorded]:
                        await score(sequence, recorded)
                    await engine.call_ranks("slipstream_write_activations", str(activations))
            return [
                Sampled(
                    len(prompt),
                    sequence,
                    tuple(rollouts[0].logprobs),
                    tuple(score[len(prompt) - 1 :]),
                    rollouts[0].routes,
                )
                for prompt, rollouts, sequence, score in zip(prompts, groups, sequences, scores, strict=True)
            ]
        finally:
            engine.shutdown()

    return asyncio.run(run())
