"""Locks: who reads a file meanwhile, or after a write that failed, finds the one before; a line that was cut costs no
other.
"""

from pathlib import Path

import pytest
from cases.largest_file import largest_file

from slipstream.conf.whole_files import append_line, write_whole


def test_a_file_that_cannot_be_written_is_as_before(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    write_whole(file, "before")
    with largest_file(10), pytest.raises(OSError, match=f"File too large: '{file}'$"):
        write_whole(file, b"longer than that")
    assert (list(tmp_path.iterdir()), file.read_text()) == ([file], "before")


def test_a_line_behind_one_that_was_cut_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    append_line(file, '{"a": 1}')
    with file.open("a") as cut:
        cut.write('{"b": ')
    for line in ('{"c": 3}', '{"d": 4}'):
        append_line(file, line)
    assert file.read_text() == '{"a": 1}\n{"b": \n{"c": 3}\n{"d": 4}\n'
