"""What an engine wrote that did not come up, or died, is found, and the line that says why is in the error. No vLLM."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from slipstream.conf.schema import Device
from slipstream.rollout.crash_reports import PARENT_VARIABLE
from slipstream.rollout.engine.start_log import OutputSince, cause_in
from slipstream.rollout.engine.vllm_engine import VllmEngine
from slipstream.rollout.engine.vllm_process import VllmProcess
from slipstream.rollout.errors import EngineDied, EngineError

DEAD = cast(Any, SimpleNamespace(errored=True))
REFERRAL = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("", "it said nothing"),
        ("INFO all is well\nkilled\n", "killed"),
        (
            "(EngineCore) ValueError: Available memory is less than desired\nTraceback (most recent call last):\n"
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
            "(EngineCore) ValueError: Available memory is less than desired",
        ),
        (
            "(Worker_TP1) ERROR torch.OutOfMemoryError: CUDA out of memory\n"
            "(EngineCore) EngineDeadError: EngineCore failed. See stack trace (above) for the root cause.\n",
            "(Worker_TP1) ERROR torch.OutOfMemoryError: CUDA out of memory",
        ),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, max_model_len (100000) is greater [type=value_error]\n    For further information\n",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig "
            "Value error, max_model_len (100000) is greater [type=value_error]",
        ),
    ],
)
def test_an_engine_that_ended_is_quoted_with_what_ended_it(log: str, why: str) -> None:
    assert cause_in(log) == why


def test_output_is_what_was_written_since_to_files_each_once(tmp_path: Path) -> None:
    both = os.open(tmp_path / "both", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    same, other = os.dup(both), os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    reading, writing = os.pipe()
    try:
        os.write(both, b"ValueError: of before\n")
        output = OutputSince([both, same, other, writing])
        assert output.read() == "\n"
        os.write(same, b"first\n")
        os.write(other, b"second\n")
        os.write(writing, b"third\n")
        assert output.read() == "first\n\nsecond\n"
    finally:
        for descriptor in (both, same, other, reading, writing):
            os.close(descriptor)


@contextmanager
def stderr_at(path: str) -> Iterator[None]:
    """As Ray redirects a worker."""
    kept, opened = os.dup(2), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(opened)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's start sets variables for its processes."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


FRAMES = 'Current thread 0x1 (most recent call first):\n  File "/lib/model.py", line 3 in load\n'
NO_MEMORY = "ValueError: No available memory for the cache blocks."
TOO_LONG = "max_model_len (100000) is greater than the model's"


@pytest.mark.parametrize(
    ("stderr", "log", "error", "told"),
    [
        ("stderr", f"Process EngineCore:\n{NO_MEMORY}\n", RuntimeError(REFERRAL),
         f"RuntimeError: {REFERRAL}; the engine's process said: {NO_MEMORY}"),
        (os.devnull, f"Process EngineCore:\n{NO_MEMORY}\n", RuntimeError(REFERRAL), f"RuntimeError: {REFERRAL}"),
        ("stderr", "ImportError: of an optional package\n", ValueError(TOO_LONG), f"ValueError: {TOO_LONG}"),
        ("stderr", "Warning: NUMA binding\n", RuntimeError(REFERRAL.replace("{}", "{'EngineCore_DP0': -9}")),
         "its process was ended by SIGKILL"),
        ("rollout-0-EngineCore.txt", f"Fatal Python error: Segmentation fault\n\n{FRAMES}", RuntimeError(REFERRAL),
         "its process died of SIGSEGV (main thread in /lib/model.py:3, load); frames of all threads: {}"),
    ],
    ids=["said in a file", "said elsewhere", "says why itself", "killed, as where memory runs out", "died of a signal"],
)  # fmt: skip
async def test_an_engine_that_does_not_start_is_quoted_with_its_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine_of: Callable[..., VllmEngine],
    stderr: str,
    log: str,
    error: Exception,
    told: str,
) -> None:
    """A file that is called as a crash report is one."""
    monkeypatch.setenv(PARENT_VARIABLE, str(tmp_path / "rollout-0"))

    def fails(_: dict[str, Any]) -> NoReturn:
        os.write(2, log.encode())
        raise error

    (tmp_path / "stderr").write_text("RuntimeError: of the engine before\n")
    with stderr_at(str(tmp_path / stderr)), pytest.raises(EngineError) as caught:
        await engine_of(make_llm=fails).start()
    assert (
        str(caught.value) == f"the engine did not start: {told.format(tmp_path / stderr) if 'frames' in told else told}"
    )


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (1, "ended with exit code 1; its last error: ERROR torch.OutOfMemoryError: CUDA out of memory"),
        (None, "died; its last error: ERROR torch.OutOfMemoryError: CUDA out of memory"),
        (-9, "was ended by SIGKILL"),
    ],
)
async def test_an_engine_that_ended_by_itself_is_quoted(
    tmp_path: Path, engine_of: Callable[..., VllmEngine], code: int | None, told: str
):
    """A signal is a reason, and what was logged before it none."""
    engine = engine_of(make_llm=lambda _: DEAD)
    with stderr_at(str(tmp_path / "stderr")):
        await engine.process.start()
        os.write(2, b"ERROR torch.OutOfMemoryError: CUDA out of memory\nEngineDeadError: above is the root cause\n")
        engine.process.children = cast(Any, [SimpleNamespace(exitcode=code)])
        with pytest.raises(EngineDied) as caught:
            engine.check()
    assert str(caught.value) == f"the engine's process {told}; this rollout worker must be restarted"


def sleeping() -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    return process


@pytest.fixture
def other() -> Iterator[BaseProcess]:
    """A child of this process that is not the engine's."""
    process = sleeping()
    yield process
    process.kill()
    process.join()


async def test_an_engine_is_dead_if_its_own_process_is_and_not_if_another_child_is(
    engine_of: Callable[..., VllmEngine], other: BaseProcess
) -> None:
    own: list[BaseProcess] = []

    def make(_: dict[str, Any]) -> Any:
        own.append(sleeping())
        return SimpleNamespace(errored=False)

    engine = engine_of(make_llm=make)
    await engine.process.start()
    other.kill()
    other.join()
    engine.check()
    own[0].kill()
    own[0].join()
    with pytest.raises(EngineDied, match="was ended by SIGKILL"):
        engine.check()


async def test_a_start_whose_process_was_killed_ends_although_vllm_goes_on_waiting(
    monkeypatch: pytest.MonkeyPatch, other: BaseProcess
) -> None:
    """vLLM does, for ten minutes, where the process dies between its two messages."""
    is_seen, gives_up, active_children = threading.Event(), threading.Event(), multiprocessing.active_children

    def look() -> list[BaseProcess]:
        if found := active_children():
            is_seen.set()
        return found

    def make(_: dict[str, Any]) -> Any:
        process = sleeping()
        is_seen.clear()
        is_seen.wait()
        other.terminate()
        other.join()
        for _look in range(2):  # the start has seen that it ended, and goes on
            is_seen.clear()
            is_seen.wait()
        process.kill()
        gives_up.wait()
        raise TimeoutError("Timed out waiting for engine core processes to start")

    monkeypatch.setattr(multiprocessing, "active_children", look)
    process = VllmProcess({}, Device.cpu, batch_invariant=False, make=make)
    try:
        with pytest.raises(EngineError, match=r"^the engine did not start: its process was ended by SIGKILL$"):
            await process.start()
    finally:
        gives_up.set()
