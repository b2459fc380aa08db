# pyright: strict
"""Reads a JSON object of a model's folder, or says in one message why it cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from conf.errors import ConfigError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it cannot be read, or is no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; save the file as UTF-8") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, got a {type(content).__name__}; give the model's own file")
    return cast("dict[str, Any]", content)
