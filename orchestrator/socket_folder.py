"""Where Unix sockets can lie. Linux takes paths of 107 bytes, and Ray and vLLM put theirs below the temporary folder.

    TMPDIR, or where that is too long /tmp or /var/tmp <- private_folder.py      the folder of a run
                                                       <- for_engines_alone()    commands that start engines without one

Owns: that choice, which a start, `--dry-run` and `slipstream doctor` share. Does not own: the folders themselves.
"""

import os
import tempfile
from pathlib import Path

from slipstream.conf.errors import ConfigError

DOOR = "controller"
"""Name of the socket in a run's folder at which its processes wait for another controller."""
HOLD, LET_GO = b"+", b"-"
"""What a controller says there, and before over a pipe: whether they wait for another one if it is killed."""
_LONGEST_PATH = 107
_OTHERS = ("/tmp", "/var/tmp")
_OF_A_RUN = "/slipstream-12345678/ray/session_2026-11-27_18-57-41_123456_4194304/sockets/plasma_store"
_OF_AN_ENGINE = "/vllm-12345678/01234567-0123-4567-89ab-0123456789ab"
MOST_FOR_A_RUN = _LONGEST_PATH - len(_OF_A_RUN)
MOST_FOR_ENGINES = _LONGEST_PATH - len(_OF_AN_ENGINE)
"""Bytes of the temporary folder's path, below which a run puts such sockets, and an engine of vLLM's."""


def socket_folder(most_bytes: int = MOST_FOR_A_RUN) -> Path:
    """The temporary folder, or another one whose path has no more bytes than that. Raises ConfigError: there is
    none."""
    wanted = tempfile.gettempdir()
    for folder in (wanted, *_OTHERS):
        if len(os.fsencode(folder)) <= most_bytes and os.access(folder, os.W_OK | os.X_OK):
            return Path(folder)
    raise ConfigError(
        f"TMPDIR={wanted} has {len(os.fsencode(wanted))} bytes, and Unix sockets need a path of {most_bytes} at most; "
        f"neither {' nor '.join(_OTHERS)} can be written: set TMPDIR to a shorter folder"
    )


def where_sockets_lie(most_bytes: int = MOST_FOR_A_RUN) -> str:
    """The folder in words, with the reason where it is not TMPDIR. Raises ConfigError: there is none."""
    folder, wanted = socket_folder(most_bytes), tempfile.gettempdir()
    if str(folder) == wanted:
        return wanted
    return f"{folder}, because Unix sockets need a path of {most_bytes} bytes at most and TMPDIR={wanted} is longer"


def for_engines_alone() -> str | None:
    """Make the temporary folder of this process, and of those that it starts, one in which engines can have sockets.
    Returns what is to be said about it; None where TMPDIR is short enough."""
    folder = socket_folder(MOST_FOR_ENGINES)
    if str(folder) == tempfile.gettempdir():
        return None
    said = f"temporary files are in {where_sockets_lie(MOST_FOR_ENGINES)}"
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    return said
