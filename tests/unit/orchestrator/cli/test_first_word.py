"""Locks: a terminal is answered before options are read, which takes seconds on a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SAYS_WHEN_HYDRA_COMES = """
import sys
from importlib.abc import MetaPathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "hydra":
            print("hydra is imported", file=sys.stderr)

sys.meta_path.insert(0, Finder())
from slipstream.orchestrator.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [["train"], ["resume", "RUN"], ["eval", "RUN"]])
def test_a_terminal_is_answered_before_options_are_read(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {num_steps: 9}")
    words = [word.replace("RUN", str(tmp_path)) for word in words]
    command = [sys.executable, "-c", SAYS_WHEN_HYDRA_COMES, *words, "run.num_steps=none"]
    ours, terminal = os.openpty()
    try:
        assert subprocess.run(command, stderr=terminal, stdout=subprocess.PIPE, check=False).returncode == 2
        said = os.read(ours, 4096).decode().splitlines()
    finally:
        os.close(ours)
        os.close(terminal)
    assert said[:2] == ["checking options and files", "hydra is imported"]
    piped = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "checking options" not in piped.stderr, "a program that reads what is wrong gets that alone"
