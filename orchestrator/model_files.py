"""Checks a Hugging Face checkpoint on disk by its headers alone: no weights are read, and torch is not needed.

Finds what makes a run die minutes later: a missing shard, an interrupted download, a Git LFS pointer in a file's
place, a checkpoint of another architecture. Callers: `orchestrator.preflight`.

A safetensors file is 8 bytes (length N of the header, little endian), N bytes of JSON {tensor: {dtype, shape,
data_offsets}}, then the data (https://huggingface.co/docs/safetensors). Its size therefore follows from its header.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from weight_sync.layout import TensorMeta

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 1 << 30


def check_checkpoint_files(folder: Path, expected: Sequence[TensorMeta]) -> int:
    """Check that the folder's safetensors files are whole and hold every expected tensor in its shape.

    Returns:
        Bytes of all shards.

    Raises:
        ConfigError: naming the file, and the first tensors that are missing or of another shape.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    num_bytes = 0
    for path in _shards(folder):
        shapes |= read_header(path)
        num_bytes += path.stat().st_size
    missing = [tensor.name for tensor in expected if tensor.name not in shapes]
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ConfigError(
            f"model.path={folder} lacks {listed}; is it a checkpoint of the model that its config.json describes?"
        )
    for tensor in expected:
        if shapes[tensor.name] != tensor.shape:
            raise ConfigError(
                f"model.path={folder}: {tensor.name} has shape {shapes[tensor.name]}, and config.json makes it "
                f"{tensor.shape}"
            )
    return num_bytes


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of one safetensors file, after its size was compared with what the header says.

    Raises:
        ConfigError: the file is not safetensors, or is cut short.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(b"version "):
            raise ConfigError(f"{path} is a Git LFS pointer, not weights; fetch the file itself (git lfs pull)")
        header_bytes = int.from_bytes(start, "little")
        if len(start) < 8 or header_bytes > min(size, _MAX_HEADER_BYTES):
            raise ConfigError(f"{path} is not a whole safetensors file ({size} bytes); download it again")
        try:
            header: dict[str, Any] = json.loads(file.read(header_bytes))
        except ValueError as error:
            raise ConfigError(f"{path} has no readable safetensors header; download it again") from error
    header.pop("__metadata__", None)
    end = 8 + header_bytes + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size < end:
        raise ConfigError(f"{path} is cut short: {size} of {end} bytes; download it again")
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def _shards(folder: Path) -> list[Path]:
    """Files of the index, or every safetensors file when there is no index."""
    index = folder / INDEX_NAME
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ConfigError(
                f"model.path={folder} holds no .safetensors file; give a folder with weights, or set "
                "model.init=random to draw them"
            )
        return found
    try:
        names: set[str] = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {error}") from error
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ConfigError(
            f"model.path={folder} lacks {len(missing)} of {len(names)} shards "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); "
            "download the rest"
        )
    return [folder / name for name in sorted(names)]
