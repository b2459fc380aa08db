"""RL on an INT4 base: the engine loads it from disk, the trainer keeps it packed, and adapters go into slots.

The oracle of the slots' bytes and of log-probabilities is an engine that loads base and adapter from disk by itself;
that of the base is the trainer, which reads the same files with code of its own.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.checkpoints import MAX_PACKED_K3, PACKED, pack_experts, write_checkpoint
from fakes.vllm_oracle import vllm_serves_adapter
from test_adapter_gpu import KEY, MAX_LOGPROB_ERROR, SHORT, draw, save_for_vllm

from conf.load import load_run_config
from conf.schema import Device, RunConfig
from orchestrator.placement import adapter_slots
from orchestrator.prepare import prepare_model
from rollout.engine import engine_arguments
from rollout.types import Prompt
from trainer.rank import TrainerRank
from trainer.types import Denominators, Sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),
]

PROMPT = Prompt(0, tuple(3 + (7 * i) % 60 for i in range(40)), "")


def config_of(folder: Path) -> RunConfig:
    """Rank 8 on attention and experts."""
    return load_run_config(
        [
            "experiment=quickstart", "cluster.device=cuda", "trainer.ep_size=1", "trainer.num_ranks=1",
            "trainer.lora.rank=8", "trainer.lora.alpha=8", "model.dtype=bfloat16", "model=checkpoint",
            f"model.path={folder}", "model.tokenizer=characters", "rollout.num_workers=1", "rollout.max_model_len=256",
            "rollout.gpu_memory_utilization=0.3", "rollout.enforce_eager=true", "weight_sync.mode=adapter",
        ]
    )  # fmt: skip


def test_an_int4_base_is_served_from_disk_and_adapters_of_its_experts_from_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    asyncio.run(compare(tmp_path))


async def compare(tmp_path: Path) -> None:
    """Publish an adapter into a slot of a live engine, and let the trainer and an engine of its own judge it."""
    from rollout.worker import RolloutWorker

    base = write_checkpoint(PACKED, tmp_path / "base", seed=1)
    pack_experts(base)
    config = config_of(base)
    model = prepare_model(config.model, tmp_path / "model")
    slots = adapter_slots(config, model.hf_config)
    assert slots is not None
    assert slots.base == base
    worker = RolloutWorker(
        model.folder, config=config.rollout, weight_sync=config.weight_sync, dtype=config.model.dtype,
        device=Device.cuda, seed=1, tensors=(), key=KEY, adapters=slots,
    )  # fmt: skip
    address = await worker.start()
    trainer = TrainerRank(
        model=config.model, trainer=config.trainer, algorithm=config.algorithm, sampling_temperature=1.0,
        weight_sync=config.weight_sync, seed=3, num_steps=4, rank=0, world_size=1, rendezvous="", device="cuda",
        hf_config=model.hf_config, sync_key=KEY,
    )  # fmt: skip
    try:
        assert trainer.load()["packed_bytes"] > 0
        await asyncio.to_thread(trainer.connect, [address], None, [await worker.adapter_endpoint()])
        assert (await asyncio.to_thread(trainer.publish)).replicas[0].error is None
        zero = await mismatch(trainer, worker, 0)
        draw(trainer, 1)
        save_for_vllm(trainer, config.trainer.lora, slots.target_modules, tmp_path / "adapter")
        stale = await mismatch(trainer, worker, 0, now=1)
        assert (await asyncio.to_thread(trainer.publish)).replicas[0].error is None
        drawn = await mismatch(trainer, worker, 1)
        print(f"k3: version 0 {zero:.2e}, version 1 {drawn:.2e}; version 0 sampled, version 1 judged {stale:.2e}")
        assert zero < MAX_PACKED_K3
        assert drawn < MAX_PACKED_K3
        assert stale > 30 * MAX_PACKED_K3, "an adapter that changes nothing proves nothing"
        (served,) = await worker.generate_group(PROMPT, 1, sampling=SHORT, seed=5)
        (held,) = await worker._engine.call_ranks("slipstream_read_slots")
    finally:
        await worker.stop()
        trainer.shutdown()
    del trainer
    torch.cuda.empty_cache()
    arguments = engine_arguments(
        base, config.rollout, dtype=config.model.dtype, device=Device.cuda, seed=1, adapters=slots
    )
    options = {name: value for name, value in arguments.items() if name not in OWN}
    (theirs,), tokens, logprobs = await asyncio.to_thread(
        vllm_serves_adapter, base, tmp_path / "adapter", list(PROMPT.token_ids), num_tokens=8, seed=5,
        engine_options=options,
    )  # fmt: skip
    assert theirs in held
    agreed = next((i for i, (a, b) in enumerate(zip(tokens, served.token_ids, strict=True)) if a != b), 8)
    assert agreed >= 1
    torch.testing.assert_close(
        torch.tensor(served.logprobs[:agreed]), torch.tensor(logprobs[:agreed]), atol=MAX_LOGPROB_ERROR, rtol=0
    )


OWN = ("model", "load_format", "skip_tokenizer_init", "disable_log_stats", "worker_extension_cls", "logprobs_mode")
"""Arguments that the oracle sets itself."""


async def mismatch(trainer: TrainerRank, worker, sampled: int, now: int | None = None) -> float:
    """Mean k3 of the trainer's log-probabilities against the engine's, over 256 tokens."""
    rollouts = await worker.generate_group(PROMPT, 8, sampling=replace(SHORT, max_tokens=32), seed=7)
    assert {version for rollout in rollouts for version in rollout.policy_versions} == {sampled}
    start = len(PROMPT.token_ids)
    samples = []
    for rollout in rollouts:
        logprobs = np.zeros(start + 32, np.float32)
        logprobs[start:] = rollout.logprobs
        tokens = np.array([*PROMPT.token_ids, *rollout.token_ids], np.int32)
        mask = np.arange(start + 32) >= start
        samples.append(Sample(tokens, mask, logprobs, np.zeros(start + 32, np.float32), sampled))
    version = sampled if now is None else now
    stats = trainer.evaluate([samples], Denominators(8 * 32, 8, version))
    name = "parity/k3_sum" if version == sampled else "parity/k3_stale_sum"
    mean = stats.sums[name] / (8 * 32)
    assert math.isfinite(mean)
    return mean
