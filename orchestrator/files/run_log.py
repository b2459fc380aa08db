"""Log lines and the progress line of the controller process.

Owns: handlers, format, and the fields that every line carries (step, policy version). Does not own: what is said.

On a terminal the progress line stays at the bottom and log lines pass above it. Elsewhere it becomes a plain line at
most every `PLAIN_EVERY_S` seconds, so that logs of batch systems stay readable. run.log has a line for every step.
Invariant: a terminal that has gone (OSError) raises nothing here; the signal decides whether the run goes on.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.status import Status

logger = logging.getLogger(__name__)

PLAIN_EVERY_S = 5.0
_FORMAT = "%(asctime)s %(levelname).1s [step %(step)d v%(policy_version)d] %(name)s: %(message)s"
_LEVELS = {"": logging.INFO, "slipstream": logging.DEBUG, "httpx": logging.WARNING}
"""The lowest level that each logger writes while a run lasts. At INFO, httpx has a line for every request."""


class RunContext(logging.Filter):
    """Adds the run's clock to every record: `step` and `policy_version`."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.policy_version = 0

    def set(self, step: int, policy_version: int) -> None:
        self.step, self.policy_version = step, policy_version

    def filter(self, record: logging.LogRecord) -> bool:
        record.step, record.policy_version = self.step, self.policy_version
        return True


class RunLog:
    """Handlers of one run: the console and run.log, which is appended to. Use as a context manager; loggers are left as
    they were."""

    def __init__(self, path: Path, console: Console | None = None) -> None:
        self.context = RunContext()
        self.console = console or Console(file=sys.stderr)
        file_handler = _LogFile(path, self.console)
        file_handler.setFormatter(logging.Formatter(_FORMAT))
        file_handler.setLevel(logging.DEBUG)
        console_handler: logging.Handler
        if self.console.is_terminal:
            console_handler = RichHandler(console=self.console, show_path=False, omit_repeated_times=False)
        else:  # rich would wrap lines at 80 columns
            console_handler = logging.StreamHandler(self.console.file)
            console_handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
        console_handler.setLevel(logging.INFO)
        console_handler.addFilter(lambda record: not getattr(record, "is_progress", False))
        self._handlers: list[logging.Handler] = [file_handler, console_handler]
        for handler in self._handlers:
            handler.addFilter(self.context)
        self._old_levels = {name: logging.getLogger(name).level for name in _LEVELS}

    def __enter__(self) -> RunLog:
        root = logging.getLogger()
        for name, level in _LEVELS.items():
            logging.getLogger(name).setLevel(level)
        for handler in self._handlers:
            root.addHandler(handler)
        return self

    def __exit__(self, *_: object) -> None:
        root = logging.getLogger()
        for name, level in self._old_levels.items():
            logging.getLogger(name).setLevel(level)
        for handler in self._handlers:
            root.removeHandler(handler)
            handler.close()

    def say(self, text: str) -> None:
        """Text for people, outside of the log."""
        with suppress(OSError):
            self.console.print(text, soft_wrap=True, highlight=False, markup=False)


class _LogFile(logging.FileHandler):
    """run.log. When it cannot be written, as on a full disk, the console says so once and the run goes on."""

    def __init__(self, path: Path, console: Console) -> None:
        super().__init__(path)
        self._path = path
        self._console = console
        self._has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            with suppress(OSError):
                said = f"{self._path} cannot be written any more: {error}"
                self._console.print(said, soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        with suppress(OSError):  # what could not be written is still in the buffer
            super().close()


class ProgressLine:
    """One line that says where the run is and how much time is left. Use as a context manager."""

    def __init__(self, console: Console, now_s: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now_s = now_s
        self._status: Status | None = None
        self._shown_at = float("-inf")
        self._waited_for = ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, step: int, num_steps: int, numbers: str, left_s: float | None) -> None:
        """Replace the line by a step's. `numbers` is its row in short, `left_s` the estimate of the time left."""
        # At the front: a narrow terminal cuts the end.
        left = f"  left {format_s(left_s)}" if left_s is not None else ""
        line = f"step {step}/{num_steps}{left}  {numbers}".rstrip()
        logger.info("%s", line, extra={"is_progress": True})
        if self._console.is_terminal:
            self.say(line)
        elif step in (0, num_steps) or self._now_s() - self._shown_at >= PLAIN_EVERY_S:
            self._print(line)

    def wait(self, seconds: float, for_what: str) -> None:
        """Replace the line by what start-up waits for, `seconds` after the command. Without a terminal, and in
        run.log, a line is added when that changes."""
        line = f"starting, {seconds:.0f} s: {for_what}"
        self.say(line)
        if for_what == self._waited_for or self._now_s() - self._shown_at < PLAIN_EVERY_S:
            return
        self._waited_for = for_what
        logger.info("%s", line, extra={"is_progress": True})
        self._print(line)

    def _print(self, line: str) -> None:
        self._shown_at = self._now_s()
        if not self._console.is_terminal:
            with suppress(OSError):
                self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def say(self, text: str) -> None:
        """Replace the line by what is going on now. Only on a terminal: elsewhere the log says it."""
        if not self._console.is_terminal:
            return
        room = self._console.width - len("⠋ ")
        line = escape(text if len(text) <= room else text[: room - 1] + "…")
        with suppress(OSError):
            if self._status is None:
                self._status = Status(line, console=self._console)
                self._status.start()
            self._status.update(line)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._status is not None:
            with suppress(OSError):
                self._status.stop()
            self._status = None


def format_s(seconds: float) -> str:
    """3725 -> 1:02:05, 65 -> 1:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
