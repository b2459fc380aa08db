"""A recording in a process of its own: what that says, and what is left of it."""

import sys
from pathlib import Path

import pytest

from slipstream.conf.schema import Device, DType
from slipstream.rollout.errors import EngineError
from slipstream.rollout.layouts.offline_layout import LayoutRequest, offline_layouts

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
