"""What all tests share: a temporary folder of their own, torch's random numbers, and the order in which files start."""

import contextlib
import multiprocessing.util
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest
from longest_first import longest_first

from slipstream.rollout.engine.engine_options import compile_cache
from slipstream.weight_sync.gc_freeze import frozen_imports


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Files import torch and vLLM, whose millions of objects no collection of garbage needs to visit again."""
    with frozen_imports():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items)


def pytest_runtest_setup() -> None:
    """A test draws the same numbers, whichever ran before it in its process."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def private_tmp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """TMPDIR of the tests and of what they start: an engine whose processes are killed leaves sockets there. What it
    leaves in /dev/shm is removed once nobody maps it.
    """
    tmp_path_factory.getbasetemp()  # where pytest keeps the folders of the last runs
    multiprocessing.util.get_temp_dir()  # multiprocessing removes its own when this process ends, after this fixture
    folder = tempfile.mkdtemp(prefix="t")  # short, because sockets lie below it
    shared_before = set(os.listdir("/dev/shm"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in compile_cache().items():
            patch.setenv(name, os.environ.get(name, value))
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)  # where Python keeps its answer
        yield
    shutil.rmtree(folder, ignore_errors=True)
    left = (path for prefix in ("psm_", "vllm_dist_") for path in Path("/dev/shm").glob(f"{prefix}*"))
    came = {path for path in left if path.name not in shared_before}
    mapped = "".join(map(maps_of, psutil.process_iter())) if came else ""
    for path in came:
        if path.name not in mapped:
            with contextlib.suppress(OSError):
                path.unlink()


def maps_of(process: psutil.Process) -> str:
    """What a process has mapped; nothing where it has ended, or is another user's."""
    try:
        return Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return ""
