"""Ray's core takes SIGTERM from the process that starts a cluster; a run must get it back to be wound down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from slipstream.orchestrator.environment import run_environment

PROGRAM = """
import asyncio, logging, signal
import ray
from slipstream.orchestrator.signals import take_sigterm_back

received = []

async def main():
    await asyncio.to_thread(  # as the cluster does; ray.init then leaves Python's own handlers alone
        ray.init, address="local", include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False,
        logging_level=logging.ERROR,
    )
    take_sigterm_back()
    signal.raise_signal(signal.SIGTERM)

signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum))
asyncio.run(main())
ray.shutdown()
assert received == [signal.SIGTERM], received
print("wound down")
"""


def test_sigterm_is_the_runs_own_after_ray_has_started() -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **run_environment("cpu"), "RAY_AUTH_MODE": "disabled", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "wound down\n"), done.stderr
