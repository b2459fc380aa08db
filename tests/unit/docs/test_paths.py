"""The documents name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HISTORY = {"LOG.md"}
"""Pages that also speak of files that are gone."""
FOLDERS = "conf|weight_sync|trainer|rollout|orchestrator|tests|bench|docker|requirements"
PATH = re.compile(rf"(?<![\w/.])((?:{FOLDERS})/[\w/-]+\.\w+)")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = set(PATH.findall(page.read_text()))
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_room_is_on_the_map() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [
        folder.name
        for package in ("orchestrator", "trainer", "rollout", "weight_sync")
        for folder in (ROOT / package).iterdir()
        if (folder / "__init__.py").exists()
    ]
    assert [room for room in rooms if f"{room}/" not in page] == []
