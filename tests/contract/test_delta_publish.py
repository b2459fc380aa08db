"""Publishes in a row of changes alone, or of factors alone, which the engine merges: a real engine proves each version,
and holds at the end, byte by byte, what vLLM's own loader makes of the trainer's export.
"""

import asyncio
from pathlib import Path

import pytest
import torch
from cases.tiny_models import make_decoder
from fakes.checkpoints import CONFIGS, write_checkpoint
from fakes.one_worker import fed_worker
from fakes.vllm_oracle import vllm_loads_and_samples
from fakes.vllm_publish import KEY

from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import Device, DType, RemoteMerge, RolloutConfig, SamplingConfig, WeightSyncConfig
from slipstream.orchestrator.inputs.character_tokenizer import save_character_tokenizer
from slipstream.rollout.types import WorkerOptions
from slipstream.trainer.adapter_io import save_merged
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.weights.factors import merges_of
from slipstream.trainer.weights.loading import CheckpointReader
from slipstream.weight_sync.merging.factors import OwnMergeSpec
from slipstream.weight_sync.publish.report import PublishReport

SYNC = WeightSyncConfig(watermark_bytes=64 << 20, delta_bytes=8 << 20)


async def publish_in_a_row(
    folder: Path, decoder: Decoder, config: RolloutConfig, sync: WeightSyncConfig, num_publishes: int
) -> tuple[list[PublishReport], list[dict[str, str]]]:
    """Reports, and what the engine holds afterwards: per rank, the hash of every parameter."""
    save_character_tokenizer(folder, vocab_size=64)
    merges = merges_of(decoder) if sync.remote_merge is RemoteMerge.host else ()
    source = TrainerWeightSource(decoder, 0, keeps_last=sync.delta_bytes > 0, merges=merges)
    base = TrainerWeightSource(decoder, 0, is_merged=False, merges=merges) if merges else None
    options = WorkerOptions(
        folder=folder, config=config, weight_sync=sync, dtype=DType.bfloat16, device=Device.cpu,
        tensors=decoder.spec.checkpoint_tensors("bfloat16"), key=KEY,
        own_merge=OwnMergeSpec(str(folder), on_device=False, merges=merges) if merges else None,
    )  # fmt: skip
    reports: list[PublishReport] = []
    async with fed_worker(options, source, base=base) as (worker, publisher):
        for version in range(num_publishes):
            if version:
                step(decoder, version)
            reports.append(await asyncio.to_thread(publisher.publish, version))
            assert [replica.error for replica in reports[-1].replicas] == [None]
        held = await worker.engine.call_ranks("read_params")
    return reports, held


@torch.no_grad()
def step(decoder: Decoder, seed: int) -> None:
    """Move adapters a little."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if "lora_" in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-5)


MERGES = WeightSyncConfig(watermark_bytes=64 << 20, remote_merge=RemoteMerge.host)


@pytest.mark.parametrize(
    ("model", "tp_size", "sync"), [("qwen3_tied", 2, SYNC), ("deepseek_v3", 1, SYNC), ("qwen3_moe", 2, MERGES)]
)
def test_an_engine_that_gets_less_holds_what_its_own_loader_makes_of_the_export(
    model: str, tp_size: int, sync: WeightSyncConfig, tmp_path: Path
) -> None:
    check_publishes(model, tp_size, sync, tmp_path, num_publishes=3)


def check_publishes(model: str, tp_size: int, sync: WeightSyncConfig, tmp_path: Path, *, num_publishes: int) -> None:
    """Every publish is proven by hashes of whole parameters, so that the last one's bytes stand for all."""
    config = CONFIGS[model]
    base = write_checkpoint(config, tmp_path / "base", seed=3)
    decoder = make_decoder(config, dtype=torch.bfloat16, reader=CheckpointReader(base, read_config(config)))
    rollout = RolloutConfig(
        max_model_len=256, max_num_seqs=8, kv_cache_bytes=16 << 20, tp_size=tp_size,
        sampling=SamplingConfig(max_tokens=12),
    )  # fmt: skip
    reports, held = asyncio.run(publish_in_a_row(base, decoder, rollout, sync, num_publishes))
    first, *others = (report.num_bytes for report in reports)
    if sync is MERGES:
        assert {report.num_takers for report in reports} == {tp_size}, "from the first one on"
    elif sync.delta_bytes:
        assert max(others) < 0.3 * first, "CPU engines repack experts, which go whole"
    assert all(report.num_changed_params for report in reports[1:])
    save_merged(decoder, tmp_path / "merged", config)
    arguments = {"attention_backend": "CPU_MLA"} if "kv_lora_rank" in config else {}
    hashes, _ = vllm_loads_and_samples(tmp_path / "merged", "bfloat16", tensor_parallel_size=tp_size, **arguments)
    assert held == hashes
