"""Adapters of experts in engine slots on CUDA: a real trainer rank, a real engine, and an engine that loads from disk.

The trainer and the first engine rank share GPU 0. One slot's bytes are compared bitwise, on every rank;
log-probabilities within what LoRA's split-k sums, whose order is the scheduler's, may differ by. Two engine starts are
most of the time; the case with two GPUs (tensor and expert parallel) runs where there are two.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.rank_helpers import draw, rank_of
from fakes.vllm_oracle import vllm_serves_adapter
from safetensors.torch import save_file

from slipstream.conf.load import load_run_config
from slipstream.conf.schema import Device, LoraConfig, RunConfig, SamplingConfig
from slipstream.orchestrator.cluster.rollout_workers import worker_options
from slipstream.orchestrator.inputs.model_folder import prepare_model
from slipstream.rollout.types import Prompt
from slipstream.trainer.delivery.adapter_source import AdapterSource
from slipstream.trainer.rank import TrainerRank
from slipstream.weight_sync.layout import Region

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(300),
]

KEY = b"k" * 32
MAX_LOGPROB_ERROR = 0.05
"""bfloat16, and the order of LoRA's atomic sums."""
PROMPT = Prompt(0, tuple(3 + (7 * i) % 60 for i in range(40)), "")
SHORT = SamplingConfig(max_tokens=8, stop_at_eos=False)


def config_of(tp_size: int) -> RunConfig:
    """Rank 6 in three slots of rank 8."""
    return load_run_config(
        [
            "experiment=quickstart", "cluster.device=cuda", "trainer.ep_size=1", "trainer.num_ranks=1",
            "trainer.lora.rank=6", "trainer.lora.alpha=12", "model.dtype=bfloat16", "model.hf_config.hidden_size=256",
            "model.hf_config.head_dim=64", "model.hf_config.moe_intermediate_size=128", "rollout.max_model_len=512",
            "rollout.gpu_memory_utilization=0.3", f"rollout.tp_size={tp_size}",
            *["rollout.enable_expert_parallel=true"] * (tp_size > 1), "weight_sync.mode=adapter",
            "algorithm.max_staleness_steps=1",
        ]
    )  # fmt: skip


def save_for_vllm(trainer: TrainerRank, lora: LoraConfig, targets: tuple[str, ...], folder: Path) -> None:
    """A PEFT adapter with one matrix an expert: float32, not scaled, at the trainer's rank."""
    raw = AdapterSource(trainer.decoder, 0, lora)
    tensors = {}
    for meta in raw.layout().tensors:
        whole = torch.empty(meta.shape, device="cuda")
        raw.read(meta.name, Region((0, 0), meta.shape), whole)
        if ".lora_B." in meta.name:
            whole /= lora.scale  # a power of two: exact
        cropped = whole[: lora.rank] if ".lora_A." in meta.name else whole[:, : lora.rank]
        tensors[meta.name] = cropped.contiguous().cpu()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_slot_of_expert_adapters_holds_what_vllm_loads_from_disk(
    tmp_path: Path, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Said here, because vLLM looks only whether this process has used CUDA; having asked for it spoils a fork, too.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if torch.cuda.device_count() < tp_size:
        pytest.skip(f"needs {tp_size} GPUs")
    asyncio.run(compare(tmp_path, tp_size))


async def compare(tmp_path: Path, tp_size: int) -> None:
    """Publish adapters into slots of a live engine, then let an engine of its own load them from disk."""
    from fakes.readable_engine import ReadableEngine

    from slipstream.rollout.worker import RolloutWorker

    config = config_of(tp_size)
    model = prepare_model(config.model, tmp_path / "model")
    options = worker_options(config, model.hf_config, model.folder, Device.cuda, KEY)
    slots = options.adapters
    assert slots is not None and "experts" in slots.target_modules
    worker = RolloutWorker(options, seed=1, make_engine=ReadableEngine)
    address = await worker.start()
    trainer = rank_of(config, KEY, hf_config=model.hf_config, device="cuda")
    try:
        trainer.load()
        trainer.states.save_merged(tmp_path / "base")  # B is still zero: the merged model is the base
        await asyncio.to_thread(trainer.delivery.connect, [address], None, [await worker.adapter_endpoint()])
        draw(trainer, 1001, std=0.3)
        save_for_vllm(trainer, config.trainer.lora, slots.target_modules, tmp_path / "adapter")
        report = await asyncio.to_thread(trainer.delivery.publish, 1)  # it probes that adapters act
        assert report.replicas[0].error is None
        (first,) = await worker.generate_group(PROMPT, 1, sampling=SHORT, seed=5)
        ours = [[slot for slot in rank if rank.count(slot) == 1] for rank in await _slots(worker)]
        assert [len(held) for held in ours] == [1] * tp_size, "one slot holds the adapter, the others are alike"

        task = asyncio.create_task(
            worker.generate_group(PROMPT, 1, sampling=SamplingConfig(max_tokens=400, stop_at_eos=False), seed=3)
        )
        while worker.engine.num_generated_tokens < 20:
            await asyncio.sleep(0.002)
        for version in (2, 3, 4):
            draw(trainer, 1000 + version, std=0.3)
            assert (await asyncio.to_thread(trainer.delivery.publish, version)).replicas[0].error is None
        was_in_flight = not task.done()
        (newest,) = await worker.generate_group(PROMPT, 1, sampling=SHORT, seed=5)
        assert newest.policy_versions == [4] * 8
        assert newest.logprobs != first.logprobs
        (outlived,) = await task
        assert was_in_flight
        assert outlived.policy_versions == [1] * 400
    finally:
        await worker.stop()
        trainer.shutdown()
    del trainer
    torch.cuda.empty_cache()
    theirs, tokens, logprobs = await asyncio.to_thread(
        vllm_serves_adapter, tmp_path / "base", tmp_path / "adapter", list(PROMPT.token_ids), num_tokens=8, seed=5,
        options=options,
    )  # fmt: skip
    assert [held[0] for held in ours] == theirs
    agreed = next((i for i, (a, b) in enumerate(zip(tokens, first.token_ids, strict=True)) if a != b), 8)
    assert agreed >= 1
    torch.testing.assert_close(
        torch.tensor(first.logprobs[:agreed]), torch.tensor(logprobs[:agreed]), atol=MAX_LOGPROB_ERROR, rtol=0
    )


async def _slots(worker: Any) -> list[list[dict[str, str]]]:
    """sha256 of every buffer, by rank and slot."""
    return await worker.engine.call_ranks("read_slots")
