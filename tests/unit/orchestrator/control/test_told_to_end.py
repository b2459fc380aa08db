"""Locks: a run asked to end gets SIGTERM, whoever asks waits until its lock is free, and nothing else is hurt; a
process whose run another one goes on with ends, and writes nothing more into the run's folder.
"""

import asyncio
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from fakes.fleet import never
from fakes.run_folders import MadeUpRun

from slipstream.conf.errors import ConfigError
from slipstream.fleet.supervisor import Supervisor
from slipstream.orchestrator.checkpoints.journal import Journal, Whereabouts, remove_journal, write_journal
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.control import stop_request
from slipstream.orchestrator.control.control_folder import alive, answer_requests, note_end
from slipstream.orchestrator.control.stop_request import end_when_asked, stop
from slipstream.orchestrator.errors import RunTakenOver
from slipstream.orchestrator.files import may_write
from slipstream.orchestrator.files.may_write import THIS_PROCESS
from slipstream.orchestrator.files.run_folder import RunFolder

STATE = RunState(2, 2, {}, {}, BufferState())
TAKEN = "process 7 on elsewhere goes on with the run in "


def take_over(folder: RunFolder) -> None:
    """As another machine does to which the file system has given the lock of one that was out of reach."""
    other = folder.root / "control" / "other"
    other.write_text("process 7 on elsewhere")
    other.replace(folder.alive)


def files_of(folder: RunFolder) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}


def test_a_process_that_was_given_up_writes_nothing(tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path / "run", num_steps=9)
    folder, store = run.folder, CheckpointStore(run.folder.checkpoints, keep=1, options={})
    journal = Journal(Whereabouts("/nowhere", 4711), "{}", STATE)
    before: dict[Path, bytes] = {}
    with pytest.raises(RunTakenOver, match=TAKEN), alive(folder.root):
        run.write_step(1)
        write_journal(folder, journal)
        begun = store.begin(2)
        take_over(folder)
        before |= files_of(folder)
        writers: list[Callable[[], object]] = [
            partial(run.write_step, 2),
            partial(write_journal, folder, journal),
            partial(store.begin, 2),
            partial(store.finish, begun, STATE),
        ]
        for write in writers:
            with pytest.raises(RunTakenOver, match=TAKEN):
                write()
        store.discard_unfinished()
        remove_journal(folder)
        note_end(folder.root, "stopped")
        run.write_step(2)
    assert files_of(folder) == before
    assert begun.is_dir()
    with alive(folder.root):
        assert store.begin(2) == begun, "it is this process's again"
        assert folder.alive.read_text() == THIS_PROCESS


def test_a_process_of_the_same_number_on_a_host_of_the_same_name_is_another_one(tmp_path: Path) -> None:
    """As in two containers."""
    folder = RunFolder(tmp_path)
    with alive(tmp_path):
        folder.alive.write_text(runpy.run_path(may_write.__file__)["THIS_PROCESS"])
        with pytest.raises(RunTakenOver):
            may_write.check_own(folder)


async def test_it_is_told_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: told.append((pid, number)))
    with alive(tmp_path):
        listening = asyncio.create_task(end_when_asked(tmp_path))
        await asyncio.sleep(0)
        take_over(RunFolder(tmp_path))
        await listening
        (tmp_path / "control" / "1.request.json").write_text('{"ask": "recover", "worker": null}')
        await answer_requests(tmp_path, Supervisor([], restart=never))
        assert (tmp_path / "control" / "1.request.json").exists(), "the other one answers"
    assert told == [(os.getpid(), signal.SIGTERM)]


RUN = """
import asyncio, sys
from pathlib import Path
from slipstream.orchestrator.control.control_folder import alive
from slipstream.orchestrator.control.stop_request import end_when_asked
from slipstream.orchestrator.signals import wound_down_by_signals

async def run(folder):
    listening = asyncio.create_task(end_when_asked(folder))
    try:
        await asyncio.sleep(60)
    finally:
        checkpoint = folder / "checkpoints" / "step-000007"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").touch()

with wound_down_by_signals() as received, alive(folder := Path(sys.argv[1])):
    print("up", flush=True)
    try:
        asyncio.run(run(folder))
    except KeyboardInterrupt:
        sys.exit(128 + received[0])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("run: {num_steps: 9}")
    return tmp_path


def test_a_run_saves_and_ends_when_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", RUN, str(folder)], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.readline()
        assert main(["stop", str(folder)]) == 0
        assert run.wait(120) == 128 + 15
    out = capsys.readouterr().out
    assert out.startswith(f"the run in {folder} has ended\nstep 7 is saved; go on with: slipstream resume {folder}")
    assert {path.name for path in (folder / "control").iterdir()} == {"alive", "end.json"}
    assert main(["stop", str(folder)]) == 0
    assert "had ended already\nstep 7 is saved" in capsys.readouterr().out


async def test_a_folder_that_is_out_of_reach_asks_nobody_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system of another machine is that does not answer for a moment."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _, number: sent.append(number))
    monkeypatch.setattr(stop_request, "LOOK_EVERY_S", 0)
    listening = asyncio.create_task(stop_request.end_when_asked(Path("x" * 1000)))  # whose stat(2) fails
    try:
        for _ in range(10):
            await asyncio.sleep(0)
        assert not listening.done() and not sent
    finally:
        listening.cancel()


def test_of_a_run_that_is_complete_nothing_is_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = folder / "checkpoints" / "step-000009"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    (folder / "adapter").mkdir()
    assert main(["stop", str(folder)]) == 0
    said = f"the run in {folder} had ended already\nall 9 steps are made, so a resume has nothing left to train: "
    assert capsys.readouterr().out.startswith(said)
    assert main(["recover", str(folder)]) == 2
    assert (
        f"the run in {folder} is not alive; all 9 steps are made, so a resume has nothing left"
        in capsys.readouterr().err
    )


def test_one_that_does_not_end_in_time_is_named(folder: Path) -> None:
    with alive(folder), pytest.raises(ConfigError, match=r"still goes on 0 s after it was asked.*--timeout-s"):
        stop(folder, timeout_s=0.01)
    assert (folder / "control" / "stop.json").exists(), "the request stands"
    with alive(folder):
        assert not (folder / "control" / "stop.json").exists(), "the next run is not asked to end"


def test_a_request_that_a_start_removes_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_request, "_SAY_EVERY_S", 0.0)

    def forget(_: str) -> None:
        (folder / "control" / "stop.json").unlink(missing_ok=True)

    with alive(folder), pytest.raises(ConfigError, match="still goes on"):
        stop(folder, timeout_s=0.3, say=forget)
    assert (folder / "control" / "stop.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "slipstream stop needs a run folder, e.g. slipstream stop runs/latest"),
        (["nowhere"], "nowhere is not a run folder; give one like runs/latest"),
        (["nowhere", "--timeout-s=-1"], "--timeout-s must be > 0 and finite, got -1"),
        (["nowhere", "--timeout"], "Did you mean --timeout-s?"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", *words]) == 2
    assert message in capsys.readouterr().err
