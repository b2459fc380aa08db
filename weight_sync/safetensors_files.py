"""Where the tensors of a safetensors checkpoint lie on disk, by its headers alone: no weights are read.

Owns: the index of a folder, whole or refused with the reason (a missing shard, an interrupted download, a Git LFS
pointer in a file's place). Does not own reading the data (`checkpoint.py`) nor what a model needs
(`orchestrator/model_files.py`). Knows no torch.

A safetensors file is 8 bytes (length N of the header, little endian), N bytes of JSON {tensor: {dtype, shape,
data_offsets}}, then the data (https://huggingface.co/docs/safetensors). Its size therefore follows from its header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from weight_sync.layout import DTYPE_BYTES, TensorMeta

INDEX_NAME = "model.safetensors.index.json"
DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
}
"""Formats that may cross, as safetensors names them."""
_MAX_HEADER_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk, row-major. Example: StoredTensor(Path("model.safetensors"), 4096, (64,), "BF16")."""

    path: Path
    offset: int
    """Of its first byte, from the start of the file."""
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it."""


def read_index(folder: Path, option: str, hint: str = "") -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder: those of its index, or of all its safetensors files without one.

    Args:
        folder: Holds the files.
        option: What the user calls the folder, for messages: "model.path".
        hint: What else a user can do who has no weights.

    Raises:
        ConfigError: no safetensors file, a shard is missing, or a file is not whole.
    """
    found: dict[str, StoredTensor] = {}
    for path in _shards(folder, option, hint):
        found |= read_header(path)
    return found


def tensor_metas(stored: Mapping[str, StoredTensor]) -> tuple[TensorMeta, ...]:
    """The tensors in checkpoint coordinates, ordered by name: the same on every rank.

    Raises:
        ConfigError: a tensor's format cannot cross.
    """
    for name, tensor in stored.items():
        if tensor.dtype not in DTYPES:
            raise ConfigError(
                f"{tensor.path}: {name} has format {tensor.dtype}; formats that can be published: {', '.join(DTYPES)}"
            )
    return tuple(TensorMeta(name, stored[name].shape, DTYPES[stored[name].dtype]) for name in sorted(stored))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, after its size was compared with what the header says.

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
    data = 8 + header_bytes
    end = data + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size < end:
        raise ConfigError(f"{path} is cut short: {size} of {end} bytes; download it again")
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
        element = DTYPE_BYTES.get(DTYPES.get(entry["dtype"], ""))
        if element is not None and last - first != prod(shape) * element:
            raise ConfigError(f"{path}: {name} has {last - first} bytes, its shape and format need another number")
        tensors[name] = StoredTensor(path, data + first, shape, entry["dtype"])
    return tensors


def _shards(folder: Path, option: str, hint: str) -> list[Path]:
    """Files of the index, or every safetensors file when there is no index."""
    index = folder / INDEX_NAME
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ConfigError(f"{option}={folder} holds no .safetensors file; give a folder with weights{hint}")
        return found
    try:
        names: set[str] = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {error}") from error
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ConfigError(
            f"{option}={folder} lacks {len(missing)} of {len(names)} shards "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); "
            "download the rest"
        )
    return [folder / name for name in sorted(names)]
