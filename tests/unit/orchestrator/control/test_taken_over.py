"""Locks: a process whose run another one goes on with ends, and writes nothing more into the run's folder."""

import asyncio
import os
import runpy
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from fakes.fleet import never
from fakes.run_folders import MadeUpRun

from slipstream.fleet.supervisor import Supervisor
from slipstream.orchestrator.checkpoints.journal import Journal, Whereabouts, remove_journal, write_journal
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState
from slipstream.orchestrator.checkpoints.run_checkpoint import CheckpointStore
from slipstream.orchestrator.control.control_folder import alive, answer_requests, note_end
from slipstream.orchestrator.control.stop_request import end_when_asked
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
