"""Locks: a disk that is full in mid-run ends the run with its path and what is free, loses no earlier checkpoint, and
never hides why a run ends. The disk is /dev/full, or the limit on a file's size that the kernel enforces.
"""

import asyncio
import errno
import logging
import os
from io import StringIO
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from cases.largest_file import largest_file
from fakes.loop import Loop, make_config
from rich.console import Console

from slipstream.fleet.errors import NoReplicasLeft, WaitTimeout
from slipstream.orchestrator.errors import DiskFull, DiskLost, OrchestratorError, TrainingStopped
from slipstream.orchestrator.files.may_write import naming_a_full_disk
from slipstream.orchestrator.files.run_log import RunLog


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ESTALE])
def test_a_disk_that_is_gone_is_named_and_nothing_else_is(number: int, tmp_path: Path) -> None:
    journal, said = tmp_path / "journal", os.strerror(number)
    lost = pytest.raises(DiskLost, match=f"^{journal} is out of reach or read-only: {said}$")
    with lost, naming_a_full_disk(tmp_path), naming_a_full_disk(tmp_path):
        raise OSError(number, said, str(journal))
    with lost, naming_a_full_disk(journal):
        raise OSError(number, said)  # of a file that is open
    with pytest.raises(OSError, match=said) as found, naming_a_full_disk(tmp_path):
        raise OSError(number, said)  # of a socket, or of a terminal
    assert type(found.value) is OSError


def test_a_disk_without_room_for_another_file_is_not_said_to_have_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_inodes = os.statvfs_result((4096, 4096, 1000, 900, 900, 160, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: without_inodes)
    with (
        pytest.raises(DiskFull, match=r"\(it has 160 files, and room for no other one\)"),
        naming_a_full_disk(tmp_path),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "state.json"))


def full_for_checkpoints(loop: Loop, from_version: int) -> None:
    async def full() -> None:
        if loop.world.version >= from_version:
            await asyncio.to_thread(Path("/dev/full").write_text, "state")

    loop.trainer.before["has_written"] = full


def test_only_the_error_of_a_full_disk_is_renamed(tmp_path: Path) -> None:
    full, state = Path("/dev/full"), tmp_path / "state"
    said = r"/dev/full cannot be written: No space left on device \([\d.]+ of \d+ MB are free\)"
    with pytest.raises(DiskFull, match=said), naming_a_full_disk(full):
        full.write_text("x")
    with pytest.raises(DiskFull, match=f"{state} cannot be written: No space left"), naming_a_full_disk(state):
        raise OrchestratorError("trainer rank 0 failed with SafetensorError: No space left on device (os error 28)")
    run = tmp_path / "run"
    for path in (tmp_path, run):
        with pytest.raises(FileNotFoundError), naming_a_full_disk(path):
            (tmp_path / "none").read_text()
    with pytest.raises(DiskLost, match=f"^{run} is gone: somebody has removed or moved it"), naming_a_full_disk(run):
        (run / "timeline.jsonl").touch()


async def test_a_run_whose_rows_find_no_room_ends_and_goes_on_once_there_is_some(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=12))
    with largest_file(17_000), pytest.raises(DiskFull, match=r"metrics\.jsonl cannot be written: File too large"):
        await loop.run()
    lost = loop.rows[-1]["step"] + 1
    assert 4 <= lost < 12, "the limit of this test fits no row, or all of them"
    assert loop.saved.step in (lost - 2, lost - 1)

    rest = Loop(tmp_path, make_config(num_steps=12), resume_step=loop.saved.step)
    await rest.run()
    assert [row["step"] for row in rest.rows] == list(range(13))


async def test_a_checkpoint_without_room_ends_the_run_and_leaves_the_one_before_it_alone(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make_config(num_steps=9))
    full_for_checkpoints(loop, from_version=4)
    with pytest.raises(DiskFull, match="No space left on device"):
        await loop.run()
    assert [path.name for path in loop.folder.checkpoints.iterdir()] == ["step-000002"], "what was half written is gone"
    assert loop.saved.step == 2
    assert loop.rows[-1]["step"] >= 4, "no step is lost that was trained before its files found no room"


async def test_a_save_without_room_does_not_hide_why_the_run_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, make_config(num_steps=9))
    full_for_checkpoints(loop, from_version=3)
    loop.trainer.failing_replicas = {3: {0, 1}}
    with pytest.raises(NoReplicasLeft, match=r"lm_head\.weight"):
        await loop.run()
    (said,) = [r for r in caplog.records if "saving the run's state failed" in r.message]
    assert "No space left on device" in said.message
    assert not any(r.exc_info for r in caplog.records if r.levelno >= logging.INFO), "tracebacks are run.log's alone"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, ".*No space left on device"),
        (WaitTimeout("gave up after 60 s"), r"\(gave up after 60 s\)"),  # of a trainer that does not save
    ],
)
async def test_refused_steps_that_cannot_be_saved_are_still_why_the_run_stops(
    error: Exception | None, said: str, tmp_path: Path
) -> None:
    loop = Loop(tmp_path, make_config(num_steps=9, run={"checkpoint_every_steps": 0}))
    loop.trainer.not_finite = {2, 3, 4}
    full_for_checkpoints(loop, from_version=0)
    if error is not None:
        loop.trainer.before["has_written"] = AsyncMock(side_effect=error)
    with pytest.raises(TrainingStopped, match=f"3 steps in a row .* could not be saved {said}"):
        await loop.run()


def test_a_log_without_room_is_said_once_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.log").symlink_to("/dev/full")
    console = StringIO()
    with RunLog(tmp_path / "run.log", Console(file=console, width=200)):
        for step in range(3):
            logging.getLogger("slipstream.orchestrator").debug("step %d", step)
    assert console.getvalue().count("run.log cannot be written any more: [Errno 28] No space left on device") == 1
    assert len(console.getvalue().splitlines()) == 1
