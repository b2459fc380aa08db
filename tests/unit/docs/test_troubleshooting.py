"""Every message on the page about troubleshooting is one that the code says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGES = ("conf", "orchestrator", "fleet", "trainer", "rollout", "weight_sync")
MESSAGE = re.compile(r"^\| `(?P<said>[^`]+)` \|", re.MULTILINE)
GAP = "\0"
"""Stands in a text of the code for what is filled in."""


def texts_of(source: str) -> set[str]:
    """Every text that is written in Python source; what is filled in at run time is a gap."""
    return {_text(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant | ast.JoinedStr)}


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return re.sub(r"%(\.\d+)?[sdgf]", GAP, node.value) if isinstance(node.value, str) else ""
    return "".join(_text(part) for part in node.values) if isinstance(node, ast.JoinedStr) else GAP


def is_said(message: str, texts: set[str]) -> bool:
    """Whether one text has the parts of a message, between its `...`, in their order and with gaps between them."""
    parts = message.split("...")
    pattern = re.compile(rf".*{GAP}.*".join(re.escape(part) for part in parts), re.DOTALL)
    longest = max(parts, key=len)
    return any(longest in text and pattern.search(GAP + text) for text in texts)


@pytest.fixture(scope="module")
def texts() -> set[str]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return set().union(*(texts_of(path.read_text(encoding="utf-8")) for path in files))


def test_every_message_is_one_of_the_product(texts: set[str]) -> None:
    messages = MESSAGE.findall(PAGE.read_text(encoding="utf-8"))
    assert len(messages) > 80
    assert [message for message in messages if not is_said(message, texts)] == []
    assert not is_said("... left, ... is out of service", texts), "its parts the other way round"
