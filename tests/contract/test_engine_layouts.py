"""Architectures and parallel layouts of a real engine: after a publish its bytes are what vLLM's own loader makes.

Everything but the weights' origin is the product: worker, recording, plan, Mooncake over TCP, commit. The checkpoints
are transformers' own, so weight_sync and rollout meet every architecture without a line for it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes.checkpoints import CONFIGS, CheckpointSource, write_checkpoint
from fakes.vllm_oracle import ONLY_THE_LIKELIEST, vllm_loads_and_samples
from safetensors.torch import load_file

from conf.schema import Device, DType, RolloutConfig, SamplingConfig, WeightSyncConfig
from rollout.types import Prompt
from rollout.worker import RolloutWorker
from weight_sync.publisher import Publisher
from weight_sync.transport.mooncake import MooncakeTransport

KEY = b"k" * 32
PROMPTS = [[5, 6, 7, 8], [100, 200, 300], [42] * 20]
NUM_TOKENS = 12


@dataclass
class Seen:
    """What an engine held after a publish."""

    first: list[dict[str, str]]
    """Hashes by rank."""
    zeroed: list[dict[str, str]]
    again: list[dict[str, str]]
    tokens: list[list[int]]


async def publish_twice(folder: Path, tp_size: int, expert_parallel: bool, num_workers: int = 1) -> list[Seen]:
    """Publish a checkpoint to engines, zero their weights, publish again, and sample greedily."""
    source = CheckpointSource(load_file(folder / "model.safetensors"))
    sync = WeightSyncConfig(watermark_bytes=1 << 20, timeout_s=60.0)
    workers = [
        RolloutWorker(
            folder,
            config=RolloutConfig(
                tp_size=tp_size,
                enable_expert_parallel=expert_parallel,
                max_model_len=256,
                max_num_seqs=8,
                kv_cache_bytes=16 << 20,
                sampling=SamplingConfig(max_tokens=NUM_TOKENS),
            ),
            weight_sync=sync,
            dtype=DType.bfloat16,
            device=Device.cpu,
            seed=index,
            tensors=source.layout().tensors,
            key=KEY,
        )
        for index in range(num_workers)
    ]
    transport = MooncakeTransport(sync.transport, timeout_s=sync.timeout_s)
    publisher = Publisher(source, transport, rank=0, world_size=1, group=None, config=sync, key=KEY)

    async def publish() -> list[list[dict[str, str]]]:
        report = await asyncio.to_thread(publisher.publish, 0)
        assert [replica.error for replica in report.replicas] == [None] * num_workers
        return await read()

    async def read() -> list[list[dict[str, str]]]:
        return [await worker._engine.call_ranks("slipstream_read_params") for worker in workers]

    try:
        addresses = [await worker.start() for worker in workers]
        await asyncio.to_thread(publisher.connect, addresses)
        first = await publish()
        for worker in workers:
            await worker._engine.call_ranks("slipstream_zero_params")
        zeroed, again = await read(), await publish()
        greedy = SamplingConfig(max_tokens=NUM_TOKENS, top_p=ONLY_THE_LIKELIEST, stop_at_eos=False)
        tokens = [
            [(await worker.generate_group(Prompt(0, tuple(p), ""), 1, sampling=greedy))[0].token_ids for p in PROMPTS]
            for worker in workers
        ]
    finally:
        publisher.close()
        for worker in workers:
            await worker.stop()
        transport.close()
    return [Seen(*facts) for facts in zip(first, zeroed, again, tokens, strict=True)]


def check(seen: Seen, hashes: list[dict[str, str]], tokens: list[list[int]]) -> None:
    """Every byte on every rank, and what comes of them."""
    assert seen.first == hashes
    assert seen.again == hashes
    for before, after in zip(seen.first, seen.zeroed, strict=True):
        assert not set(before.items()) & set(after.items()), "zeroing left a weight as it was"
    assert seen.tokens == tokens


@pytest.mark.parametrize(
    ("model", "tp_size", "expert_parallel"),
    [
        ("llama", 1, False),
        ("glm4_moe", 1, False),
        ("deepseek_v3", 1, False),
        ("deepseek_v3", 2, True),
        ("qwen3_moe", 2, False),
    ],
)
def test_a_publish_leaves_what_vllms_loader_makes(
    model: str, tp_size: int, expert_parallel: bool, tmp_path: Path
) -> None:
    folder = write_checkpoint(CONFIGS[model], tmp_path, seed=3)
    (seen,) = asyncio.run(publish_twice(folder, tp_size, expert_parallel))
    arguments: dict[str, Any] = {"tensor_parallel_size": tp_size, "enable_expert_parallel": expert_parallel}
    check(seen, *vllm_loads_and_samples(folder, "bfloat16", prompts=PROMPTS, max_tokens=NUM_TOKENS, **arguments))
    if model == "deepseek_v3":
        assert any(name.endswith("W_UK_T") for name in seen.first[0])


def test_two_replicas_hold_the_same_bytes(tmp_path: Path) -> None:
    folder = write_checkpoint(CONFIGS["qwen3_tied"], tmp_path, seed=5)
    seen = asyncio.run(publish_twice(folder, 1, False, num_workers=2))
    expected = vllm_loads_and_samples(folder, "bfloat16", prompts=PROMPTS, max_tokens=NUM_TOKENS)
    for one in seen:
        check(one, *expected)
