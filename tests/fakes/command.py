"""A run that a test of the command line stands in for."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
READY = ["train", "experiment=quickstart", "cluster.dashboard=false"]


def fake_run(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    """Stand in for orchestrator.run, which the command line imports when it starts a run."""
    module = ModuleType("slipstream.orchestrator.run")
    module.run = run  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "slipstream.orchestrator.run", module)
