"""How a section refuses a value: the option, what was given, what is allowed and the cure in one message. And metadata
of a field: in which runs the option is read; who types one that his run does not read is told so (checks/ignored.py).
"""

import difflib
import math
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeGuard, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonMapping, is_list

Section = TypeVar("Section")


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def refuse_first(problems: Iterable[str]) -> None:
    for problem in problems:
        raise ConfigError(problem)


def without_password(option: str, url: str | None) -> None:
    """Refuse a URL that has a password in it: options are written into the run folder."""
    require(
        url is None or re.search(r"//[^/?#]*:[^/?#]*@", url) is None,
        f"{option} holds a password, which would be in config.yaml; give credentials in the environment",
    )


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def at_least(minimum: float, section: str, options: object, *names: str) -> None:
    """Refuse an option that is below `minimum`, infinite or no number; null is not. Example: at_least(1, "trainer",
    self, "num_ranks")."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not minimum <= value < math.inf:
            or_null = " or null" if type(None) in get_args(get_type_hints(type(options))[name]) else ""
            bound = "finite" if value == math.inf else f">= {minimum}"
            raise ConfigError(f"{section}.{name} must be {bound}{or_null}, got {value}")


def above(bound: float, section: str, options: object, *names: str) -> None:
    """Refuse an option that is `bound` or less, or infinite."""
    for name in names:
        value = getattr(options, name)
        require(value > bound, f"{section}.{name} must be > {bound}, got {value}")
        require(value < math.inf, f"{section}.{name} must be finite, got {value}")


def section_of(cls: type[Section], section: str, values: JsonMapping) -> Section:
    """A section's dataclass from plain mappings, where Hydra does not know its options: a value of a mapping."""
    hints = get_type_hints(cls)
    known = {item.name: hints[item.name] for item in fields(cast("Any", cls))}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            hint = meant(str(name), known) or f"Options: {', '.join(known)}"
            raise ConfigError(f"unknown option {section}.{name}. {hint}")
        annotation = known[name]
        if is_dataclass(annotation):
            require(isinstance(value, Mapping), f"{section}.{name} is a section; set its options one by one")
            value = section_of(cast("type[Any]", annotation), f"{section}.{name}", value)
        elif not _fits(annotation, value):
            raise ConfigError(f"{section}.{name} must be {with_article(type_label(annotation))}, got {value!r}")
        arguments[name] = tuple(value) if get_origin(annotation) is tuple else value
    return cls(**arguments)


def meant(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]}?" if near else ""


def _fits(annotation: Any, value: Any) -> bool:
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_fits(one, value) for one in get_args(annotation))
    if get_origin(annotation) is tuple:
        return is_list(value) and all(_fits(get_args(annotation)[0], one) for one in value)
    if get_origin(annotation) is dict:
        return isinstance(value, Mapping)
    if isinstance(value, bool):
        return annotation is bool
    return isinstance(value, (int, float) if annotation is float else annotation)


def is_enum(annotation: Any) -> TypeGuard[type[Enum]]:
    return isinstance(annotation, type) and issubclass(annotation, Enum)


def type_label(annotation: Any) -> str:
    """A type in words for users: `integer`, `text or null`, `one of auto, tcp`."""
    if is_enum(annotation):
        return "one of " + ", ".join(member.name for member in annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(type_label(part) for part in get_args(annotation))
    if get_origin(annotation) is dict:
        return "mapping"
    if get_origin(annotation) is tuple:
        parts = get_args(annotation)
        if parts[1:] == (...,):
            return f"list of {type_label(parts[0])}s"
        return f"list of {len(parts)} {type_label(parts[0])}s"
    names = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null"}
    return names.get(annotation, str(annotation))


def with_article(label: str) -> str:
    articles = {"integer": "an ", "number": "a ", "mapping": "a ", "list": "a "}
    return articles.get(label.split(" ", 1)[0], "") + label


READ_IF = "read_if"
REMOVE_ONE = "remove one of the two"


class If(NamedTuple):
    """One condition. Example: If("weight_sync.mode=adapter", ", which has no slots")."""

    condition: str
    """`NAME=VALUE`, `NAME=VALUE|VALUE` or `NAME!=VALUE`, and several of these with ` or ` between them. NAME is an
    option or a property of RunConfig; a VALUE may have `*`, and of a list it is one that the list has."""
    told: str = ""
    """What is said of the first NAME and its value; without a comma or colon at its beginning: instead of these."""
    cure: str = ""
    """What else to do; empty: to set NAME to the first VALUE."""


def read_if(*conditions: If) -> dict[str, tuple[If, ...]]:
    """The option, or each of a section, is read where all of these hold."""
    return {READ_IF: conditions}
