"""Shared by the tests of the command line."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test runs in an empty folder and leaves the process's environment as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return tmp_path
