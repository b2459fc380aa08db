"""Publishes in a row that send only changes: after each, a real engine holds byte by byte what one beside it holds that
gets every byte, and at the end what vLLM's own loader makes of the trainer's export.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases.tiny_models import make_decoder
from fakes.checkpoints import CONFIGS, write_checkpoint
from fakes.vllm_oracle import vllm_loads_and_samples
from fakes.vllm_publish import KEY

from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig, WeightSyncConfig
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.rollout.engine.vllm_engine import VllmEngine
from slipstream.rollout.worker import RolloutWorker
from slipstream.trainer.adapter_io import save_merged
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.weights.loading import CheckpointReader
from slipstream.weight_sync.publish.publisher import Publisher
from slipstream.weight_sync.publish.report import PublishReport
from slipstream.weight_sync.transport.mooncake import MooncakeTransport

NUM_PUBLISHES = 5
SYNC = WeightSyncConfig(watermark_bytes=64 << 20, delta_bytes=8 << 20)

Held = list[list[dict[str, str]]]
"""Per engine and rank, the hash of every parameter."""


async def publish_in_a_row(folder: Path, decoder: Decoder, config: RolloutConfig) -> list[tuple[PublishReport, Held]]:
    """To an engine with a landing zone and one without."""
    save_character_tokenizer(folder, vocab_size=64)
    source = TrainerWeightSource(decoder, 0, keeps_last=True)
    workers = [
        RolloutWorker(
            folder, config=config, weight_sync=replace(SYNC, delta_bytes=num_bytes), dtype=DType.bfloat16,
            device=Device.cpu, seed=0, tensors=source.layout().tensors, key=KEY, make_engine=VllmEngine,
        )
        for num_bytes in (SYNC.delta_bytes, 0)
    ]  # fmt: skip
    transport = MooncakeTransport(SYNC.transport, device="cpu", timeout_s=SYNC.timeout_s)
    publisher = Publisher(source, transport, rank=0, world_size=1, group=None, config=SYNC, key=KEY, device="cpu")
    seen: list[tuple[PublishReport, Held]] = []
    try:
        addresses = [await worker.start() for worker in workers]
        await asyncio.to_thread(publisher.connect, addresses)
        for version in range(NUM_PUBLISHES):
            report = await asyncio.to_thread(publisher.publish, version)
            assert [replica.error for replica in report.replicas] == [None, None]
            held = [await worker.engine.call_ranks("slipstream_read_params") for worker in workers]
            seen.append((report, held))
            if version < NUM_PUBLISHES - 1:
                step(decoder, version)
    finally:
        publisher.close()
        for worker in workers:
            await worker.stop()
        transport.close()
    return seen


@torch.no_grad()
def step(decoder: Decoder, seed: int) -> None:
    """Move adapters a little."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if "lora_" in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-4)


@pytest.mark.parametrize(("model", "tp_size"), [("qwen3_tied", 1), ("deepseek_v3", 1), ("llama", 2)])
def test_an_engine_that_gets_changes_holds_what_one_holds_that_gets_every_byte(
    model: str, tp_size: int, tmp_path: Path
) -> None:
    config = CONFIGS[model]
    base = write_checkpoint(config, tmp_path / "base", seed=3)
    decoder = make_decoder(config, dtype=torch.bfloat16, reader=CheckpointReader(base, read_config(config)))
    rollout = RolloutConfig(
        max_model_len=256, max_num_seqs=8, kv_cache_bytes=16 << 20, tp_size=tp_size,
        sampling=SamplingConfig(max_tokens=12),
    )  # fmt: skip
    seen = asyncio.run(publish_in_a_row(base, decoder, rollout))
    assert all(changes == whole for _, (changes, whole) in seen)
    assert len({str(held) for _, held in seen}) == NUM_PUBLISHES, "every version differs"
    sent = [report.num_bytes for report, _ in seen]
    assert max(sent[1:]) < 0.95 * sent[0], "half of it went whole to the other engine; CPU engines repack experts"
    save_merged(decoder, tmp_path / "merged", config)
    arguments = {"attention_backend": "CPU_MLA"} if "kv_lora_rank" in config else {}
    hashes, _ = vllm_loads_and_samples(tmp_path / "merged", "bfloat16", tensor_parallel_size=tp_size, **arguments)
    assert seen[-1][1] == [hashes, hashes]
