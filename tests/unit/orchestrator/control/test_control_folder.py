"""Locks: a run that goes on hears what it is asked; one that does not is told apart, and nothing is left behind."""

import asyncio
import contextlib
import errno
import fcntl
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from fakes.workers import FakeWorker
from fakes.world import World

from slipstream.conf.errors import ConfigError
from slipstream.fleet.replicas import ReplicaState
from slipstream.fleet.supervisor import Supervisor
from slipstream.orchestrator.cli.main import main
from slipstream.orchestrator.control.control_folder import (
    KILLED,
    alive,
    answer_requests,
    ask,
    how_it_ended,
    is_alive,
    note_end,
    note_start,
    note_started,
    state_of,
    workers_asked,
)
from slipstream.orchestrator.files.run_folder import RunFolder


def recover(worker: int | None) -> dict[str, object]:
    return {"ask": "recover", "worker": worker}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("algorithm: {objective: policy}")
    return tmp_path


@contextlib.asynccontextmanager
async def listening(run: Path) -> AsyncIterator[Supervisor]:
    world = World(committed=[0, 0])

    async def restart(name: str) -> FakeWorker:
        return FakeWorker(world, int(name[-1]))

    workers = [FakeWorker(world, i) for i in range(2)]
    supervisor = Supervisor(workers, restart=restart, max_restarts=1, backoff_s=0)
    with alive(run):
        task = asyncio.create_task(answer_requests(run, supervisor))
        yield supervisor
        task.cancel()
    await supervisor.close()


async def test_an_answer_that_cannot_be_written_is_not_the_last_one(run: Path) -> None:
    """As on a disk that is full for a second."""
    async with listening(run):
        (run / "control" / "a.answer.json").mkdir()
        (run / "control" / "a.request.json").write_text('{"ask": "recover", "worker": null}')
        (line,) = await asyncio.to_thread(ask, run, recover(None), timeout_s=10)
        assert "no rollout worker is out of service" in line


async def test_a_folder_that_was_out_of_reach_for_a_moment_is_looked_at_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, glob = [errno.ESTALE, errno.EIO], Path.glob

    def fails_at_first(folder: Path, pattern: str) -> Iterator[Path]:
        if failures and pattern == "*.request.json":
            raise OSError(failures.pop(), "out of reach", str(folder))
        return glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", fails_at_first)
    async with listening(run):
        (line,) = await asyncio.to_thread(ask, run, recover(None), timeout_s=10)
        assert "no rollout worker is out of service" in line and not failures


async def test_without_a_number_it_is_every_worker_that_is_out(run: Path) -> None:
    async with listening(run) as supervisor:
        (line,) = await asyncio.to_thread(ask, run, recover(None))
        assert "no rollout worker is out of service" in line
        supervisor.roster.replicas["rollout-1"].state = ReplicaState.starting
        assert await asyncio.to_thread(ask, run, recover(None)) == ["rollout-1 is being restarted already"]
        supervisor.roster.replicas["rollout-0"].state = ReplicaState.out
        (line,) = await asyncio.to_thread(ask, run, recover(None))
        assert line == "rollout-0 was out and is being restarted"


async def test_restarting_the_last_one_that_serves_is_told(run: Path) -> None:
    async with listening(run) as supervisor:
        supervisor.roster.replicas["rollout-0"].state = ReplicaState.out
        supervisor.roster.replicas["rollout-1"].state = ReplicaState.serving
        lines = await asyncio.to_thread(ask, run, recover(1))
        assert lines == [
            "rollout-1 was serving and is being restarted",
            "no other rollout worker serves: sampling stands still until one is back",
        ]


async def test_workers_come_and_go_by_request_and_what_cannot_be_is_said(run: Path) -> None:
    async def scale(number: int) -> list[str]:
        return await asyncio.to_thread(ask, run, {"ask": "scale", "rollout": number})

    async with listening(run) as supervisor:
        for replica in supervisor.roster.replicas.values():
            replica.state = ReplicaState.serving
        assert await scale(3) == ["rollout-2 is being started"]
        assert await scale(3) == ["the run has 3 rollout workers already"]
        with pytest.raises(ConfigError, match="rollout=0: a run needs at least one rollout worker"):
            await scale(0)
        assert workers_asked(RunFolder(run)) == 3, "nothing was done"
        drained = await asyncio.to_thread(ask, run, {"ask": "drain", "worker": 1})
        assert drained == ["rollout-1 hands its requests over and ends"]
        with pytest.raises(ConfigError, match="rollout-7: the rollout workers of this run are rollout-0, rollout-2"):
            await asyncio.to_thread(ask, run, {"ask": "drain", "worker": 7})
        assert supervisor.roster.num_wanted == 2
        assert workers_asked(RunFolder(run)) == 2, "which a resume reads"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scale", "RUN", "rollout=two"], "needs rollout=N after the run folder, e.g. rollout=3, got 'rollout=two'"),
        (["scale", "RUN", "workers=2"], "got 'workers=2'"),
        (["scale", "RUN"], "got nothing"),
        (["scale"], "slipstream scale needs a run folder, e.g. slipstream scale runs/latest rollout=3"),
        (["drain"], "slipstream drain needs a run folder, e.g. slipstream drain runs/latest rollout-1"),
        (["scale", "RUN", "rollout=2"], "is not alive"),
        (["drain", "RUN", "first"], "e.g. rollout-1, got 'first'"),
        (["drain", "RUN"], "got nothing"),
        (["drain", "RUN", "rollout-1"], "is not alive"),
        (["recover"], "needs a run folder"),
        (["recover", "nowhere"], "not a run folder"),
        (["recover", "nowhere", "--worker", "first"], "--worker must be an integer, got 'first'"),
    ],
)
def test_bad_words_of_a_request_are_one_message(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main([str(run) if word == "RUN" else word for word in words]) == 2
    assert said in capsys.readouterr().err


async def test_mistakes_are_answered_and_cost_the_run_nothing(run: Path) -> None:
    async with listening(run) as supervisor:
        with pytest.raises(ConfigError, match="--worker 2: the rollout workers of this run are rollout-0, rollout-1"):
            await asyncio.to_thread(ask, run, recover(2))
        (run / "control" / "x.request.json").write_text("nonsense")
        while not (run / "control" / "x.answer.json").exists():
            await asyncio.sleep(0.01)
        (line,) = await asyncio.to_thread(ask, run, recover(0))
        assert line == "rollout-0 was pending and is being restarted"
        while supervisor.starts.num_restarts == 0:
            await asyncio.sleep(0)
        assert supervisor.roster.replicas["rollout-1"].state is ReplicaState.pending
        assert {path.name for path in (run / "control").iterdir()} == {"alive", "end.json", "x.answer.json"}


def test_a_run_that_is_over_is_told_apart(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"is not alive; there is no checkpoint .*: start it again"):
        ask(run, recover(0))
    with alive(run):
        assert is_alive(run)
        with pytest.raises(ConfigError, match="did not answer within 0 s; nothing was done"):
            ask(run, recover(0), timeout_s=0)
        assert not list((run / "control").glob("*.request.json")), "a request that was given up is not carried out"
        with monkeypatch.context() as hurried, pytest.raises(ConfigError, match="is starting, and answers when its en"):
            hurried.setattr("slipstream.orchestrator.control.control_folder.START_ANSWER_TIMEOUT_S", 0.0)
            note_start(RunFolder(run), 1.0, "Ray")
            ask(run, recover(0))
        note_started(RunFolder(run))
        with monkeypatch.context() as taken, pytest.raises(ConfigError, match="it had begun to do what was asked"):
            taken.setattr(Path, "replace", lambda partial, target: partial.unlink())  # the run was at once there
            ask(run, recover(0), timeout_s=0)
    assert not is_alive(run)
    with pytest.raises(ConfigError, match="not a run folder"):
        ask(tmp_path / "nowhere", recover(0))


def test_control_is_the_owners_alone_and_a_readers_lock_proves_nothing(run: Path) -> None:
    (run / "control").mkdir(mode=0o755)
    (run / "control" / "alive").touch(0o644)  # as an older version left it
    reader = os.open(run / "control" / "alive", os.O_RDONLY)  # all that another user could do then
    with alive(run):
        modes = [path.stat().st_mode & 0o777 for path in (run / "control", run / "control" / "alive")]
        assert modes == [0o700, 0o600]
    fcntl.flock(reader, fcntl.LOCK_EX)
    assert not is_alive(run), "another user's lock on a finished run"
    with alive(run):
        assert is_alive(run)
    os.close(reader)


def test_a_folder_that_cannot_be_written_is_not_to_be_removed() -> None:
    cure = r"control cannot be opened \(No such file .*\); a run writes there: allow it, or .* a copy of /proc/self"
    with pytest.raises(ConfigError, match=cure), alive(Path("/proc/self")):  # in which nobody makes a folder
        pass


def test_a_planted_link_is_not_followed(run: Path, tmp_path: Path) -> None:
    (run / "control").mkdir()
    (run / "control" / "alive").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(
            ConfigError, match=r"alive cannot be opened \(Too many levels of symbolic links\); remove .*/control$"
        ),
        alive(run),
    ):
        pass
    assert not (tmp_path / "elsewhere").exists()
    assert not is_alive(run)


def hold_for_ever(run: Path) -> None:
    with alive(run):
        signal.pause()


def test_a_run_that_is_out_of_reach_is_not_taken_for_one_that_has_ended() -> None:
    """As a file system of another machine is that does not answer for a moment."""
    with pytest.raises(ConfigError, match=r"control/alive cannot be reached \(File name too long\), so nobody can say"):
        is_alive(Path("x" * 1000))  # whose open(2) fails


def test_a_controller_that_is_killed_leaves_no_lock(run: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=hold_for_ever, args=(run,))
    process.start()
    while not is_alive(run):
        assert process.is_alive()
    with pytest.raises(ConfigError, match="is being run by another process"), alive(run):
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not is_alive(run)
    assert how_it_ended(run) == ("failed", KILLED)
    report = run / "crash" / "command.txt"
    report.parent.mkdir()
    report.write_text("Fatal Python error: Aborted\n\n")
    died = f"its process died of SIGABRT (a native thread, without Python frames); frames of all threads: {report}"
    assert how_it_ended(run) == ("failed", died)


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (None, ("finished", None)),
        (KeyboardInterrupt(), ("stopped", None)),
        (ZeroDivisionError("a bug"), ("failed", "ZeroDivisionError: a bug")),
    ],
)
def test_the_folder_says_how_a_run_ended(run: Path, error: BaseException | None, ended: tuple[str, str | None]) -> None:
    assert how_it_ended(run) == ("", None)
    with contextlib.suppress(KeyboardInterrupt, ZeroDivisionError), alive(run):
        if error is not None:
            raise error
    assert how_it_ended(run) == ended
    with alive(run):
        assert how_it_ended(run) == ("failed", KILLED), "as long as it says nothing else"


def test_what_a_run_says_at_its_end_needs_no_room_on_the_disk(run: Path) -> None:
    """On a disk that is full no file can be made, and none can grow."""
    end = run / "control" / "end.json"
    why = f"DiskFull: {'/long/path' * 99} cannot be written"
    with pytest.raises(RuntimeError), alive(run):
        before = end.stat()
        note_end(run, "stopped")
        note_end(run, "failed", "x" * 9999)
        note_end(run, "failed", why)
        raise RuntimeError(why)
    after = end.stat()
    assert how_it_ended(run) == ("failed", f"RuntimeError: {why}")
    assert (after.st_ino, after.st_size, after.st_blocks) == (before.st_ino, before.st_size, before.st_blocks)
    assert before.st_blocks > 0


def test_a_disk_without_locks_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.fcntl", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    with (
        pytest.raises(ConfigError, match=r"alive cannot be locked .*put run\.dir on a file system with locks"),
        alive(run),
    ):
        pass


def test_a_run_that_fine_tunes_has_no_workers_and_says_so_at_once(run: Path) -> None:
    (run / "config.yaml").write_text("algorithm: {objective: sft}")
    with alive(run), pytest.raises(ConfigError, match=r"is of algorithm=sft: .*no rollout workers"):
        ask(run, recover(None), timeout_s=0)


def test_a_run_of_another_user_is_unknown_unless_its_export_says_that_it_has_finished(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who alone may read how it ended, and whether it goes on: it has not stopped because nobody else can see that."""
    folder = RunFolder(run)
    with pytest.raises(KeyboardInterrupt), alive(run):
        raise KeyboardInterrupt
    assert state_of(folder, 3, 3) == ("stopped", None)
    private = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(os, "open", private)
    monkeypatch.setattr(Path, "read_text", private)
    assert [state_of(folder, step, 3) for step in (None, 2, 3)] == [("unknown", None)] * 3
    folder.adapter.mkdir()
    assert [state_of(folder, step, 3)[0] for step in (None, 2, 3, 4)] == ["unknown"] * 2 + ["finished"] * 2
