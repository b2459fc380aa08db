"""Trainer ranks of a bench, each a process of its own that runs the bench's script again."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_ranks(words: Sequence[str], num_ranks: int, gpus: str, out: Path, limit_s: float) -> dict[str, Any]:
    """Start the ranks and wait for them, until one fails or reports a failure, or the time is over.

    Args:
        words: the command of a rank but for --rank-index and --out.
        gpus: that they see, as CUDA_VISIBLE_DEVICES names them.
        out: where rank 0 writes its figures, after each one.

    Returns:
        The figures, and exit_codes of all ranks; None: it was ended.
    """
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, *words, "--rank-index", str(rank), "--out", str(out)] for rank in range(num_ranks)]
    ranks = [subprocess.Popen(command, env=environment) for command in commands]
    deadline, codes = time.monotonic() + limit_s, list[int | None]([None] * num_ranks)
    while None in codes and time.monotonic() < deadline and not any(codes):
        time.sleep(0.2)
        codes = [rank.poll() for rank in ranks]
        if 0 in codes and out.exists() and "failed" in out.read_text():
            break  # the others wait in an exchange
    for rank in ranks:
        rank.kill()
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return found | {"exit_codes": codes}
