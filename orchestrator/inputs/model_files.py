"""Checks a Hugging Face checkpoint on disk by its headers alone: no weights are read, and torch is not needed.

Finds what makes a run die minutes later: a missing shard, an interrupted download, a Git LFS pointer in a file's
place, a checkpoint of another architecture. The files are read by `weight_sync.disk.safetensors_files`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from conf.errors import ConfigError
from weight_sync.disk.safetensors_files import read_index
from weight_sync.layout import TensorMeta


def read_hf_config(folder: Path, subject: str) -> dict[str, Any]:
    """config.json of a model's folder; or the file itself, where that is given.

    Args:
        subject: What the user was asked for, to name it: "model.path", "MODEL".

    Raises:
        ConfigError: There is none, or it is no JSON object.
    """
    path = folder if folder.is_file() else folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not folder.exists():
            raise ConfigError(
                f"{subject}={folder}: no such folder; give a Hugging Face model folder on this machine (a model of the"
                " hub is downloaded first: hf download NAME --local-dir FOLDER)"
            ) from error
        raise ConfigError(f"{subject}={folder} has no config.json; give a Hugging Face model folder") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; save the file as UTF-8") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, got a {type(content).__name__}; give a model's config.json")
    return cast("dict[str, Any]", content)


def check_checkpoint_files(folder: Path, expected: Sequence[TensorMeta]) -> int:
    """Check that the folder's safetensors files are whole and hold every expected tensor in its shape.

    Returns:
        Bytes of all shards.

    Raises:
        ConfigError: naming the file, and the first tensors that are missing or of another shape.
    """
    stored = read_index(folder, "model.path", ", or set model.init=random to draw them")
    missing = [tensor.name for tensor in expected if tensor.name not in stored]
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ConfigError(
            f"model.path={folder} lacks {listed}; is it a checkpoint of the model that its config.json describes?"
        )
    for tensor in expected:
        if stored[tensor.name].shape != tensor.shape:
            raise ConfigError(
                f"model.path={folder}: {tensor.name} has shape {stored[tensor.name].shape}, and config.json makes it "
                f"{tensor.shape}"
            )
    return sum(path.stat().st_size for path in {tensor.path for tensor in stored.values()})
