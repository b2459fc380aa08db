"""A recording in a process of its own: what that says, and what is left of it. What engines of a node leave for later
ones of their kind."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.conf.schema import Device, DType, RolloutConfig, WeightSyncConfig
from slipstream.rollout.errors import EngineError
from slipstream.rollout.layouts import offline_layout
from slipstream.rollout.layouts.offline_layout import ExpectedLayouts, LayoutRequest, offline_layouts
from slipstream.rollout.types import WorkerOptions
from slipstream.weight_sync.layout import TensorMeta

REQUEST = LayoutRequest(
    hf_config={}, tensors=[], tp_size=1, enable_expert_parallel=False, dtype=DType.bfloat16, device=Device.cpu
)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("echo 'error: RecordError: no o_proj' >&2; echo noise >&2; exit 1", "an engine: RecordError: no o_proj$"),
        ("echo 'Killed by the host' >&2; exit 137", "an engine: Killed by the host$"),
        ("exit 1", "an engine: it said nothing$"),
    ],
)
def test_a_recording_that_fails_says_why_and_leaves_nothing(
    program: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(f"#!/bin/sh\necho 'progress: a layer'\n{program}\n")
    (tmp_path / "python").chmod(0o755)
    said: list[str] = []
    with pytest.raises(EngineError, match=why):
        offline_layouts(REQUEST, tmp_path / "cache", said.append)
    assert said[-1] == "a layer"
    assert not (tmp_path / "cache").exists()


OPTIONS = WorkerOptions(
    folder=Path("model"), config=RolloutConfig(), dtype=DType.float32, device=Device.cpu,
    weight_sync=WeightSyncConfig(), tensors=[TensorMeta("w", (2,), "float32")], key=b"k" * 16,
)  # fmt: skip
OTHERS = [
    {"dtype": DType.bfloat16},
    {"device": Device.cuda},
    {"config": RolloutConfig(tp_size=2)},
    {"config": RolloutConfig(enable_expert_parallel=True)},
    {"tensors": [TensorMeta("w", (3,), "float32")]},
]


def test_layouts_are_kept_apart_by_what_they_depend_on(node_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kept in (["of before"], ["digest"]):
        expected = ExpectedLayouts(OPTIONS)
        expected.digests()
        expected.keep(kept)
    assert ExpectedLayouts(replace(OPTIONS, folder=Path("another"))).digests() == ["digest"]
    for other in OTHERS:
        assert ExpectedLayouts(replace(OPTIONS, **other)).digests() == [], other
    file_of_plans = REQUEST.file(None)
    with monkeypatch.context() as another:
        another.setattr(offline_layout, "engine_version", lambda: "vllm 9.9.9")
        assert ExpectedLayouts(OPTIONS).digests() == [] and REQUEST.file(None) != file_of_plans
    (file,) = node_cache.rglob("*.digests")
    for damaged in ("[1]", "{", '"digest"'):
        file.write_text(damaged)
        assert ExpectedLayouts(OPTIONS).digests() == [], damaged


def test_where_nothing_can_be_written_nothing_is_known(node_cache: Path) -> None:
    node_cache.touch()
    ExpectedLayouts(OPTIONS).keep(["digest"])
    assert ExpectedLayouts(OPTIONS).digests() == []
