"""Shared by the tests of the orchestrator."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.reward_runs import try_each_reward_once


@pytest.fixture
def short_tmpdir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR, of its own and short enough for the sockets of a run (orchestrator/socket_folder.py)."""
    folder = tempfile.mkdtemp(prefix="t", dir="/tmp")
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr("tempfile.tempdir", None)
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def each_reward_is_tried_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        try_each_reward_once(patch)
        yield
