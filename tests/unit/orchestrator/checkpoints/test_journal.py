"""Locks: a journal gives back what was written, is its owner's alone, and counts only while processes wait."""

import os
import socket
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from slipstream.conf.schema import AlgorithmConfig, RunConfig, RunSection
from slipstream.orchestrator.checkpoints.journal import (
    Journal,
    Whereabouts,
    read_journal,
    remove_journal,
    waits_for,
    write_journal,
)
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState
from slipstream.orchestrator.control.control_folder import KILLED, WAITS, alive, how_it_ended
from slipstream.orchestrator.control.stop_request import stop
from slipstream.orchestrator.files.run_folder import RunFolder, to_plain
from slipstream.orchestrator.socket_folder import DOOR, LET_GO
from slipstream.rollout.types import Group, Prompt, Rollout

NEXT = Prompt(9, (3,), "l")
WAITING = Group(Prompt(3, (1, 2), "k"), [Rollout([5], [-0.5], [4], "a", "stop")], [1.0], [{}], ["a"])
STATE = RunState(4, 3, {"num_drawn": 17}, {"state": 1 << 90}, BufferState(4, {16: WAITING}, {17: NEXT}))
"""One group is finished, and one is being sampled."""
READ = replace(STATE, buffer=BufferState(4, {}, {16: WAITING.prompt, 17: NEXT}))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run whose command was killed, and whose processes are gone."""
    folder = RunFolder(tmp_path / "run")
    (folder.root / "control").mkdir(parents=True)
    (folder.root / "control" / "alive").touch()
    folder.config.write_text(yaml.safe_dump(to_plain(asdict(RunConfig()))))
    folder.metrics.write_text('{"step": 3}\n{"step": 4}\n')
    write_journal(folder, Journal(Whereabouts(str(tmp_path / "private"), 4711), '{"name": "run"}', STATE))
    return folder


@pytest.fixture
def door(tmp_path: Path, folder: RunFolder) -> socket.socket:
    """Where its processes wait."""
    (tmp_path / "private").mkdir()
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(tmp_path / "private" / DOOR))
    door.listen()
    return door


def resumed(folder: RunFolder, **algorithm: object) -> RunConfig:
    return RunConfig(run=RunSection(resume=str(folder.root)), algorithm=AlgorithmConfig(**algorithm))


def test_what_was_written_is_read_by_its_owner(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = read_journal(folder)
    assert journal is not None and journal.state == READ
    assert (journal.ray.pid, journal.processes) == (4711, '{"name": "run"}')
    assert folder.journal.stat().st_mode & 0o777 == 0o600
    with alive(folder.root):
        assert read_journal(folder) is not None, "a start leaves it"
    partial, flushed = folder.journal.with_suffix(".partial"), list[tuple[str, int]]()
    partial.write_text("x" * 9999)  # of a controller that was killed
    monkeypatch.setattr(os, "fsync", lambda n: flushed.append((os.readlink(f"/proc/self/fd/{n}"), os.fstat(n).st_size)))
    write_journal(folder, journal)
    assert read_journal(folder) == journal and flushed == [(str(partial), folder.journal.stat().st_size)]
    text = folder.journal.read_text()
    folder.journal.write_text(text[: len(text) // 2])
    assert read_journal(folder) == journal, "the one before is whole"
    folder.journal_before.unlink()
    assert read_journal(folder) is None
    write_journal(folder, journal)
    remove_journal(folder)
    assert not folder.journal.exists() and not folder.journal_before.exists()
    remove_journal(folder)
    assert read_journal(folder) is None


def test_it_counts_while_processes_wait_and_options_are_the_same(folder: RunFolder, door: socket.socket) -> None:
    with door:
        assert waits_for(resumed(folder)) == READ
        assert waits_for(RunConfig()) is None, "a run of its own"
        assert waits_for(resumed(folder, group_size=17)) is None
        assert how_it_ended(folder.root) == ("failed", KILLED + WAITS)
    assert (folder.root.parent / "private" / DOOR).exists(), "as kill -9 leaves it"
    with socket.socket(socket.AF_UNIX) as another:
        another.bind(str(folder.root.parent / "private" / f"{DOOR}s"))
        assert waits_for(resumed(folder)) is None
    assert how_it_ended(folder.root) == ("failed", KILLED)


def test_slipstream_stop_ends_what_waits(folder: RunFolder, door: socket.socket) -> None:
    words: list[bytes] = []

    def host() -> None:
        with door, door.accept()[0] as visit:
            while word := visit.recv(1):
                words.append(word)

    (waiting := threading.Thread(target=host)).start()
    said = stop(folder.root)
    waiting.join(20)
    assert words == [LET_GO]
    assert "its trainer ranks and engines, which were alive, are ended" in said
    (folder.root.parent / "private" / DOOR).unlink()
    assert len(stop(folder.root)) == len(said) - 1


def test_a_state_counts_once_its_step_has_a_row(folder: RunFolder) -> None:
    journal = read_journal(folder)
    assert journal is not None
    for _ in range(2):  # the second one by a controller that went on, and was killed in the same step
        write_journal(folder, replace(journal, state=replace(READ, step=5)))
        assert read_journal(folder) == journal
        assert folder.journal_before.exists(), "until another one counts"
        write_journal(folder, journal)  # with which a controller begins
        assert read_journal(folder) == journal
    write_journal(folder, newer := replace(journal, state=replace(READ, step=5)))
    with folder.metrics.open("a") as rows:
        rows.write('{"step": 5}\n')
    assert read_journal(folder) == newer
    folder.metrics.unlink()
    assert read_journal(folder) is None
