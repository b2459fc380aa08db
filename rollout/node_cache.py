"""What this user's runs and servers keep on this node for later ones.

Owns: the folder, and writing files into it while others read them. Does not own: what is in them.
"""

import os
import tempfile
from pathlib import Path

from slipstream.conf.errors import ConfigError
from slipstream.conf.whole_files import write_whole


def cache_folder() -> Path:
    """Where it is: in XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slipstream"


def where_caches_lie() -> Path:
    """The folder in which vLLM, PyTorch and Slipstream keep what they compile.

    Raises:
        ConfigError: Nothing can be written there, as in a container whose user has no home.
    """
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
