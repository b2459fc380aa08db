"""Every block of commands, Python, JSON or YAML on the pages that users paste from is pasted, as far as it goes
without a GPU, a network or another program.

A page is one session in a folder of its own, in the page's order: Python and heredocs become the files that they name,
and commands find them. `slipstream` is called in this process: a start ends where --dry-run does, and other commands
where they would begin to work. What a page takes for granted (a model's folder, data, a run): tests/fakes/pages.py.
"""

import ast
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from fakes.reward_runs import try_each_reward_once

from slipstream.conf.options import GROUPS, options_by_name
from tests.fakes.pages import Place, dry_run_ends, rows_of

ROOT = Path(__file__).resolve().parents[3]
USED = ("guide", "data", "rewards", "agents", "algorithms", "evaluation", "view", "push")
PAGES = ("README", *(f"docs/{name}" for name in USED))

TEXT = {
    "slipstream train experiment=...              conf/": "a picture",
    "starting, 27 s: trainer ranks": "what a start prints",
    "weight = max(0.1": "a formula",
    "distill_coef * (log teacher(t)": "a formula",
    "reward of y   r(y) = dpo_beta": "a formula",
}
"""Blocks that nobody can paste, by how they begin, and what they are."""
FILES = {"Question: {{prompt}}": "grade.txt", "def leaky_clip": "losses.py", "def above_the_median": "advantages.py"}
"""Blocks that are files, by how they begin, where the block does not say its name."""
OTHER_PROGRAMS = ("pip", "source", "vllm", "ray", "python3", "cd", "head", "tail", "hf", "VLLM_SERVER_DEV_MODE=1")
"""Commands that are somebody else's, which no unit test can call."""


@dataclass(frozen=True)
class Block:
    """Example: Block("docs/view.md", 4, "", ("slipstream view",))."""

    page: str
    line: int
    language: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def begins(self, table: dict[str, str]) -> str | None:
        """The entry of a table by how its block begins."""
        return next((value for start, value in table.items() if self.text.lstrip().startswith(start)), None)


def blocks_of(page: str) -> Iterator[Block]:
    """Fenced blocks, and paragraphs that are indented by four spaces."""
    lines = [*(ROOT / f"{page}.md").read_text(encoding="utf-8").splitlines(), ""]
    at = 0
    while at < len(lines):
        first = at
        if fence := re.match(r"```(\w*)$", lines[at]):
            at = lines.index("```", at + 1)
            yield Block(f"{page}.md", first + 2, fence[1], tuple(lines[first + 1 : at]))
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            while lines[at].startswith("    "):
                at += 1
            yield Block(f"{page}.md", first + 1, "", tuple(line[4:] for line in lines[first:at]))
        at += 1


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A folder with what pages take for granted; work that needs more than this process is not begun."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    dry_run_ends(monkeypatch)
    try_each_reward_once(monkeypatch)
    return Place(tmp_path, monkeypatch)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_says_can_be_pasted(page: str, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    problems: list[str] = []
    blocks = list(blocks_of(page))
    for block in blocks:
        if name := file_of(block):
            place.write(name, block.text)
    for block in blocks:
        try:
            paste_of(block)(block, place)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - named with its line
            said = capsys.readouterr().err.strip()
            problems.append(f"{block.page}:{block.line}: {type(error).__name__}: {error} {said}\n{block.text}")
    assert not problems, "\n\n".join(problems)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slipstream train experiment=quickstart \\\n    run.num_step=3", "slipstream train"),
        ("slipstream stop runs/latest --now", "slipstream stop"),
        ("make everything", "the Makefile has no everything"),
        ("frobnicate --now", "neither a command"),
        ('{"prompt": "2 + 2 ="}\n{"prompts": "a"}', "no reader takes it"),
        ("trainer:\n  lora: {ranks: 3}", "slipstream train"),
        ("from slipstream.weight_sync.api import Sender\nSender(a, b, kex=1)", "unexpected keyword argument 'kex'"),
    ],
)
def test_what_cannot_be_pasted_is_found(text: str, message: str, place: Place) -> None:
    block = Block("a.md", 1, "", tuple(text.splitlines()))
    with pytest.raises((Exception, SystemExit), match=message):
        paste_of(block)(block, place)


def test_every_page_has_blocks_and_no_exception_is_stale() -> None:
    blocks = {page: list(blocks_of(page)) for page in PAGES}
    assert all(blocks.values())
    for start in (*TEXT, *FILES):
        found = [one for of_page in blocks.values() for one in of_page if one.text.lstrip().startswith(start)]
        assert found, f"no block begins with {start!r} any more: remove it from the tables of this test"


def file_of(block: Block) -> str | None:
    """The file that a block is."""
    named = re.match(r"# (\S+\.py)$", block.lines[0])
    return named[1] if named else block.begins(FILES)


def paste_of(block: Block) -> Callable[[Block, Place], None]:
    """What is to be done with a block."""
    first = block.text.lstrip()
    if block.begins(TEXT) is not None:
        return lambda block, place: None
    if (file_of(block) or "").endswith(".txt"):
        return lambda block, place: None
    if block.language == "python":
        return paste_python
    if first.startswith("{"):
        return paste_rows
    if "@package" in first or re.match(r"\w+:\n", first):
        return paste_yaml
    word = first.split()[0].rpartition("/")[2]
    if word in ("slipstream", "make", "export", "cat", "python") or word in OTHER_PROGRAMS:
        return paste_shell
    if "=" in word and word.partition("=")[0] in (*GROUPS, *options_by_name()):
        return paste_options
    return paste_python  # or it is text, which the tables must name


def paste_python(block: Block, place: Place) -> None:
    """Compile it, find what it imports of ours, bind the arguments of what it calls of ours, and keep it as a file."""
    try:
        text = block.text.replace(", ...}", "}")
        tree = ast.parse(text)
        compile(text, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        raise AssertionError("neither a command, Python, JSON nor YAML; name it in TEXT or FILES") from error
    is_code = any(not isinstance(node, ast.Expr) or isinstance(node.value, (ast.Call, ast.Await)) for node in tree.body)
    assert is_code, "neither a command, Python, JSON nor YAML; name it in TEXT or FILES"
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "slipstream":
            module = importlib.import_module(node.module or "")
            known |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    place.known |= known
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in place.known:
            keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
            inspect.signature(place.known[node.func.id]).bind_partial(*node.args, **keywords)
    if option := re.search(r"# (algorithm\.\w+=\S+)$", block.lines[0]):
        place.run_slipstream(["train", "experiment=quickstart", option[1]])


def paste_rows(block: Block, place: Place) -> None:
    """Every row is read by the reader of one of the objectives."""
    for row in rows_of(block.text):
        place.check_row(row)


def paste_yaml(block: Block, place: Place) -> None:
    """A preset, or a part of one."""
    text = block.text if "@package" in block.text else f"# @package _global_\n# A part.\n{block.text}"
    assert isinstance(yaml.safe_load(text), dict)
    place.write("presets/experiment/mine.yaml", text := place.with_stand_ins(text))
    place.make_data(text)
    place.run_slipstream(["train", "--config-dir", "presets", *place.base([]), "experiment=mine"])


def paste_options(block: Block, place: Place) -> None:
    """Options alone, a line for each run."""
    for words in commands_in(block):
        place.run_slipstream(["train", *place.base(words), *words])


def paste_shell(block: Block, place: Place) -> None:
    """Commands of ours are called; `export` and heredocs are done; of others nothing is known."""
    for words in commands_in(block):
        command = words[0].removeprefix(".venv/bin/")
        if command.startswith("~"):  # of an environment of the reader's
            continue
        if command == "cat" and "<<END" in words:
            place.write(words[2], block.text.partition("<<END\n")[2].partition("\nEND")[0] + "\n")
        elif command == "export":
            for name, _, value in (word.partition("=") for word in words[1:]):
                place.monkeypatch.setenv(name, sys.executable if value.startswith("~") else value)
        elif command == "slipstream":
            place.run_slipstream(words[1:])
        elif command == "make":
            targets = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert re.search(rf"^{words[1]}:", targets, re.MULTILINE), f"the Makefile has no {words[1]}"
        elif command == "python":
            script = next((word for word in words if word.endswith(".py")), words[-1])
            assert (ROOT / script).exists(), f"there is no {script}"
        else:
            assert command in OTHER_PROGRAMS, f"{command}: name it in OTHER_PROGRAMS, if it is not ours"


def commands_in(block: Block) -> Iterator[list[str]]:
    """The words of each command. A remark follows `#`, or a gap, as in a table."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"<<END\n.*?\nEND(?=\n|$)", "<<END", block.text, flags=re.DOTALL))
    for line in text.splitlines():
        for command in line.split(" && "):
            words = shlex.split(re.split(r"\s{3,}", command.strip())[0], comments=True)
            if words:
                yield words
