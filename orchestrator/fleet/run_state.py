"""Whether a run goes on, from its folder alone. Owns: the four words. Does not own: the run's lock (control_folder)."""

from __future__ import annotations

from orchestrator.files.run_folder import RunFolder
from orchestrator.fleet.control_folder import is_alive


def state_of(folder: RunFolder, step: int | None, num_steps: int) -> str:
    """running, finished, stopped, or unknown: the run is another user's, who alone may read its lock.

    Args:
        step: of the newest row of metrics; None before the first.
    """
    is_running = is_alive(folder.root)
    if is_running:
        return "running"
    if step is not None and step >= num_steps and (folder.adapter.is_dir() or folder.merged.is_dir()):
        return "finished"
    return "stopped" if is_running is False else "unknown"
