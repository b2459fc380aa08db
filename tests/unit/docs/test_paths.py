"""The documents and docstrings name files and options that exist."""

import ast
import re
from pathlib import Path

import pytest

from slipstream.conf.options import options_by_name

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HISTORY = {"LOG.md"}
"""Pages that also speak of files that are gone."""
PACKAGES = "conf|weight_sync|trainer|rollout|fleet|orchestrator|tests|bench"
FOLDERS = f"{PACKAGES}|docker|requirements"
PATH = re.compile(rf"(?<![\w/.])((?:{FOLDERS})/[\w/-]+\.\w+)")

SECTIONS = "|".join(sorted({name.split(".")[0] for name in options_by_name()}))
OPTION = re.compile(rf"`((?:{SECTIONS})\.[a-z_.]+[a-z])(?:=[^`]*)?`")
NO_OPTIONS = re.compile(
    r"\.(py|log|json|png)$|^weight_sync\.api\b|^data\.(columns|eval_sets|chat_template_kwargs)\.|^reward\.parts\."
)
"""Files and modules; and options whose last part is a name that the user chooses."""


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = set(PATH.findall(page.read_text()))
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("package", PACKAGES.split("|"))
def test_every_file_that_a_docstring_names_exists(package: str) -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    gone = [
        f"{source.relative_to(ROOT)}: {path}"
        for source in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, kinds)
        for path in PATH.findall(ast.get_docstring(node) or "")
        if not (ROOT / path).exists() and "NAME" not in path
    ]
    assert gone == []


def test_every_room_is_on_the_map() -> None:
    """Among the packages above the ways of a prompt and of a weight."""
    tree = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    rooms = [
        folder.name
        for package in ("conf", "orchestrator", "trainer", "rollout", "weight_sync")
        for folder in (ROOT / package).iterdir()
        if (folder / "__init__.py").exists()
    ]
    assert [room for room in rooms if not re.search(rf"\s{room}/", tree)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: page.name)
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    if page.name == "coming_from.md":  # of its tables, the column that is ours
        text = "\n".join(line.split("|")[2] if line.startswith("|") else line for line in text.splitlines())
    named = {name for name in OPTION.findall(text) if not NO_OPTIONS.search(name)}
    options = options_by_name()
    assert [name for name in sorted(named) if not any(f"{option}.".startswith(f"{name}.") for option in options)] == []
