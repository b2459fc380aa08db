"""Verdicts of a judge by the content of what it was asked, in one SQLite file that processes and runs may share."""

import logging
import sqlite3
from pathlib import Path

from slipstream.rollout.errors import RewardError

logger = logging.getLogger(__name__)

WAIT_S = 2.0
"""How long another process may hold the file."""


class VerdictCache:
    """See the module's docstring. A cache that cannot be read or written costs a request, never a sample.

    Args:
        file: Where; None: in this process alone.
        option: How an error names it.

    Raises:
        RewardError: The file cannot be opened, or is something else.
    """

    def __init__(self, file: Path | None, option: str) -> None:
        try:
            self._file = sqlite3.connect(file or ":memory:", timeout=WAIT_S, isolation_level=None)
            self._file.execute("PRAGMA synchronous=OFF")
            self._file.execute("CREATE TABLE IF NOT EXISTS verdicts (asked TEXT PRIMARY KEY, verdict TEXT NOT NULL)")
        except sqlite3.Error as e:
            raise RewardError(f"{option}={file} cannot be used: {e}; give the path of a cache or of a new file") from e

    def get(self, asked: str) -> str | None:
        """The verdict; None if it is not known."""
        try:
            row = self._file.execute("SELECT verdict FROM verdicts WHERE asked = ?", (asked,)).fetchone()
        except sqlite3.Error:
            return None
        return None if row is None else str(row[0])

    def put(self, asked: str, verdict: str) -> None:
        try:
            self._file.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (asked, verdict))
        except sqlite3.Error as e:
            logger.warning("a verdict was not kept: %s", e)  # into rewards.log
