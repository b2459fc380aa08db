"""The recorder against vLLM's own loaders: what was recorded, replayed, is what vLLM's `load_weights` writes.

One process, forked from that of the tests, has one engine after the other. For each model it builds a tiny random
checkpoint, starts vLLM with dummy weights, records its loader, and then lets the same loader load the real tensors as
the oracle.
One case is an engine that reads its weights by itself: the language model beside a tower. It comes before those of
block-FP8, whose models on meta leave process groups of two ranks behind.
Experts are compared as loaded, before any repacking by a CPU backend. Block-FP8: cases/recorded_fp8.py.
"""

from pathlib import Path
from typing import Any

import pytest
from cases import recorded_fp8
from cases.recorded import replay_plan
from cases.vllm_process import outcomes_of

MODELS = [
    "qwen3",
    "qwen2",
    "mistral",
    "olmoe",
    "mixtral",
    "qwen2_moe",
    "minimax_m2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_0_25",
    "gemma3",
    "gemma4_moe",
]
"""Others are recorded and published in test_engine_layouts.py, qwen3_moe in test_engine_vllm.py. `_0_25`: with the
class that a vLLM without one of its own gets."""
BESIDE_TOWER = "beside_tower"
CASES = [*MODELS, BESIDE_TOWER, *recorded_fp8.CASES]
SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 16 << 20,
}
"""Options of every engine here."""
NO_PICTURES = Path(__file__).parents[1] / "fakes" / "no_pictures"
"""Has the names of a package that vLLM's file of Qwen3.5 imports and CPU environments lack."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("vllm")
    return outcomes_of(compare, tmp_path_factory.mktemp("recorded"), CASES, on_path=[NO_PICTURES])


@pytest.mark.parametrize("case", CASES)
def test_recorded_loads_are_what_vllm_loads(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "", outcomes[case]


def compare(model_name: str, folder: Path) -> None:
    """One case; raises where what was recorded is not what vLLM loads."""
    if model_name == BESIDE_TOWER:
        compare_beside_tower(folder)
        return
    if model_name in recorded_fp8.CASES:
        recorded_fp8.compare(model_name, folder)
        return
    from fakes.checkpoints import CONFIGS, write_checkpoint
    from safetensors.torch import load_file

    write_checkpoint(CONFIGS[model_name.removesuffix("_0_25")], folder, seed=0)
    tensors = load_file(folder / "model.safetensors")
    if model_name.endswith("_0_25"):
        take_our_class("Qwen3_5MoeForCausalLM")

    import torch
    from fakes.readable_weights import readable
    from fakes.vllm_oracle import engine_of

    from slipstream.rollout.in_vllm.vllm_patches import keep_linear_weights_in_place
    from slipstream.weight_sync.layout import TensorMeta
    from slipstream.weight_sync.record.recorder import record_layout

    keep_linear_weights_in_place()
    with engine_of(model=str(folder), load_format="dummy", **SMALL) as llm:
        client: Any = llm.llm_engine.engine_core  # in this process, so it holds the engine
        executor = client.engine_core.model_executor
        model = executor.driver_worker.worker.model_runner.model
        params = readable(model)
        before = {name: param.detach().clone() for name, param in params.items()}
        metas = tuple(TensorMeta(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items())
        layout = record_layout(model.load_weights, params, metas, 0)
        for name, param in params.items():
            assert torch.equal(param.view(torch.uint8), before[name].view(torch.uint8)), f"recording changed {name}"

        model.load_weights(iter(tensors.items()))
        memory = replay_plan(layout, metas, tensors)
        assert set(memory) == set(params)
        for name, param in params.items():
            assert torch.equal(memory[name].view(param.shape), param), name


def take_our_class(name: str) -> None:
    """Let this process's vLLM be one that has no such architecture."""
    from vllm.model_executor.models import ModelRegistry

    from slipstream.rollout.in_vllm.process_imports import know_text_models

    del ModelRegistry.models[name]
    know_text_models()
    assert ModelRegistry.models[name].load_model_cls().__module__ == "slipstream.rollout.in_vllm.qwen3_5_text"


def compare_beside_tower(folder: Path) -> None:
    """vLLM itself refuses a parameter that its loader did not fill."""
    import torch
    from fakes.checkpoints import CONFIGS, write_checkpoint
    from fakes.vllm_oracle import engine_of
    from safetensors.torch import load_file, save_file
    from vllm.model_executor.model_loader import get_model_loader

    from slipstream.rollout.in_vllm.language_model_loader import register_language_model_loader
    from slipstream.rollout.types import LANGUAGE_MODEL

    file = write_checkpoint(CONFIGS["deepseek_v3"], folder / "config", seed=0) / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    (folder / "whole").mkdir()
    tower = {f"{name}.weight": torch.ones(2) for name in ("vision_tower.patch_embed.proj", "mm_projector.pre_norm")}
    stored = {f"language_model.{name}": tensor for name, tensor in tensors.items()} | tower
    save_file(stored, folder / "whole" / "model.safetensors", metadata={"format": "pt"})
    register_language_model_loader()
    with engine_of(
        model=str(folder / "config"),
        load_format=LANGUAGE_MODEL,
        model_loader_extra_config={"folder": str(folder / "whole")},
        **SMALL,
        attention_backend="CPU_MLA",
    ) as llm:
        loader: Any = get_model_loader(llm.llm_engine.vllm_config.load_config)
        handed_on = dict(loader.get_all_weights(None, None))
    assert set(handed_on) == set(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in handed_on.items())
