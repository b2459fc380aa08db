"""Promise of tests/longest_first.py: the files that it names exist, and start first, the longest of them before all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from longest_first import LONGEST_FIRST, TESTS


def test_every_name_is_a_file_and_stands_there_once() -> None:
    assert [name for name in LONGEST_FIRST if not (TESTS / name).is_file()] == []
    assert len(set(LONGEST_FIRST)) == len(LONGEST_FIRST)


def test_longest_files_start_first_and_the_rest_keeps_its_order(pytestconfig: pytest.Config) -> None:
    def item(path: Path, name: str) -> SimpleNamespace:
        return SimpleNamespace(path=path, name=name)

    first, second = (TESTS / name for name in LONGEST_FIRST[:2])
    given = [item(TESTS / "unit" / "b.py", "1"), item(second, "2"), item(TESTS / "a.py", "3"), item(first, "4")]
    items = [*given, item(first, "5"), item(TESTS / "unit" / "b.py", "6")]
    ours = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    assert ours is not None
    ours.pytest_collection_modifyitems(items)
    assert [one.name for one in items] == ["4", "5", "2", "1", "3", "6"]
