"""Gives vLLM a path to a model's config that depends on the config alone, so that compiled code is found again.

    runs/NAME/model/config.json  --copied-->  ~/.cache/slipstream/models/HASH/config.json  --> vLLM's `model`

vLLM finds what it compiled, captured and tuned before by a hash of its configuration, and the model's path is in it
(ModelConfig.compute_hash, 0.25.1 and 0.32). With a run's own folder every run would compile anew.

Owns: the copies. Does not own: vLLM's caches (~/.cache/vllm), nor models whose weights vLLM reads: these keep their
path. Invariant: equal configs have equal paths, different ones different paths; a copy is whole or not there.
"""

import hashlib
import logging
from pathlib import Path

from slipstream.rollout.node_cache import cache_folder, keep

logger = logging.getLogger(__name__)

_READ_BY_VLLM = ("config.json", "generation_config.json")
"""The files of a model folder that vLLM reads when it is given neither weights nor a tokenizer."""


def same_path(folder: Path) -> Path:
    """A folder with the config of the given one. Where it cannot be written, the given one."""
    contents = {name: (folder / name).read_bytes() for name in _READ_BY_VLLM if (folder / name).is_file()}
    digest = hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()
    kept = cache_folder() / "models" / digest[:24]
    try:
        for name, content in contents.items():
            if not (kept / name).is_file() or (kept / name).read_bytes() != content:
                keep(kept / name, content)
    except OSError as error:
        logger.warning("later runs compile again what this engine compiles: %s cannot be written: %s", kept, error)
        return folder
    return kept
