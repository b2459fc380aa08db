"""On GPUs: MLA, block-FP8, TP and EP engines hold, after a publish, what vLLM's own loading of the checkpoint leaves.

Two engines a case, one after the other and in processes of their own: the first gets its weights by publish (zeroed in
between, or given other weights, and published again), the second loads the same checkpoint from disk by itself.
Compared are all bytes that kernels read, of every rank, MLA's derived matrices included, and greedy tokens. The FP8
DeepSeek engine runs with CUDA graphs, so that a derived matrix at another address would show in its tokens.

Run by hand: python tests/gpu/test_engine_layouts_gpu.py CASE FOLDER publish|load
"""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@dataclass(frozen=True)
class Case:
    model: str
    is_fp8: bool
    tp_size: int = 1
    expert_parallel: bool = False
    has_graphs: bool = False
    width: int = 256
    """Width of an expert. Blocks of 128 are not cut."""
    is_merged: bool = False
    """The weights come from a decoder with adapters, merged (and quantized) by its weight source."""
    sends_changes: bool = False
    """In place of zeros other weights are published, and each publish but the first sends what changed."""


CASES = {
    "mla": Case("deepseek_v3", is_fp8=False),
    "mla-fp8-graphs": Case("deepseek_v3", is_fp8=True, has_graphs=True),
    "moe-fp8-merged": Case("qwen3_moe", is_fp8=True, is_merged=True),
    "moe-fp8-changes": Case("qwen3_moe", is_fp8=True, is_merged=True, sends_changes=True),
    "moe-fp8-tp2": Case("qwen3_moe", is_fp8=True, tp_size=2),
    "mla-fp8-ep2": Case("deepseek_v3", is_fp8=True, tp_size=2, expert_parallel=True),
    "moe-fp8-tp4": Case("qwen3_moe", is_fp8=True, tp_size=4, width=512),  # and two heads of keys on four ranks
    "mla-fp8-ep4": Case("deepseek_v3", is_fp8=True, tp_size=4, expert_parallel=True, width=512),
}


@pytest.mark.parametrize("name", CASES)
def test_a_publish_leaves_what_vllms_loader_makes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    if CASES[name].tp_size > torch.cuda.device_count():
        pytest.skip(f"needs {CASES[name].tp_size} GPUs")
    paths = [str(REPOSITORY), str(REPOSITORY / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    for step in ("publish", "load"):
        done = subprocess.run(
            [sys.executable, __file__, name, str(tmp_path), step],
            env=env, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    seen, expected = (json.loads((tmp_path / f"{step}.json").read_text()) for step in ("publish", "load"))
    assert len(expected["hashes"]) == CASES[name].tp_size
    for moment in ("first", "again"):
        for mine, theirs in zip(seen[moment], expected["hashes"], strict=True):
            assert mine.keys() == theirs.keys()
            assert [key for key in theirs if mine[key] != theirs[key]] == [], moment
    for before, after in zip(seen["first"], seen["zeroed"], strict=True):
        as_before = {key for key in before if before[key] == after[key]}
        if CASES[name].sends_changes:
            assert not [key for key in as_before if key.endswith(("w13_weight", "w2_weight", "qkv_proj.weight"))]
        else:
            assert not as_before, "zeroing left a weight as it was"
    assert any(key.endswith("W_UK_T") for key in expected["hashes"][0]) == (CASES[name].model == "deepseek_v3")
    assert any(key.endswith("_scale_inv") for key in expected["hashes"][0]) == CASES[name].is_fp8
    assert seen["tokens"] == expected["tokens"]


def rollout_config(case: Case) -> Any:
    """Small, and the same for both engines."""
    from fakes.vllm_publish import NUM_TOKENS

    from slipstream.conf.schema import RolloutConfig, SamplingConfig

    return RolloutConfig(
        tp_size=case.tp_size, enable_expert_parallel=case.expert_parallel, max_model_len=256, max_num_seqs=8,
        kv_cache_bytes=64 << 20, gpu_memory_utilization=0.3, enforce_eager=not case.has_graphs,
        sampling=SamplingConfig(max_tokens=NUM_TOKENS),
    )  # fmt: skip


def publish(case: Case, folder: Path) -> dict[str, Any]:
    """Write the checkpoint, publish it to an engine, say what that holds."""
    from fakes.checkpoints import CONFIGS, FOR_GPUS, CheckpointSource, quantize_checkpoint, write_checkpoint
    from fakes.vllm_publish import publish_twice
    from safetensors.torch import load_file

    from slipstream.conf.schema import Device

    config = {**CONFIGS[case.model], **FOR_GPUS[case.model], "moe_intermediate_size": case.width}
    checkpoint, others = folder / "checkpoint", None
    if case.is_merged:
        source, decoder = merged_source(config, checkpoint)
        others = partial(other_adapters, decoder) if case.sends_changes else None
    else:
        write_checkpoint(config, checkpoint, seed=7)
        if case.is_fp8:
            quantize_checkpoint(checkpoint)
        source = CheckpointSource({n: t.cuda() for n, t in load_file(checkpoint / "model.safetensors").items()})
    seen = asyncio.run(publish_twice(checkpoint, source, rollout_config(case), device=Device.cuda, others=others))
    return dataclasses.asdict(seen)


@contextmanager
@torch.no_grad()
def other_adapters(decoder: Any) -> Iterator[None]:
    """Adapters that differ a little, as after a step; then those of before."""
    adapters = {name: one for name, one in decoder.named_parameters() if "lora_" in name}
    before = {name: one.clone() for name, one in adapters.items()}
    for one in adapters.values():
        one.add_(torch.randn_like(one), alpha=1e-5)
    yield
    for name, one in adapters.items():
        one.copy_(before[name])


def merged_source(config: dict[str, Any], checkpoint: Path) -> Any:
    """A policy with adapters on everything, whose export is put on disk: its weight source, and its decoder."""
    from slipstream.conf.architecture.families import read_config
    from slipstream.conf.schema import LoraConfig, TrainerConfig
    from slipstream.trainer.adapter_io import save_merged
    from slipstream.trainer.delivery.merged_source import TrainerWeightSource
    from slipstream.trainer.model.build_decoder import build_decoder
    from slipstream.trainer.weights.quantization import BlockFp8

    spec = read_config(config)
    config = {**config, "quantization_config": BlockFp8.hf_entry(spec.checkpoint_tensors("bfloat16"))}
    decoder = build_decoder(
        spec, dtype=torch.bfloat16, device="cuda", trainer=TrainerConfig(lora=LoraConfig(rank=8, alpha=16.0))
    )
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.1)
    save_merged(decoder, checkpoint, config)
    return TrainerWeightSource(decoder, 0, BlockFp8.from_hf_config(config)), decoder


def load(case: Case, folder: Path) -> dict[str, Any]:
    """What an engine with the product's arguments makes of the checkpoint on disk."""
    from fakes.vllm_oracle import vllm_loads_and_samples
    from fakes.vllm_publish import NUM_TOKENS, PROMPTS

    from slipstream.conf.schema import Device, DType
    from slipstream.rollout.engine.engine_options import engine_arguments
    from slipstream.rollout.types import EngineOptions

    arguments = engine_arguments(
        EngineOptions(
            folder=folder / "checkpoint", config=rollout_config(case), dtype=DType.bfloat16, device=Device.cuda
        ),
        seed=0,
    )
    for given in ("model", "load_format", "skip_tokenizer_init", "dtype", "disable_log_stats", "worker_extension_cls"):
        del arguments[given]
    hashes, tokens = vllm_loads_and_samples(
        folder / "checkpoint", "bfloat16", prompts=PROMPTS, max_tokens=NUM_TOKENS, **arguments
    )
    return {"hashes": hashes, "tokens": tokens}


if __name__ == "__main__":
    from slipstream.conf.schema import Device as _Device
    from slipstream.rollout.engine.engine_options import engine_environment

    os.environ.update(engine_environment(_Device.cuda) | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"})
    _name, _folder, _step = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    _facts = {"publish": publish, "load": load}[_step](CASES[_name], _folder)
    (_folder / f"{_step}.json").write_text(json.dumps(_facts))
    sys.stdout.flush()
    os._exit(0)  # skip vLLM's shutdown
