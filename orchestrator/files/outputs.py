"""Files and folders that a user has named: whether they can be written is known before the work whose result they are,
and what they held before stays until the new content is there, whole. And what else would be written on the terminal.

Owns: all of it. Does not own: what is written, nor files of a run (run_folder.py).
"""

import errno
import io
import os
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from slipstream.conf.errors import ConfigError
from slipstream.conf.whole_files import write_whole
from slipstream.orchestrator.machine import nearest_existing

_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.ENOENT)
"""Errors of a folder that takes no other file: somebody else's, read-only, one that a container mounts a file in."""


class Figure(Protocol):
    """What is used of matplotlib's."""

    def savefig(self, fname: IO[bytes], *, dpi: int, format: str) -> None: ...


def check_can_write(target: Path, told: str, *, is_folder: bool = False) -> None:
    """Leaves nothing behind.

    Args:
        told: What begins the message, such as "--export FILE".
        is_folder: The target is a folder, to be made with those above it; a file needs one that is there.

    Raises:
        ConfigError: It cannot be written.
    """
    folder = nearest_existing(target.absolute()) if is_folder else target.absolute().parent
    try:
        if target.is_dir() and not is_folder:
            raise IsADirectoryError(0, "it is a folder")
        if not _is_special(target):
            try:
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                if is_folder or error.errno not in _REFUSALS or not os.access(target, os.W_OK):
                    raise
    except OSError as error:
        cure = "give another folder with --output" if is_folder else "give a file in a folder that is there"
        raise ConfigError(f"{told} cannot be written ({folder}: {error.strerror}); {cure}") from error


def write_output(file: Path, content: str | bytes) -> None:
    """Write a file that a user may have from before: a full disk leaves that one. Its mode stays, and so do links. One
    whose folder takes no other file is overwritten.
    """
    if _is_special(file) or not _replaced(file.resolve(), content):
        file.write_bytes(content.encode() if isinstance(content, str) else content)


def save_picture(figure: Figure, file: Path) -> None:
    """Write a figure as PNG, as write_output does."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png")
    write_output(file, drawn.getvalue())


@contextmanager
def output_in(file: Path) -> Generator[None]:
    """In the block, this process and those that it starts write into the file instead of on the terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with file.open("wb") as opened:
        for descriptor in (1, 2):
            os.dup2(opened.fileno(), descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, terminal in zip((1, 2), kept, strict=True):
            os.dup2(terminal, descriptor)
            os.close(terminal)


def _replaced(target: Path, content: str | bytes) -> bool:
    """Whether another file has taken its name; False: its folder refuses that."""
    is_there = target.is_file()
    mode = target.stat().st_mode if is_there else 0
    try:
        write_whole(target, content)
    except OSError as error:
        if is_there and error.errno in _REFUSALS:
            return False
        raise
    if is_there:
        target.chmod(mode & 0o7777)
    return True


def _is_special(file: Path) -> bool:
    """A terminal, a pipe or /dev/null: nothing may take its name. A folder is one, too: writing it tells so."""
    return file.exists() and not file.is_file()
