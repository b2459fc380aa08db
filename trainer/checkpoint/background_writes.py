"""Files that a thread writes while the rank trains on.

    begin(write)    the thread calls write(), after those that were begun before
    are_done()      whether all have returned; raises what the first one that failed raised, once

What is written must not change meanwhile: callers copy it first. The thread writes large files, for which Python's
lock is not held.

Owns: the thread and its errors. Does not own: what is written.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class BackgroundWrites:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writes files")
        self._begun: list[Future[None]] = []

    def begin(self, write: Callable[[], None]) -> None:
        """Have the thread call a function once."""
        self._begun.append(self._thread.submit(write))

    def are_done(self) -> bool:
        """Whether nothing is being written any more. Does not wait.

        Raises:
            Exception: what a function raised that begin() was given. The next call does not raise it again.
        """
        if not all(write.done() for write in self._begun):
            return False
        begun, self._begun = self._begun, []
        for write in begun:
            write.result()
        return True

    def settle(self) -> None:
        """Wait for all, and forget what failed: whoever asked for it is gone."""
        wait(self._begun)
        self._begun = []

    def finish(self) -> None:
        """Wait for all. Raises as are_done()."""
        wait(self._begun)
        self.are_done()
