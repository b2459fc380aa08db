"""A fresh engine with a run's options that loads its weights from a folder on local disk, up to its first token.

    python bench/plain_restart.py RUN_FOLDER CHECKPOINT

What a user would do without Slipstream's recovery; bench/recovery.py starts it beside its own. It prints one line of
JSON: event -> time in seconds since 1970, by the names of fleet.jsonl, and the CPU seconds of its processes.
"""

import asyncio
import json
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

MARKS = {"process_up": time.time()}

from slipstream.conf.load import load_resolved_yaml  # noqa: E402
from slipstream.conf.schema import Device  # noqa: E402
from slipstream.rollout.engine.vllm_engine import VllmEngine  # noqa: E402
from slipstream.rollout.engine.vllm_process import make_llm  # noqa: E402


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and all below it, user and system."""
    top = psutil.Process(pid)
    times = [process.cpu_times() for process in [top, *top.children(recursive=True)]]
    return sum(one.user + one.system for one in times)


def build(arguments: dict[str, Any]) -> Any:
    """The engine of a run, but with the weights that lie in its folder."""
    return make_llm(arguments | {"load_format": "auto"})


async def main(run: Path, checkpoint: Path) -> None:
    """Start, sample one token, end."""
    config = load_resolved_yaml((run / "config.yaml").read_text())
    options = replace(config.rollout, max_num_seqs=config.engine_num_seqs)
    device = Device.cuda if config.cluster.device == "cuda" else Device.cpu
    engine = VllmEngine(checkpoint, options, dtype=config.model.dtype, device=device, seed=0, make_llm=build)
    await engine.prepare()
    MARKS["imported"] = time.time()
    await engine.start()
    MARKS["engine_up"] = time.time()
    await engine.generate_group([1, 2, 3, 4], 1, replace(options.sampling, max_tokens=1, stop_at_eos=False))
    MARKS["first_token"] = engine.first_token_at or time.time()
    cpu_s = cpu_seconds(os.getpid())
    engine.shutdown()
    print(json.dumps({"marks": MARKS, "cpu_s": cpu_s}), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
