"""A publish from one trainer rank to a live vLLM engine over the product's own path, and what the engine then holds."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from fakes.one_worker import fed_worker
from fakes.vllm_oracle import ONLY_THE_LIKELIEST
from slipstream.conf.schema import Device, DType, EvalSampling, EvalSamplingConfig, RolloutConfig, WeightSyncConfig
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.rollout.types import Prompt, WorkerOptions
from slipstream.weight_sync.disk.kept_source import KeptSource
from slipstream.weight_sync.source import WeightSource

KEY = b"k" * 32
PROMPTS = [[5, 6, 7, 8], [100, 200, 300], [42] * 20]
NUM_TOKENS = 12


@dataclass
class Seen:
    """What an engine held after a publish."""

    first: list[dict[str, str]]
    """Hashes by rank."""
    zeroed: list[dict[str, str]]
    """Or after the publish of other weights."""
    again: list[dict[str, str]]
    tokens: list[list[int]]


async def publish_twice(
    folder: Path,
    source: WeightSource,
    config: RolloutConfig,
    *,
    device: Device,
    others: Callable[[], AbstractContextManager[None]] | None = None,
) -> Seen:
    """Publish to an engine, zero its weights, publish again, and sample greedily.

    Args:
        folder: config.json of the engine's model; a tokenizer is added.
        source: The trainer's one rank.
        config: Of the engine.
        device: Of both sides.
        others: Within it the source has weights that differ a little. They are published in place of zeros, and the
            second and third publish send what changed alone.
    """
    save_character_tokenizer(folder, vocab_size=64)
    zone = 0 if others is None else 32 << 20
    sync = WeightSyncConfig(watermark_bytes=64 << 20, timeout_s=60.0, delta_bytes=zone)
    options = WorkerOptions(
        folder=folder, config=config, weight_sync=sync, dtype=DType.bfloat16, device=device,
        tensors=source.layout().tensors, key=KEY,
    )  # fmt: skip
    sent: list[int] = []
    held = KeptSource(source, sync.watermark_bytes, device.value) if zone else source
    async with fed_worker(options, held) as (worker, publisher):

        async def publish() -> list[dict[str, str]]:
            report = await asyncio.to_thread(publisher.publish, 0)
            assert [replica.error for replica in report.replicas] == [None]
            sent.append(report.num_bytes)
            return await worker.engine.call_ranks("read_params")

        first = await publish()
        if others is None:
            await worker.engine.call_ranks("zero_params")
            zeroed = await worker.engine.call_ranks("read_params")
        else:
            with others():
                zeroed = await publish()
        again = await publish()
        assert others is None or max(sent[1:]) < sent[0] / 4, sent
        drawing = EvalSamplingConfig(top_p=ONLY_THE_LIKELIEST)
        greedy = EvalSampling(max_tokens=NUM_TOKENS, stop_at_eos=False, drawing=drawing)
        asked = [Prompt(0, tuple(prompt), "") for prompt in prompts_for(config, device)]
        tokens = [(await worker.generate_group(prompt, 1, greedy))[0].token_ids for prompt in asked]
    return Seen(first, zeroed, again, tokens)


def prompts_for(config: RolloutConfig, device: Device) -> list[list[int]]:
    """What is sampled after a publish. Nothing on a CPU with split experts: vLLM's kernels there take no expert map
    (supports_expert_map is False in 0.32), and read beyond the experts of a rank, at times with a SIGSEGV.
    """
    return [] if config.enable_expert_parallel and device is Device.cpu else PROMPTS


def check(seen: Seen, hashes: list[dict[str, str]], tokens: list[list[int]]) -> None:
    """Every byte on every rank, and what comes of them on one rank (the sums of several are rounded as they arrive)."""
    assert seen.first == hashes
    assert seen.again == hashes
    for before, after in zip(seen.first, seen.zeroed, strict=True):
        assert not set(before.items()) & set(after.items()), "zeroing left a weight as it was"
    if len(hashes) == 1:
        assert seen.tokens == tokens
