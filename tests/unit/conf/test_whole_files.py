"""Locks: who reads a file meanwhile, or after a write that failed, finds the one before."""

from pathlib import Path

import pytest
from cases.largest_file import largest_file

from slipstream.conf.whole_files import write_whole


def test_a_file_that_cannot_be_written_is_as_before(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    write_whole(file, "before")
    with largest_file(10), pytest.raises(OSError, match="File too large"):
        write_whole(file, b"longer than that")
    assert (list(tmp_path.iterdir()), file.read_text()) == ([file], "before")
