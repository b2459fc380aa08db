"""What `slipstream parity` says while it works, and where the engine's own words go."""

import os
import subprocess
import threading
from pathlib import Path

import pytest

from slipstream.orchestrator.files.outputs import output_in
from slipstream.orchestrator.parity.progress import Count, telling


def test_a_part_is_told_as_it_begins_and_then_how_far_it_is() -> None:
    said, is_told, count = list[str](), threading.Event(), Count(60)

    def say(text: str) -> None:
        said.append(text)
        if text == "trainer: passes: 5 of 60":
            is_told.set()

    with telling(say, "trainer: passes", lambda: str(count), every_s=0.001):
        count.done = 5
        assert is_told.wait(60)
    assert said[0] == "trainer: passes"


def test_nothing_is_told_after_a_part_that_failed() -> None:
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError), telling(lambda text: None, "engine: start", lambda: "", every_s=3600):
        raise RuntimeError
    assert set(threading.enumerate()) <= before


def test_output_of_children_goes_into_the_file_and_comes_back(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    file = tmp_path / "engine.log"
    with pytest.raises(RuntimeError), output_in(file):
        os.write(1, b"own ")
        subprocess.run(["sh", "-c", "printf child; printf error >&2"], check=True)
        raise RuntimeError
    os.write(2, b"on the terminal")
    assert file.read_bytes() == b"own childerror"
    assert capfd.readouterr() == ("", "on the terminal")
