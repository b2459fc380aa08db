"""One rank's training state on disk: what an exact resume needs, and a refusal to resume anything else.

Owns the files `rank-<n>.safetensors` and `rank-<n>.json` of a state folder. Does not own which tensors go in
(rank.py), nor the folder's atomicity and retention (orchestrator/files/run_checkpoint.py).

Invariant: only the same rank of the same layout reads a state, and any difference raises before anything is changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.conf.schema import ModelConfig, TrainerConfig, TrainMode
from slipstream.trainer.errors import CheckpointError

FORMAT_VERSION = 1


def write_rank_state(
    folder: Path, rank: int, tensors: dict[str, Tensor], layout: dict[str, Any], progress: dict[str, int]
) -> None:
    """Write one rank's state; each file appears whole or not at all.

    Args:
        folder: made if missing.
        rank: this rank.
        tensors: name -> tensor on the host; nobody changes them meanwhile.
        layout: JSON facts that a reader must match exactly.
        progress: counters, e.g. {"policy_version": 12}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, meta = _paths(folder, rank)
    partial = data.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, data)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    document = {"format_version": FORMAT_VERSION, "layout": layout, "progress": progress, "shapes": shapes}
    partial = meta.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1, sort_keys=True), encoding="utf-8")
    os.replace(partial, meta)


def read_rank_state(
    folder: Path, rank: int, layout: dict[str, Any], shapes: dict[str, list[int]]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Read one rank's state back: (tensors on the CPU, progress).

    Args:
        folder: where `write_rank_state` wrote.
        rank: this rank.
        layout: this run's facts, compared key by key.
        shapes: the tensors that this run needs, and their shapes.

    Raises:
        CheckpointError: missing or unreadable files, another layout, other tensors or other shapes.
    """
    data, meta = _paths(folder, rank)
    try:
        document = json.loads(meta.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"no state of trainer rank {rank} in {folder}: {meta.name} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"{meta} is not valid JSON: {error}") from error
    if document.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{meta} has format {document.get('format_version')}, this version reads {FORMAT_VERSION}"
        )
    written, layout = document["layout"], json.loads(json.dumps(layout))  # tuples come back as lists
    for key in sorted(written.keys() | layout.keys()):
        if written.get(key) != layout.get(key):
            raise CheckpointError(
                f"the state in {folder} was written with {key}={written.get(key)!r}, this run has {layout.get(key)!r}; "
                "resume with the options it was written with"
            )
    try:
        tensors = load_file(data)
    except (FileNotFoundError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {data}: {error}") from error
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(found.keys() | shapes.keys()):
        if found.get(name) != shapes.get(name):
            raise CheckpointError(
                f"{data}: tensor {name} has shape {found.get(name)}, trainer rank {rank} needs {shapes.get(name)}"
            )
    return tensors, document["progress"]


def _paths(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank-{rank}.safetensors", folder / f"rank-{rank}.json"


def state_layout(
    model: ModelConfig, trainer: TrainerConfig, hf_config: Mapping[str, Any], device_type: str
) -> dict[str, Any]:
    """Options on which a rank's values and their meaning depend."""
    lora = trainer.lora if trainer.mode is TrainMode.lora else None
    return {
        "trainer.num_ranks": trainer.num_ranks,
        "trainer.ep_size": trainer.ep_size,
        "trainer.mode": trainer.mode.value,
        "trainer.lora.rank": None if lora is None else lora.rank,
        "trainer.lora.alpha": None if lora is None else lora.alpha,
        "trainer.lora.dtype": None if lora is None else lora.dtype.value,
        "trainer.optim.state": trainer.optim.state.value,
        "model.dtype": model.dtype.value,
        "device": device_type,
        "model.hf_config": hf_config,
    }
