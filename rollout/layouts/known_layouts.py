"""Digests of the layouts that engines on this node had, so that the next engine of the same kind records two layers.

    first engine    every layer is recorded (5 s of a core with 18,867 tensors), --digest per rank-->   a file
                    beside its start (beside_start.py) or by itself
    later engines   record two layers of each kind, derive the others, and compare digests; record every layer if
                    they differ (in_vllm/worker_extension.py)

Owns: those files and their names. Invariant: a digest is of a layout that was recorded layer by layer. A file that is
wrong, damaged or missing costs the time of a whole recording, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.node_cache import cache_folder, write_whole

logger = logging.getLogger(__name__)


def known_file(*depends_on: Any) -> Path:
    """The file of engines that agree in these values (JSON types): whatever may change a layout."""
    name = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()
    return cache_folder() / "layouts" / f"{name}.digests"


def read_known(file: Path) -> list[str]:
    """A digest per rank; empty if there are none, or the file cannot be read."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) and all(isinstance(digest, str) for digest in found) else []


def keep_known(file: Path, digests: Sequence[str]) -> None:
    """Write them for the next engine."""
    try:
        write_whole(file, json.dumps(list(digests)).encode())
    except OSError as error:
        logger.warning("later engines record the whole layout again: %s cannot be written: %s", file, error)
