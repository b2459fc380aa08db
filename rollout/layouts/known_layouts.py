"""Digests of the layouts that engines on this node had, so that the next engine of the same kind records two layers.

    first engine    records every layer (5 s of a core with 18,867 tensors), --digest per rank-->   a file
    later engines   record two layers of each kind, derive the others, and compare digests; record every layer if
                    they differ (in_vllm/worker_extension.py)

Owns: what an engine is told of its layout; those files and their names. Does not own: the recordings. Invariant: a
digest is of a layout that was recorded layer by layer. A file that is wrong, damaged or missing costs the time of a
whole recording, nothing else.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from slipstream.rollout.layouts.offline_layout import engine_version
from slipstream.rollout.node_cache import cache_folder, keep
from slipstream.rollout.types import WorkerOptions

logger = logging.getLogger(__name__)


class ExpectedLayouts:
    """The digests that one engine's ranks are told before they describe their layouts."""

    def __init__(self, options: WorkerOptions) -> None:
        config, tensors = options.config, [[meta.name, list(meta.shape), meta.dtype] for meta in options.tensors]
        kind = str(options.dtype), str(options.device), config.tp_size, config.enable_expert_parallel
        self._file = known_file(tensors, *kind, engine_version())
        self._known: list[str] = []

    def digests(self) -> list[str]:
        """layout_wire.layouts_digest() of each rank of a former engine; empty if there was none."""
        self._known = read_known(self._file)
        return self._known

    def keep(self, found: Sequence[str]) -> None:
        """Let later engines know what this one has found."""
        if list(found) != self._known:
            keep_known(self._file, found)


def known_file(*depends_on: object) -> Path:
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
        keep(file, json.dumps(list(digests)).encode())
    except OSError as error:
        logger.warning("later engines record the whole layout again: %s cannot be written: %s", file, error)
