"""What the system tests share: runs through the command line, each in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN_TIMEOUT_S = 280


def free_port() -> int:
    """A port of loopback that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(words: list[str], folder: Path) -> list[str]:
    """The command line of a small quick start under `folder`."""
    return [
        sys.executable, "-m", "orchestrator.cli", "train", "experiment=quickstart", f"run.dir={folder}",
        f"cluster.dashboard_port={free_port()}", *words,
    ]  # fmt: skip


@dataclass(frozen=True)
class FinishedRun:
    """A run that ended by itself."""

    folder: Path
    exit_code: int
    stderr: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def train(words: list[str], folder: Path) -> FinishedRun:
    """One run, to its end."""
    done = subprocess.run(
        command(words, folder), capture_output=True, text=True, timeout=RUN_TIMEOUT_S, env={**os.environ}
    )
    return FinishedRun((folder / "latest").resolve(), done.returncode, done.stderr + done.stdout[-3000:])
