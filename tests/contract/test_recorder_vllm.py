"""What is recorded of vLLM's loaders: replayed, it is what `load_weights` writes; and without an engine it is the same.

One process, forked from that of the tests, has one live engine after the other, each as in a run: dummy weights, the
product's own arguments and worker extension, asked to describe itself. The loader that was recorded then loads the real
tensors of a tiny random checkpoint, as the oracle; experts are compared as loaded, before any repacking by a backend.
Models on meta come last, for they leave process groups behind: layouts of the same engines, of engines that GPUs would
have, and of block-FP8 (cases/recorded_fp8.py).
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import recorded_fp8
from cases.recorded import replay_plan
from cases.vllm_process import outcomes_of
from fakes.checkpoints import CONFIGS, FOR_GPUS, write_checkpoint
from fakes.vllm_oracle import engine_of
from safetensors.torch import load_file, save_file

from slipstream.conf.architecture.families import read_config
from slipstream.conf.checks.tensor_parallel import tp_problem
from slipstream.conf.schema import Device, DType, RolloutConfig, SamplingConfig
from slipstream.orchestrator.inputs.model_folder import engine_checkpoint
from slipstream.orchestrator.offline.record import layouts_digest, record
from slipstream.rollout.engine.engine_options import engine_arguments
from slipstream.rollout.layouts.offline_layout import LayoutRequest, offline_layouts
from slipstream.rollout.types import LANGUAGE_MODEL, EngineOptions
from slipstream.weight_sync.layout import DestLayout, PostLoad, TensorMeta
from slipstream.weight_sync.record.layout_wire import layouts_from_bytes, layouts_to_bytes
from slipstream.weight_sync.replica.messages import EngineRank
from slipstream.weight_sync.typed_msgpack import unpack

NO_PICTURES = Path(__file__).parents[1] / "fakes" / "no_pictures"
"""Has the names of a package that vLLM's file of Qwen3.5 imports and CPU environments lack."""
FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(2))],
}  # fmt: skip


def config_of(model: str) -> dict[str, Any]:
    return {**CONFIGS[model.removesuffix("_0_25")], "dtype": "bfloat16", "torch_dtype": "bfloat16"}


def asked(
    config: dict[str, Any], *, tp_size: int = 1, is_split: bool = False, device: Device = Device.cpu, **more: Any
) -> LayoutRequest:
    return LayoutRequest(
        hf_config=config, tensors=engine_checkpoint(config, DType.bfloat16), tp_size=tp_size,
        enable_expert_parallel=is_split, dtype=DType.bfloat16, device=device, **more,
    )  # fmt: skip


# -- live engines ------------------------------------------------------------------------------------------------------


def describe(engine: Any, tensors: Sequence[TensorMeta], known: Sequence[str] = ()) -> tuple[DestLayout, ...]:
    """The layouts that the ranks of a live engine report, which may be given those that are known."""
    given = ([astuple(meta) for meta in tensors], "tcp", "127.0.0.1", 5.0, known)
    layouts: list[DestLayout] = []
    for error, text, described in engine.collective_rpc("slipstream_describe", args=given):
        assert not error, (error, text)
        layouts.append(unpack(EngineRank, described).layout)
    return tuple(layouts)


def found_as_expected(worker: Any) -> bool:
    """Whether the digest that a rank was given is that of its layout."""
    return worker.slipstream_is_expected


def forget_loaders(model: Any) -> int:
    """Every parameter becomes a plain one over the same memory, as those of block-FP8 engines do; tied ones stay tied.
    Returns how many."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for leaf, param in module._parameters.items():
            if param is not None:
                plain = made.setdefault(id(param), torch.nn.Parameter(param.data, requires_grad=False))
                module._parameters[leaf] = plain
    return len(made)


def take_our_class(name: str) -> None:
    """Let this process's vLLM be one that has no such architecture, and so gets our class."""
    from vllm.model_executor.models import ModelRegistry

    from slipstream.rollout.in_vllm.process_imports import know_text_models

    del ModelRegistry.models[name]
    know_text_models()
    assert ModelRegistry.models[name].load_model_cls().__module__ == "slipstream.rollout.in_vllm.qwen3_5_text"


def describe_and_load(folder: Path, model: str, tp_size: int, loses_loaders: bool) -> None:
    """A live engine: keeps the layouts that it reports."""
    from fakes.readable_weights import readable

    if model.endswith("_0_25"):
        take_our_class("Qwen3_5MoeForCausalLM")
    config = config_of(model)
    write_checkpoint(config, folder, seed=0)
    tensors, metas = load_file(folder / "model.safetensors"), read_config(config).checkpoint_tensors("bfloat16")
    rollout = RolloutConfig(
        tp_size=tp_size, max_model_len=128, max_num_seqs=4, kv_cache_bytes=16 << 20,
        sampling=SamplingConfig(max_tokens=8),
    )  # fmt: skip
    options = EngineOptions(folder=folder, config=rollout, dtype=DType.bfloat16, device=Device.cpu)
    with engine_of(**engine_arguments(options, seed=0)) as engine:
        if tp_size == 1:  # in this process
            core: Any = engine.llm_engine.engine_core
            net = core.engine_core.model_executor.driver_worker.worker.model_runner.model
            params = readable(net)
            before = {name: param.detach().clone() for name, param in params.items()}
        layouts = describe(engine, metas)
        (folder / "layouts").write_bytes(layouts_to_bytes(layouts))
        known = [layouts_digest((layout,)) for layout in layouts]
        for digests, are_true in ((known, True), (["0"] * tp_size, False)):
            assert describe(engine, metas, digests) == layouts
            assert engine.collective_rpc(found_as_expected) == [are_true] * tp_size
        if tp_size == 1:
            for name, param in params.items():
                assert torch.equal(param.view(torch.uint8), before[name].view(torch.uint8)), f"{name} has changed"
            net.load_weights(iter(tensors.items()))
            memory = replay_plan(layouts[0], metas, tensors)
            assert set(memory) == set(params)
            for name, param in params.items():
                assert torch.equal(memory[name].view(param.shape), param), name
        if loses_loaders:
            assert all(num_params > 10 for num_params in engine.apply_model(forget_loaders))
            assert describe(engine, metas) == layouts


def read_beside_tower(folder: Path) -> None:
    """An engine that reads its weights by itself: vLLM refuses a parameter that its loader did not fill."""
    from vllm.model_executor.model_loader import get_model_loader

    from slipstream.rollout.in_vllm.language_model_loader import register_language_model_loader

    file = write_checkpoint(CONFIGS["deepseek_v3"], folder / "config", seed=0) / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    (folder / "whole").mkdir()
    tower = {f"{name}.weight": torch.ones(2) for name in ("vision_tower.patch_embed.proj", "mm_projector.pre_norm")}
    stored = {f"language_model.{name}": tensor for name, tensor in tensors.items()} | tower
    save_file(stored, folder / "whole" / "model.safetensors", metadata={"format": "pt"})
    register_language_model_loader()
    with engine_of(
        model=str(folder / "config"), load_format=LANGUAGE_MODEL,
        model_loader_extra_config={"folder": str(folder / "whole")}, attention_backend="CPU_MLA", dtype="bfloat16",
        skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
    ) as engine:  # fmt: skip
        loader: Any = get_model_loader(engine.llm_engine.vllm_config.load_config)
        handed_on = dict(loader.get_all_weights(None, None))
    assert set(handed_on) == set(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in handed_on.items())


# -- on meta -----------------------------------------------------------------------------------------------------------


def recorded(request: LayoutRequest) -> tuple[DestLayout, ...]:
    from slipstream.rollout.layouts.meta_engine import record_all

    return record_all(json.loads(request.text))


def record_on_meta(folder: Path, model: str, tp_size: int) -> None:
    mine = recorded(asked(config_of(model), tp_size=tp_size, every_layer=True))
    assert mine == layouts_from_bytes((folder.parent / f"{model}-{tp_size}" / "layouts").read_bytes())


def record_split_experts(folder: Path) -> None:
    """Expert-parallel ranks hold whole experts, and GPUs hold them as loaded."""
    held: list[set[int]] = []
    for layout in recorded(asked(config_of("qwen3_moe"), tp_size=4, is_split=True, device=Device.cuda)):
        assert all(param.post_load is PostLoad.identity for param in layout.params)
        names = [load.tensor.split(".experts.")[1] for load in layout.loads if ".experts." in load.tensor]
        held.append({int(name.split(".")[0]) for name in names})
    assert held == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]


def build_sizes(folder: Path, model: str, changes: dict[str, Any], refused: int, is_split: bool) -> None:
    """The largest tp_size that is allowed can be built; the one that is refused cannot. Unit tests hold other rules."""
    config = {**config_of(model), **changes}
    assert tp_problem(refused, config, is_expert_parallel=is_split) is not None
    largest = max(n for n in (1, 2, 3, 4, 6) if tp_problem(n, config, is_expert_parallel=is_split) is None)
    with pytest.raises(Exception):  # noqa: B017 - whatever vLLM raises
        recorded(asked(config, tp_size=refused, is_split=is_split, device=Device.cuda))
    assert len(recorded(asked(config, tp_size=largest, is_split=is_split, device=Device.cuda))) == largest


def fail_to_record(folder: Path) -> None:
    """What the engine cannot build is an error that says why. How it reaches the caller: tests/unit/rollout/layouts."""
    from slipstream.rollout.layouts.meta_engine import main

    whole, said = asked(config_of("qwen3_tied")), io.StringIO()
    request = replace(whole, tensors=[meta for meta in whole.tensors if not meta.name.endswith("o_proj.weight")])
    (folder / "request").write_text(request.text)
    with contextlib.redirect_stderr(said):
        assert main(str(folder / "request"), str(folder / "layouts")) != 0
    assert re.search(r"^error: RecordError: .*o_proj", said.getvalue(), re.MULTILINE), said.getvalue()
    assert not (folder / "layouts").exists()


LIVE = [
    ("qwen3_tied", 1, True), ("qwen3_moe", 1, True), ("qwen3_moe", 2, False), ("qwen2", 1, False),
    ("mistral", 1, False), ("olmoe", 1, False), ("mixtral", 1, False), ("qwen2_moe", 1, False),
    ("minimax_m2", 1, False), ("qwen3_5", 1, False), ("qwen3_5_moe", 1, False), ("qwen3_5_moe_0_25", 1, False),
    ("gemma3", 1, False), ("gemma4_moe", 1, False),
]  # fmt: skip
"""Model, tp_size, whether its parameters lose their loaders. Others are recorded and published in
test_engine_layouts.py. `_0_25`: with the class that a vLLM without one of its own gets."""
CASES: dict[str, Callable[[Path], None]] = {
    **{f"{model}-{tp}": partial(describe_and_load, model=model, tp_size=tp, loses_loaders=x) for model, tp, x in LIVE},
    "beside a tower": read_beside_tower,
    **{f"{model}-{tp} on meta": partial(record_on_meta, model=model, tp_size=tp) for model, tp, _ in LIVE},
    "split experts": record_split_experts,
    "a shared expert": partial(  # it is cut in any case
        build_sizes, model="glm4_moe", changes={"moe_intermediate_size": 62}, refused=4, is_split=True
    ),
    "blocks of FP8": partial(
        build_sizes, model="qwen3_moe", refused=4, is_split=False,
        changes={**FOR_GPUS["qwen3_moe"], "quantization_config": FP8},
    ),
    "without a projection": fail_to_record,
    **{case: partial(recorded_fp8.compare, case=case) for case in recorded_fp8.CASES},
}  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folders of all cases, and by case what failed."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("recorded")
    return folder, outcomes_of(CASES, folder, on_path=[NO_PICTURES])


@pytest.mark.parametrize("case", CASES)
def test_what_is_recorded_is_what_vllm_loads(told: tuple[Path, dict[str, str]], case: str) -> None:
    assert told[1][case] == "", told[1][case]


def test_a_damaged_recording_is_made_again_and_a_kept_one_is_not(
    told: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, config = tmp_path / "cache", config_of("qwen3_tied")
    cache.mkdir()
    asked(config).file(cache).write_bytes(b"damaged")
    live = layouts_from_bytes((told[0] / "qwen3_tied-1" / "layouts").read_bytes())
    assert offline_layouts(asked(config), cache) == live
    assert asked(config).file(cache).read_bytes() == layouts_to_bytes(live)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a cached layout must not be recorded again"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = record(tmp_path, tp_size=1, enable_expert_parallel=False, dtype="bfloat16", device="cpu", cache=cache)
    assert report.digest == layouts_digest(live)
    assert report.was_cached
    assert [rank.num_bytes for rank in report.ranks] == [sum(param.num_bytes for param in live[0].params)]
