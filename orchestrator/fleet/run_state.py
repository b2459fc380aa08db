"""Whether a run goes on, and where its page of Ray is, from its folder alone.

Owns: the five words, and control/dashboard.json. Does not own: the run's lock (control_folder).
"""

from __future__ import annotations

import json
from contextlib import suppress

from orchestrator.files.run_folder import RunFolder
from orchestrator.fleet.control_folder import how_it_ended, is_alive


def state_of(folder: RunFolder, step: int | None, num_steps: int) -> tuple[str, str | None]:
    """(running, finished, stopped, failed, or unknown: the run is another user's, who alone may read its lock; and the
    error of a run that failed).

    Args:
        step: of the newest row of metrics; None before the first.
    """
    is_running = is_alive(folder.root)
    if is_running:
        return "running", None
    is_done = step is not None and step >= num_steps and (folder.adapter.is_dir() or folder.merged.is_dir())
    state, error = how_it_ended(folder.root)
    if is_done and state != "failed":
        return "finished", None
    if state:
        return state, error
    return ("stopped" if is_running is False else "unknown"), None


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
