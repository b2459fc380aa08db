"""One rank's training state as bytes: what an exact resume needs, and a refusal to resume anything else.

Owns the files `rank-<n>.safetensors` and `rank-<n>.json` of a state folder, and the same in memory: a safetensors file
with the JSON in its metadata. Does not own which tensors go in (rank_states.py), the folder's atomicity and retention
(orchestrator/checkpoints/run_checkpoint.py), nor where a state in memory is kept (keeper.py).

Invariant: only the same rank of the same layout reads a state, and any difference raises before anything is changed.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.conf.json_files import HfConfig, JsonObject
from slipstream.conf.schema import ModelConfig, TrainerConfig, TrainMode
from slipstream.trainer.errors import CheckpointError

FORMAT_VERSION = 1

State = tuple[dict[str, Tensor], dict[str, int]]
"""Tensors on the CPU, and progress."""
_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""What safetensors calls them."""
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def write_rank_state(
    folder: Path, rank: int, tensors: dict[str, Tensor], layout: JsonObject, progress: dict[str, int]
) -> None:
    """Write one rank's state; each file appears whole or not at all.

    Args:
        folder: made if missing.
        tensors: name -> tensor on the host; nobody changes them meanwhile.
        layout: JSON facts that a reader must match exactly.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, meta = _paths(folder, rank)
    partial = data.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, data)
    partial = meta.with_suffix(".partial")
    partial.write_text(_document(tensors, layout, progress), encoding="utf-8")
    os.replace(partial, meta)


def rank_state_parts(tensors: dict[str, Tensor], layout: JsonObject, progress: dict[str, int]) -> list[memoryview]:
    """The same as one safetensors file, in parts that follow each other: a header, then each tensor's own memory."""
    parts = [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in tensors.values()]
    entries: dict[str, object] = {"__metadata__": {"state": _document(tensors, layout, progress)}}
    end = 0
    for (name, tensor), part in zip(tensors.items(), parts, strict=True):
        start, end = end, end + part.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return [memoryview(len(header).to_bytes(8, "little") + header), *parts]


def read_rank_state_parts(data: memoryview, rank: int, layout: JsonObject, shapes: dict[str, list[int]]) -> State:
    """Read what `rank_state_parts` made: its tensors are views of `data`. Arguments and errors: `read_rank_state`."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    where = _Place(*["the state in memory"] * 3)
    text = header.pop("__metadata__")["state"]
    return _checked(text, lambda: _views(data, start, header), where, rank, layout, shapes)


def _views(data: memoryview, start: int, header: JsonObject) -> dict[str, Tensor]:
    """safetensors.load copies all bytes twice, into memory that a host gives page by page: 15 GB took 40 s."""
    tensors = {}
    for name, entry in header.items():
        dtype, shape, (first, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if start + end > len(data) or end - first != math.prod(shape) * dtype.itemsize:
            raise SafetensorError(f"tensor {name} does not fit into {len(data)} bytes")
        count = math.prod(shape)
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=start + first) if count else torch.empty(0)
        tensors[name] = flat.to(dtype).view(shape)
    return tensors


@dataclass(frozen=True, slots=True)
class _Place:
    """What messages call a state and its two parts."""

    state: str
    meta: str
    data: str


def _document(tensors: dict[str, Tensor], layout: JsonObject, progress: dict[str, int]) -> str:
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    document = {"format_version": FORMAT_VERSION, "layout": layout, "progress": progress, "shapes": shapes}
    return json.dumps(document, indent=1, sort_keys=True)


def read_rank_state(folder: Path, rank: int, layout: JsonObject, shapes: dict[str, list[int]]) -> State:
    """Read one rank's state back: (tensors on the CPU, progress).

    Args:
        layout: this run's facts, compared key by key.
        shapes: the tensors that this run needs, and their shapes.

    Raises:
        CheckpointError: missing or unreadable files, another layout, other tensors or other shapes.
    """
    data, meta = _paths(folder, rank)
    try:
        document = meta.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"no state of trainer rank {rank} in {folder}: {meta.name} is missing") from error
    where = _Place(f"the state in {folder}", str(meta), str(data))
    return _checked(document, lambda: load_file(data), where, rank, layout, shapes)


def _checked(
    text: str,
    load_tensors: Callable[[], dict[str, Tensor]],
    where: _Place,
    rank: int,
    layout: JsonObject,
    shapes: dict[str, list[int]],
) -> State:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{where.meta} is not valid JSON: {error}") from error
    if document.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{where.meta} has format {document.get('format_version')}, this version reads {FORMAT_VERSION}"
        )
    written, layout = document["layout"], json.loads(json.dumps(layout))  # tuples come back as lists
    for key in sorted(written.keys() | layout.keys()):
        if written.get(key) != layout.get(key):
            raise CheckpointError(
                f"{where.state} was written with {key}={written.get(key)!r}, this run has {layout.get(key)!r}; "
                "resume with the options it was written with"
            )
    try:
        tensors = load_tensors()
    except (FileNotFoundError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {where.data}: {error}") from error
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(found.keys() | shapes.keys()):
        if found.get(name) != shapes.get(name):
            raise CheckpointError(
                f"{where.data}: tensor {name} has shape {found.get(name)}, trainer rank {rank} needs {shapes.get(name)}"
            )
    return tensors, document["progress"]


def _paths(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank-{rank}.safetensors", folder / f"rank-{rank}.json"


def state_layout(model: ModelConfig, trainer: TrainerConfig, hf_config: HfConfig, device_type: str) -> JsonObject:
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
