"""The manifest of a checkpoint: which files it has, their sizes and sums, and the proof that they are whole.

Owns: manifest.json. Does not own: what the files contain, or their folder's name (run_checkpoint.py).
Invariant: whoever wrote a manifest made all files durable that it lists.
"""

import functools
import json
import os
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slipstream.conf.json_files import JsonObject, is_object
from slipstream.orchestrator.checkpoints.object_store import MANIFEST
from slipstream.orchestrator.errors import CheckpointError

FORMAT = 1
_SETTLED_S = 2.0
"""A file that was written less long ago may change without another time of change: file systems have coarse clocks."""
_CHUNK_BYTES = 1 << 22
_SUMS_AT_ONCE = 8


def write_manifest(folder: Path) -> None:
    """List the folder's files in one more, and make all of them durable."""
    paths = _files(folder)
    files = {str(path.relative_to(folder)): facts for path, facts in zip(paths, _all_facts(paths), strict=True)}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=2))
    flush(folder)


def flush(folder: Path) -> None:
    """Make a folder and all that is in it durable."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)


def verify(path: Path) -> None:
    """Compare every file of a checkpoint with its manifest. Raises CheckpointError: a file is missing, damaged, or not
    to be read."""
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} lacks {MANIFEST}, without which nothing says that it is whole")
    files = read_json(path / MANIFEST).get("files")
    if not is_object(files):
        raise CheckpointError(f"{path} is damaged: its manifest lists no files")
    for name in files:
        if not (path / name).is_file():
            raise CheckpointError(f"{path} lacks {name}")
    try:
        found = _all_facts([path / name for name in files])
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: {error.filename} cannot be read ({error.strerror})") from error
    for (name, expected), actual in zip(files.items(), found, strict=True):
        if actual != expected:
            raise CheckpointError(f"{path} is damaged: {name} is {actual}, its manifest says {expected}")


def read_json(path: Path) -> JsonObject:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not is_object(found):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def _all_facts(paths: Sequence[Path]) -> list[dict[str, int]]:
    """Several files at once: each sum takes a core, and Python's lock is not held for it."""
    with ThreadPoolExecutor(_SUMS_AT_ONCE) as threads:
        return list(threads.map(_facts, paths))


def _facts(path: Path) -> dict[str, int]:
    found = path.stat()
    is_settled = time.time() - found.st_mtime > _SETTLED_S
    crc32 = _crc32 if is_settled else _crc32.__wrapped__
    return {"num_bytes": found.st_size, "crc32": crc32(path, found.st_size, found.st_mtime_ns, found.st_ino)}


@functools.lru_cache(maxsize=1024)
def _crc32(path: Path, num_bytes: int, mtime_ns: int, inode: int) -> int:
    """Read a file in chunks and sum it up, once while it stays as it is: a resume asks before and after it starts."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
