"""Digests of the layouts that engines on this node had, so that the next engine of the same kind records two layers.

    first engine    records every layer (5 s of a core with 18,867 tensors), --digest per rank-->   a file
    later engines   record two layers of each kind, derive the others, and compare digests; record every layer if
                    they differ (in_vllm/worker_extension.py)

Owns: what an engine is told of its layout; those files and their names. Does not own: the recordings. Invariant: a
digest is of a layout that was recorded layer by layer. A file that is wrong, damaged or missing costs the time of a
whole recording, nothing else.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Sequence

from slipstream.rollout.layouts.offline_layout import engine_version
from slipstream.rollout.node_cache import cache_folder, keep
from slipstream.rollout.types import WorkerOptions

logger = logging.getLogger(__name__)


class ExpectedLayouts:
    """The digests that one engine's ranks are told before they describe their layouts."""

    def __init__(self, options: WorkerOptions) -> None:
        config, tensors = options.config, [[meta.name, list(meta.shape), meta.dtype] for meta in options.tensors]
        kind = str(options.dtype), str(options.device), config.tp_size, config.enable_expert_parallel
        changes_it = json.dumps([tensors, *kind, engine_version()])
        name = hashlib.sha256(changes_it.encode()).hexdigest()
        self._file = cache_folder() / "layouts" / f"{name}.digests"
        self._known: list[str] = []

    def digests(self) -> list[str]:
        """layouts_digest() of each rank of a former engine; empty if there was none, or its file cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._file.read_bytes())
            if isinstance(found, list) and all(isinstance(digest, str) for digest in found):
                self._known = found
        return self._known

    def keep(self, found: Sequence[str]) -> None:
        """Let later engines know what this one has found."""
        if list(found) == self._known:
            return
        try:
            keep(self._file, json.dumps(list(found)).encode())
        except OSError as error:
            logger.warning("later engines record the whole layout again: %s cannot be written: %s", self._file, error)
