"""How a section refuses a value: the option, what was given, what is allowed and the cure in one message."""

import difflib
import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from slipstream.conf.earlier import explain
from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonMapping, is_list

Section = TypeVar("Section")


def require(ok: bool, message: str) -> None:
    """Refuse the section with `message` unless `ok`."""
    if not ok:
        raise ConfigError(message)


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def at_least(minimum: float, section: str, **values: float) -> None:
    """Refuse a value below `minimum`. Example: at_least(1, "trainer", num_ranks=self.num_ranks)."""
    for name, value in values.items():
        require(value >= minimum, f"{section}.{name} must be >= {minimum}, got {value}")


def at_least_or_null(minimum: float, section: str, **values: float | None) -> None:
    """The same for options that may be null."""
    for name, value in values.items():
        require(value is None or value >= minimum, f"{section}.{name} must be >= {minimum} or null, got {value}")


def above(bound: float, section: str, **values: float) -> None:
    """Refuse a value that is `bound` or less, or infinite."""
    for name, value in values.items():
        require(value > bound, f"{section}.{name} must be > {bound}, got {value}")
        require(value < math.inf, f"{section}.{name} must be finite, got {value}")


def section_of(cls: type[Section], section: str, values: JsonMapping) -> Section:
    """A section's dataclass from plain mappings, where Hydra does not know its options: a value of a mapping.

    Raises:
        ConfigError: An option is unknown, or has a value of a wrong type.
    """
    hints = get_type_hints(cls)
    known = {item.name: hints[item.name] for item in fields(cast("Any", cls))}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Options: {', '.join(known)}"
            raise ConfigError(explain(f"{section}.{name}") or f"unknown option {section}.{name}. {hint}")
        annotation = known[name]
        if is_dataclass(annotation):
            require(isinstance(value, Mapping), f"{section}.{name} is a section; set its options one by one")
            value = section_of(cast("type[Any]", annotation), f"{section}.{name}", value)
        elif not _fits(annotation, value):
            raise ConfigError(f"{section}.{name} must be {_in_words(annotation)}, got {value!r}")
        arguments[name] = tuple(value) if get_origin(annotation) is tuple else value
    return cls(**arguments)


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


def _in_words(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_in_words(one) for one in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "a list of texts"
    if get_origin(annotation) is dict:
        return "a mapping"
    return {bool: "true or false", int: "an integer", float: "a number", str: "text"}.get(annotation, "null")
