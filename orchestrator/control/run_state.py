"""Whether a run goes on, what its start waits for, and where its page of Ray is, from its folder alone.

Owns: the five words, control/dashboard.json and control/starting.json. Does not own: the run's lock (control_folder),
the phases of a start (files/startup.py).
"""

import json
import time
from contextlib import suppress

from slipstream.conf.whole_files import write_whole
from slipstream.orchestrator.control.control_folder import how_it_ended, is_alive
from slipstream.orchestrator.files.run_folder import RunFolder


def state_of(folder: RunFolder, step: int | None, num_steps: int) -> tuple[str, str | None]:
    """(running, finished, stopped, failed, "moved or removed": the folder is not there any more, or unknown: the run is
    another user's, who alone may read its lock; and the error of a run that failed). `step`: of the newest row of
    metrics; None before the first."""
    if not folder.root.is_dir():
        return "moved or removed", None
    is_running = is_alive(folder.root)
    if is_running:
        return "running", None
    state, error = how_it_ended(folder.root)
    if state:
        return state, error
    is_done = step is not None and step >= num_steps and (folder.adapter.is_dir() or folder.merged.is_dir())
    return ("finished" if is_done else "stopped" if is_running is False else "unknown"), None


def note_start(folder: RunFolder, seconds: float, waits_for: str) -> None:
    """Write down what a start waits for, `seconds` after the command. The next start removes it, too."""
    with suppress(OSError):  # the log has it, too
        write_whole(folder.starting, json.dumps({"began_at": time.time() - seconds, "waits_for": waits_for}))


def note_started(folder: RunFolder) -> None:
    with suppress(OSError):
        folder.starting.unlink()


def start_of(folder: RunFolder) -> str | None:
    """What the start of a run that goes on waits for, for people: "34 s: engines 1 of 2 up"; None: it is over."""
    try:
        found = json.loads(folder.starting.read_text()) if is_alive(folder.root) else None
        return None if found is None else f"{time.time() - found['began_at']:.0f} s: {found['waits_for']}"
    except (OSError, ValueError):  # none, or another user's
        return None


def note_dashboard(folder: RunFolder, where: str) -> None:
    """Write down where the run's page of Ray is. The next start of the run removes it (control_folder.alive)."""
    with suppress(OSError):  # the log has it, too
        folder.dashboard.write_text(json.dumps(where))


def dashboard_of(folder: RunFolder) -> str | None:
    """Where the page of a run that goes on is, with the file of its token; None where it has none."""
    try:
        return str(json.loads(folder.dashboard.read_text())) if is_alive(folder.root) else None
    except (OSError, ValueError):  # none, or another user's
        return None
