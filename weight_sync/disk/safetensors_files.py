"""Where the tensors of a safetensors checkpoint lie on disk. Only headers are read, no weights.

The index of a folder is complete, or refused with the reason (a missing shard, an interrupted download, a Git LFS
pointer instead of a file). No torch. Invariant: each tensor comes from one file: the one that the folder's index names
or, without an index, the only one that holds it.

A safetensors file is 8 bytes (length N of the header, little endian), N bytes of JSON {tensor: {dtype, shape,
data_offsets}}, then the data, without a hole (https://huggingface.co/docs/safetensors). Its size therefore follows
from its header.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import is_object
from slipstream.weight_sync.layout import DTYPE_BYTES, TensorMeta

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
"""Formats that can be published, by their names in safetensors."""
_MAX_HEADER_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk, row-major. Example: StoredTensor(Path("model.safetensors"), 4096, (64,), "BF16", "bias")."""

    path: Path
    offset: int
    """Position of its first byte, from the start of the file."""
    shape: tuple[int, ...]
    dtype: str
    """Its name in safetensors."""
    name: str = ""
    """The tensor in the file that it is, or that it is a part of."""
    inside: tuple[int, int] | None = None
    """The matrix of that tensor, and the first row there; None: it is the whole."""


def read_index(folder: Path, option: str, hint: str = "") -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder: those that its index names; without an index, those of all its safetensors
    files.

    Args:
        option: What the user calls the folder, for messages: "model.path".
        hint: What a user without weights can do instead.

    Raises:
        ConfigError: there is no safetensors file, a shard is missing or lacks a tensor, a file is not whole, or two
            files hold tensors of one name and no index says which counts.
    """
    weight_map = _weight_map(folder, option)
    if weight_map is None:
        return _without_index(folder, option, hint)
    headers = {file: read_header(folder / file) for file in sorted(set(weight_map.values()))}
    lacking = [name for name, file in weight_map.items() if name not in headers[file]]
    if lacking:
        raise ConfigError(
            f"{folder / INDEX_NAME} says that {lacking[0]} is in {weight_map[lacking[0]]}, which does not hold it"
            f"{f' ({len(lacking) - 1} more are missing so)' if len(lacking) > 1 else ''}; download both again"
        )
    return {name: headers[file][name] for name, file in weight_map.items()}


def tensor_metas(stored: Mapping[str, StoredTensor]) -> tuple[TensorMeta, ...]:
    """Ordered by name: the same on every rank. Raises ConfigError if a tensor's format cannot be published."""
    for name, tensor in stored.items():
        if tensor.dtype not in DTYPES:
            raise ConfigError(
                f"{tensor.path}: {name} has format {tensor.dtype}; formats that can be published: {', '.join(DTYPES)}"
            )
    return tuple(TensorMeta(name, stored[name].shape, DTYPES[stored[name].dtype]) for name in sorted(stored))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises ConfigError if it is none, or is shorter than its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            header_bytes = int.from_bytes(start, "little")
            text = file.read(header_bytes) if header_bytes <= min(size, _MAX_HEADER_BYTES) else b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if start.startswith(b"version "):
        raise ConfigError(f"{path} is a Git LFS pointer, not weights; fetch the file itself (git lfs pull)")
    if len(start) < 8 or header_bytes > min(size, _MAX_HEADER_BYTES):
        raise ConfigError(f"{path} is not a whole safetensors file ({size} bytes); download it again")
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} has no readable safetensors header; download it again") from error
    if not is_object(content):
        raise ConfigError(f"{path} has a {type(content).__name__} for a safetensors header; download it again")
    content.pop("__metadata__", None)
    data = 8 + header_bytes
    tensors: dict[str, StoredTensor] = {}
    places: list[tuple[int, int, str]] = []
    for name, entry in content.items():
        dtype, shape, first, last = _checked(path, name, entry)
        tensors[name] = StoredTensor(path, data + first, shape, dtype, name)
        places.append((first, last, name))
    end = 0
    for first, last, name in sorted(places):
        if first != end:
            raise ConfigError(
                f"{path}: {name} begins at byte {first} of the data, and what is before it ends at byte {end}; "
                "download the file again"
            )
        end = last
    if size < data + end:
        raise ConfigError(f"{path} is cut short: {size} of {data + end} bytes; download it again")
    if size > data + end:
        raise ConfigError(f"{path} has {size - data - end} bytes behind its last tensor; download it again")
    return tensors


def _checked(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """A header's entry: its format, its shape, its first byte and the byte past its last."""
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in (*shape, first, last - first)):
            raise ValueError("a number is no size")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: {name} needs dtype, shape and data_offsets in the header, got {str(entry)[:200]}; download the "
            "file again"
        ) from error
    element = DTYPE_BYTES.get(DTYPES.get(dtype, ""))
    if element is not None and last - first != prod(shape) * element:
        raise ConfigError(f"{path}: {name} has {last - first} bytes, its shape and format need another number")
    return dtype, shape, first, last


def _without_index(folder: Path, option: str, hint: str) -> dict[str, StoredTensor]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{option}={folder} holds no .safetensors file; give a folder with weights{hint}")
    found: dict[str, StoredTensor] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            if name in found:
                raise ConfigError(
                    f"{option}={folder}: {name} is in {found[name].path.name} and in {path.name}, and there is no "
                    f"{INDEX_NAME} to say which counts; remove one of the files, or add the index"
                )
            found[name] = tensor
    return found


def _weight_map(folder: Path, option: str) -> dict[str, str] | None:
    """The index: tensor -> file. Refused if a file is missing; None without an index."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return None
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {type(error).__name__}: {error}") from error
    if not is_object(content) or not all(isinstance(file, str) for file in content.values()):
        raise ConfigError(
            f"{index} is not a safetensors index: weight_map must be an object of tensors and their files"
        )
    found: dict[str, str] = content
    files = sorted(set(found.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ConfigError(
            f"{option}={folder} lacks {len(missing)} of {len(files)} shards "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); "
            "download the rest"
        )
    return found
