"""Shared by the tests of the command line."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.cli.start_commands import AT_ONCE


@pytest.fixture
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test runs in an empty folder and leaves the process's environment as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return tmp_path


Refuse = Callable[..., str]


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Refuse]:
    """`slipstream train experiment=quickstart WORDS` must be refused; returns the message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    module = ModuleType("slipstream.orchestrator.run")
    module.run = lambda *_: pytest.fail("the run was started")  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "slipstream.orchestrator.run", module)

    def check(*words: str) -> str:
        had_ray = "ray" in sys.modules  # another test of this process may have imported it
        files = set(tmp_path.rglob("*"))
        dashboard = [] if any(word.startswith("cluster.") for word in words) else ["cluster.dashboard=false"]
        code = main(["train", "experiment=quickstart", *dashboard, *words])
        out, err = capsys.readouterr()
        assert code == 2
        assert out == ""
        err = err.removeprefix(f"{AT_ONCE}\n")
        assert err.startswith("error: ")
        assert "Traceback" not in err
        assert err.count("\n") == 1, "one message"
        assert set(tmp_path.rglob("*")) == files, "nothing was written"
        assert ("ray" in sys.modules) == had_ray
        return err

    yield check
