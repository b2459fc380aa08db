"""A logger that talks to a service, in a thread of its own, so that a slow or absent service costs the run nothing.

Owns: the queue of rows, what a failure means, and how long the run's end waits. Does not own: how rows are sent
(wandb_runs.py, mlflow_runs.py). Invariants: `write` never blocks and never raises; rows arrive in order, each once;
a service that fails is told in the log, once, and so is that it works again. metrics.jsonl has every row in any case.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from slipstream.conf.failures import outcome_of

logger = logging.getLogger(__name__)

TRY_AGAIN_S = 30.0
"""Pause after a failure. Rows are kept meanwhile."""
CLOSE_TIMEOUT_S = 20.0
"""Longest that the end of a run waits for rows to arrive."""
MOST_ROWS = 10_000
"""Rows that are kept for a service that does not take them; the newest beyond them are left out."""

Row = tuple[int, Mapping[str, float]]


class Service(Protocol):
    """A connection to a service. Its methods may block and raise."""

    def send(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def finish(self, timeout_s: float) -> None: ...


class InBackground:
    """See the module's docstring.

    Args:
        name: of the service, for people.
        connect: makes the connection. Called in the thread, again after a failure.
    """

    def __init__(self, name: str, connect: Callable[[], Service], *, try_again_s: float = TRY_AGAIN_S) -> None:
        self._name = name
        self._connect = connect
        self._try_again_s = try_again_s
        self._rows: queue.Queue[Row | None] = queue.Queue(MOST_ROWS)
        self._num_left_out = 0
        self._closing = threading.Event()
        self._deadline_s = float("inf")
        self._num_unsent = 0
        self._thread = threading.Thread(target=self._send_all, name=f"logger of {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        try:
            self._rows.put_nowait((step, numbers))
        except queue.Full:
            self._num_left_out += 1

    def close(self) -> None:
        """Wait until the rows have arrived, for CLOSE_TIMEOUT_S at most. What has not is counted in the log."""
        self._deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        self._closing.set()
        while True:
            try:
                self._rows.put_nowait(None)
                break
            except queue.Full:  # of rows that nobody takes
                self._rows.get_nowait()
                self._num_left_out += 1
        self._thread.join(CLOSE_TIMEOUT_S + 1)
        num_lost = self._num_left_out + self._num_unsent
        if self._thread.is_alive():
            logger.warning("%s does not end within %.0f s and is left; metrics.jsonl has all rows",
                           self._name, CLOSE_TIMEOUT_S)  # fmt: skip
        elif num_lost:
            logger.warning("%s did not get %d rows; metrics.jsonl has them", self._name, num_lost)

    def _send_all(self) -> None:
        """The thread: connect, then send row after row, each until it is taken."""
        service: Service | None = None
        row = self._rows.get()
        is_failing = False
        while row is not None:
            try:
                service = service or self._connect()
                service.send(*row)
            except Exception as error:  # noqa: BLE001 - the edge to a library that speaks to a service
                if not is_failing:
                    logger.warning("%s does not take rows (%s: %s); they are kept, and tried again every %.0f s",
                                   self._name, type(error).__name__, _first_line(error), self._try_again_s)  # fmt: skip
                is_failing = True
                if self._closing.wait(self._try_again_s):
                    self._num_unsent = 1 + sum(left is not None for left in _drained(self._rows))
                    return
                continue
            if is_failing:
                logger.info("%s takes rows again", self._name)
            is_failing = False
            row = self._rows.get()
        if service is not None:
            failure = outcome_of(service.finish, max(1.0, self._deadline_s - time.monotonic()))
            if failure is not None:
                logger.warning("%s was not closed: %s: %s", self._name, type(failure).__name__, _first_line(failure))


def _drained(rows: queue.Queue[Row | None]) -> list[Row | None]:
    found: list[Row | None] = []
    while not rows.empty():
        found.append(rows.get_nowait())
    return found


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
