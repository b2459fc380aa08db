"""Lists what can be set: every option with its type, default and meaning, and every choice of every config group.

Options come from the dataclasses of conf/schema/ (their docs are the strings under the fields), choices from the YAML
files under conf/ (their description is the first comment line). `slipstream train --help`, the "did you mean" of error
messages and docs/options.md (docs/options_page.py) are all written from these lists.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from slipstream.conf.json_files import is_list
from slipstream.conf.schema import RunConfig
from slipstream.conf.schema.rules import READ_IF, If, is_enum, type_label

DERIVED = {
    "is_bitwise=false": "Not with trainer.numerics.match=bitwise.",
    "has_experts=true": "Only for a model with experts.",
}
"""Conditions that are no options, in words."""
CONF_DIR = Path(__file__).parent
GROUPS = (
    *("experiment", "model", "trainer", "rollout", "weight_sync"),
    *("algorithm", "parity", "data", "reward", "cluster"),
)
"""Folders of conf/ whose YAML files are chosen with `group=choice`, in the order they are shown."""


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf of RunConfig. Example: Option("trainer.ep_size", int, "integer", 1, (), TrainerConfig)."""

    name: str
    """With dots, as on the command line."""
    type: Any
    """Resolved annotation."""
    type_label: str
    """The type in words for users: `integer`, `text or null`, `one of auto, tcp`."""
    default: Any
    choices: tuple[str, ...]
    """Allowed values of an enumeration; empty for other types."""
    owner: type
    """The dataclass of its section."""

    @property
    def section(self) -> str:
        return self.name.split(".", 1)[0]

    @property
    def doc(self) -> str:
        """Its meaning, and when it is read. Help alone needs it: to read it out of the source takes long."""
        field = next(field for field in dataclasses.fields(self.owner) if self.name.endswith(f".{field.name}"))
        return " ".join((_field_docs(self.owner)[field.name], *_when(field.metadata.get(READ_IF, ()))))


@dataclass(frozen=True, slots=True)
class Choice:
    """One YAML file of a config group. Example: Choice("data", "letters", "Find the one letter ...")."""

    group: str
    name: str
    doc: str


@functools.cache
def flat_options() -> tuple[Option, ...]:
    """Every option of RunConfig in the order of the schema."""
    return tuple(_walk(RunConfig, prefix=""))


@functools.cache
def options_by_name() -> Mapping[str, Option]:
    return types.MappingProxyType({option.name: option for option in flat_options()})


@functools.cache
def section_docs() -> Mapping[str, str]:
    """The doc of every section by dotted name (`trainer`, `trainer.lora`, ...): the docstring of its dataclass."""
    return types.MappingProxyType(dict(_walk_sections(RunConfig, prefix="")))


def group_choices(group: str, extra_dir: Path | None = None) -> tuple[Choice, ...]:
    """Choices of one group, by name, including those of a user's own config folder."""
    folders = [CONF_DIR / group] + ([extra_dir / group] if extra_dir is not None else [])
    files = {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
    return tuple(Choice(group, name, _first_comment(path)) for name, path in sorted(files.items()))


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three known names that `name` was probably meant to be, best first. A dotted name is compared as a whole
    and by its last part, so that `num_rank` finds `trainer.num_ranks`; a part of a known name counts as similar."""
    name = name.lower()
    leaf = name.rsplit(".", 1)[-1]

    def score(candidate: str) -> float:
        candidate_leaf = candidate.rsplit(".", 1)[-1]
        whole = difflib.SequenceMatcher(None, name, candidate).ratio()
        part = 0.95 if candidate.startswith(name) else 0.8 if len(name) >= 3 and name in candidate else 0.0
        return max(whole, part, 0.95 * difflib.SequenceMatcher(None, leaf, candidate_leaf).ratio())

    scored = sorted(((score(candidate), candidate) for candidate in set(known)), key=lambda pair: (-pair[0], pair[1]))
    # Return only those about as near as the best one: one, if it is clearly the best.
    return [candidate for value, candidate in scored[:3] if value >= max(0.6, scored[0][0] - 0.1)]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`Did you mean a or b?`, or an empty string."""
    found = nearest(name, known)
    return f"Did you mean {' or '.join(found)}?" if found else ""


def show(value: object) -> str:
    """A value as it would be written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    if is_list(value):
        return "[" + ", ".join(map(show, value)) + "]"
    return str(value)


def _walk(cls: type, prefix: str) -> Iterable[Option]:
    hints = get_type_hints(cls)
    for item in dataclasses.fields(cls):
        name, annotation = f"{prefix}{item.name}", hints[item.name]
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            yield from _walk(annotation, prefix=f"{name}.")
            continue
        default = item.default if item.default is not dataclasses.MISSING else None
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        choices = tuple(member.name for member in annotation) if is_enum(annotation) else ()
        yield Option(name, annotation, type_label(annotation), default, choices, cls)


def _when(conditions: Sequence[If]) -> Iterator[str]:
    """When an option is read, but for what its own words say."""
    for one in conditions:
        if one.condition in DERIVED:
            yield DERIVED[one.condition]
        elif re.fullmatch(r"[\w.]+!?=[\w|]+", one.condition):
            is_not, cases = "!=" in one.condition, one.condition.replace("!=", "=").replace("|", " or ")
            yield f"{'Not' if is_not else 'Only'} with {cases}."


def _walk_sections(cls: type, prefix: str) -> Iterable[tuple[str, str]]:
    for item_name, annotation in get_type_hints(cls).items():
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            yield f"{prefix}{item_name}", " ".join((annotation.__doc__ or "").split())
            yield from _walk_sections(annotation, prefix=f"{prefix}{item_name}.")


@functools.cache
def _field_docs(cls: type) -> Mapping[str, str]:
    """Field name -> the string literal under the field, its line breaks folded; those of bases included."""
    docs = {
        name: doc for base in cls.__bases__ if dataclasses.is_dataclass(base) for name, doc in _field_docs(base).items()
    }
    (node,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef)
    name = None
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            docs[name] = ""
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and name is not None:
            docs[name] = " ".join(str(statement.value.value).split())
            name = None
        else:
            name = None
    return docs


def _first_comment(path: Path) -> str:
    """The first comment of a YAML file that is not Hydra's `@package` directive: its description."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ").strip()
    return ""
