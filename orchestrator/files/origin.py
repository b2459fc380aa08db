"""Which weights a run began from: others would be a base that what was learned was not learned on.

    weights_of --> environment.json "weights" --of a run to resume, evaluate or merge--> check_weights

Owns: what is compared, and the refusal. Does not own environment.json (run_folder.py), nor whether the files can be
read at all (inputs/model_files.py). Files are compared by their sizes and a sample of their bytes, so that a model of
terabytes takes a moment; an update of a training run changes nearly all of them.
"""

import hashlib
import os
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.conf.json_files import JsonMapping, JsonObject, object_or_empty
from slipstream.conf.schema import Init, RunConfig, TrainMode

_BLOCKS, _BLOCK_BYTES = 16, 1 << 16
"""How many blocks of a file are read, evenly spread, and how long each is."""


def weights_of(config: RunConfig) -> JsonObject:
    """A digest of the files that each of these options names; "" where they cannot be read."""
    named: dict[str, str | None] = {}
    if config.model.init is Init.checkpoint:
        named["model.path"] = config.model.path
    if config.trainer.mode is TrainMode.lora and config.algorithm.needs_reference:  # else no resume reads it
        named["trainer.lora.init_from"] = config.trainer.lora.init_from
    return {option: _digest(Path(path)) for option, path in named.items() if path is not None}


def check_weights(environment: JsonMapping, config: RunConfig, *, is_resumed: bool = False) -> None:
    """Refuse a run whose base, or reference, has been overwritten since it began. Raises ConfigError: it names the
    option. `is_resumed`: whether the run is to go on; else its reference is not read."""
    before = object_or_empty(environment.get("weights"))  # a former release did not write it down
    for option, now in weights_of(config).items():
        is_read = is_resumed or option == "model.path"
        if is_read and now and before.get(option, now) not in ("", now):
            raise ConfigError(
                f"{option}={_path_of(config, option)} has other weights than when the run began, and what it has "
                "learned belongs to those: put them back, or start a new run"
            )


def _path_of(config: RunConfig, option: str) -> str | None:
    return config.model.path if option == "model.path" else config.trainer.lora.init_from


def _digest(folder: Path) -> str:
    found, paths = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    try:
        for path in paths:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                found.update(size.to_bytes(8, "big"))
                for block in range(_BLOCKS):
                    file.seek(block * max(size - _BLOCK_BYTES, 0) // (_BLOCKS - 1))
                    found.update(file.read(_BLOCK_BYTES))
    except OSError:
        return ""
    return found.hexdigest() if paths else ""
