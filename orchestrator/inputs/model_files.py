"""Checks a Hugging Face checkpoint on disk by its headers: of the weights at most the head is read, and torch is not
needed.

Finds what makes a run die minutes later, or compute another model: a missing shard, an interrupted download, a Git LFS
pointer in a file's place, a checkpoint of another architecture, a head that is stored and said to be tied.
"""

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonObject, read_json_object
from slipstream.orchestrator.checkpoints.run_checkpoint import complete_checkpoints, step_of
from slipstream.orchestrator.files.run_folder import RunFolder
from slipstream.weight_sync.disk.language_model import language_model_tensors
from slipstream.weight_sync.disk.safetensors_files import StoredTensor, read_index
from slipstream.weight_sync.layout import TensorMeta

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PART_ELEMENTS = 1 << 24

_HUB_NAME = re.compile(r"(?!models/|runs/)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def download_first(folder: Path) -> str:
    """The command that fetches what is not there, where it can be the name of a repository of the hub; else empty."""
    if not _HUB_NAME.fullmatch(str(folder)) or folder.parent.is_dir():
        return ""
    own = f"models/{folder.name}"
    return f"of the hub's, it is downloaded first: hf download {folder} --local-dir {own}; then give {own}"


def read_hf_config(folder: Path, subject: str) -> JsonObject:
    """config.json of a model's folder; or the file itself, where that is given. `subject` is what the user was asked
    for: "model.path", "MODEL". Raises: ConfigError, where there is none, or it is no JSON object."""
    path = folder if folder.is_file() else folder / "config.json"
    try:
        return read_json_object(path)
    except FileNotFoundError as error:
        if not folder.exists():
            cure = download_first(folder) or (
                "give a Hugging Face model folder on this machine, with config.json and *.safetensors (one of the hub "
                "is downloaded first: hf download NAME --local-dir FOLDER)"
            )
            raise ConfigError(f"{subject}={folder}: no such folder; {cure}") from error
        raise ConfigError(f"{subject}={folder} has no config.json; {_model_of(folder)}") from error


def _model_of(folder: Path) -> str:
    """What to give instead of a folder that is no model's: the model of the run in whose folder it is, or one in it."""
    around = (folder, *folder.parents)
    run = next((RunFolder(one) for one in around if RunFolder(one).config.is_file()), None)
    if run is not None:
        saved = complete_checkpoints(run.checkpoints)
        chosen = "".join(f" --checkpoint {step_of(one)}" for one in saved if one in around)
        if (run.merged / "config.json").is_file() and not chosen:
            return f"give the model of that run: {run.merged}"
        if saved:
            return f"the model of that run is written by: slipstream merge {shlex.quote(str(run.root))}{chosen}"
    if (folder / "adapter_config.json").is_file():
        return (
            "it is an adapter: merge it into its model (merge_and_unload of PEFT), or train it further: the model, and "
            f"trainer.lora.init_from={folder}"
        )
    there = sorted(config.parent for config in folder.glob("*/config.json"))[:3]
    return f"give one in it: {', '.join(map(str, there))}" if there else "give a Hugging Face model folder"


def check_checkpoint_files(folder: Path, expected: Sequence[TensorMeta]) -> int:
    """Check that the folder's safetensors files are whole and hold every expected tensor in its shape. A head that is
    stored though none is expected has to be the embedding table. Returns the bytes of all shards. Raises ConfigError:
    naming the file, and the first tensors that are missing, of another shape, or unequal."""
    index = read_index(folder, "model.path", ", or set model.init=random to draw them")
    stored = language_model_tensors(index, [tensor.name for tensor in expected])
    missing = [tensor.name for tensor in expected if tensor.name not in stored]
    if missing:
        listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ConfigError(
            f"model.path={folder} lacks {listed}; is it a checkpoint of the model that its config.json describes?"
        )
    for tensor in expected:
        if stored[tensor.name].shape != tensor.shape:
            raise ConfigError(
                f"model.path={folder}: {tensor.name} has shape {stored[tensor.name].shape}, and config.json makes it "
                f"{tensor.shape}"
            )
    if HEAD in stored and HEAD not in {tensor.name for tensor in expected}:
        _check_tied(folder, stored[HEAD], stored[EMBEDDING])
    return sum(path.stat().st_size for path in {tensor.path for tensor in stored.values()})


def _check_tied(folder: Path, head: StoredTensor, embedding: StoredTensor) -> None:
    """Raise ConfigError where config.json ties the head to an embedding table of other values."""
    parts = zip(_values(head), _values(embedding), strict=False)
    if head.shape != embedding.shape or not all(np.array_equal(ours, theirs) for ours, theirs in parts):
        raise ConfigError(
            f"model.path={folder}: config.json says tie_word_embeddings=true, and {HEAD} is stored with other values "
            f"than {EMBEDDING}; set tie_word_embeddings=false in config.json to keep the stored head, as transformers "
            "does, or remove the tensor"
        )


def _values(stored: StoredTensor) -> Iterator[np.ndarray]:
    """A stored tensor in float32, part by part; bytes, where its format is none of 16 or 32 bits."""
    kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(stored.dtype, "u1")
    flat = np.memmap(stored.path, kind, "r", stored.offset, (math.prod(stored.shape),))
    for start in range(0, len(flat), PART_ELEMENTS):
        part = flat[start : start + PART_ELEMENTS]
        yield (part.astype("<u4") << 16).view("<f4") if stored.dtype == "BF16" else part.astype("f4")
