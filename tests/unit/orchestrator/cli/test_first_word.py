"""Locks: a command answers before options are read, which takes seconds on a busy machine."""

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
def test_a_command_answers_before_options_are_read(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {num_steps: 9}")
    words = [word.replace("RUN", str(tmp_path)) for word in words]
    command = [sys.executable, "-c", SAYS_WHEN_HYDRA_COMES, *words, "run.num_steps=none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[:2]) == (2, ["checking options and files", "hydra is imported"])
