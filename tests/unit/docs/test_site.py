"""The documentation builds as a site without a warning: every link and anchor leads somewhere, README.md's too."""

import json
import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parents[3]


def build_site(site: Path, docs: Path = ROOT / "docs") -> None:
    build(load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(docs), site_dir=str(site)))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        folder = tmp_path_factory.mktemp("site")
        build_site(folder)
    return folder


def loaded(page: Path) -> list[str]:
    """What a browser loads to show a page."""
    tags = re.findall(r"<(?:script|img|iframe|link)\b[^>]*>", page.read_text(encoding="utf-8"))
    return [a for tag in tags if 'rel="canonical"' not in tag for a in re.findall(r'\s(?:src|href)="([^"]+)"', tag)]


def test_every_page_and_the_readme_are_on_the_site_and_can_be_searched(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages = {page.replace("README", "index") for page in pages} | {"index.html"}
    assert [page for page in sorted(pages) if not (site / page).is_file()] == []
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert pages <= {entry["location"].partition("#")[0] for entry in index["docs"]}


def test_pages_load_nothing_from_other_servers(site: Path) -> None:
    pages = {page: loaded(page) for page in site.rglob("*.html")}
    assert any(pages.values())
    assert {page.name: a for page, found in pages.items() for a in found if re.match(r"(https?:)?//", a)} == {}
    styles = [style for style in site.rglob("*.css") if re.search(r"url\(['\"]?(https?:)?//", style.read_text())]
    assert styles == []


def test_lists_are_lists(site: Path) -> None:
    """Python-Markdown wants an empty line before a list; without it the items stand in one paragraph."""
    broken = [
        (page.name, text[:60])
        for page in site.rglob("*.html")
        for text in re.findall(r"<p>(.*?)</p>", page.read_text(encoding="utf-8"), re.DOTALL)
        if re.search(r"^(\*|-|\d\.) ", text, re.MULTILINE)
    ]
    assert broken == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_no_text_is_taken_for_a_tag_of_html(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`]*`|^    .*?$|<!--.*?-->", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"</?[a-zA-Z][^>]*>", text) == []


@pytest.mark.parametrize("folder", ["", "docs", "bench/results"])
def test_a_row_is_of_a_table_with_a_head(folder: str) -> None:
    """Without a head and the line below it, rows are shown as they are typed."""
    pages = {page.name: page.read_text() for page in (ROOT / folder).glob("*.md")}
    tables = {name: re.findall(r"^\|.*\n(?:\|.*\n)*", text, re.MULTILINE) for name, text in pages.items()}
    is_whole = re.compile(r".*\n\|[ :|-]+\|\n\|")
    assert [(name, table[:60]) for name, found in tables.items() for table in found if not is_whole.match(table)] == []


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrong = ["missing.md", "other.md#nowhere", "#nowhere", "../bench/missing.py", "missing.png", "/page.md"]
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "README.md").write_text("# Start\n\n[right](docs/other.md#here), [wrong](docs/moved.md)\n")
    (docs / "other.md").write_text("# Other\n\n## Here\n")
    (docs / "page.md").write_text("# Page\n\n[right](other.md#here)\n\n" + "\n\n".join(f"[wrong]({w})" for w in wrong))
    with pytest.raises(Abort):
        build_site(tmp_path / "site", docs)
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [link for link in [*wrong, "docs/moved.md"] if not any(f"'{link}'" in message for message in found)] == []
    assert not any("other.md#here" in message for message in found)
