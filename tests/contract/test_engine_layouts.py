"""Architectures and parallel layouts of a real engine: after a publish its bytes are what vLLM's own loader makes.

Everything but the weights' origin is the product: worker, recording, plan, Mooncake over TCP, commit. The checkpoints
are transformers' own, so weight_sync and rollout meet every architecture without a line for it. For some families the
trainer's decoder is the origin.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.tiny_models import make_decoder
from fakes.checkpoints import CONFIGS, GPT_OSS, CheckpointSource, write_checkpoint
from fakes.vllm_oracle import engine_of, vllm_loads_and_samples
from fakes.vllm_publish import NUM_TOKENS, PROMPTS, Seen, check, prompts_for, publish_twice
from safetensors.torch import load_file

from slipstream.conf.architecture.families import read_config
from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig
from slipstream.rollout.engine.engine_options import engine_arguments
from slipstream.rollout.types import EngineOptions
from slipstream.trainer.adapter_io import save_merged
from slipstream.trainer.delivery.merged_source import TrainerWeightSource
from slipstream.trainer.weights.loading import CheckpointReader
from slipstream.weight_sync.source import WeightSource


def publish(folder: Path, *, source: WeightSource | None = None, **parallel: Any) -> Seen:
    """What a source has, by default the whole checkpoint of a folder, to CPU engines of the folder's config.json."""
    config = RolloutConfig(
        max_model_len=256, max_num_seqs=8, kv_cache_bytes=16 << 20, sampling=SamplingConfig(max_tokens=NUM_TOKENS),
        **parallel,
    )  # fmt: skip
    source = source or CheckpointSource(load_file(folder / "model.safetensors"))
    return asyncio.run(publish_twice(folder, source, config, device=Device.cpu))


@pytest.mark.parametrize(
    ("model", "tp_size", "expert_parallel"),
    [("glm4_moe", 1, False), ("deepseek_v3", 2, True), ("glm4_moe_lite", 1, False), ("qwen3_next", 2, False)],
)
def test_a_publish_leaves_what_vllms_loader_makes(
    model: str, tp_size: int, expert_parallel: bool, tmp_path: Path
) -> None:
    folder = write_checkpoint(CONFIGS[model], tmp_path, seed=3)
    seen = publish(folder, tp_size=tp_size, enable_expert_parallel=expert_parallel)
    arguments: dict[str, Any] = {"tensor_parallel_size": tp_size, "enable_expert_parallel": expert_parallel}
    is_latent = "kv_lora_rank" in CONFIGS[model]
    if is_latent:  # as the product asks for
        arguments["attention_backend"] = "CPU_MLA"
        arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    split = RolloutConfig(tp_size=tp_size, enable_expert_parallel=expert_parallel)
    prompts = prompts_for(split, Device.cpu)
    check(seen, *vllm_loads_and_samples(folder, "bfloat16", prompts=prompts, max_tokens=NUM_TOKENS, **arguments))
    if is_latent:
        assert any(name.endswith("W_UK_T") for name in seen.first[0])


def test_what_the_trainer_publishes_is_what_vllms_loader_makes_of_its_export(tmp_path: Path) -> None:
    """The trainer's own decoder, with adapters that do something, read from transformers' checkpoint."""
    config = CONFIGS["qwen3_next"]
    base = write_checkpoint(config, tmp_path / "base", seed=3)
    reader = CheckpointReader(base, read_config(config))
    decoder = make_decoder(config, dtype=torch.bfloat16, reader=reader)
    save_merged(decoder, tmp_path / "merged", config)
    seen = publish(base, source=TrainerWeightSource(decoder, 0))
    merged = vllm_loads_and_samples(
        tmp_path / "merged", "bfloat16", prompts=PROMPTS, max_tokens=NUM_TOKENS,
        mamba_ssm_cache_dtype="float32",  # as our engines keep it
    )  # fmt: skip
    check(seen, *merged)


def test_a_bias_that_one_rank_adds_is_zero_on_the_others(tmp_path: Path) -> None:
    """gpt-oss: vLLM sets down_proj's bias to 0 on all ranks but the first, which a publish must leave so."""
    folder = write_checkpoint(GPT_OSS, tmp_path, seed=3)
    seen = publish(folder, tp_size=2)
    hashes, _ = vllm_loads_and_samples(folder, "bfloat16", tensor_parallel_size=2)
    assert seen.first == seen.again == hashes
    bias = next(name for name in hashes[0] if name.endswith("w2_bias"))
    assert hashes[0][bias] != hashes[1][bias]
    assert seen.zeroed[0][bias] == hashes[1][bias]


@pytest.mark.parametrize(
    "model",
    sorted(
        CONFIGS.keys()
        - {"minimax_m2", "deepseek_v32", "glm_moe_dsa", "qwen3_next", "qwen3_5", "qwen3_5_moe"}
        - {"qwen3", "llama", "gemma4"}
    ),
)  # CPU engines: no router, no sparse attention, bfloat16 alone; as qwen3_tied, as mistral, as gemma4_moe
def test_engines_say_what_transformers_says(model: str, tmp_path: Path) -> None:
    """In float32, where programs that are right differ by 1e-5 at most; the arguments are the product's."""
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    folder = write_checkpoint(CONFIGS[model], tmp_path, seed=3, dtype="float32")
    config = RolloutConfig(max_num_seqs=8, kv_cache_bytes=64 << 20, max_model_len=512)
    arguments = engine_arguments(
        EngineOptions(folder=folder, config=config, dtype=DType.float32, device=Device.cpu), seed=1
    )
    params = SamplingParams(n=2, max_tokens=16, temperature=1.0, seed=7, logprobs=0, ignore_eos=True, detokenize=False)
    prompt: Any = {"prompt_token_ids": list(PROMPTS[0])}
    with engine_of(**arguments | {"load_format": "auto"}) as engine:
        (output,) = engine.generate(prompt, params, use_tqdm=False)
    transformers = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for one in output.outputs:
        tokens = torch.tensor([[*PROMPTS[0], *one.token_ids]])
        with torch.no_grad():
            said = transformers(tokens).logits.log_softmax(-1)[0, len(PROMPTS[0]) - 1 : -1]
        expected = said.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        assert one.logprobs is not None
        sampled = torch.tensor([entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)])
        torch.testing.assert_close(sampled, expected, atol=1e-3, rtol=0)
