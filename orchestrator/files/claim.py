"""Whose a run is: a word in control/alive, which whoever goes on with the run writes anew, as beside its checkpoints in
an object store (checkpoints/object_store.py).

The lock of that file keeps a second process out as long as the file system gives it to one. A file system that several
machines mount takes it from one that is out of reach, and in a copy of the folder it is another one. A process that
comes back then must not write: it asks before each row, checkpoint and journal whether the run is its own still.

Owns: the word, and that question. Does not own: the lock (control/control_folder.py). Invariant: a folder that cannot
be read, or has no word, is nobody else's.
"""

import os
import secrets
import socket

from slipstream.orchestrator.errors import RunTakenOver
from slipstream.orchestrator.files.run_folder import RunFolder

THIS_PROCESS = f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(8)})"


def is_own(folder: RunFolder) -> bool:
    """Whether nobody else goes on with the run."""
    try:
        check_own(folder)
    except RunTakenOver:
        return False
    return True


def check_own(folder: RunFolder) -> None:
    """Raises RunTakenOver if somebody else goes on with the run."""
    try:
        check_word(folder.alive.read_text(), str(folder.root))
    except OSError:  # it was moved, or is out of reach
        return


def check_word(word: str, where: str) -> None:
    """Raises RunTakenOver if it is another process's."""
    if word not in ("", THIS_PROCESS):
        raise RunTakenOver(
            f"{word} goes on with the run in {where}: this process was given up, and writes nothing there any more"
        )
