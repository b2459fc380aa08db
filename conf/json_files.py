"""What JSON, YAML and a user's functions give, as the kinds that code reads: checked, so that no caller casts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from slipstream.conf.errors import ConfigError

JsonObject: TypeAlias = dict[str, Any]
"""An object of JSON, or a mapping of YAML."""
JsonMapping: TypeAlias = Mapping[str, Any]
"""One that is only read."""
HfConfig: TypeAlias = JsonMapping
"""A model's config.json."""


def read_json_object(path: Path) -> JsonObject:
    """The object in a file. A missing file is a FileNotFoundError; what cannot be read, or is no object, a
    ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:  # lists in lists in lists
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not is_object(content):
        raise ConfigError(f"{path} must hold a JSON object, got a {type(content).__name__}; give the model's own file")
    return content


def object_in(path: Path) -> JsonObject:
    """The object in a file; empty where there is none that can be read."""
    try:
        return object_or_empty(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return {}


def object_or_empty(value: object) -> JsonObject:
    return value if is_object(value) else {}


def is_object(value: object) -> TypeGuard[JsonObject]:
    """Whether it is a JSON object, or a mapping of YAML."""
    return isinstance(value, dict)


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether its values come in an order, text apart."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def kind_of(value: object) -> str:
    if value is None:
        return "null"
    return "an empty list" if value == [] else type(value).__name__


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether it is a JSON array, or a tuple in its place."""
    return isinstance(value, list | tuple)
