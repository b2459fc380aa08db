"""Cases that need vLLM, in one process that imports it once: importing takes longer than any of them.

A test module calls `outcomes_of` for a fixture, and `run_cases` where it is itself run as a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.rollout.in_vllm.process_imports import import_vllm

REPOSITORY = Path(__file__).parents[2]


def import_path(*first: Path) -> str:
    """PYTHONPATH for a process of a test: those folders, the product, the tests, and what this process was given."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, (*first, REPOSITORY, REPOSITORY / "tests")), *filter(None, [given])])


def outcomes_of(script: str, folder: Path, cases: Sequence[str], on_path: Sequence[Path] = ()) -> dict[str, str]:
    """By case, the traceback of what failed in `python SCRIPT FOLDER CASE ...`; "" where nothing did."""
    env = {
        **os.environ,
        "PYTHONPATH": import_path(*on_path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, script, str(folder), *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads((folder / "outcomes.json").read_text())


def run_cases(compare: Callable[[str, Path], None]) -> None:
    """compare(case, an empty folder) for each case of the command line; it leaves vLLM ready for the next one."""
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    import_vllm()
    outcomes: dict[str, str] = {}
    for case in cases:
        (folder / case).mkdir()
        try:
            compare(case, folder / case)
            outcomes[case] = ""
        except Exception:  # noqa: BLE001 - told to the test, which decides
            outcomes[case] = traceback.format_exc()
    (folder / "outcomes.json").write_text(json.dumps(outcomes))
    os._exit(0)  # without vLLM's shutdown
