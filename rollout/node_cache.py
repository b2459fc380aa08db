"""What this user's runs and servers keep on this node for later ones.

Owns: the folder, writing files into it while others read them, and the copies of models' configs in it. Does not own:
what else is in it, or vLLM's own caches (~/.cache/vllm).
"""

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.conf.whole_files import write_whole

logger = logging.getLogger(__name__)
_READ_BY_VLLM = ("config.json", "generation_config.json")
"""The files of a model folder that vLLM reads when it is given neither weights nor a tokenizer."""


def cache_folder() -> Path:
    """Where it is: in XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slipstream"


def where_caches_lie() -> Path:
    """The folder in which vLLM, PyTorch and Slipstream keep what they compile. Raises ConfigError if nothing can be
    written there, as in a container whose user has no home."""
    folder = cache_folder().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}), where vLLM, PyTorch and Slipstream keep what they compile "
            f"(docs/starts.md), got HOME={Path.home()}; set XDG_CACHE_HOME to a folder of yours, and on GPUs "
            "TRITON_CACHE_DIR to one in it"
        ) from error
    return folder


def keep(file: Path, content: bytes) -> None:
    """Write a file of the folder, and the folders down to it. Raises OSError where that cannot be done."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, content)


def same_path(folder: Path) -> Path:
    """A folder of the cache with this folder's config, the same one for equal configs; `folder` itself where the cache
    cannot be written.

    vLLM finds what it compiled, captured and tuned before by a hash of its configuration, and the model's path is in it
    (ModelConfig.compute_hash, 0.25.1 and 0.32). With a run's own folder every run would compile anew.
    """
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
