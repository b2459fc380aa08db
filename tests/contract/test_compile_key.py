"""What a run compiled is found by the next one with the same options: vLLM's own key does not depend on the run's
folder, and depends on the model.
"""

import json
import os
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import triton
from cases.only_compiles import OnlyCompiles, only_allocate
from cases.tiny_configs import MIXED
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig
from slipstream.rollout.engine.engine_options import engine_arguments, engine_environment
from slipstream.rollout.engine.vllm_engine import sampling_params
from slipstream.rollout.engine.vllm_process import vllm_arguments
from slipstream.rollout.in_vllm.process_imports import import_vllm
from slipstream.rollout.node_cache import cache_folder
from slipstream.rollout.types import EngineOptions
from slipstream.trainer.engine_ops.vllm_operations import as_sampled, batch_invariant_kernels


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
    arguments = engine_arguments(
        EngineOptions(folder=folder, config=config, dtype=DType.float32, device=Device.cpu), seed=seed
    )
    return vllm_arguments(arguments).create_engine_config().compute_hash()


def test_kernels_that_a_bitwise_trainer_calls_are_where_it_looks_for_them() -> None:
    import_vllm()
    kernels = batch_invariant_kernels()
    assert callable(kernels.rms_norm_batch_invariant)
    assert callable(kernels.linear_batch_invariant)


@pytest.mark.parametrize("vocab_size", [4096, 4100, 4099])
def test_the_samplers_kernel_is_compiled_alike_for_trainer_and_engine(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It adds a row in an order that Triton derives from the logits' dtype and from where rows begin."""
    import_vllm()
    from vllm import triton_utils
    from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    # vLLM for CPUs has no Triton, so its module is read once more.
    for name, value in {"tl": triton.language, "triton": triton}.items():
        monkeypatch.setattr(triton_utils, name, value)
    spec = find_spec("vllm.v1.worker.gpu.sample.logprob")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(logprob := module_from_spec(spec))
    monkeypatch.setattr(driver, "_active", OnlyCompiles())
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", only_allocate)
    compiled: list[str] = []

    def launcher(kernel: JITFunction, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **named: compiled.append(kernel.warmup(*args, grid=grid, **named).asm["ttgir"])

    monkeypatch.setattr(JITFunction, "__getitem__", launcher)
    request = sampling_params(SamplingConfig(max_tokens=4), [], seed=1)
    needs = SamplingStates.add_request(mock.MagicMock(vocab_size=vocab_size), 0, request)
    sampler, rows = mock.Mock(needs_logits_processing=np.array([needs])), np.zeros(8, np.int64)
    logits = torch.zeros(8, pad_vocab_size(vocab_size), dtype=torch.bfloat16)[:, :vocab_size]
    for given in (
        Sampler.apply_sampling_params(sampler, logits, rows, rows, rows, *[None] * 4),
        as_sampled(logits.contiguous(), batch_invariant_kernels()),
    ):
        logprob.compute_token_logprobs(given, torch.zeros(8, 1, dtype=torch.int64))
    assert compiled[0] == compiled[1]


def test_the_key_of_compiled_code_is_the_same_in_the_next_run_and_another_for_another_model(tmp_path: Path) -> None:
    import_vllm()
    first = key_of(tmp_path / "runs" / "grpo-1")
    assert key_of(tmp_path / "runs" / "grpo-2", seed=1000) == first
    assert key_of(tmp_path / "runs" / "grpo-3", vocab_size=128) != first
    assert len(list((cache_folder() / "models").iterdir())) == 2
