"""A run that a test of the command line stands in for."""

import os
import subprocess
import sys
from collections.abc import Sequence
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


def called(words: Sequence[str], stdout: Any = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command whose processes see this source tree."""
    seen = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    return subprocess.run(words, env=seen, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=240, check=False)


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return called([sys.executable, "-c", code, *arguments])
