"""`slipstream push`, and what served engines hold: for the tests of both, in processes as a user starts them."""

import ast
import os
import sys
from pathlib import Path

from cases.vllm_process import import_path
from slipstream.conf.schema import Device
from slipstream.rollout.engine.engine_options import engine_environment
from slipstream.rollout.served.client import ServedEngine

SMALL = ["--max-model-len", "256", "--kv-cache-memory-bytes", str(16 << 20)]


def environment(*folders: Path) -> dict[str, str]:
    """Variables of a process that imports vLLM, with folders on its path."""
    return {
        **os.environ,
        **engine_environment(Device.cpu),
        "PYTHONPATH": import_path(*folders),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def command(*words: str) -> list[str]:
    """`slipstream` and these words."""
    return [sys.executable, "-m", "slipstream.orchestrator.cli.main", *words]


def held(engine: ServedEngine) -> dict[str, str]:
    """Hashes of every parameter that a served engine holds."""
    (result,) = engine._request("POST", "/collective_rpc", {"method": "read_params"})["results"]
    error, text, hashes = ast.literal_eval(result) if isinstance(result, str) else result
    assert not error, text
    return hashes
