"""Layouts recorded on meta, without an engine, against those that the ranks of a live engine report.

The live side is what a run does: vLLM with the product's own arguments and worker extension, asked to describe itself.
One process, forked from that of the tests, has all of them and what needs no cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases.vllm_process import outcomes_of
from fakes.checkpoints import CONFIGS, FOR_GPUS
from fakes.vllm_oracle import engine_of

from slipstream.conf.architecture.families import read_config
from slipstream.conf.checks.tensor_parallel import tp_problem
from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig
from slipstream.orchestrator.inputs.model_folder import engine_checkpoint
from slipstream.orchestrator.offline.record import layouts_digest, record
from slipstream.rollout.engine.engine_options import engine_arguments
from slipstream.rollout.layouts.offline_layout import LayoutRequest, offline_layouts
from slipstream.rollout.types import EngineOptions
from slipstream.weight_sync.layout import DestLayout, PostLoad
from slipstream.weight_sync.record.layout_wire import layouts_from_bytes, layouts_to_bytes
from slipstream.weight_sync.replica.messages import EngineRank
from slipstream.weight_sync.typed_msgpack import unpack

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**CONFIGS["qwen3_tied"], "torch_dtype": "bfloat16"},
    **{name: {**CONFIGS[name], "torch_dtype": "bfloat16"} for name in ("qwen3_moe", "mixtral", "qwen2_moe")},
}

ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", *ROUTERS],
}  # fmt: skip

FAMILIES = ["mixtral", "qwen2_moe"]
"""Whose layouts are recorded in the process of all live engines, after the last one: it can have none then."""
LIVE = {
    "qwen3-1": ("qwen3", 1), "qwen3_moe-1": ("qwen3_moe", 1), "qwen3_moe-2": ("qwen3_moe", 2),
    **{f"{model}-1": (model, 1) for model in FAMILIES},
}  # fmt: skip
"""Model and tp_size of live engines."""
SPLIT = "expert parallel"
UNBUILT = "without a projection"
RECORDED: dict[str, dict[str, Any]] = {
    "recorded qwen3_moe-1": {"model": "qwen3_moe"},
    "recorded qwen3_moe-2": {"model": "qwen3_moe", "tp_size": 2},
    SPLIT: {"model": "qwen3_moe", "tp_size": 4, "expert_parallel": True, "device": Device.cuda},
}
"""Arguments of asked(), for layouts that are recorded in that process, too, and kept in the folder of their case."""
SIZES: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    "shared_expert": ("glm4_moe", {"moe_intermediate_size": 62}, 4, True),  # which is cut in any case
    "fp8_blocks": ("qwen3_moe", {**FOR_GPUS["qwen3_moe"], "quantization_config": FP8}, 4, False),
}
"""Model, changes, a tp_size that is refused, expert parallel. The other rules are held by unit tests."""


def asked(model: str, *, tp_size: int = 1, expert_parallel: bool = False, device: Device = Device.cpu) -> LayoutRequest:
    config = MODELS[model]
    return LayoutRequest(
        hf_config=config, tensors=read_config(config).checkpoint_tensors("bfloat16"), tp_size=tp_size,
        enable_expert_parallel=expert_parallel, dtype=DType.bfloat16, device=device,
    )  # fmt: skip


@pytest.fixture(scope="module")
def in_vllm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """What live engines said, a folder for each, and by case what failed in the one process of them all."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("live")
    return folder, outcomes_of(compare, folder, [*LIVE, *SIZES, *FAMILIES, *RECORDED, UNBUILT])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recordings that tests of this file share; what is found there at first cannot be read."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("cache")
    asked("qwen3").file(folder).write_bytes(b"damaged")
    return folder


@pytest.mark.parametrize(
    ("case", "kind"),
    [("qwen3-1", "plain"), ("qwen3_moe-1", "loaded"), ("qwen3_moe-1", "plain"), ("qwen3_moe-2", "loaded")],
)
def test_a_layout_recorded_on_meta_is_the_live_engines(
    in_vllm: tuple[Path, dict[str, str]], cache: Path, case: str, kind: str, tmp_path: Path
) -> None:
    """plain: the live engine's parameters have lost their loaders, as those of block-FP8 engines do."""
    folder, outcomes = in_vllm
    assert outcomes[case] == "", outcomes[case]
    model, tp_size = LIVE[case]
    kept = f"recorded {case}"
    if kept in RECORDED:
        assert outcomes[kept] == "", outcomes[kept]
        cache = folder / kept
    recorded = offline_layouts(asked(model, tp_size=tp_size), cache)
    expected = layouts_from_bytes((folder / case / kind).read_bytes())
    assert len(recorded) == len(expected) == tp_size
    for mine, theirs in zip(recorded, expected, strict=True):
        assert mine.params == theirs.params
        assert set(mine.fills) == set(theirs.fills)
        assert mine == theirs
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    report = record(
        tmp_path, tp_size=tp_size, enable_expert_parallel=False, dtype="bfloat16", device="cpu", cache=cache
    )
    assert report.digest == layouts_digest(expected)
    assert report.was_cached
    assert [rank.num_bytes for rank in report.ranks] == [sum(p.num_bytes for p in live.params) for live in expected]


def test_expert_parallel_ranks_hold_whole_experts_and_gpus_hold_them_as_loaded(
    in_vllm: tuple[Path, dict[str, str]],
) -> None:
    assert in_vllm[1][SPLIT] == "", in_vllm[1][SPLIT]
    layouts = offline_layouts(asked(**RECORDED[SPLIT]), in_vllm[0] / SPLIT)
    held: list[set[int]] = []
    for layout in layouts:
        assert all(param.post_load is PostLoad.identity for param in layout.params)
        names = [load.tensor.split(".experts.")[1] for load in layout.loads if ".experts." in load.tensor]
        held.append({int(name.split(".")[0]) for name in names})
    assert held == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]


def test_a_damaged_layout_is_recorded_again_and_a_kept_one_is_not(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = offline_layouts(asked("qwen3"), cache)
    assert asked("qwen3").file(cache).read_bytes() == layouts_to_bytes(first)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a cached layout must not be recorded again"))
    assert offline_layouts(asked("qwen3"), cache) == first


def test_what_the_engine_cannot_build_is_an_error_that_says_why(in_vllm: tuple[Path, dict[str, str]]) -> None:
    """How it reaches the caller: tests/unit/rollout/layouts."""
    assert in_vllm[1][UNBUILT] == "", in_vllm[1][UNBUILT]


@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_are_refused_are_those_that_the_engine_cannot_build(
    in_vllm: tuple[Path, dict[str, str]], case: str
) -> None:
    """The largest size that is allowed can be built; the one that is refused cannot."""
    assert in_vllm[1][case] == "", in_vllm[1][case]


@pytest.mark.parametrize("model", FAMILIES)
def test_a_familys_layout_recorded_on_meta_is_its_engines(in_vllm: tuple[Path, dict[str, str]], model: str) -> None:
    live = f"{model}-1"
    assert in_vllm[1][live] == "", in_vllm[1][live]
    assert in_vllm[1][model] == "", in_vllm[1][model]


def request_of(config: dict[str, Any], *, expert_parallel: bool, device: Device) -> dict[str, Any]:
    """What record_all takes, but for tp_size."""
    return {
        "hf_config": config, "enable_expert_parallel": expert_parallel, "dtype": "bfloat16", "device": device.value,
        "every_layer": False,
        "tensors": [[meta.name, meta.shape, meta.dtype] for meta in engine_checkpoint(config, DType.bfloat16)],
    }  # fmt: skip


def build_sizes(case: str) -> None:
    """The recording itself, in the process that has imported vLLM."""
    from slipstream.rollout.layouts.meta_engine import record_all

    model, changes, tp_size, expert_parallel = SIZES[case]
    config = {**CONFIGS[model], **changes, "torch_dtype": "bfloat16"}
    assert tp_problem(tp_size, config, is_expert_parallel=expert_parallel) is not None
    sizes = [n for n in (1, 2, 3, 4, 6) if tp_problem(n, config, is_expert_parallel=expert_parallel) is None]
    request = request_of(config, expert_parallel=expert_parallel, device=Device.cuda)
    with pytest.raises(Exception):  # noqa: B017 - whatever vLLM raises
        record_all({**request, "tp_size": tp_size})
    assert len(record_all({**request, "tp_size": sizes[-1]})) == sizes[-1]


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


def describe(engine: Any, model: str, known: Sequence[str] = ()) -> bytes:
    """The layouts that the ranks of a live engine report, which may be given those that are known."""
    tensors = [dataclasses.astuple(meta) for meta in read_config(MODELS[model]).checkpoint_tensors("bfloat16")]
    layouts: list[DestLayout] = []
    given = (tensors, "tcp", "127.0.0.1", 5.0, known)
    for error, text, described in engine.collective_rpc("slipstream_describe", args=given):
        assert not error, (error, text)
        layouts.append(unpack(EngineRank, described).layout)
    return layouts_to_bytes(layouts)


def found_as_expected(worker: Any) -> bool:
    """Whether the digest that a rank was given is that of its layout."""
    return worker.slipstream_is_expected


def ask_live_engine(case: str, folder: Path) -> None:
    """What an engine says of its layouts once it has loaded, and once its parameters have lost their loaders."""
    model, tp_size = LIVE[case]
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    config = RolloutConfig(
        tp_size=tp_size, max_model_len=128, max_num_seqs=4, kv_cache_bytes=16 << 20,
        sampling=SamplingConfig(max_tokens=8),
    )  # fmt: skip
    with engine_of(
        **engine_arguments(EngineOptions(folder=folder, config=config, dtype=DType.bfloat16, device=Device.cpu), seed=0)
    ) as engine:
        loaded = describe(engine, model)
        (folder / "loaded").write_bytes(loaded)
        known = [layouts_digest((layout,)) for layout in layouts_from_bytes(loaded)]
        for digests, are_true in ((known, True), (["0"] * tp_size, False)):
            assert describe(engine, model, digests) == loaded
            assert engine.collective_rpc(found_as_expected) == [are_true] * tp_size
        if model in FAMILIES:  # some have biases, which vLLM cannot load without their loaders
            return
        assert all(num_params > 10 for num_params in engine.apply_model(forget_loaders))
        (folder / "plain").write_bytes(describe(engine, model))


def record_family(model: str, live: Path) -> None:
    """The layout without an engine is that which a live one said."""
    from slipstream.rollout.layouts.meta_engine import record_all

    request = request_of(MODELS[model], expert_parallel=False, device=Device.cpu)
    recorded = record_all({**request, "tp_size": 1, "every_layer": True})
    assert recorded == layouts_from_bytes(live.read_bytes())


def record_and_keep(case: str, folder: Path) -> None:
    """As offline_layouts() does with a process of its own."""
    from slipstream.rollout.layouts.meta_engine import record_all

    request = asked(**RECORDED[case])
    layouts = record_all(json.loads(request.text))
    request.file(folder).write_bytes(layouts_to_bytes(layouts))


def fail_to_record(folder: Path) -> None:
    """As the process of a recording does."""
    from slipstream.rollout.layouts.meta_engine import main

    whole, said = asked("qwen3"), io.StringIO()
    request = replace(whole, tensors=[meta for meta in whole.tensors if not meta.name.endswith("o_proj.weight")])
    (folder / "request").write_text(request.text)
    with contextlib.redirect_stderr(said):
        assert main(str(folder / "request"), str(folder / "layouts")) != 0
    assert re.search(r"^error: RecordError: .*o_proj", said.getvalue(), re.MULTILINE), said.getvalue()
    assert not (folder / "layouts").exists()


def compare(case: str, folder: Path) -> None:
    """One case, in the process of them all."""
    if case == UNBUILT:
        fail_to_record(folder)
    elif case in SIZES:
        build_sizes(case)
    elif case in FAMILIES:
        record_family(case, folder.parent / f"{case}-1" / "loaded")
    elif case in RECORDED:
        record_and_keep(case, folder)
    else:
        ask_live_engine(case, folder)
