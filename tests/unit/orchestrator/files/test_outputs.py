"""What a user names to be written: refused before the work where it cannot be, and never lost half way."""

import os
from pathlib import Path

import pytest
from cases.largest_file import largest_file
from matplotlib.figure import Figure

from slipstream.conf.errors import ConfigError
from slipstream.orchestrator.files.outputs import check_can_write, save_picture, write_output


@pytest.mark.parametrize(
    ("target", "is_folder", "why"),
    [
        ("taken/page.html", False, "Not a directory"),
        ("nowhere/page.html", False, "No such file or directory"),
        (".", False, "it is a folder"),
        ("/proc/page.html", False, "No such file or directory"),
        ("taken/merged", True, "Not a directory"),
        ("/proc/merged/of/mine", True, "No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_refused(target: str, is_folder: bool, why: str, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError) as refused:
        check_can_write(tmp_path / target, f"--to {target}", is_folder=is_folder)
    assert str(refused.value).startswith(f"--to {target} cannot be written (") and why in str(refused.value)


def test_a_check_leaves_nothing_and_changes_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("before")
    check_can_write(page, "--export")
    check_can_write(tmp_path / "new" / "merged", "--output", is_folder=True)
    check_can_write(Path("/dev/null"), "--export")
    assert list(tmp_path.iterdir()) == [page] and page.read_text() == "before"


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "curves.png"
    page.write_text("before")
    save_picture(Figure(figsize=(1, 1)), picture)
    before = picture.read_bytes()
    with largest_file(1000):
        for write in (lambda: write_output(page, "x" * 1001), lambda: save_picture(Figure(), picture)):
            with pytest.raises(OSError, match="File too large"):
                write()
    assert page.read_text() == "before" and picture.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [picture, page]


def test_a_file_that_is_written_again_keeps_its_mode_and_its_links(tmp_path: Path) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("before")
    page.chmod(0o751)
    link.symlink_to("page.html")
    write_output(link, "after")
    assert link.is_symlink() and page.read_text() == "after" and page.stat().st_mode & 0o777 == 0o751


def test_a_file_in_a_folder_that_takes_no_other_is_written_itself() -> None:
    name = Path("/proc/self/comm")  # this thread's name: a file that may be written; its folder may not, by nobody
    before = name.read_text()
    try:
        check_can_write(name, "--export")
        write_output(name, "after")
        assert name.read_text() == "after\n"
    finally:
        name.write_text(before)


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, b"written")
    assert os.read(reader, 100) == b"written" and pipe.is_fifo()
    os.close(reader)
