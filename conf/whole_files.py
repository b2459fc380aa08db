"""Files that others read while they are written. Does not own: what is in them."""

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from slipstream.conf.failures import undone_by

logger = logging.getLogger(__name__)


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file so that nobody ever reads a part of it; who is killed meanwhile leaves it as it was before. An
    OSError has the file's name, as that of an open file has not."""
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")

    def undo(error: BaseException) -> None:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(file)

    with undone_by(undo):
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(file)


def point(link: Path, name: str) -> None:
    """Atomically lead a link to its neighbour of this name. Where that cannot be, on a disk without links or where
    another user's stands in a folder of everybody's, the log says so."""
    partial = link.with_name(f".{link.name}-{os.getpid()}")
    try:
        partial.unlink(missing_ok=True)
        partial.symlink_to(name)
        partial.replace(link)
    except OSError as error:
        logger.warning("%s does not lead to %s: %s", link, name, error.strerror)
        with suppress(OSError):
            partial.unlink()


def append_line(file: Path, line: str) -> None:
    """Add a line to a file of lines. Where a crash or a full disk has cut the last one, that one alone is lost."""
    with file.open("ab+") as lines:
        if lines.seek(0, os.SEEK_END) and os.pread(lines.fileno(), 1, lines.tell() - 1) != b"\n":
            line = f"\n{line}"
        lines.write(f"{line}\n".encode())
