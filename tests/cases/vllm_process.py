"""Cases that need vLLM and leave traces in their process, in one that is forked from the tests': importing vLLM takes
longer than any of them.
"""

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slipstream.conf.schema import Device
from slipstream.rollout.engine.engine_options import engine_environment
from slipstream.rollout.in_vllm.process_imports import import_vllm

REPOSITORY = Path(__file__).parents[2]
SAID = "said.txt"
"""What the process of the cases wrote."""


def import_path(*first: Path) -> str:
    """PYTHONPATH for a process of a test: those folders, the product, the tests, and what this process was given."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, (*first, REPOSITORY, REPOSITORY / "tests")), *filter(None, [given])])


def outcomes_of(
    cases: Mapping[str, Callable[[Path], None]], folder: Path, on_path: Sequence[Path] = ()
) -> dict[str, str]:
    """By case, the traceback of what failed in it; "" where nothing did. All of them in one process, which is forked
    from this one, each with an empty folder of its name.

    Args:
        cases: Each leaves vLLM ready for the next one.
        on_path: Folders to import from there.
    """
    import_vllm()
    process = multiprocessing.get_context("fork").Process(target=_run_cases, args=(cases, folder, on_path))
    process.start()
    try:
        process.join()
    finally:
        process.kill()
    assert process.exitcode == 0, (folder / SAID).read_text()[-8000:]
    return json.loads((folder / "outcomes.json").read_text())


def _run_cases(cases: Mapping[str, Callable[[Path], None]], folder: Path, on_path: Sequence[Path]) -> None:
    with (folder / SAID).open("w") as said:
        for descriptor in (1, 2):
            os.dup2(said.fileno(), descriptor)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not where pytest keeps what its own process says
    os.environ.update(engine_environment(Device.cpu))
    sys.path[:0] = map(str, on_path)
    outcomes: dict[str, str] = {}
    for case, run in cases.items():
        (folder / case).mkdir()
        try:
            run(folder / case)
            outcomes[case] = ""
        except Exception:  # noqa: BLE001 - told to the test, which decides
            outcomes[case] = traceback.format_exc()
    (folder / "outcomes.json").write_text(json.dumps(outcomes))
    os._exit(0)  # without vLLM's shutdown
