"""In a module of its own, because a forked process imports the one that its function is in."""

import json
import os
from pathlib import Path


def written_environment(file: Path) -> None:
    """Write this process's to a file."""
    file.write_text(json.dumps(dict(os.environ)))
