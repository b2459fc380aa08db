"""Digests of the layouts that engines on this node had, so that the next engine of the same kind records two layers.

    first engine    every layer is recorded (5 s of a core with 18,867 tensors), --digest per rank-->   a file
                    beside its start (beside_start.py) or by itself
    later engines   record two layers of each kind, derive the others, and compare digests; record every layer if
                    they differ (in_vllm/worker_extension.py)

Owns: what an engine is told of its layout; those files and their names. Does not own: the recordings. Invariant: a
digest is of a layout that was recorded layer by layer. A file that is wrong, damaged or missing costs the time of a
whole recording, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.schema import Device, DType
from rollout.layouts.beside_start import LayoutBesideStart
from rollout.layouts.offline_layout import engine_version, request_text
from rollout.node_cache import cache_folder, write_whole
from weight_sync.layout import TensorMeta

logger = logging.getLogger(__name__)

WORTH_A_PROCESS = 4_000
"""Checkpoint tensors from which on an engine's own recording takes a second or more."""


class ExpectedLayouts:
    """The digests that one engine's ranks are told before they describe their layouts.

    Args:
        folder: config.json of the model.
        tensors, tp_size, enable_expert_parallel, dtype, device: As for offline_layout.offline_layouts().
    """

    def __init__(
        self,
        folder: Path,
        tensors: Sequence[TensorMeta],
        *,
        tp_size: int,
        enable_expert_parallel: bool,
        dtype: DType,
        device: Device,
    ) -> None:
        self._folder = folder
        self._tensors = tensors
        self._options: dict[str, Any] = {
            "tp_size": tp_size, "enable_expert_parallel": enable_expert_parallel, "dtype": dtype, "device": device,
        }  # fmt: skip
        listed = [[meta.name, list(meta.shape), meta.dtype] for meta in tensors]
        self._file = known_file(listed, str(dtype), str(device), tp_size, enable_expert_parallel, engine_version())
        self._known: list[str] = []
        self._beside: LayoutBesideStart | None = None

    def begin(self) -> None:
        """Look for those of a former engine. Where there are none, record them while the engine starts. Call it when
        the fork server has been begun.
        """
        self._known = read_known(self._file)
        if not self._known and len(self._tensors) >= WORTH_A_PROCESS:
            hf_config = json.loads((self._folder / "config.json").read_text())
            request = request_text(hf_config, self._tensors, **self._options, every_layer=True)
            self._beside = LayoutBesideStart(request)

    def digests(self) -> list[str]:
        """layout_wire.layouts_digest() of each rank; empty if nobody knows, or not yet."""
        return self._known if self._beside is None else self._beside.digests()

    def keep(self, found: Sequence[str]) -> None:
        """Let later engines know what this one has found."""
        if list(found) != self._known:
            keep_known(self._file, found)


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
