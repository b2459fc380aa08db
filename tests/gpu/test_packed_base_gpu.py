"""RL on an INT4 base: the engine loads it from disk, the trainer keeps it packed, and adapters go into slots.

Both are judged by a third program, transformers in float32 (fakes/packed.py): the engine's kernels for packed experts,
the trainer's, and the adapters of experts between them. One engine start is most of the time.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases.rank_helpers import rank_of
from fakes import packed
from test_adapter_gpu import KEY, PROMPT, SHORT, draw
from torch import Tensor

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import Device, RunConfig
from slipstream.orchestrator.cluster.rollout_workers import worker_options
from slipstream.orchestrator.inputs.model_folder import prepare_model
from slipstream.rollout.engine.vllm_engine import VllmEngine
from slipstream.rollout.types import Rollout
from slipstream.rollout.worker import RolloutWorker
from slipstream.trainer.delivery.adapter_source import AdapterSource
from slipstream.trainer.rank import TrainerRank
from slipstream.trainer.types import Denominators, Sample
from slipstream.weight_sync.layout import Region

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),
]

START = len(PROMPT.token_ids)
NUM_TOKENS = 64
ONE_EXPERT = ".layers.1.mlp.experts.3."


def config_of(model: str, base: Path) -> RunConfig:
    """Rank 8 on experts, and on attention where that is not latent."""
    return load_run_config(
        [
            "experiment=quickstart", "cluster.device=cuda", "trainer.ep_size=1", "trainer.num_ranks=1",
            "trainer.lora.rank=8", "trainer.lora.alpha=8",
            f"trainer.lora.targets=[{'attention,' * (model == 'qwen3_moe')}experts]", "model.dtype=bfloat16",
            "model=checkpoint", f"model.path={base}",
            "model.tokenizer=characters", "rollout.num_workers=1", "rollout.max_model_len=256",
            "rollout.gpu_memory_utilization=0.3", "rollout.enforce_eager=true", "weight_sync.mode=adapter",
        ]
    )  # fmt: skip


@pytest.mark.parametrize("model", packed.MODELS)
def test_an_int4_base_is_served_from_disk_and_adapters_of_its_experts_from_slots(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)  # a trainer of engine_ops in this process sets it
    asyncio.run(compare(tmp_path, model))


async def compare(tmp_path: Path, model: str) -> None:
    """Publish two versions of an adapter to a live engine, and judge what it sampled."""
    base = packed.write_packed_checkpoint(model, tmp_path / "base", seed=1)
    config = config_of(model, base)
    prepared = prepare_model(config.model, tmp_path / "model")
    options = worker_options(config, prepared.hf_config, prepared.folder, Device.cuda, KEY)
    assert options.adapters is not None and options.adapters.base == base
    worker = RolloutWorker(options, seed=1, make_engine=VllmEngine)
    address = await worker.start()
    trainer = rank_of(config, KEY, hf_config=prepared.hf_config, device="cuda")
    try:
        assert trainer.load()["packed_bytes"] > 0
        await asyncio.to_thread(trainer.delivery.connect, [address], None, [await worker.adapter_endpoint()])
        for version in (0, 1):
            if version:
                draw(trainer, 1000 + version, std=0.3)
            assert (await asyncio.to_thread(trainer.delivery.publish, version)).replicas[0].error is None
            rollouts = await worker.generate_group(PROMPT, 8, sampling=replace(SHORT, max_tokens=NUM_TOKENS), seed=7)
            assert {stamp for rollout in rollouts for stamp in rollout.policy_versions} == {version}
            await asyncio.to_thread(judge, trainer, config, rollouts, version, base, tmp_path)
    finally:
        await worker.stop()
        trainer.shutdown()


def judge(
    trainer: TrainerRank, config: RunConfig, rollouts: Sequence[Rollout], version: int, base: Path, tmp_path: Path
) -> None:
    """Engine and trainer are near the truth, and the engine is far from what is not."""
    adapter = factors(trainer, config)
    token_ids_BT = torch.tensor([[*PROMPT.token_ids, *rollout.token_ids] for rollout in rollouts])
    sampled_BT = torch.tensor([rollout.logprobs for rollout in rollouts])

    def said(name: str, dtype: torch.dtype) -> Tensor:
        return packed.said_by_transformers(tmp_path / name, token_ids_BT, dtype)[:, START - 1 : -1]

    def of_tokens(said_BTV: Tensor) -> Tensor:
        return said_BTV.gather(-1, token_ids_BT[:, START:, None])[..., 0]

    def engine_k3(name: str) -> float:
        return packed.k3(sampled_BT, of_tokens(said(name, torch.float32)))

    right = packed.dequantize(base, tmp_path / f"version{version}", adapter=adapter).name
    truth_BTV = said(right, torch.float32)
    floor = packed.expected_k3(said(right, torch.bfloat16), truth_BTV)
    found = {
        "engine": packed.k3(sampled_BT, of_tokens(truth_BTV)),
        "trainer": trainer_k3(trainer, token_ids_BT, of_tokens(truth_BTV)),
        "engine to trainer": trainer_k3(trainer, token_ids_BT, sampled_BT),
    }
    planted: dict[str, float] = {}
    for number, misreading in enumerate(packed.MISREADINGS if version == 0 else ()):
        wrong = packed.dequantize(base, tmp_path / f"wrong{number}", adapter=adapter, misreading=misreading)
        planted[misreading] = engine_k3(wrong.name)
    if version:
        less = {name: factor for name, factor in adapter.items() if ONE_EXPERT not in name}
        planted["no adapter of one expert"] = engine_k3(packed.dequantize(base, tmp_path / "less", adapter=less).name)
        planted["the version before"] = engine_k3("version0")
    print(f"version {version}: k3 of bfloat16 {floor:.2e}; in such floors:")
    print("  ", {name: round(value / floor, 2) for name, value in (found | planted).items()}, flush=True)
    assert 0 < max(found.values()) < packed.MAX_RATIO * floor
    assert min(planted.values()) > packed.MAX_RATIO * floor


def factors(trainer: TrainerRank, config: RunConfig) -> dict[str, Tensor]:
    """lora_A and scaled lora_B beside every adapted matrix."""
    source = AdapterSource(trainer.decoder, 0, config.trainer.lora)
    tensors: dict[str, Tensor] = {}
    for meta in source.layout().tensors:
        whole = torch.empty(meta.shape, device=trainer._device)
        source.read(meta.name, Region((0, 0), meta.shape), whole)
        tensors[meta.name] = whole.cpu()
    return tensors


def trainer_k3(trainer: TrainerRank, token_ids_BT: Tensor, logprobs_BT: Tensor) -> float:
    """Mean k3 of the trainer's log-probabilities against these. The trainer has made no step: adapters were drawn."""
    version = trainer.policy_version
    num_tokens = token_ids_BT.shape[1]
    mask, nothing = np.arange(num_tokens) >= START, np.zeros(num_tokens, np.float32)
    samples = [
        Sample(
            tokens.numpy().astype(np.int32), mask, np.concatenate((nothing[:START], logprobs.numpy())), nothing, version
        )
        for tokens, logprobs in zip(token_ids_BT, logprobs_BT, strict=True)
    ]
    count = logprobs_BT.numel()
    counts = Denominators(count, len(samples), version, num_possible_tokens=count)
    return trainer.evaluate([samples], counts).sums["parity/k3_sum"] / count
