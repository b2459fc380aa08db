"""What engines of a node leave for later ones of their kind."""

from pathlib import Path

import pytest

from slipstream.rollout.layouts.known_layouts import keep_known, known_file, read_known


def test_layouts_are_kept_apart_by_what_they_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert known_file("bfloat16", 1) == known_file("bfloat16", 1) != known_file("bfloat16", 2)
    assert known_file("bfloat16", 1).is_relative_to(tmp_path)


def test_where_nothing_can_be_written_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_known(known_file("a"), ["digest"])
    assert read_known(known_file("a")) == []
