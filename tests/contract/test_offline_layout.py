"""Layouts recorded on meta, without an engine, against those that the ranks of a live engine report.

The live side is what a run does: vLLM with the product's own arguments and worker extension, asked to describe itself.
It runs in a process of its own, because an engine owns its process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases.vllm_process import import_path
from fakes.checkpoints import CONFIGS, FOR_GPUS

from conf.schema import Device, DType, RolloutConfig, SamplingConfig
from conf.tensor_parallel import tp_problem
from orchestrator.inputs.model_folder import engine_checkpoint
from orchestrator.offline.record import layouts_digest, record
from rollout.engine.engine_options import engine_arguments, engine_environment
from rollout.errors import EngineError
from rollout.layouts.offline_layout import offline_layouts
from trainer.architecture.families import read_config
from weight_sync.layout import DestLayout, PostLoad
from weight_sync.typed_msgpack import pack, unpack

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**CONFIGS["qwen3_tied"], "torch_dtype": "bfloat16"},
    "qwen3_moe": {**CONFIGS["qwen3_moe"], "torch_dtype": "bfloat16"},
}

ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", *ROUTERS],
}  # fmt: skip


def offline(model: str, cache: Path, *, tp_size: int = 1, expert_parallel: bool = False, device: Device = Device.cpu):
    config = MODELS[model]
    return offline_layouts(
        config,
        read_config(config).checkpoint_tensors("bfloat16"),
        tp_size=tp_size,
        enable_expert_parallel=expert_parallel,
        dtype=DType.bfloat16,
        device=device,
        cache=cache,
    )


def live(model: str, tp_size: int, folder: Path, *, is_plain: bool = False) -> tuple[DestLayout, ...]:
    env = {
        **os.environ,
        **engine_environment(Device.cpu),
        "PYTHONPATH": import_path(),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    done = subprocess.run(
        [sys.executable, __file__, model, str(tp_size), str(folder), str(int(is_plain))],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return unpack(tuple[DestLayout, ...], (folder / "layouts").read_bytes())


@pytest.mark.parametrize(
    ("model", "tp_size", "is_plain"),
    [("qwen3", 1, True), ("qwen3_moe", 1, False), ("qwen3_moe", 1, True), ("qwen3_moe", 2, False)],
)
def test_a_layout_recorded_on_meta_is_the_live_engines(
    model: str, tp_size: int, is_plain: bool, tmp_path: Path
) -> None:
    """is_plain: the live engine's parameters have lost their loaders, as those of block-FP8 engines do."""
    pytest.importorskip("vllm")
    recorded, expected = offline(model, tmp_path, tp_size=tp_size), live(model, tp_size, tmp_path, is_plain=is_plain)
    assert len(recorded) == len(expected) == tp_size
    for mine, theirs in zip(recorded, expected, strict=True):
        assert mine.params == theirs.params
        assert set(mine.fills) == set(theirs.fills)
        assert mine == theirs
    report = record(
        tmp_path, tp_size=tp_size, enable_expert_parallel=False, dtype="bfloat16", device="cpu", cache=tmp_path
    )
    assert report.digest == layouts_digest(expected)
    assert report.was_cached
    assert [rank.num_bytes for rank in report.ranks] == [sum(p.num_bytes for p in live.params) for live in expected]


def test_expert_parallel_ranks_hold_whole_experts_and_gpus_hold_them_as_loaded(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    layouts = offline("qwen3_moe", tmp_path, tp_size=4, expert_parallel=True, device=Device.cuda)
    held: list[set[int]] = []
    for layout in layouts:
        assert all(param.post_load is PostLoad.identity for param in layout.params)
        names = [load.tensor.split(".experts.")[1] for load in layout.loads if ".experts." in load.tensor]
        held.append({int(name.split(".")[0]) for name in names})
    assert held == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]


def test_a_damaged_layout_is_recorded_again_and_a_kept_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    first = offline("qwen3", cache := tmp_path / "cache")
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert offline("qwen3", cache) == first
    assert file.read_bytes() == whole
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a cached layout must not be recorded again"))
    assert offline("qwen3", cache) == first


def test_what_the_engine_cannot_build_is_an_error_that_says_why(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    tensors = read_config(MODELS["qwen3"]).checkpoint_tensors("bfloat16")
    missing = [meta for meta in tensors if not meta.name.endswith("o_proj.weight")]
    options: dict[str, Any] = {"tp_size": 1, "enable_expert_parallel": False, "dtype": DType.bfloat16}
    with pytest.raises(EngineError, match=r"RecordError: .*o_proj"):
        offline_layouts(MODELS["qwen3"], missing, device=Device.cpu, cache=tmp_path, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "changes", "tp_size", "expert_parallel"),
    [  # two loads of vLLM each: the other rules are held by unit tests
        ("glm4_moe", {"moe_intermediate_size": 62}, 4, True),  # the shared expert is cut in any case
        ("qwen3_moe", {**FOR_GPUS["qwen3_moe"], "quantization_config": FP8}, 4, False),
    ],
)
def test_sizes_that_are_refused_are_those_that_the_engine_cannot_build(
    model: str, changes: dict[str, Any], tp_size: int, expert_parallel: bool, tmp_path: Path
) -> None:
    """The largest size that is allowed can be built; the one that is refused cannot."""
    pytest.importorskip("vllm")
    config = {**CONFIGS[model], **changes, "torch_dtype": "bfloat16"}
    assert tp_problem(tp_size, config, is_expert_parallel=expert_parallel) is not None
    sizes = [n for n in (1, 2, 3, 4, 6) if tp_problem(n, config, is_expert_parallel=expert_parallel) is None]
    options: dict[str, Any] = {"enable_expert_parallel": expert_parallel, "dtype": DType.bfloat16}
    tensors = engine_checkpoint(config, DType.bfloat16)
    with pytest.raises(EngineError, match="cannot be recorded"):
        offline_layouts(config, tensors, tp_size=tp_size, device=Device.cuda, cache=tmp_path, **options)
    assert offline_layouts(config, tensors, tp_size=sizes[-1], device=Device.cuda, cache=tmp_path, **options)


def forget_loaders(model: Any) -> int:
    """Every parameter becomes a plain one over the same memory; tied ones stay tied. Returns how many."""
    from torch import nn

    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for leaf, param in module._parameters.items():
            if param is not None:
                plain = made.setdefault(id(param), nn.Parameter(param.data, requires_grad=False))
                module._parameters[leaf] = plain
    return len(made)


def main(model: str, tp_size: int, folder: Path, is_plain: bool) -> None:
    """The live side; runs in a process of its own."""
    from vllm import LLM

    config = RolloutConfig(
        tp_size=tp_size,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_bytes=16 << 20,
        sampling=SamplingConfig(max_tokens=8),
    )
    arguments = engine_arguments(folder, config, dtype=DType.bfloat16, device=Device.cpu, seed=0)
    engine = LLM(**arguments)
    if is_plain:
        (num_params,) = engine.apply_model(forget_loaders)
        assert num_params > 10
    tensors = [dataclasses.astuple(meta) for meta in read_config(MODELS[model]).checkpoint_tensors("bfloat16")]
    replies = engine.collective_rpc("slipstream_describe", args=(tensors, "tcp", "127.0.0.1", 5.0))
    layouts: list[DestLayout] = []
    from weight_sync.replica.messages import EngineRank

    for error, text, described in replies:
        assert not error, (error, text)
        layouts.append(unpack(EngineRank, described).layout)
    (folder / "layouts").write_bytes(pack(tuple(layouts)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), bool(int(sys.argv[4])))
