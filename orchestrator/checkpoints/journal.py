"""What another controller needs to go on with a run whose controller was killed: written in each step.

    runs/NAME/control/journal           0600: where the run's Ray is, its processes, their key, the state after a step
    runs/NAME/control/journal.before    the one before, which counts until metrics.jsonl has the row of that step

Owns: the file. Does not own: what processes are (cluster/placement.py: Living), nor what is done with them
(training.py).
Invariant: a file is whole and of one instant, and is on the disk when `write_journal` returns. What is read is the
state after the newest row of metrics, or after the one before.
"""

import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slipstream.conf.schema import RunConfig
from slipstream.orchestrator.checkpoints.loop_state import BufferState, RunState, lines_of, state_of
from slipstream.orchestrator.files.may_write import check_own, is_own
from slipstream.orchestrator.files.row_files import last_rows
from slipstream.orchestrator.files.run_folder import RunFolder, changed_options, resumed_folder
from slipstream.orchestrator.socket_folder import DOOR, LET_GO


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a run's Ray is. Example: Whereabouts("/tmp/slipstream-1a2b3c4d", 4711)."""

    folder: str
    """The private folder."""
    pid: int
    """The process that holds Ray's servers."""

    @property
    def door(self) -> Path:
        """Socket at which that process waits for another controller."""
        return Path(self.folder) / DOOR


@dataclass(frozen=True, slots=True)
class Journal:
    ray: Whereabouts
    processes: str
    """JSON of cluster/placement.py's Living, which only who imports Ray can read."""
    state: RunState


def write_journal(folder: RunFolder, journal: Journal) -> None:
    """Write the newest journal, and keep the one before it. Of groups that wait for their step it holds the prompts
    alone: workers keep their tokens (rollout/kept_groups.py), megabytes at every step. Raises RunTakenOver."""
    check_own(folder)
    buffer = journal.state.buffer
    prompts = {ticket: group.prompt for ticket, group in buffer.groups.items()}
    buffer = BufferState(buffer.num_batches, {}, prompts | buffer.in_flight)
    head, rows = lines_of(replace(journal.state, buffer=buffer))
    first = json.dumps({"ray": asdict(journal.ray), "processes": journal.processes, "state": head})
    partial = folder.journal.with_suffix(".partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"{first}\n{rows}")
        file.flush()
        os.fsync(file.fileno())
    if _read(folder, folder.journal) is not None:
        folder.journal.replace(folder.journal_before)
    partial.replace(folder.journal)


def read_journal(folder: RunFolder) -> Journal | None:
    """The newest journal whose step has its row. None if there is none: the run's processes ended with its controller,
    or the run is another user's."""
    return _read(folder, folder.journal) or _read(folder, folder.journal_before)


def _read(folder: RunFolder, path: Path) -> Journal | None:
    """The journal in a file, if it can be read and its step has a row."""
    try:
        with path.open() as lines:
            first = json.loads(next(lines))
            journal = Journal(Whereabouts(**first["ray"]), first["processes"], state_of(first["state"], lines))
    except (OSError, StopIteration, ValueError, KeyError, TypeError):
        return None
    rows = last_rows(folder.metrics, 1)
    return journal if rows and journal.state.step <= rows[0]["step"] else None


def door_of(folder: RunFolder) -> Path | None:
    """Where the run's processes wait for another controller, if they do."""
    journal = read_journal(folder)
    return journal.ray.door if journal is not None and _is_answered(journal.ray.door) else None


def _is_answered(door: Path) -> bool:
    """Whether a process listens there: of one that was killed, the file stays."""
    with Path("/proc/net/unix").open() as sockets:
        return any(line.endswith(f" {door}\n") for line in sockets)


def end_what_waits(folder: RunFolder) -> bool:
    """End processes that wait for another controller, by a visit of one that leaves at once. Whether there were any."""
    door = door_of(folder)
    if door is None:
        return False
    with socket.socket(socket.AF_UNIX) as visit, suppress(OSError):  # they have just ended
        visit.connect(str(door))
        visit.sendall(LET_GO)
    return True


def remove_journal(folder: RunFolder) -> None:
    """The run's processes end with its controller from now on."""
    for path in (folder.journal, folder.journal_before):
        with suppress(OSError):
            if is_own(folder):
                path.unlink()


def waits_for(config: RunConfig) -> RunState | None:
    """What the run to be resumed had reached, if its processes wait for a controller and its options are the same."""
    root = resumed_folder(config.run)
    if root is None:
        return None
    folder = RunFolder(root)
    journal = read_journal(folder)
    if journal is not None and _is_answered(journal.ray.door) and not changed_options(folder, config):
        return journal.state
    return None
