"""What a run compiled is found by the next one with the same options: vLLM's own key does not depend on the run's
folder, and depends on the model.
"""

import json
import os
from pathlib import Path

import pytest
from cases.tiny_models import MIXED

from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig
from slipstream.rollout.engine.engine_options import engine_arguments, engine_environment
from slipstream.rollout.engine.vllm_process import vllm_arguments
from slipstream.rollout.in_vllm.process_imports import import_vllm
from slipstream.rollout.node_cache import cache_folder
from slipstream.trainer.engine_ops.vllm_operations import batch_invariant_kernels


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everybodys = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", os.environ.get("VLLM_CACHE_ROOT", str(everybodys / "vllm")))  # saves 10 s
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in engine_environment(Device.cpu).items():
        monkeypatch.setenv(name, value)


def key_of(run: Path, *, seed: int = 0, **changed: object) -> str:
    """The key of an engine whose run has this folder."""
    folder = run / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**MIXED, **changed}))
    (folder / "generation_config.json").write_text("{}")
    config = RolloutConfig(max_model_len=128, sampling=SamplingConfig(max_tokens=4), kv_cache_bytes=64 << 20)
    arguments = engine_arguments(folder, config, dtype=DType.float32, device=Device.cpu, seed=seed)
    return vllm_arguments(arguments).create_engine_config().compute_hash()


def test_kernels_that_a_bitwise_trainer_calls_are_where_it_looks_for_them() -> None:
    import_vllm()
    kernels = batch_invariant_kernels()
    assert callable(kernels.rms_norm_batch_invariant)
    assert callable(kernels.linear_batch_invariant)


def test_the_key_of_compiled_code_is_the_same_in_the_next_run_and_another_for_another_model(tmp_path: Path) -> None:
    import_vllm()
    first = key_of(tmp_path / "runs" / "grpo-1")
    assert key_of(tmp_path / "runs" / "grpo-2", seed=1000) == first
    assert key_of(tmp_path / "runs" / "grpo-3", vocab_size=128) != first
    assert len(list((cache_folder() / "models").iterdir())) == 2
