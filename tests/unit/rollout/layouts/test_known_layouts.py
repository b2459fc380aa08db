"""What engines of a node leave for later ones of their kind."""

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.conf.schema import Device, DType, RolloutConfig, WeightSyncConfig
from slipstream.rollout.layouts.offline_layout import ExpectedLayouts
from slipstream.rollout.types import WorkerOptions
from slipstream.weight_sync.layout import TensorMeta

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


def test_layouts_are_kept_apart_by_what_they_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ExpectedLayouts(OPTIONS).keep(["digest"])
    assert ExpectedLayouts(replace(OPTIONS, folder=Path("another"))).digests() == ["digest"]
    for other in OTHERS:
        assert ExpectedLayouts(replace(OPTIONS, **other)).digests() == [], other
    (file,) = tmp_path.rglob("*.digests")
    for damaged in ("[1]", "{", '"digest"'):
        file.write_text(damaged)
        assert ExpectedLayouts(OPTIONS).digests() == [], damaged


def test_where_nothing_can_be_written_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    ExpectedLayouts(OPTIONS).keep(["digest"])
    assert ExpectedLayouts(OPTIONS).digests() == []
