"""One rank's training state as bytes: what an exact resume needs, and a refusal to resume anything else.

Owns the files `rank-<n>.safetensors` and `rank-<n>.json` of a state folder, and the same in memory: a safetensors file
with the JSON in its metadata. The folder's atomicity and retention are orchestrator/checkpoints/run_checkpoint.py's.

Invariant: only the same rank of the same layout reads a state, and any difference raises before anything is changed.
"""

import json
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.conf.json_files import HfConfig, JsonObject
from slipstream.conf.schema import ModelConfig, TrainerConfig, TrainMode
from slipstream.trainer.errors import CheckpointError
from slipstream.trainer.model.build_decoder import dense_trainable, expert_trainable
from slipstream.trainer.model.decoder import Decoder
from slipstream.trainer.moe.block import expert_shares

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
    """Write one rank's state; each file appears whole or not at all. The layout is what a reader must match exactly."""
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
    """What messages say."""

    state: str
    meta: str
    data: str


def _document(tensors: dict[str, Tensor], layout: JsonObject, progress: dict[str, int]) -> str:
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    document = {"format_version": FORMAT_VERSION, "layout": layout, "progress": progress, "shapes": shapes}
    return json.dumps(document, indent=1, sort_keys=True)


def read_rank_state(folder: Path, rank: int, layout: JsonObject, shapes: dict[str, list[int]]) -> State:
    """Read one rank's state back. Raises CheckpointError for missing or unreadable files, another layout, and other
    tensors or shapes than this run needs."""
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


@torch.no_grad()
def load_trained(decoder: Decoder, folder: Path, num_ranks: int, ep_size: int) -> None:
    """Put every rank's rows of what was trained into one process; other weights stay as they are. Full training alone:
    of a LoRA run each checkpoint has the adapter beside the ranks' files.

    Args:
        decoder: Of one rank.
        num_ranks, ep_size: Of the run that wrote the files.

    Raises CheckpointError if a file is missing or damaged, or of another model.
    """
    try:
        with ExitStack() as stack:
            paths = [folder / f"rank-{rank}.safetensors" for rank in range(num_ranks)]
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]

            def rows(name: str, ranks: range) -> Tensor:
                return torch.cat([files[rank].get_tensor(f"{name}.value") for rank in ranks])

            for name, parameter in dense_trainable(decoder):
                _set(name, parameter, rows(name, range(num_ranks)))
            for name, parameter in expert_trainable(decoder):
                layer = int(name.removeprefix("model.layers.").partition(".")[0])
                for ep_rank, share in enumerate(expert_shares(len(parameter), ep_size, layer)):
                    own = parameter[share.start : share.stop]
                    _set(name, own, rows(name, range(ep_rank, num_ranks, ep_size)))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is not the whole state of {num_ranks} trainer ranks: {error}") from error


def _set(name: str, parameter: Tensor, values: Tensor) -> None:
    if values.shape != parameter.shape:
        raise CheckpointError(f"{name} has the shape {list(values.shape)} in files, {list(parameter.shape)} here")
    parameter.copy_(values)
