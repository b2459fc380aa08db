"""What this user's runs and servers keep on this node for later ones.

Owns: the folder, and writing files into it while others read them. Does not own: what is in them.
"""

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Where it is: in XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slipstream"


def write_whole(file: Path, content: bytes) -> None:
    """Write a file so that nobody ever reads a part of it.

    Raises:
        OSError: It cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
        temporary.write(content)
    os.replace(temporary.name, file)
