"""What the site has beside docs/*.md: the start page, files that pages link to, a whole navigation.

MkDocs calls the functions whose names begin with `on_` while it builds the site (mkdocs.yml).

Pages are written for readers of the repository: `[script](../bench/runs.py)` is a path from the page's folder. The
site ends at docs/, so each such file is copied below files/ and the link is rewritten. A link to a file that does not
exist is left as it is, and the build fails with its name.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
NARROW_COLUMNS = 5
"""A table of so many columns has room for short words only."""
MAX_NAME = 36
"""In other tables names of this length stay whole."""
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?(?=\))")
HISTORY = ("decisions/", "LOG.md", "files/")
SHOWN_BY_BROWSERS = {".json", ".png", ".svg", ".html"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out pages that do not exist, and add those that the navigation does not name."""
    docs = Path(config.docs_dir)
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} | {"index.md"}
    named: set[str] = set()
    nav = _existing(config.nav or [], pages, named)
    if others := sorted(pages - named):
        nav.append({"More": others})
    config.nav = nav
    return config


def _existing(entries: list[Any], pages: set[str], named: set[str]) -> list[Any]:
    """`entries` without missing pages, a folder replaced by its pages; the pages kept are added to `named`."""
    kept: list[Any] = []
    for entry in entries:
        title, target = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(target, list):
            if section := _existing(target, pages, named):
                kept.append({title: section})
        elif target.endswith("/"):
            inside = sorted(page for page in pages if page.startswith(target))
            inside.sort(key=lambda page: not page.endswith("/README.md"))  # the folder's own page first
            named.update(inside)
            kept.append({title or target.rstrip("/").capitalize(): inside})
        elif target in pages:
            named.add(target)
            kept.append(entry)
    return kept


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the start page, and every file outside docs/ that a page links to."""
    docs = Path(config.docs_dir)
    sources = [docs.parent / "README.md", *docs.rglob("*.md")]
    files.append(File.generated(config, "index.md", abs_src_path=str(sources[0])))
    for source in sources:  # grows: a page outside docs/ has links of its own
        for link in LINK.finditer(source.read_text(encoding="utf-8")):
            target = (source.parent / link["path"]).resolve()
            uri = _site_uri(target, docs)
            if target.is_file() and uri.startswith("files/") and uri not in files.src_uris:
                files.append(File.generated(config, uri, abs_src_path=str(target), inclusion=InclusionLevel.NOT_IN_NAV))
                sources += [target] * (target.suffix == ".md")
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links from paths of the repository to paths of the site; let a search show pages for users first."""
    if page.file.src_uri.startswith(HISTORY):
        page.meta["search"] = {"boost": 0.2}
    docs = Path(config.docs_dir)
    folder = Path(page.file.abs_src_path or "").parent
    here = Path(page.file.src_uri).parent

    def rewritten(link: re.Match[str]) -> str:
        target = (folder / link["path"]).resolve()
        return os.path.relpath(_site_uri(target, docs), here) + (link["anchor"] or "") if target.is_file() else link[0]

    return LINK.sub(rewritten, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let a browser break long names in tables after a dot, a slash, an underscore or an equals sign."""

    def with_breaks(table: re.Match[str]) -> str:
        longest = 0 if table[0].count("</th>") >= NARROW_COLUMNS else MAX_NAME
        return CODE.sub(lambda code: _code_of_a_cell(code[0], longest), table[0])

    return TABLE.sub(with_breaks, html)


def _code_of_a_cell(code: str, longest: int) -> str:
    r"""A code span of a table. Markdown asks for `\|` there, and Python-Markdown leaves the backslash."""
    code = code.replace("\\|", "|")
    return code if len(code) <= longest else re.sub(r"(?<=[./_=|])(?=[^./_=|])", "<wbr>", code)


def _site_uri(target: Path, docs: Path) -> str:
    """Where a file of the repository is on the site. What browsers would rather save than show is shown as text."""
    if target.is_relative_to(docs):
        return target.relative_to(docs).as_posix()
    if target == docs.parent / "README.md":
        return "index.md"
    path = os.path.relpath(target, docs.parent)
    return f"files/{path}" + ("" if target.suffix in {*SHOWN_BY_BROWSERS, ".md"} else ".txt")
